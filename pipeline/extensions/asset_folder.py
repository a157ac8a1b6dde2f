"""Folders of files that requests name: listed, checked, and read on demand; the last ones used are kept in memory."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import weight_files
from pipeline.extensions.asset_cache import Asset, AssetCache, ReadFile
from pipeline.extensions.weight_files import PICKLE, PICKLES

T = TypeVar("T")


class AssetFolder(ABC, Generic[T]):
    """The files NAME.safetensors of one folder. Thread-safe.

    Files are read in the background: when a request is checked, before it reaches the engine, and, if one was evicted
    meanwhile, before the request joins others. A changed file is read anew: running requests keep the old version.

    A kind whose files lie otherwise overrides `asset_names` and `_stamp`, and where it says more of a damaged one
    `_check_header`.
    """

    kind: ClassVar[str]  # begins messages
    setting: ClassVar[str] = ""  # limits the memory of its files, if messages name it
    missing: ClassVar[str] = "there is no {} in the folder"  # ends the message for a file that is not there

    def __init__(self, folder: Path, capacity: int, *, at_once: int = 1, most_bytes: int | None = None) -> None:
        """`capacity` limits the sizes of contents, as `AssetCache` does, and `most_bytes` a file."""
        self.folder = folder.expanduser()
        self.cache: AssetCache[T] = AssetCache(
            self.kind, capacity, self._read, check=self._check_header, at_once=at_once
        )
        self._most_bytes = most_bytes

    def asset_names(self) -> list[str]:
        """The names that requests may use now."""
        return weight_files.offered(self.folder)

    def find(self, name: str) -> Asset[T]:
        """The file's current version, read if it has changed or was evicted. Raises `ModelError`, naming the file."""
        return self.cache.find(name, self._stamp(name))

    def get(self, name: str) -> T:
        """The content of the same, for callers that keep it."""
        return self.cache.get(name, self._stamp(name))

    @property
    def held(self) -> Mapping[Any, int]:
        """The bytes of the cached files, by name, least recently used first."""
        return self.cache.held

    def size_bytes(self) -> int:
        """Return the memory that its files take at most."""
        return self.cache.capacity

    def check_room(self, assets: Collection[Asset[T]], name: str = "", beside: str = "") -> None:
        """Raise `ModelError` for files of one request that are larger together than all that may be in memory."""
        needed = sum(asset.size_bytes for asset in assets)
        if needed > self.cache.capacity:
            raise self._too_large(name or " and ".join(asset.name for asset in assets), needed, beside)

    def _too_large(self, name: str, needed: int, beside: str = "") -> ModelError:
        room = f"there is room for {self.cache.capacity} ({self.setting})"
        return self._error(name, f"needs {needed} bytes{beside}, and {room}")

    def _path(self, name: str) -> Path:
        return weight_files.path_of(self.folder, name)

    def _stamp(self, name: str) -> Hashable:
        """Return what changes with the file. Raises `ModelError` for what cannot be read as one."""
        path = self._path(name)
        try:
            about = path.stat()
        except OSError:
            pickle = next((f"{name}{end} {PICKLE}" for end in PICKLES if path.with_name(name + end).exists()), None)
            raise self._error(name, pickle or self.missing.format(path.name)) from None
        most = self._most_bytes
        if not stat.S_ISREG(about.st_mode) or (most is not None and about.st_size > most):
            raise self._error(name, f"{path.name} is no file of at most {(most or 0) // 2**20} MiB")
        return about.st_ino, about.st_size, about.st_mtime_ns

    def _check_header(self, key: Any) -> object:
        """Read the file's header. Raises `ModelError`."""
        path = self._path(key)
        try:
            weight_files.check_header(path)
        except ValueError as error:
            raise self._error(key, f"{path.name} {error}") from error
        except OSError as error:
            raise self._error(key, f"{path.name} cannot be read ({error.strerror})") from error
        return None

    @abstractmethod
    def _read(self, key: Any) -> ReadFile[T]:
        """Read and compute all that requests use of the file. Raises `ModelError`."""

    def _data(self, name: str) -> bytes:
        """The file's bytes. Raises `ModelError`."""
        try:
            return self._path(name).read_bytes()
        except OSError as error:
            raise self._error(name, f"cannot be read ({error.strerror})") from error

    def _error(self, name: str, reason: object) -> ModelError:
        """The error for a file that cannot be used."""
        return ModelError(f"{name}: {reason}", kind=self.kind)


def stamp_of(*paths: Path) -> tuple[Any, ...]:
    """Changes when any of these files does, or any file right in one of these folders."""
    files = (file for path in paths for file in ([path] if path.is_file() else sorted(path.iterdir())))
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, about.st_ino, about.st_size, about.st_mtime_ns) for name, about in stats)
