"""Downloads one file over HTTPS to disk: resumable, within a limit of size, and refused early by its first bytes."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import ipaddress
import json
import re
import shutil
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from contract.printable import printable
from pipeline.checkpoints.folder import ModelError

_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 30.0  # without a byte
_RETRIED_STATUSES = (408, 425, 429, 500, 502, 503, 504)
_START_BYTES = 512
_NUMBER = "[0-9]{1,18}"  # in headers, where int() also takes digits of other scripts
_VALIDATOR = re.compile(r"[ -~]{1,500}")
_NETWORK_ERRORS = (OSError, http.client.HTTPException)


class Downloaded(NamedTuple):
    """The downloaded file, and the name that the server or the address gives it."""

    file: Path
    name: str


@dataclass(frozen=True, slots=True)
class DownloadOptions:
    """The limits of a download.

    max_bytes: the largest file.
    attempts: how often in a row the connection may break without bringing anything new.
    pause_s: before the second attempt, and twice as long before each further one.
    check_start: called with the file's path and its whole size in bytes once its header is there, given by
        `start_bytes` of its first 512; raises `ModelError` for a file that is not worth the rest.
    count: called with the bytes that are there and those of the whole.
    """

    max_bytes: int
    check_start: Callable[[Path, int], None]
    start_bytes: Callable[[bytes], int]
    count: Callable[[int, int], None] = lambda done, total: None
    attempts: int = 6
    pause_s: float = 1.0


def redacted(url: str) -> str:
    """Return an address without its query, which may hold a token."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def download(url: str, folder: Path, options: DownloadOptions) -> Downloaded:
    """Download the file at an address into `folder`. A broken download that is there is resumed.

    That needs a server that tells versions apart (a strong ETag or Last-Modified) and answers ranges; else it begins
    anew. Raises `ModelError`.
    """
    _check_address(url)
    key = hashlib.sha256(url.encode()).hexdigest()[:16]
    part = folder / f"{key}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ModelError(f"{redacted(url)}: is being downloaded by another process") from None
            return _Download(url, part, stream, options).run()
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written ({error.strerror or error})") from error


def remove(file: Path) -> None:
    """Delete a download and its note."""
    file.unlink(missing_ok=True)
    _note(file).unlink(missing_ok=True)


def _note(part: Path) -> Path:
    return part.with_suffix(".json")


class _Download:
    """A download in progress."""

    def __init__(self, url: str, part: Path, stream: IO[bytes], options: DownloadOptions) -> None:
        self._url, self._part, self._stream, self._options = url, part, stream, options
        self._checked = False
        self._name = ""

    def run(self) -> Downloaded:
        """Download until the file is whole. Raises `ModelError`."""
        failed, largest_size = 0, 0
        while True:
            largest_size = max(largest_size, self._size)
            try:
                if self._attempt():
                    return Downloaded(self._part, self._name)
                reason = "it ended early"
            except urllib.error.HTTPError as error:
                if error.code not in _RETRIED_STATUSES:
                    answer = f"{error.code} {printable(str(error.reason))}"
                    raise ModelError(f"{redacted(self._url)}: the server answers {answer}") from error
                reason = f"the server answers {error.code}"
            except _NETWORK_ERRORS as error:
                if isinstance(error, OSError) and error.filename is not None:  # the disk's, not the network's
                    raise
                reason = printable(str(getattr(error, "reason", error)) or type(error).__name__)
            except ModelError:
                raise
            except (ValueError, LookupError) as error:  # of the libraries that read addresses and headers
                detail = printable(f"{type(error).__name__}: {error}")
                raise ModelError(f"{redacted(self._url)}: the server's answer cannot be read ({detail})") from error
            failed = 1 if self._size > largest_size else failed + 1
            if failed >= self._options.attempts:
                resume_note = (
                    f"; {self._size} bytes are kept, and the same command goes on from there" if self._size else ""
                )
                raise ModelError(f"{redacted(self._url)}: the connection broke {failed} times ({reason}){resume_note}")
            time.sleep(self._options.pause_s * 2 ** (failed - 1))

    @property
    def _size(self) -> int:
        return self._part.stat().st_size

    def _attempt(self) -> bool:
        """Connect once, and return whether the file is whole after that."""
        note = self._read_note()
        if not note.get("validator"):
            self._begin_anew()
        elif self._size == note["total"]:
            self._name = note["name"]
            self._check_start(note["total"])
            return True
        headers = {"Accept-Encoding": "identity", "User-Agent": "diptych"}
        if self._size:
            headers |= {"Range": f"bytes={self._size}-", "If-Range": note["validator"]}
        try:
            answer = _opener().open(urllib.request.Request(self._url, headers=headers), timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code == 416 and self._size:  # it has become shorter: another file
                self._begin_anew()
                return False
            raise
        with answer:
            total = self._take_headers(answer)
            while block := answer.read(_BLOCK_BYTES):
                self._check_limit(self._size + len(block))
                try:
                    self._stream.write(block)
                    self._stream.flush()
                except OSError as error:
                    raise ModelError(f"{self._part}: cannot be written: {error.strerror}") from error
                self._check_start(total)
                self._options.count(self._size, max(total, self._size))
        if total and self._size < total:
            return False
        self._check_start(self._size, is_complete=True)
        return True

    def _take_headers(self, answer: Any) -> int:
        """Return the whole file's size, or 0 where the server does not say; empty the file if it is not resumed."""
        content_length, total = answer.headers.get("Content-Length"), 0
        span = re.fullmatch(rf"bytes ({_NUMBER})-{_NUMBER}/({_NUMBER})", answer.headers.get("Content-Range", ""))
        if answer.status == 206 and span is not None and int(span[1]) == self._size:
            total = int(span[2])
        else:
            self._begin_anew()
            if answer.status != 200:
                raise http.client.HTTPException(f"the server answers {answer.status} with another part of the file")
            total = int(content_length) if content_length and re.fullmatch(_NUMBER, content_length) else 0
        self._check_limit(total)
        free = shutil.disk_usage(self._part.parent).free
        if total - self._size > free:
            raise ModelError(
                f"{redacted(self._url)}: has {total} bytes, and {self._part.parent} has room for {free} more"
            )
        tag = answer.headers.get("ETag", "")
        validator = tag if tag.startswith('"') else answer.headers.get("Last-Modified", "")
        if not _VALIDATOR.fullmatch(validator):  # it is sent back in a header
            validator = ""
        self._name = _name(answer.headers.get_filename() or urllib.parse.urlsplit(answer.url).path)
        if total and validator:
            note = {"validator": validator, "total": total, "name": self._name}
            _note(self._part).write_text(json.dumps(note), "utf-8")
        return total

    def _read_note(self) -> dict[str, Any]:
        try:
            note = json.loads(_note(self._part).read_text("utf-8"))
            return {**note, "total": int(note["total"]), "name": str(note["name"])}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def _begin_anew(self) -> None:
        self._stream.truncate(0)
        _note(self._part).unlink(missing_ok=True)
        self._checked = False

    def _check_limit(self, size: int) -> None:
        if size > self._options.max_bytes:
            remove(self._part)
            raise ModelError(f"{redacted(self._url)}: has more than the {self._options.max_bytes} bytes allowed")

    def _check_start(self, total: int, *, is_complete: bool = False) -> None:
        """Refuse the file once its header is there, or ended without one."""
        if self._checked:
            return
        with self._part.open("rb") as stream:
            needed = max(_START_BYTES, self._options.start_bytes(stream.read(_START_BYTES)))
        size = self._size
        if not is_complete and size < min(needed, total or needed):
            return
        try:
            self._options.check_start(self._part, total or size)
        except ModelError:
            remove(self._part)
            raise
        self._checked = True


def _name(path: str) -> str:
    """Return the last word of an address or file name, without its ending."""
    last = urllib.parse.unquote(path).replace("\\", "/").rstrip("/").rpartition("/")[2]
    return last.removesuffix(".safetensors")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to encrypted addresses, and, of an address on this machine that the user gave, to such ones.

    No other server can send a download to a service of this machine.
    """

    def redirect_request(
        self, request: urllib.request.Request, answer: IO[bytes], *arguments: Any
    ) -> urllib.request.Request | None:
        url = arguments[-1]
        try:
            _check_address(url)
            if _on_this_machine(url) and not _on_this_machine(request.full_url):
                raise ModelError(f"{redacted(request.full_url)}: leads to {redacted(url)}, an address of this machine")
        except ModelError:
            answer.close()
            raise
        return super().redirect_request(request, answer, *arguments)


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Redirects)


def _check_address(url: str) -> None:
    """Raise `ModelError` for an address that is not encrypted, except on this machine."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise ModelError(f"{url[:200]}: is not an address") from error
    if not host or any(character <= " " for character in url):
        raise ModelError(f"{url[:200]}: is not an address")
    if parts.scheme == "https" or (parts.scheme == "http" and _is_here(host)):
        return
    raise ModelError(f"{redacted(url)}: must begin with https://, so that nobody on the way can change the file")


def _on_this_machine(url: str) -> bool:
    return _is_here(urllib.parse.urlsplit(url).hostname or "")


def _is_here(host: str) -> bool:
    host = host.rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            address = ipaddress.IPv4Address(socket.inet_aton(host))  # 127.1, 2130706433
        except (OSError, UnicodeError):
            return False
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return any(
        candidate.is_loopback or candidate.is_unspecified for candidate in (address, mapped) if candidate is not None
    )
