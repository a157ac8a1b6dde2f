"""Folders of files NAME.safetensors that requests name: listed, checked, and the last ones used kept in memory."""

from __future__ import annotations

import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from contract.loras import is_name
from pipeline.folder import ModelError, first_line

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".safetensors"
PICKLES = (".bin", ".ckpt", ".pt", ".pth")
PICKLE = "is a pickle, which could run code; convert it to safetensors"

T = TypeVar("T")


def offered(folder: Path) -> list[str]:
    """The names of the folder's files, sorted; none if it cannot be read."""
    try:
        stems = [path.name.removesuffix(SUFFIX) for path in folder.iterdir() if path.name.endswith(SUFFIX)]
    except OSError:
        return []
    return sorted(stem for stem in stems if is_name(stem))


def tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a file's bytes. Raises ValueError for a pickle and for a damaged file."""
    from safetensors.torch import load

    try:
        return load(data)
    except Exception as error:  # of another library: damaged, or of another kind
        if data[:1] == b"\x80" or data[:2] == b"PK":  # pickle's own files, and torch's
            raise ValueError(PICKLE) from error
        raise ValueError(f"is damaged ({first_line(error)[:200]})") from error


class WeightFiles(Generic[T]):
    """The files of one folder, each read when a request first names it, and again when it has changed. Thread-safe.

    `what` the files are begins every message, and `missing` ends the one for a file that is not there. Files may have
    `most_bytes` bytes; of `kept` files the content stays in memory. `read` makes the content of a name and a path, and
    raises `ModelError`.
    """

    def __init__(
        self, folder: Path, *, what: str, missing: str, most_bytes: int, kept: int, read: Callable[[str, Path], T]
    ) -> None:
        self.folder = folder
        self._what, self._missing, self._most_bytes, self._kept = what, missing, most_bytes, kept
        self._read = read
        self._files: OrderedDict[str, tuple[tuple[int, ...], T]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, name: str) -> T:
        """The file's current content. Raises `ModelError`, naming the file."""
        path = self.folder / f"{name}{SUFFIX}"
        try:
            stamp = self._stamp(name, path)
        except ValueError as error:
            raise ModelError(f"{self._what} {name}: {error}") from None
        with self._lock:
            known = self._files.get(name)
            if known is None or known[0] != stamp:
                known = self._files[name] = stamp, self._read(name, path)
            self._files.move_to_end(name)
            while len(self._files) > self._kept:
                self._files.popitem(last=False)
        return known[1]

    def _stamp(self, name: str, path: Path) -> tuple[int, ...]:
        """What changes with the file. Raises ValueError for what cannot be read as one."""
        try:
            about = path.stat()
        except OSError:
            kind = next((suffix for suffix in PICKLES if path.with_name(name + suffix).exists()), None)
            raise ValueError(self._missing.format(path.name) if kind is None else f"{name}{kind} {PICKLE}") from None
        if not stat.S_ISREG(about.st_mode) or about.st_size > self._most_bytes:
            raise ValueError(f"{path.name} is no file of at most {self._most_bytes // 2**20} MiB")
        return about.st_ino, about.st_size, about.st_mtime_ns
