"""Reads the lines of a batch's file sequentially from any offset, without loading the whole file."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypedDict

from api.errors import ApiError, invalid_field
from api.http import body
from contract.strict import MAX_NAME
from core.artifacts import ArtifactError, Artifacts

MOST_LINES = 10_000
_PART, _LARGEST_PART = 64 * 1024, 2**21  # bytes per read: the first, and the largest
_WORK = 8192  # bytes of lines between two pauses: about a millisecond's work
_LINE = 256  # fixed cost of a line, in bytes
_LONGEST_REST_S = 0.05
_MOST_ERRORS = 100  # reported per file


class RawLine(NamedTuple):
    """A raw line of the file, and the offset of the next one."""

    data: bytes
    end: int


class BatchLine(TypedDict):
    """A parsed line of a batch's file; `bytes` is its length in the file."""

    custom_id: str
    body: dict[str, Any]
    bytes: int


def raw_lines(artifacts: Artifacts, key: str, place: int = 0, *, check: bool = False) -> Iterator[RawLine]:
    """Yield the non-blank lines from an offset, which must be the start of a line. Raises `ArtifactError`.

    With `check`, from the beginning, the file's hash is verified at the end.
    """
    size, at, parts = artifacts.size(key), place, [b""]  # parts of the line before the next newline
    digest, length = hashlib.sha256(), _PART
    while at < size:
        part = artifacts.read_part(key, at, length)
        length = min(2 * length, _LARGEST_PART)
        if not part:
            break
        digest.update(part)
        at += len(part)
        *lines, rest = part.split(b"\n")
        end = at - len(part)
        for line in lines:
            end += len(line) + 1
            joined = b"".join([*parts, line])
            parts = []
            if joined.strip():
                yield RawLine(joined, end)
        parts.append(rest)
    if check and digest.hexdigest() not in key.replace("/", ""):
        raise ArtifactError("an artifact is damaged: its content does not match its key")
    joined = b"".join(parts)
    if joined.strip():
        yield RawLine(joined, size)


def read(raw: bytes, endpoint: str) -> BatchLine:
    """Parse a line of a batch for this endpoint. Raises `ApiError` (400) naming the field."""
    line = body.parse(raw)
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512:
        raise invalid_field("custom_id", "must be text of 1 to 512 characters")
    if line.get("method") != "POST":
        raise invalid_field("method", "must be POST")
    if line.get("url") != endpoint:
        raise invalid_field("url", "must be the batch's endpoint", "mismatched_endpoint")
    if not isinstance(line.get("body"), dict):
        raise invalid_field("body", "must be an object", "invalid_type")
    return {"custom_id": custom_id, "body": line["body"], "bytes": len(raw)}


class CheckedFile(NamedTuple):
    """A file's line count, images by the model's name as lines give it, and errors; with errors none of its lines is
    run.
    """

    lines: int
    pictures: Mapping[str | None, int]
    errors: list[dict[str, Any]]


def check(raws: Iterator[RawLine], endpoint: str, rest: Callable[[float], None] = time.sleep) -> CheckedFile:
    """Check every line of a file. Raises `ArtifactError`.

    Pauses regularly, for as long as it has computed since the last pause, so that other threads get the interpreter.
    """
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    pictures: Counter[str | None] = Counter()
    number = good = work = 0
    begun = time.thread_time()
    for number, (raw, _) in enumerate(raws, 1):
        work += _LINE + len(raw)
        if work >= _WORK:
            rest(min(_LONGEST_REST_S, time.thread_time() - begun))
            work, begun = 0, time.thread_time()
        if number > MOST_LINES:
            continue  # counted only
        if len(errors) >= _MOST_ERRORS:
            continue
        try:
            line = read(raw, endpoint)
            if line["custom_id"] in seen:
                raise invalid_field("custom_id", "must be unique within the file", "duplicate_custom_id")
        except ApiError as error:
            errors.append(_wrong(number, error.param, str(error), error.code))
        else:
            seen.add(line["custom_id"])
            name, n = images_of(line)
            pictures[name] += n
            good += 1
    if not 1 <= number <= MOST_LINES:
        return CheckedFile(0, {}, [_wrong(None, None, f"must have between 1 and {MOST_LINES} lines, not {number}")])
    return CheckedFile(good, pictures, errors)


def images_of(line: BatchLine) -> tuple[str | None, int]:
    """The name of a line's model, and how many images it is for. None if it has no name, or what cannot be one."""
    name, n = (line["body"].get(field) for field in ("model", "n"))
    count = n if isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 10 else 1
    return name if isinstance(name, str) and len(name) <= MAX_NAME else None, count


def _wrong(line: int | None, param: str | None, message: str, code: str | None = "invalid_file") -> dict[str, Any]:
    return {"code": code, "line": line, "message": message, "param": param}
