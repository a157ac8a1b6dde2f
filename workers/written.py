"""What a job's answers have come to, and how much of that has been told: it is told in pieces.

Knows texts, their log probabilities and offsets; knows nothing of Redis or of models. A piece says where it begins, so
that one that is told twice, or told again by a later attempt, is known for what it is:

    {"index": answer, "at": characters before it, "text"}, and where it has them "token": tokens before, "logprobs"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.jobs.record import to_json

_EVENT = 100  # bytes of an event beside its pieces, some
_LEAST = 16_384  # bytes of pieces that are told before all there is takes their place


@dataclass(frozen=True, slots=True)
class News:
    """Pieces that were not told yet, or, if `whole`, all there is. `marks`: how far each answer is told with them."""

    pieces: list[dict[str, Any]]
    whole: bool
    marks: list[tuple[int, int]]


class Written:
    """One thread adds to it, and one tells.

    All there is takes the place of the pieces when they are as large as it was the last time: what is kept is twice the
    answers at most (and `_LEAST`), and what is ever written three times.
    """

    def __init__(self, answers: int) -> None:
        self.followed = False  # whether anybody wants to be told
        self.cumulative = False  # told as to an API of a version before, which knows no pieces
        self.texts = [""] * answers
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in range(answers)]
        self._marks: list[tuple[int, int]] | None = None  # None: nothing was told
        self._size = self._since = 0  # bytes of the last whole, and of the pieces after it

    def add(self, index: int, text: str, logprobs: Sequence[dict[str, Any]]) -> None:
        self._logprobs[index] += logprobs
        self.texts[index] += text

    def news(self) -> News:
        """What is to be told now. Whoever has told it says `told`; else it is told again, with what is new by then."""
        # The first of an attempt takes the place of what another attempt told.
        whole = self._marks is None or self._since > max(_LEAST, self._size)
        begins = [(0, 0)] * len(self.texts) if whole or self._marks is None else self._marks
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
        return News(pieces, whole, marks)

    def so_far(self) -> dict[str, Any]:
        """All there is, as a version before told it each time."""
        told: dict[str, Any] = {"texts": list(self.texts)}
        if any(self._logprobs):
            told["logprobs"] = [list(one) for one in self._logprobs]
        return told

    def told(self, news: News) -> None:
        """These were told."""
        size = len(to_json(news.pieces)) + _EVENT
        self._marks = news.marks
        self._size, self._since = (size, 0) if news.whole else (self._size, self._since + size)
