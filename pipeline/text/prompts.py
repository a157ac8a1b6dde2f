"""Reads prompt files: one prompt per line, or a table with a caption column. Errors name file and row. Imports no
torch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

COLUMNS = ("prompt", "caption")
MAX_FILE_BYTES = 256 * 2**20


class PromptsError(ValueError):
    """A prompts file that cannot be used. The message names file and row."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt. `row` counts from 1 as in an editor; `name` is the start of the image's file name."""

    text: str
    row: int
    name: str


def read(
    path: Path, limit: int | None = None, *, columns: Sequence[str] = COLUMNS, names: Sequence[str] = ("id",)
) -> list[PromptRow]:
    """Return the prompts of a file, the first `limit` of them. What comes after those is not looked at.

    A `.tsv` or `.csv` needs a header with one of `columns`; the first of the columns `names` that is there becomes the
    name. Any other file holds one prompt a line, and empty lines are passed over.

    Raises:
        PromptsError: for a file that is missing, too large, not UTF-8, or empty; a table without such a column, with a
            row too short or too long, an empty prompt, or an id that is empty or there twice.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)  # not by its size: a pipe has none
    except OSError as error:
        raise PromptsError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > MAX_FILE_BYTES:
        raise PromptsError(f"{path}: is larger than {MAX_FILE_BYTES // 2**20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise PromptsError(f"{path}: row {row} is not UTF-8 (byte {error.start} of the file)") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    suffix = path.suffix.lower()
    if suffix in (".tsv", ".csv"):
        rows = _tabs(text) if suffix == ".tsv" else _commas(path, text)
        prompts = list(islice(_table(path, rows, columns, names), limit))
    else:
        lines = ((row, line.strip()) for row, line in enumerate(text.split("\n"), 1))
        prompts = list(islice((PromptRow(line, row, f"{row:05d}") for row, line in lines if line), limit))
    if not prompts:
        raise PromptsError(f"{path}: holds no prompts")
    return prompts


def _tabs(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (row, cells) of a table without quoting: captions in TSV hold bare quotes."""
    for row, line in enumerate(text.split("\n"), 1):
        yield row, line.split("\t")


def _commas(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (first row, cells) of a table whose quoted cells may hold line ends."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    row = 1
    try:
        for cells in reader:
            yield row, cells
            row = reader.line_num + 1
    except csv.Error as error:  # an unclosed quote, an oversized cell
        raise PromptsError(f"{path}: row {row} cannot be read as CSV ({error})") from None


def _table(
    path: Path, rows: Iterator[tuple[int, list[str]]], columns: Sequence[str], names: Sequence[str]
) -> Iterator[PromptRow]:
    filled = ((row, cells) for row, cells in rows if any(cell.strip() for cell in cells))
    first = next(filled, None)
    if first is None:
        raise PromptsError(f"{path}: is empty")
    header, column, number = _header(path, *first, columns, names)
    seen: dict[str, int] = {}
    for row, cells in filled:
        if len(cells) != len(header):
            raise PromptsError(f"{path}: row {row} has {len(cells)} columns, the header has {len(header)}")
        if not cells[column].strip():
            raise PromptsError(f"{path}: row {row} has an empty {header[column]}")
        name = cells[number].strip() if number is not None else f"{row:05d}"
        if not name:
            raise PromptsError(f"{path}: row {row} has an empty {header[number or 0]}")
        if name in seen:
            raise PromptsError(f"{path}: row {row} has the {header[number or 0]} {name[:80]!r} of row {seen[name]}")
        seen[name] = row
        yield PromptRow(cells[column].strip(), row, name)


def _header(
    path: Path, row: int, cells: Sequence[str], columns: Sequence[str], names: Sequence[str]
) -> tuple[list[str], int, int | None]:
    """Return the columns' names, and the indices of the prompt's and, if there is one, of the name's."""
    header = [cell.strip().lower() for cell in cells]
    column = next((header.index(name) for name in columns if name in header), None)
    if column is None:
        listed = ascii(", ".join(header)[:200])  # quoted: it may hold binary data or terminal escapes
        raise PromptsError(f"{path}: row {row} names no column {' or '.join(columns)}; it has {listed}")
    return header, column, next((header.index(name) for name in names if name in header), None)
