"""Stores finished artifacts (images, batch files) under content-addressed keys, on disk or in an object store."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, from_url

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

LAID: Final = "laid"  # field of a job's result: the key of the artifact that has it
_LARGE: Final = 65_536  # characters of a result in JSON: a thousand tokens' top log probabilities are megabytes

_SUFFIXES: Final = {"image/png": "png", "image/webp": "webp", "image/jpeg": "jpg", "application/jsonl": "jsonl"}
_MEDIA_TYPES: Final = {suffix: media_type for media_type, suffix in _SUFFIXES.items()}
_KEY: Final = re.compile(r"sha256/([0-9a-f]{2})/([0-9a-f]{62})\.([a-z]+)")
_PATIENCE_S: Final = 120.0  # longer than a deletion may take
_AGAIN_S: Final = 0.2
_PART: Final = 2**20  # bytes of a large artifact per read; a few are in memory at once
_WRITES: Final = 100  # retries of a file whose folder is deleted at the same moment
WITHIN_S: Final = 20.0
_CONNECT_S: Final = 5.0
_TRIES: Final = 4
_LOOKS: Final = 0.25  # the part of an operation's time in which the store must say whether an artifact exists
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
# Object stores' answers: 507, or an error code such as S3's QuotaExceeded and MinIO's XMinioStorageFull.
_REFUSED: Final = re.compile(r"\bstatus code: 507\b|StorageFull|QuotaExceeded|InsufficientStorage|TotalStorageLimit")
# obstore's messages for no reply, or a 5xx: it has no exception types for these.
_UNWELL: Final = re.compile(r"HTTP error|error sending request|timed out|[Ss]erver (returned|error).{0,40}\b5\d\d\b")
_DENIED: Final = (PermissionDeniedError, UnauthenticatedError, PermissionError)
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")


class ArtifactError(RuntimeError):
    """The store cannot do the operation. The message says why, for people."""


class NoArtifact(ArtifactError):
    """The key does not exist, or is malformed."""


def media_type(key: str) -> str:
    """An artifact's media type, by its key. Raises `NoArtifact` for a malformed key."""
    return _MEDIA_TYPES[_checked(key)[3]]


def digest_of(key: str) -> str:
    """SHA-256 of an artifact's bytes, in hexadecimal, by its key. Raises `NoArtifact` for a malformed key."""
    return _digest(_checked(key))


def key_of(data: bytes, media_type: str) -> str:
    """The content-addressed key of these bytes."""
    return _key(hashlib.sha256(data).hexdigest(), media_type)


def _key(digest: str, media_type: str) -> str:
    return f"sha256/{digest[:2]}/{digest[2:]}.{_SUFFIXES[media_type]}"


class StorageDown(ArtifactError):
    """The store is unreachable, does not reply in time, or reports a failure. Retryable."""


class StorageFull(StorageDown):
    """The disk, the quota or the object store has no space for what is written. Retryable."""


class ArtifactUnwritable(ArtifactError):
    """The store refuses a write, mostly for want of a right."""


class Spool:
    """A large artifact before it is stored: an unnamed file, hashed as it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.size = 0
        self._hash = hashlib.sha256()

    @classmethod
    def of(cls, file: IO[bytes]) -> Spool:
        """Wrap a complete file, which the caller still closes. Raises `ArtifactError`."""
        spool = cls(file)
        with _told("read a file"):
            file.seek(0)
            while part := file.read(_PART):
                spool._hash.update(part)
                spool.size += len(part)
        return spool

    def write(self, data: bytes) -> None:
        """Raises `StorageFull` if the disk is full, and `ArtifactUnwritable`."""
        with _told("write an artifact", ArtifactUnwritable):
            self.file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def key(self, media_type: str) -> str:
        """The key of the bytes written so far."""
        return _key(self._hash.hexdigest(), media_type)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # flushing the buffer to a full disk may fail; the data is not needed
            self.file.close()


class Artifacts:
    """An artifact store: `file:///folder`, `memory://`, `s3://bucket/path`, and others that obstore supports.

    Thread-safe. Object store credentials come from the environment (AWS_ACCESS_KEY_ID and so on). Raises
    `ArtifactError` for an unusable URL; an object store is contacted at the first operation. `within_s` limits one
    operation, failed tries included; beyond it raises `StorageDown`.
    """

    def __init__(self, url: str, within_s: float = WITHIN_S) -> None:
        self._store: ObjectStore
        self._folder: Path | None = None  # if the store is a folder
        with _told("open the store of artifacts"):
            parts = urlsplit(url)
            if parts.scheme == "file":
                folder = Path(url2pathname(parts.path))
                if parts.netloc or not folder.is_absolute():
                    raise ValueError("file:// needs an absolute local path")
                self._store = LocalStore(folder, mkdir=True, automatic_cleanup=True)
                self._folder = folder
            else:
                self._store = _client(url, within_s * (1 - _LOOKS))
            # Looks whether an artifact exists before it is written: both end within the time of one operation.
            self._looking = self._store if parts.scheme in ("file", "memory") else _client(url, within_s * _LOOKS)

    def put(self, data: bytes, media_type: str) -> str:
        """Store `data` fully or not at all, and return its key. Existing data is not written again.

        In a folder the data is synced to disk on return, and existing damaged data is rewritten.
        """
        return self.put_kept(data, media_type, lambda key: True)

    def put_kept(self, data: bytes, media_type: str, keep: Callable[[str], bool]) -> str:
        """Store like `put`, after `keep` was called with the key, so that nobody deletes it; `keep` returns whether it
        may be written now.

        Errors of `keep` are raised too.
        """
        key = key_of(data, media_type)
        _wait_for(keep, key)
        self._put(key, io.BytesIO(data), len(data), media_type)
        return key

    def spool(self) -> Spool:
        """A spool for a large artifact. The caller closes it. Raises `ArtifactError`.

        It is on the artifacts' disk, or among the temporary files if these are not on a disk.
        """
        with _told("write an artifact", ArtifactUnwritable):
            return Spool(tempfile.TemporaryFile(dir=self._folder))

    def put_spool(self, spool: Spool, media_type: str, keep: Callable[[str], bool]) -> str:
        """Store like `put_kept`, holding at most a few parts in memory."""
        key = spool.key(media_type)
        _wait_for(keep, key)
        self._put(key, spool.file, spool.size, media_type)
        return key

    def _put(self, key: str, file: IO[bytes], size: int, media_type: str) -> None:
        with _told("write an artifact", ArtifactUnwritable):
            if self._folder is not None:
                path = self._folder / key
                if not _holds(path, size, _digest(_checked(key))):
                    _write(path, file)
            elif self._size(key) != size:
                file.seek(0)
                # Parts of a multipart upload have at least 5 MiB.
                obstore.put(
                    self._store, key, file, attributes={"Content-Type": media_type}, chunk_size=5 * _PART,
                    max_concurrency=2,
                )  # fmt: skip

    def read_part(self, key: str, start: int, length: int) -> bytes:
        """Bytes of an artifact from `start` on, fewer at its end. Not verified against the key.

        Raises as `get`, and `ArtifactError` for a `start` beyond its end.
        """
        _checked(key)
        with _told("read an artifact"):
            return bytes(obstore.get_range(self._store, key, start=start, length=length))

    def size(self, key: str) -> int:
        """The artifact's size in bytes. Raises `NoArtifact` and `ArtifactError`."""
        _checked(key)
        with _told("read an artifact"):
            return int(obstore.head(self._store, key)["size"])

    def get(self, key: str) -> bytes:
        """The artifact's bytes. Raises `NoArtifact` if it does not exist, and `ArtifactError` if it is damaged."""
        match = _checked(key)
        with _told("read an artifact"):
            data = bytes(obstore.get(self._store, key).bytes())
        if hashlib.sha256(data).hexdigest() != _digest(match):
            raise ArtifactError("an artifact is damaged: its content does not match its key")
        return data

    def delete(self, key: str) -> None:
        """Delete an artifact; deleting a missing one succeeds. Raises `ArtifactError`."""
        _checked(key)
        with contextlib.suppress(NoArtifact), _told("delete an artifact"):
            obstore.delete(self._store, key)

    def _size(self, key: str) -> int | None:
        try:
            return int(obstore.head(self._looking, key)["size"])
        except FileNotFoundError:
            return None


def _wait_for(keep: Callable[[str], bool], key: str) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not keep(key):  # an equal artifact exists and is being deleted
        if time.monotonic() > until:
            raise ArtifactUnwritable("an equal artifact is still being deleted")
        time.sleep(_AGAIN_S)


def _holds(path: Path, size: int, digest: str) -> bool:
    """Return whether the file exists and is intact: after a power cut it may hold other bytes of the right length."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as stream, contextlib.suppress(OSError):
        return os.fstat(descriptor).st_size == size and hashlib.file_digest(stream, "sha256").hexdigest() == digest
    return False


def _write(path: Path, file: IO[bytes]) -> None:
    """Write a copy of the file atomically and durably: readers and a power cut see all of it or nothing. Raises
    OSError.
    """
    file.seek(0)
    partial = path.with_name(f"{path.name}#{secrets.token_hex(8)}")
    for _ in range(_WRITES):
        created = [folder for folder in path.parents[:2] if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            break
        except FileNotFoundError:  # the folder was deleted with its last other artifact
            continue
    else:
        raise FileExistsError(f"{path.parent} is deleted again and again")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            shutil.copyfileobj(file, stream, _PART)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    for folder in (path.parent, *(folder.parent for folder in created)):
        _sync(folder)


def _sync(folder: Path) -> None:
    """Sync a folder's entries to disk."""
    with contextlib.suppress(FileNotFoundError):  # deleted as empty meanwhile
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _checked(key: str) -> re.Match[str]:
    """Reject anything but a well-formed key: no path can be read through one."""
    match = _KEY.fullmatch(key)
    if match is None or match[3] not in _MEDIA_TYPES:
        raise NoArtifact("the artifact's key is malformed")
    return match


def _digest(key: re.Match[str]) -> str:
    return key[1] + key[2]


@contextmanager
def _told(operation: str, otherwise: type[ArtifactError] = ArtifactError) -> Iterator[None]:
    """Maps a store's errors to ours, without their addresses and length: to `otherwise` where nothing else fits."""
    try:
        yield
    except FileNotFoundError as error:
        kind = NoArtifact if otherwise is ArtifactError else otherwise
        raise kind(f"cannot {operation}: it does not exist") from error
    except (OSError, BaseError, ValueError, NotImplementedError) as error:
        raise _kind(error, otherwise)(f"cannot {operation}: {_reason(error)}") from error


def _kind(error: Exception, otherwise: type[ArtifactError]) -> type[ArtifactError]:
    if _number(error) in _FULL or (isinstance(error, BaseError) and _REFUSED.search(str(error))):
        return StorageFull
    if isinstance(error, _DENIED) or not isinstance(error, BaseError) or not _UNWELL.search(str(error)):
        return otherwise
    return StorageDown


def _number(error: BaseException) -> int | None:
    """The system's number of an error, from obstore's message too."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    code = _OS_ERROR.search(str(error))
    return None if code is None else int(code[1])


def _reason(error: BaseException) -> str:
    if isinstance(error, _DENIED):
        return "permission denied"
    number = _number(error)
    return str(error).partition("\n")[0] if number is None else os.strerror(number).lower()


def _client(url: str, within_s: float) -> ObjectStore:
    """An object store whose calls end within this time. http:// is allowed for a named endpoint (AWS_ENDPOINT_URL)."""
    try_s, last_try_s = within_s * 2 / 3, within_s / 3  # no try starts after the latter
    return from_url(
        url,
        client_options={
            "allow_http": True,
            "connect_timeout": timedelta(seconds=min(_CONNECT_S, try_s)),
            "timeout": timedelta(seconds=try_s),
        },
        retry_config={"max_retries": _TRIES - 1, "retry_timeout": timedelta(seconds=last_try_s)},
    )


def lay_result(result: dict[str, Any], put: Callable[[bytes, str], str]) -> dict[str, Any]:
    """Return the result as a record has it. `put` stores bytes of a media type and returns their key; if it cannot, a
    large result is kept in the record too.
    """
    text = json.dumps(result, allow_nan=False, separators=(",", ":"))
    if len(text) <= _LARGE:
        return result
    try:
        return {LAID: put(text.encode("ascii"), "application/jsonl")}
    except ArtifactError as error:
        log.warning("a result of %d bytes is kept in Redis: %s", len(text), error)
        return result


def fetch_result(recorded: Mapping[str, Any] | None, get: Callable[[str], bytes]) -> Mapping[str, Any]:
    """Return the result of a record, empty for None. `get` returns an artifact's bytes. Raises what it raises."""
    if recorded is None or LAID not in recorded:
        return recorded or {}
    result: Mapping[str, Any] = json.loads(get(recorded[LAID]))
    return result
