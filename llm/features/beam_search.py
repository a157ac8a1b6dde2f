"""Beam search: keeps the likeliest beginnings of an answer, and continues all of them at once.

As transformers' `generate` does it: of all continuations of all beams the likeliest run on, and those that end are
finished; finished ones are ranked by the sum of their log probabilities over length^`length_penalty`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from llm.cache.pages import SequencePages
from llm.parameters import Finish, GeneratedText, Logprob, TextParameters
from llm.text.detokenizer import Detokenizer

S = TypeVar("S")


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A beginning of the answer, or a whole one: its tokens, and the sum of their log probabilities."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0
    logprobs: tuple[Logprob, ...] = ()  # where they were requested


class BeamSearch(Generic[S]):
    """The beams of one request, and the places in the KV cache of those that run.

    `running` are best first; `states` are their sequences, none while what all have in common is read.
    """

    def __init__(self, parameters: TextParameters, ends: Collection[int], vocabulary: int) -> None:
        """`ends` are the tokens that end an answer, of a model with so many tokens."""
        self.parameters = parameters
        self.width = parameters.beams
        self._ends = frozenset() if parameters.ignore_end else frozenset(ends)
        # As many as leave `width` that run on, whichever of them end.
        self._kept = max(2, 1 + len(self._ends)) * self.width
        self.candidates = min(self._kept, vocabulary)  # of each beam
        self.running = [Beam()]
        self._finished: list[tuple[float, Beam]] = []  # by score, at most `width`
        self.length = 0  # tokens of each running beam
        self.states: list[S] = []
        self.idle: list[S] = []  # sequences without pages, for beams to come
        self.spare = SequencePages()  # pages for copies of those that are not full

    @property
    def common(self) -> tuple[int, ...]:
        """The tokens that all running beams begin with, but for the last one: after it each goes on by itself."""
        first, last = (choose(beam.tokens for beam in self.running) for choose in (min, max))
        return first[: next((n for n, pair in enumerate(zip(first, last, strict=True)) if len({*pair}) > 1), -1)]

    def advance(self, candidates: Sequence[Logprob]) -> list[int]:
        """Take the `candidates` likeliest tokens after each running beam.

        Returns, for each beam that runs on, the one that it continues; none if the search has ended.
        """
        parameters, width = self.parameters, self.width
        tokens = [[token for token, _ in entry.top] for entry in candidates]
        logprobs = np.array([[value for _, value in entry.top] for entry in candidates], np.float32)
        totals = logprobs + np.array([beam.total for beam in self.running], np.float32)[:, None]
        order = np.argsort(-totals, axis=None, kind="stable")[: self._kept].tolist()
        self.length += 1
        last, full = self.length >= parameters.max_tokens, len(self._finished) == width
        beams: list[Beam] = []
        parents: list[int] = []
        for rank, place in enumerate(order):
            parent, k = divmod(place, totals.shape[1])
            token, total = tokens[parent][k], float(totals[parent, k])
            if not (last or token in self._ends):
                if len(beams) < width:
                    beams.append(self._continued(parent, candidates[parent].top, k, total))
                    parents.append(parent)
            elif rank < width and not (full and parameters.early_stopping):
                beam = self._continued(parent, candidates[parent].top, k, total)
                self._finished.append((self._score(total), beam))
        self.running = beams
        self._finished = sorted(self._finished, key=lambda pair: -pair[0])[:width]
        if len(self._finished) == width:
            hopeless = bool(beams) and self._score(beams[0].total) <= self._finished[-1][0]
            if parameters.early_stopping or hopeless:
                self.running = []
        return parents if self.running else []

    def _score(self, total: float) -> float:
        return total / math.pow(self.length, self.parameters.length_penalty)

    def _continued(self, parent: int, top: Sequence[tuple[int, float]], k: int, total: float) -> Beam:
        """A running beam, continued by the k-th of the likeliest tokens."""
        beam, (token, value), count = self.running[parent], top[k], self.parameters.logprobs
        entry = () if count is None else (Logprob(token, value, tuple(top[:count])),)
        return Beam((*beam.tokens, token), total, (*beam.logprobs, *entry))

    def result(self, tokenizer: Any, cached: int) -> GeneratedText:
        """The best answer, with the next best ones as its alternatives, once the search has ended."""
        texts = [self._text(beam, tokenizer, cached) for _, beam in self._finished[: self.parameters.answers]]
        return replace(texts[0], alternatives=tuple(texts[1:]))

    def _text(self, beam: Beam, tokenizer: Any, cached: int) -> GeneratedText:
        prompt, ended = self.parameters.prompt, beam.tokens[-1] in self._ends
        writer = Detokenizer(tokenizer, before=prompt if self.parameters.continues else ())
        for token in beam.tokens[:-1] if ended else beam.tokens:
            writer.add(token)
        writer.finish()
        finish: Finish = "stop" if ended else "length"
        return GeneratedText(
            writer.text, beam.tokens, finish, len(prompt), cached, beam.logprobs, cumulative_logprob=beam.total
        )
