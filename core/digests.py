"""Identifies models by their files: a hash that reads all of small files, and samples of large ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

_WHOLE_BYTES = 256 * 2**20  # up to so many a file is read whole
_BLOCK_BYTES = 4 * 2**20
_SAMPLE_BYTES = 4096


def digest_of(folder: Path, files: Iterable[Path]) -> str:
    """SHA-256 (16 hex digits) over these files of a folder and their names in it.

    Of a safetensors file over 256 MB it reads the header and 4 KiB from the middle of each tensor.
    """
    hashed = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        hashed.update(f"{path.relative_to(folder)}\0{size}\0".encode())
        with path.open("rb") as stream:
            if size <= _WHOLE_BYTES or path.suffix != ".safetensors":
                while block := stream.read(_BLOCK_BYTES):
                    hashed.update(block)
                continue
            header = stream.read(int.from_bytes(stream.read(8), "little"))
            hashed.update(header)
            start, tensors = stream.tell(), json.loads(header)
            for name in sorted(set(tensors) - {"__metadata__"}):
                first, end = tensors[name]["data_offsets"]
                sample = min(_SAMPLE_BYTES, end - first)
                stream.seek(start + first + (end - first - sample) // 2)
                hashed.update(stream.read(sample))
    return hashed.hexdigest()[:16]
