"""Selects each request's next tokens from a forward's logits: penalties, biases, grammars, greedy and sampled, in one
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from contract.errors import Invalid
from core.kernels.kv_cache import on_device
from llm import sample
from llm.parameters import Logprob
from llm.sequence import SequenceState
from llm.speculate import NO_GUESS, DraftTokens, accepted, agreed


@dataclass(slots=True, eq=False)
class SampleRequest:
    """A request that needs next tokens: its logits begin at row `first`, one more row than it has guesses."""

    work: SequenceState
    first: int
    guess: DraftTokens = NO_GUESS

    @property
    def plain(self) -> bool:
        """Return whether greedy decoding without adjustments suffices."""
        work = self.work
        adjusted = work.settings is not None or work.modifies_logits or self.guess.tokens
        return not adjusted and work.parameters.logprobs is None

    @property
    def position(self) -> int:
        """The position of its next token: that after the pending one, if there is one."""
        return len(self.work.tokens) + (self.work.pending is not None)

    @property
    def rows(self) -> range:
        return range(self.first, self.first + len(self.guess.tokens) + 1)


@dataclass(slots=True, eq=False)
class ScoreRequest:
    """Tokens of a prompt whose log probabilities are requested: those after `positions`, whose logits begin at row
    `first`.
    """

    work: SequenceState
    positions: range
    first: int = 0

    @property
    def rows(self) -> range:
        return range(self.first, self.first + len(self.positions))

    def logprobs(self, logits: Tensor) -> list[Logprob]:
        """Log probabilities under the forward's logits [L, V]."""
        work, rows, positions = self.work, self.rows, self.positions
        targets = work.tokens[positions.start + 1 : positions.stop + 1]
        return _logprobs(logits[rows.start : rows.stop], targets, work.parameters.logprobs or 0)


@dataclass(slots=True, eq=False)
class SampledTokens:
    """The next tokens, and their log probabilities where requested."""

    tokens: list[int]
    logprobs: list[Logprob]

    @property
    def path(self) -> range:
        """The guesses that were right, by number."""
        return range(len(self.tokens) - 1)


def greedy_tokens(logits: Tensor, requests: Sequence[SampleRequest], known_tokens: Tensor | None = None) -> list[int]:
    """The most likely token of each row of logits [L, V], -1 where they are not all finite: one copy from the device.

    `known_tokens` are these, if the forward computed them. If no request is greedy, any token may stand for the most
    likely one.
    """
    if known_tokens is None and any(request.work.settings is None for request in requests):
        known_tokens = sample.likeliest(logits)
    if known_tokens is None:
        known_tokens = logits.sum(-1).isfinite().long() - 1
    tokens: list[int] = known_tokens.tolist()
    return tokens


def choose(
    logits: Tensor, requests: Sequence[SampleRequest], best: Sequence[int] | None = None
) -> list[SampledTokens | Invalid]:  # fmt: skip
    """The next tokens of each request, all of whose logits must be finite. logits [L, V] may be overwritten.

    `best` is the result of `greedy_tokens`, if it was called. `Invalid`: the request's constraints leave no token.
    """
    if not requests:
        return []
    best = greedy_tokens(logits, requests) if best is None else best
    if all(
        request.plain for request in requests
    ):  # most steps of most servers: hundreds of rows without any adjustment
        return [SampledTokens([best[request.first]], []) for request in requests]
    logprob_rows = _unmodified(logits, requests)
    adjusted, refused = _adjust_(logits, requests)
    tokens = _greedy(logits, requests, best, adjusted) | _sampled(logits, requests)
    results = [
        SampledTokens(tokens[i], _sampled_logprobs(logprob_rows[i], request, tokens[i]) if i in logprob_rows else [])
        for i, request in enumerate(requests)
    ]
    return [refused.get(i, result) for i, result in enumerate(results)]


def draw_on_device(logits: Tensor, requests: Sequence[SampleRequest], best: Tensor) -> Tensor:
    """The next token of each request, all of which are `drawn_on_device`, at its row: int64 [L], without waiting for
    the device. `best` [L] is `sample.likeliest` of logits [L, V], and what other rows get.
    """
    sampled = [request for request in requests if request.work.settings is not None]
    if not sampled:
        return best
    rows = on_device(torch.tensor([request.first for request in sampled]), logits.device)
    return best.index_copy(0, rows, torch.where(best[rows] < 0, -1, _Distributions.of(logits, sampled).draw()))


class _Distributions(NamedTuple):
    """The distributions of sampled requests' next tokens, one after each of their guesses."""

    p: Tensor  # [rows, V], normalized
    settings: sample.SamplingSettings  # of requests
    indices: sample.Counts  # of each request's next token

    @classmethod
    def of(cls, logits: Tensor, requests: Sequence[SampleRequest]) -> Self:
        rows = [row for request in requests for row in request.rows]
        settings = sample.gathered([s for request in requests if (s := request.work.settings) is not None])
        owners = torch.tensor([i for i, request in enumerate(requests) for _ in request.rows])
        selected = logits if rows == list(range(len(logits))) else logits[on_device(torch.tensor(rows), logits.device)]
        p = sample.probabilities(selected, settings if len(owners) == len(requests) else settings.at(owners))
        p /= p.sum(-1, keepdim=True)
        return cls(p, settings, np.array([request.position for request in requests], np.int64))

    def draw(self) -> Tensor:
        """The next tokens of requests without guesses: int64 [rows], on the device."""
        return sample.draw(self.p, sample.uniform(self.settings.seeds, self.indices, sample.TOKEN))


def _greedy(
    logits: Tensor, requests: Sequence[SampleRequest], best: Sequence[int], adjusted: set[int]
) -> dict[int, list[int]]:
    """The next tokens of greedy requests, by their place in `requests`; `best` is anew where logits were adjusted."""
    greedy = [i for i, request in enumerate(requests) if request.work.settings is None]
    anew = [i for i in greedy if requests[i].first in adjusted]
    again = logits[[requests[i].first for i in anew]].argmax(-1).tolist() if anew else []
    tokens = {i: [token] for i, token in zip(anew, again, strict=True)}
    for i in greedy:
        if i not in tokens:
            tokens[i] = agreed(requests[i].guess.tokens, [best[row] for row in requests[i].rows])
    return tokens


def _sampled(logits: Tensor, requests: Sequence[SampleRequest]) -> dict[int, list[int]]:
    """The next tokens of all other requests, by their place in `requests`."""
    rows = [i for i, request in enumerate(requests) if request.work.settings is not None]
    return dict(zip(rows, _drawn(logits, [requests[i] for i in rows]), strict=True)) if rows else {}


def _drawn(logits: Tensor, requests: Sequence[SampleRequest]) -> list[list[int]]:
    distributions = _Distributions.of(logits, requests)
    counts = [len(request.rows) for request in requests]
    if len(distributions.p) == len(requests):
        return [[token] for token in distributions.draw().tolist()]
    firsts = np.cumsum([0, *counts[:-1]]).tolist()
    return accepted(distributions.p, firsts, [r.guess for r in requests], distributions.settings, distributions.indices)


def _adjust_(logits: Tensor, requests: Sequence[SampleRequest]) -> tuple[set[int], dict[int, Invalid]]:
    """Apply penalties, biases and grammars, which only requests without guesses have; returns their rows, and by
    request why none of its tokens is left (its logits are then still finite).
    """
    with_seen = [
        (request, seen, counts)
        for request in requests
        if (seen := request.work.seen) is not None and (counts := request.work.output_counts) is not None
    ]
    if with_seen:
        rows = [request.first for request, _, _ in with_seen]
        requested = [request.work.parameters for request, _, _ in with_seen]
        numbers = torch.tensor(
            [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in requested], device=logits.device
        )
        seen = torch.stack([seen for _, seen, _ in with_seen]).to(logits.device)
        counts = torch.stack([counts for _, _, counts in with_seen]).to(logits.device)
        logits[rows] = sample.penalize(
            logits[rows], sample.Penalties(numbers[:, 0], numbers[:, 1], numbers[:, 2], seen, counts)
        )
    return {request.first for request in requests if request.work.modifies_logits}, _constrain_(logits, requests)


def _constrain_(logits: Tensor, requests: Sequence[SampleRequest]) -> dict[int, Invalid]:
    """Add biases, and exclude what grammars do not allow; returns by request why none of its tokens is left."""
    refused: dict[int, Invalid] = {}
    allowed: dict[int, Tensor] = {}  # by request: bool [V]
    for i, request in enumerate(requests):
        if request.work.matcher is not None:
            try:
                allowed[i] = request.work.matcher.allowed()
            except Invalid as error:
                refused[i] = error
    for i, request in enumerate(requests):
        if request.work.bias is not None and i not in refused:
            row = logits[request.first].clone()
            sample.bias_(row, request.work.bias)
            if not bool((row > -torch.inf)[allowed[i].to(row.device) if i in allowed else ...].any()):
                refused[i] = Invalid("logit_bias", "excludes every possible next token")
                allowed.pop(i, None)
            else:
                logits[request.first] = row
    if allowed:  # all of them in one pass
        rows = [requests[i].first for i in allowed]
        excluded = ~torch.stack(list(allowed.values())).to(logits.device)
        logits[rows] = logits[rows].masked_fill_(excluded, -torch.inf)
    return refused


def _unmodified(logits: Tensor, requests: Sequence[SampleRequest]) -> dict[int, Tensor]:
    """The model's unmodified logits, of requests for log probabilities."""
    return {
        i: logits[list(request.rows)]
        for i, request in enumerate(requests)
        if request.work.parameters.logprobs is not None
    }


def _sampled_logprobs(logits: Tensor, request: SampleRequest, tokens: list[int]) -> list[Logprob]:
    return _logprobs(logits[: len(tokens)], tokens, request.work.parameters.logprobs or 0)


def _logprobs(logits: Tensor, tokens: list[int], count: int) -> list[Logprob]:
    """Log probabilities of tokens [n] under logits [n, V], each with those of the `count` most likely."""
    logs, top, ids = sample.logprobs(logits, torch.tensor(tokens, device=logits.device), count)
    ranked = [tuple(zip(i, t, strict=True)) for i, t in zip(ids.tolist(), top.tolist(), strict=True)]
    return [Logprob(t, log, best) for t, log, best in zip(tokens, logs.tolist(), ranked, strict=True)]
