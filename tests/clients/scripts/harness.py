"""Runs the calls of a client against the service at DIPTYCH_URL, and prints what each returned as a line of JSON."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

URL = os.environ["DIPTYCH_URL"]
IMAGE, TEXT = os.environ["IMAGE_MODEL"], os.environ["TEXT_MODEL"]
PICTURE = os.environ["PICTURE"]  # the path of a PNG
KEY = "none"


def png_size(data: bytes) -> list[int]:
    """Width and height of a PNG, by its header."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n"), data[:20]
    return list(struct.unpack(">II", data[16:24]))


def run(calls: Mapping[str, Callable[[], Any]]) -> None:
    """Call each; a line of JSON has its `value`, or its `error` as text."""
    outcomes: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        try:
            outcomes[name] = {"value": call()}
        except Exception as error:  # of any client
            outcomes[name] = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write("\n" + json.dumps(outcomes) + "\n")
