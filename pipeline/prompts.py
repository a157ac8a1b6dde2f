"""Reads prompt files: one prompt a line, or a table with a caption column.

Knows text formats, and names file and row where one is wrong. Imports no torch.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

COLUMNS = ("prompt", "caption")
MAX_FILE_BYTES = 256 * 2**20


class PromptsError(ValueError):
    """A prompts file that cannot be used. The message names file and row."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `row` counts from 1 as an editor shows it; `name` is what a picture's file may begin with."""

    text: str
    row: int
    name: str


def read(path: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, the first `limit` of them.

    A `.tsv` or `.csv` needs a header with a column `prompt` or `caption`; an `id` column becomes the name. Any other
    file holds one prompt a line, and empty lines are passed over.

    Raises:
        PromptsError: for a file that is missing, too large, not UTF-8, or empty; a table without such a column, with a
            row too short, an empty prompt, or an id twice.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise PromptsError(f"{path}: is larger than {MAX_FILE_BYTES // 2**20} MiB")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptsError(f"{path}: is not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise PromptsError(f"{path}: cannot be read ({error.strerror})") from None
    if path.suffix in (".tsv", ".csv"):
        prompts = _table(path, text)
    else:
        lines = text.split("\n")
        prompts = [Prompt(line.strip(), row, f"{row:05d}") for row, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptsError(f"{path}: holds no prompts")
    return prompts[:limit]


def _table(path: Path, text: str) -> list[Prompt]:
    delimiter = "\t" if path.suffix == ".tsv" else ","
    if delimiter == "\t":  # captions in TSV hold bare quotes
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        header = next(reader)
    except StopIteration:
        raise PromptsError(f"{path}: is empty") from None
    column = next((header.index(name) for name in COLUMNS if name in header), None)
    if column is None:
        raise PromptsError(f"{path}: row 1 names no column {' or '.join(COLUMNS)}; it has {', '.join(header)[:200]}")
    number = header.index("id") if "id" in header else None
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for cells in reader:
        row = reader.line_num
        if not any(cells):
            continue
        if len(cells) != len(header):
            raise PromptsError(f"{path}: row {row} has {len(cells)} columns, the header has {len(header)}")
        if not cells[column].strip():
            raise PromptsError(f"{path}: row {row} has an empty {header[column]}")
        name = cells[number].strip() if number is not None else f"{row:05d}"
        if name in seen:
            raise PromptsError(f"{path}: row {row} has the id {name!r} of row {seen[name]}")
        seen[name] = row
        prompts.append(Prompt(cells[column].strip(), row, name))
    return prompts
