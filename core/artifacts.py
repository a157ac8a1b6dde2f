"""Finished artifacts (pictures, and files of batches) under content-addressed keys, on a disk or in an object store.

Knows keys, bytes and what can go wrong with a store; knows nothing of pictures, jobs or HTTP.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, from_url

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_SUFFIXES: Final = {"image/png": "png", "image/webp": "webp", "image/jpeg": "jpg", "application/jsonl": "jsonl"}
_MEDIA_TYPES: Final = {suffix: media_type for media_type, suffix in _SUFFIXES.items()}
_KEY: Final = re.compile(r"sha256/([0-9a-f]{2})/([0-9a-f]{62})\.([a-z]+)")
_PATIENCE_S: Final = 120.0  # longer than a deletion is given
_AGAIN_S: Final = 0.2
WITHIN_S: Final = 20.0
_CONNECT_S: Final = 5.0
_TRIES: Final = 4
# What obstore says of a store that did not answer, or answered 5xx: it has no types for these.
_UNWELL: Final = re.compile(r"HTTP error|error sending request|timed out|[Ss]erver (returned|error).{0,40}\b5\d\d\b")
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")


class ArtifactError(RuntimeError):
    """The store cannot do what was asked. The message says why, in words for people."""


class NoArtifact(ArtifactError):
    """There is nothing under this key, or it is no key of ours."""


def media_type(key: str) -> str:
    """The media type of an artifact, by its key. Raises `NoArtifact` for what is no key."""
    return _MEDIA_TYPES[_checked(key)[3]]


def key_of(data: bytes, media_type: str) -> str:
    """The key that these bytes are kept under."""
    digest = hashlib.sha256(data).hexdigest()
    return f"sha256/{digest[:2]}/{digest[2:]}.{_SUFFIXES[media_type]}"


class StorageDown(ArtifactError):
    """The store cannot be reached, does not answer in time, or says that it is unwell. It is worth trying again."""


class Artifacts:
    """A store of artifacts: `file:///folder`, `memory://`, `s3://bucket/path`, and what else obstore knows.

    Thread-safe. Credentials of an object store come from the environment (AWS_ACCESS_KEY_ID and so on). Raises
    `ArtifactError` for a URL that cannot be used; an object store is not talked to before it is needed. `within_s` is
    how long one of its answers may take, tries that failed included; then it is `StorageDown`.
    """

    def __init__(self, url: str, within_s: float = WITHIN_S) -> None:
        self._store: ObjectStore
        with _told("open the store of artifacts"):
            parts = urlsplit(url)
            if parts.scheme == "file":
                folder = Path(url2pathname(parts.path))
                if parts.netloc or not folder.is_absolute():
                    raise ValueError("file:// needs an absolute path of this machine")
                self._store = LocalStore(folder, mkdir=True, automatic_cleanup=True)
            else:
                # An endpoint that is named with http:// (AWS_ENDPOINT_URL) is meant so.
                self._store = from_url(
                    url,
                    client_options={
                        "allow_http": True,
                        "connect_timeout": timedelta(seconds=min(_CONNECT_S, within_s / 2)),
                        "timeout": timedelta(seconds=within_s / 2),  # of one try
                    },
                    # No try begins after this, so that the last one ends in time.
                    retry_config={"max_retries": _TRIES - 1, "retry_timeout": timedelta(seconds=within_s / 2)},
                )

    def put(self, data: bytes, media_type: str) -> str:
        """Keep `data` whole or not at all, and return its key. What is there already is not written again."""
        key = key_of(data, media_type)
        with _told("write an artifact"):
            # obstore writes beside and renames, so that others see nothing or all of it. A size that differs is what
            # a power cut left: it is written anew.
            if self._size(key) != len(data):
                # A folder has no place for a media type: there the key's ending tells it.
                attributes = None if isinstance(self._store, LocalStore) else {"Content-Type": media_type}
                obstore.put(self._store, key, data, attributes=attributes)
        return key

    def put_kept(self, data: bytes, media_type: str, keep: Callable[[str], bool]) -> str:
        """As `put`, after `keep` was told the key, so that nobody takes it away; it says whether that may be now.

        Raises what `keep` raises, too.
        """
        key, until = key_of(data, media_type), time.monotonic() + _PATIENCE_S
        while not keep(key):  # the same was made before, and is being deleted at this moment
            if time.monotonic() > until:
                raise ArtifactError("it was made before, and its deletion does not end")
            time.sleep(_AGAIN_S)
        return self.put(data, media_type)

    def get(self, key: str) -> bytes:
        """The artifact's bytes. Raises `NoArtifact` where there is none, and `ArtifactError` where it is damaged."""
        match = _checked(key)
        with _told("read an artifact"):
            data = bytes(obstore.get(self._store, key).bytes())
        if hashlib.sha256(data).hexdigest() != match[1] + match[2]:
            raise ArtifactError("an artifact is damaged: its content does not match its key")
        return data

    def delete(self, key: str) -> None:
        """Take an artifact away; one that is not there is as good as gone. Raises `ArtifactError`."""
        _checked(key)
        with contextlib.suppress(NoArtifact), _told("delete an artifact"):
            obstore.delete(self._store, key)

    def _size(self, key: str) -> int | None:
        try:
            return int(obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            return None


def _checked(key: str) -> re.Match[str]:
    """Whatever is not exactly a key of ours reaches no store: no path can be read by way of one."""
    match = _KEY.fullmatch(key)
    if match is None or match[3] not in _MEDIA_TYPES:
        raise NoArtifact("this is not the key of an artifact")
    return match


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Says of a store's errors what they mean, without its addresses and its own long-windedness."""
    try:
        yield
    except FileNotFoundError as error:
        raise NoArtifact(f"cannot {what}: it does not exist") from error
    except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
        raise ArtifactError(f"cannot {what}: permission denied") from error
    except BaseError as error:
        kind = StorageDown if _UNWELL.search(str(error)) else ArtifactError
        raise kind(f"cannot {what}: {_reason(error)}") from error
    except (OSError, ValueError, NotImplementedError) as error:
        raise ArtifactError(f"cannot {what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    code = _OS_ERROR.search(str(error))
    if code is not None:
        return os.strerror(int(code[1])).lower()
    return str(error).partition("\n")[0]
