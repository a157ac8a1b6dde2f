"""The captions of a run: read from a prompts file, stored in the run's folder, written as a table. Imports no torch."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from contract.card import MAX_PROMPT_CHARACTERS
from contract.characters import text_error
from pipeline.text import prompts
from pipeline.text.prompts import PromptsError as PromptsError

COLUMNS = ("caption", "prompt", "text", "name")  # `name` is the caption column of the embedded data
IDS = ("id", "file")


@dataclass(frozen=True, slots=True)
class Caption:
    """One caption. `index` counts from 0 over the file's captions: a run's seeds count with it."""

    index: int
    id: str
    text: str


def read(path: Path, limit: int | None = None) -> list[Caption]:
    """Read the captions of a file, the first `limit` of them.

    A `.tsv` or `.csv` has a header with a column `caption`, `prompt`, `text` or `name`, and ids in a column `id` or
    `file` (else rows are their own ids); objects of a `.json` or `.jsonl` have such fields. Any other file holds one
    caption per line.

    Raises:
        PromptsError: as `pipeline.text.prompts.read`, and for text that is no valid prompt; names the row.
    """
    rows = prompts.read(path, limit, columns=COLUMNS, names=IDS)
    for prompt in rows:
        wrong = text_error(prompt.text, MAX_PROMPT_CHARACTERS)
        if wrong is None and text_error(prompt.name, 1000) is not None:
            wrong = f"id: {text_error(prompt.name, 1000)}"
        if wrong is not None:
            raise PromptsError(f"{path}: row {prompt.row}: {wrong}")
    return [Caption(index, prompt.name, prompt.text) for index, prompt in enumerate(rows)]


def render(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> bytes:
    """Render a `.tsv` that `read` accepts, quoted as `csv` does. Raises ValueError for a cell that would be read back
    changed, or is of several lines."""
    table = io.StringIO(newline="")
    writer = csv.writer(table, delimiter=prompts.DELIMITERS[".tsv"], lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        for cell in row:
            if not cell or cell != cell.strip() or set("\t\r\n") & set(cell):
                raise ValueError(f"{cell!r} is no cell of a table with tabs")
        writer.writerow(row)
    return table.getvalue().encode()


def digest(captions: list[Caption]) -> str:
    """A digest of these captions, in this order."""
    text = "".join(f"{len(part)}:{part}" for caption in captions for part in (caption.id, caption.text))
    return hashlib.sha256(text.encode()).hexdigest()
