"""Reads JSON files of others, bounded in size, with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract.printable import printable

MOST_BYTES = 64 << 20  # the tokenizers of the largest vocabularies have half as many


def read_json(path: Path, error: Callable[[str], Exception]) -> Any:
    """The document in a file. Raises `error`, with a message that names the file."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise error(f"{path.parent}: {missing(path)}") from None
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror})") from cause
    if len(data) > MOST_BYTES:
        raise error(f"{path}: is larger than {MOST_BYTES >> 20} MiB")
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as cause:
        raise error(f"{path}: is not JSON ({printable(str(cause), 300)})") from cause


def missing(path: Path) -> str:
    """Return what to say of a file that is not there: that it is missing, or a link that leads nowhere."""
    if not path.is_symlink():
        return f"{path.name} is missing"
    return f"{path.name} is a link to {printable(str(path.readlink()), 300)}, which is not there"


def read_object(path: Path, error: Callable[[str], Exception]) -> dict[str, Any]:
    """The JSON object in a file. Raises as `read_json`."""
    document = read_json(path, error)
    if not isinstance(document, dict):
        raise error(f"{path}: must hold a JSON object")
    return document
