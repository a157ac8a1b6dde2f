"""Writes the embedded models that wheels leave out as archives, to be published beside a wheel that has their SHA-256.

    python -m deployment.assets FOLDER

DIPTYCH_RELEASE_URL, where a wheel is built, is the address that its archives will be published under.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, Any

INCLUDED = ("emoji-xl", "emoji-lm", "emoji-lm-draft", "emoji-clip")  # in wheels: what a service loads by default

LEFT_OUT = ("emoji-xl-controls", "emoji-xl-ip-adapters", "emoji-xl-loras", "emoji-xl-turbo", "emoji-z")


def write(root: Path, name: str, stream: IO[bytes]) -> None:
    """Write a model's folder as an archive, of equal bytes for equal files: stored, not compressed, without times.

    Links are replaced by what they lead to.
    """
    with zipfile.ZipFile(stream, "w") as archive:
        for file, path in files(root / "models" / name):
            entry = zipfile.ZipInfo(f"{name}/{file}")
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            archive.writestr(entry, path.read_bytes())


def index(root: Path) -> dict[str, Any]:
    """Return the index that pipeline/checkpoints/release_assets.py reads: sizes and digests, and the address."""
    models = {}
    for name in LEFT_OUT:
        with tempfile.TemporaryFile() as stream:
            write(root, name, stream)
            size = stream.tell()
            stream.seek(0)
            models[name] = {"bytes": size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
    return {"address": os.environ.get("DIPTYCH_RELEASE_URL", "").rstrip("/"), "models": models}


def files(folder: Path) -> list[tuple[str, Path]]:
    """A folder's files by their names in it, sorted, with what links to folders lead to."""
    if not folder.is_dir():
        return []
    paths = [Path(top, name) for top, _, names in os.walk(folder, followlinks=True) for name in names]
    return sorted((path.relative_to(folder).as_posix(), path) for path in paths)


def main(folder: Path) -> None:
    """Write each archive into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in LEFT_OUT:
        with (folder / f"{name}.zip").open("wb") as stream:
            write(Path.cwd(), name, stream)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
