"""Writes a prompts file: keeps the text model busy, screens its answers, finalizes the rows in order.

A row depends only on its own attempts and on the rows before it: it is the first attempt that is a valid caption, and
not a duplicate of an earlier row. So the file is independent of batch width and interruptions; working ahead of the
next row only makes it faster.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from contract.card import MAX_PROMPT_CHARACTERS
from contract.characters import text_error
from evaluation.generate import ProgressLog
from lab.captions.caption_client import CaptionClient, CaptionRequest
from lab.captions.caption_file import CaptionFile, CaptionRow
from lab.captions.caption_filter import (
    BROKEN,
    DUPLICATE,
    EMPTY,
    REFUSED,
    UNFINISHED,
    CaptionFilter,
    squeeze,
)
from lab.captions.text_sources import TextResponse, TextSource

if TYPE_CHECKING:
    from rich.progress import Progress

_AHEAD = 4  # times the author's width: rows open at once
_TEXTS = ("messages", "prompt", "prompts")  # fields of a request that hold the question
_HOPELESS = 16  # after so many rows without one caption it gives up


class HopelessError(RuntimeError):
    """The request yields no captions. `again` counts attempts by reason."""

    def __init__(self, again: Counter[str]) -> None:
        super().__init__("no valid caption was generated")
        self.again = again


@dataclass(slots=True)
class _Open:
    """An unfinished row: its completed attempts, and how many were started."""

    index: int
    begun: int = 0
    under_way: int = 0
    made: dict[int, tuple[CaptionRequest, str | None, str]] = field(default_factory=dict)  # question, reason, caption
    again: Counter[str] = field(default_factory=Counter)
    looked: int = 0  # so many attempts are known to be invalid


class CaptionGenerator:
    """Generates the captions that a file lacks. `attempts` is the maximum of tries per row."""

    def __init__(
        self, file: CaptionFile, asker: CaptionClient, author: TextSource, screen: CaptionFilter, attempts: int
    ) -> None:
        self._file, self._asker, self._author, self._screen = file, asker, author, screen
        self._attempts = attempts
        self._rows: list[_Open] = []
        self._asked: dict[Future[Any], tuple[_Open, int, CaptionRequest]] = {}
        for row in file.rows:
            if row.caption is not None:
                screen.keep(row.caption)

    def run(self, progress: Progress) -> None:
        """Generate all that is missing, row by row.

        Raises what the author raises, OSError if rows cannot be written, and `HopelessError`; finished rows stay.
        """
        file, progress_log = self._file, ProgressLog(progress.console, "captions", len(self._file.rows))
        bar = progress.add_task("captions", total=file.count, completed=len(file.rows))
        while len(file.rows) < file.count:
            self._ask()
            done, _ = wait(self._asked, return_when=FIRST_COMPLETED)
            for future in done:
                self._take(future)
            before = len(file.rows)
            while self._rows and self._settle(self._rows[0]):
                self._rows.pop(0)
            progress.advance(bar, len(file.rows) - before)
            progress_log.update(len(file.rows), file.count)
            if len(file.rows) >= min(_HOPELESS, file.count) and not any(row.caption for row in file.rows):
                raise HopelessError(file.again)

    def _ask(self) -> None:
        """Start attempts until the author is full: of the first open rows, and several of the very first."""
        while len(self._asked) < self._author.width:
            row = next((row for row in self._rows if self._wants(row)), None)
            if row is None:
                row = self._next()
            if row is None:
                return
            attempt, row.begun, row.under_way = row.begun, row.begun + 1, row.under_way + 1
            question = self._asker.first(row.index, attempt)
            self._asked[self._author.submit(question)] = (row, attempt, question)

    def _wants(self, row: _Open) -> bool:
        """The longer a row has taken, the more of its attempts run at once while all others wait for it."""
        if row.begun == self._attempts:
            return False
        if row.begun > row.looked + row.under_way:
            return False  # a pending one may be valid
        return row.under_way < (max(1, row.looked) if row is self._rows[0] else 1)

    def _next(self) -> _Open | None:
        index = len(self._file.rows) + len(self._rows)
        if index == self._file.count or len(self._rows) == _AHEAD * self._author.width:
            return None
        self._rows.append(_Open(index))
        return self._rows[-1]

    def _take(self, future: Future[Any]) -> None:
        row, attempt, question = self._asked.pop(future)
        field = getattr(future.exception(), "field", None)  # of `Invalid`, and of a service's `SourceError`
        if field is not None and field.partition(".")[0] in _TEXTS:  # an idea may be longer than the model reads
            row.made[attempt] = (question, REFUSED, "")
            row.under_way -= 1
            self._look(row)
            return
        response: TextResponse = self._author.answer(future.result())
        if question.idea:
            idea = squeeze(response.text.replace("\ufffd", ""))
            wrong = None if response.complete else UNFINISHED
            wrong = wrong or (None if idea else EMPTY) or (BROKEN if text_error(idea, MAX_PROMPT_CHARACTERS) else None)
            if wrong is None:
                then = self._asker.then(question, idea)
                assert then is not None
                self._asked[self._author.submit(then)] = (row, attempt, then)
                return
            row.made[attempt] = (question, wrong, "")
        else:
            row.made[attempt] = (question, self._screen.wrong(response.text, response.complete), squeeze(response.text))
        row.under_way -= 1
        self._look(row)

    def _look(self, row: _Open) -> None:
        """Skip the attempts that are known to be invalid."""
        while row.looked in row.made:
            _, wrong, caption = row.made[row.looked]
            wrong = wrong or (DUPLICATE if self._screen.has(caption) else None)
            if wrong is None:
                return
            row.again[wrong] += 1
            row.looked += 1

    def _settle(self, row: _Open) -> bool:
        """Write the row if all rows before it are written, and its outcome is known."""
        self._look(row)
        if row.looked not in row.made:
            if row.looked < self._attempts:
                return False
            last = row.made[row.looked - 1][0]
            self._file.add(CaptionRow(row.index, None, last.seed, last.subject, 0, dict(row.again)))
            return True
        question, _, caption = row.made[row.looked]
        self._screen.keep(caption)
        tokens = self._screen.tokens(caption)
        self._file.add(CaptionRow(row.index, caption, question.seed, question.subject, tokens, dict(row.again)))
        for other in self._rows:  # rows with the same caption restart before their turn
            self._look(other)
        return True
