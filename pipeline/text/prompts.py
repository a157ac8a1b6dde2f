"""Reads prompt files: one prompt per line, a table with a caption column, or JSON. Errors name file and row. Imports no
torch.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = ("prompt", "caption", "text")
DELIMITERS = {".tsv": "\t", ".csv": ","}
MAX_FILE_BYTES = 256 * 2**20


class PromptsError(ValueError):
    """A prompts file that cannot be used. The message names file and row."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt. `row` counts from 1 as in an editor; `name` is the start of the image's file name."""

    text: str
    row: int
    name: str


class _Record(NamedTuple):
    """A row of a table, or an object of JSON: its prompt, and its name if it has one, with their columns."""

    row: int
    column: str
    text: str
    name_column: str
    name: str | None


def read(
    path: Path, limit: int | None = None, *, columns: Sequence[str] = COLUMNS, names: Sequence[str] = ("id",)
) -> list[PromptRow]:
    """Return the prompts of a file, the first `limit` of them. What comes after those is not looked at.

    A `.tsv` or `.csv` needs a header with one of `columns`; the first of the columns `names` that is there becomes the
    name. Its cells are quoted as `csv` and pandas read them. The lines of a `.jsonl` are texts, or objects with these
    fields; a `.json` is a list of such or has one as its `annotations`, like COCO's captions, and its entries count as
    rows. Any other file holds one prompt a line, and empty lines are passed over.

    Raises:
        PromptsError: for a file that is missing, too large, not UTF-8, or empty; a table without such a column, with a
            row too short or too long, a quote that is never closed, an empty prompt, or an id that is empty or there
            twice; JSON that is malformed or of another form.
    """
    text = _decoded(path)
    suffix = path.suffix.lower()
    rows: Iterator[PromptRow]
    if suffix in DELIMITERS:
        rows = _named(path, _table(path, _cells(path, text, DELIMITERS[suffix]), columns, names))
    elif suffix in (".json", ".jsonl", ".ndjson"):
        entries = _annotations(path, text) if suffix == ".json" else _lines(path, text)
        rows = _named(path, _objects(path, entries, columns, names))
    else:
        lines = ((row, line.strip()) for row, line in enumerate(text.split("\n"), 1))
        rows = (PromptRow(line, row, f"{row:05d}") for row, line in lines if line)
    prompts = list(islice(rows, limit))
    if not prompts:
        raise PromptsError(f"{path}: holds no prompts")
    return prompts


def _decoded(path: Path) -> str:
    """Return the text of a file in UTF-8, with one kind of line ends."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)  # not by its size: a pipe has none
    except OSError as error:
        raise PromptsError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > MAX_FILE_BYTES:
        raise PromptsError(f"{path}: is larger than {MAX_FILE_BYTES // 2**20} MiB")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:2]:  # its byte order mark, or Latin without one
        raise PromptsError(f"{path}: is UTF-16, as its first two bytes say; save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise PromptsError(f"{path}: row {row} is not UTF-8 (byte {error.start} of the file)") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _cells(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (first row, cells) of a table, as `csv` and pandas read it.

    A cell that begins with a quote may hold delimiters, line ends and doubled quotes, which stand for one; in other
    cells quotes are characters.
    """
    ended = False

    def lines() -> Iterator[str]:
        nonlocal ended
        yield from io.StringIO(text, newline="")
        ended = True

    csv.field_size_limit(MAX_FILE_BYTES)  # the default would refuse long cells in columns that are not read
    reader = csv.reader(lines(), delimiter=delimiter)
    row = 1
    for cells in reader:
        if ended:  # rows end with their lines; this one asked for another
            raise PromptsError(f"{path}: row {row} has a cell that begins with a quote, which nothing closes")
        yield row, cells
        row = reader.line_num + 1


def _table(
    path: Path, rows: Iterator[tuple[int, list[str]]], columns: Sequence[str], names: Sequence[str]
) -> Iterator[_Record]:
    filled = ((row, cells) for row, cells in rows if any(cell.strip() for cell in cells))
    first = next(filled, None)
    if first is None:
        raise PromptsError(f"{path}: is empty")
    header = [cell.strip().lower() for cell in first[1]]
    column = _column(path, first[0], header, columns)
    name_column = next((name for name in names if name in header), "")
    for row, cells in filled:
        if len(cells) != len(header):
            raise PromptsError(f"{path}: row {row} has {len(cells)} columns, the header has {len(header)}")
        name = cells[header.index(name_column)] if name_column else None
        yield _Record(row, column, cells[header.index(column)], name_column, name)


def _lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield (row, value) of JSON Lines, without empty lines."""
    for row, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield row, _json(f"{path}: row {row}", line)


def _annotations(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield (number, entry) of a list in JSON, or of COCO's `annotations`."""
    entries = _json(f"{path}:", text)
    entries = entries.get("annotations") if isinstance(entries, dict) else entries
    if not isinstance(entries, list):
        raise PromptsError(f"{path}: holds neither a list nor an object with a list of `annotations`, as COCO's has")
    yield from enumerate(entries, 1)


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptsError(f"{place} is not JSON ({error})") from None


def _objects(
    path: Path, entries: Iterable[tuple[int, Any]], columns: Sequence[str], names: Sequence[str]
) -> Iterator[_Record]:
    for row, entry in entries:
        if isinstance(entry, str):
            yield _Record(row, "prompt", entry, "", None)
            continue
        if not isinstance(entry, dict):
            raise PromptsError(f"{path}: row {row} is neither a text nor an object")
        column = _column(path, row, list(entry), columns)
        name_column = next((name for name in names if entry.get(name) is not None), "")
        text, name = entry[column], entry.get(name_column)
        if not isinstance(text, str):
            raise PromptsError(f"{path}: row {row}: {column} is not a text")
        if isinstance(name, bool) or not isinstance(name, str | int | None):
            raise PromptsError(f"{path}: row {row}: {name_column} is neither a text nor a whole number")
        yield _Record(row, column, text, name_column, None if name is None else str(name))


def _column(path: Path, row: int, header: Sequence[str], columns: Sequence[str]) -> str:
    """Return the first of `columns` that a header has."""
    column = next((name for name in columns if name in header), None)
    if column is None:
        listed = ascii(", ".join(header)[:200])  # quoted: it may hold binary data or terminal escapes
        raise PromptsError(f"{path}: row {row} names no column {' or '.join(columns)}; it has {listed}")
    return column


def _named(path: Path, records: Iterable[_Record]) -> Iterator[PromptRow]:
    """Yield the prompts of records, whose names differ; those without a name are named by their rows."""
    seen: dict[str, int] = {}
    for row, column, text, name_column, given in records:
        if not text.strip():
            raise PromptsError(f"{path}: row {row} has an empty {column}")
        name = f"{row:05d}" if given is None else given.strip()
        if not name:
            raise PromptsError(f"{path}: row {row} has an empty {name_column}")
        if name in seen:
            raise PromptsError(f"{path}: row {row} has the {name_column} {name[:80]!r} of row {seen[name]}")
        seen[name] = row
        yield PromptRow(text.strip(), row, name)
