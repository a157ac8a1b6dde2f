"""Tracks a job's generated texts and which pieces of them have been sent.

A piece carries its position, so that one sent twice, or sent again by a later attempt, is recognized:

    {"index": answer, "at": characters before it, "text"}, and where it has them "token": tokens before, "logprobs"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.jobs.record import to_json

_EVENT = 100  # bytes of an event without its pieces, roughly
_LEAST = 16_384  # bytes of pieces after which the whole text replaces them


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """Unsent pieces, or, if `complete`, all texts. `marks`: how far each answer is sent with them."""

    pieces: list[dict[str, Any]]
    complete: bool
    marks: list[tuple[int, int]]


class StreamBuffer:
    """One thread adds to it, and one reads it.

    The complete texts replace the pieces when these have grown as large as the last complete texts: at most twice the
    answers' size (and `_LEAST`) is stored, and at most three times is ever written.
    """

    def __init__(self, answers: int) -> None:
        self.followed = False  # whether a client follows the text
        self.cumulative = False  # in the form for an API of an older version, which cannot merge pieces
        self.texts = [""] * answers
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in range(answers)]
        self._marks: list[tuple[int, int]] | None = None  # None: nothing was sent
        self._size = self._since = 0  # bytes of the last complete texts, and of the pieces after it

    def add(self, index: int, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        self._logprobs[index] += logprobs
        self.texts[index] += text

    def news(self) -> StreamChunk:
        """Return what to send now. The caller confirms with `told`; else it is returned again, with what was added by
        then.
        """
        # The first report of an attempt replaces what another attempt sent.
        complete = self._marks is None or self._since > max(_LEAST, self._size)
        begins = [(0, 0)] * len(self.texts) if complete or self._marks is None else self._marks
        pieces, marks = [], []
        for index, (at, token) in enumerate(begins):
            text, logprobs = self.texts[index], self._logprobs[index]
            count = len(logprobs)
            marks.append((len(text), count))
            if len(text) == at and count == token and self._marks is not None:
                continue
            piece: dict[str, Any] = {"index": index, "at": at, "text": text[at:]}
            if count > token:
                piece.update(token=token, logprobs=logprobs[token:count])
            pieces.append(piece)
        return StreamChunk(pieces, complete, marks)

    def so_far(self) -> dict[str, Any]:
        """The complete texts, in the form older versions sent each time."""
        document: dict[str, Any] = {"texts": list(self.texts)}
        if any(self._logprobs):
            document["logprobs"] = [list(entry) for entry in self._logprobs]
        return document

    def told(self, news: StreamChunk) -> None:
        """Confirm that these were sent."""
        size = len(to_json(news.pieces)) + _EVENT
        self._marks = news.marks
        self._size, self._since = (size, 0) if news.complete else (self._size, self._since + size)
