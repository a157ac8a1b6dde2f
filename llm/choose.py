"""Selects each request's next tokens from a forward's logits: penalties, biases, grammars, greedy and sampled, in one
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contract.errors import Invalid
from llm import sample
from llm.parameters import Logprob
from llm.sequence import SequenceState
from llm.speculate import DraftTokens, accepted, agreed

NO_GUESS = DraftTokens([])


@dataclass(slots=True, eq=False)
class SampleRequest:
    """A request that needs next tokens: its logits begin at row `first`, one more row than it has guesses."""

    work: SequenceState
    first: int
    guess: DraftTokens = NO_GUESS

    @property
    def plain(self) -> bool:
        """Whether greedy decoding without adjustments suffices."""
        work = self.work
        return work.settings is None and not (work.adjusted or self.guess.tokens) and work.parameters.logprobs is None

    @property
    def rows(self) -> range:
        return range(self.first, self.first + len(self.guess.tokens) + 1)


@dataclass(slots=True, eq=False)
class SampledTokens:
    """The next tokens, and their log probabilities where requested."""

    tokens: list[int]
    logprobs: list[Logprob]


def greedy_tokens(logits: Tensor, asked: Sequence[SampleRequest], known: Tensor | None = None) -> list[int]:
    """The most likely token of each row of logits [L, V], -1 where they are not all finite: one copy from the device.

    `known` are these, if the forward computed them. If no request is greedy, any token may stand for the most likely
    one.
    """
    if known is None and any(ask.work.settings is None for ask in asked):
        known = sample.likeliest(logits)
    if known is None:
        known = logits.sum(-1).isfinite().long() - 1
    found: list[int] = known.tolist()
    return found


def choose(
    logits: Tensor, asked: Sequence[SampleRequest], best: Sequence[int] | None = None
) -> list[SampledTokens | Invalid]:  # fmt: skip
    """The next tokens of each request, all of whose logits must be finite. logits [L, V] may be overwritten.

    `best` is the result of `greedy_tokens`, if it was called. `Invalid`: the request's constraints leave no token.
    """
    if not asked:
        return []
    best = greedy_tokens(logits, asked) if best is None else best
    if all(ask.plain for ask in asked):  # most steps of most servers: hundreds of rows without any adjustment
        return [SampledTokens([best[ask.first]], []) for ask in asked]
    told = _told(logits, asked)
    adjusted, refused = _adjust_(logits, asked)
    made = _greedy(logits, asked, best, adjusted) | _sampled(logits, asked)
    chosen = [
        SampledTokens(made[i], _logprobs(told[i], ask, made[i]) if i in told else []) for i, ask in enumerate(asked)
    ]
    return [refused.get(i, one) for i, one in enumerate(chosen)]


def _greedy(
    logits: Tensor, asked: Sequence[SampleRequest], best: Sequence[int], adjusted: set[int]
) -> dict[int, list[int]]:
    """The next tokens of greedy requests, by their place in `asked`; `best` is anew where logits were adjusted."""
    greedy = [i for i, ask in enumerate(asked) if ask.work.settings is None]
    anew = [i for i in greedy if asked[i].first in adjusted]
    again = logits[[asked[i].first for i in anew]].argmax(-1).tolist() if anew else []
    made = {i: [token] for i, token in zip(anew, again, strict=True)}
    for i in greedy:
        if i not in made:
            made[i] = agreed(asked[i].guess.tokens, [best[row] for row in asked[i].rows])
    return made


def _sampled(logits: Tensor, asked: Sequence[SampleRequest]) -> dict[int, list[int]]:
    """The next tokens of all other requests, by their place in `asked`."""
    drawn = [i for i, ask in enumerate(asked) if ask.work.settings is not None]
    return dict(zip(drawn, _drawn(logits, [asked[i] for i in drawn]), strict=True)) if drawn else {}


def _drawn(logits: Tensor, asked: Sequence[SampleRequest]) -> list[list[int]]:
    rows = [row for ask in asked for row in ask.rows]
    owners = [i for i, ask in enumerate(asked) for _ in ask.rows]
    settings = sample.gathered([s for ask in asked if (s := ask.work.settings) is not None])
    mine = logits if rows == list(range(len(logits))) else logits[rows]
    p = sample.probabilities(mine, settings.at(torch.tensor(owners)))
    p /= p.sum(-1, keepdim=True)
    counts = [len(ask.rows) for ask in asked]
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(int).tolist()
    index = np.array([len(ask.work.tokens) for ask in asked], np.int64)
    if len(rows) == len(asked):
        return [[token] for token in sample.draw(p, sample.uniform(settings.seeds, index, sample.TOKEN)).tolist()]
    return accepted(p, firsts, [ask.guess for ask in asked], settings, index)


def _adjust_(logits: Tensor, asked: Sequence[SampleRequest]) -> tuple[set[int], dict[int, Invalid]]:
    """Apply penalties, biases and grammars, which only requests without guesses have; returns their rows, and by
    request why none of its tokens is left (its logits are then still finite).
    """
    with_seen = [(ask, seen, said) for ask in asked
                 if (seen := ask.work.seen) is not None and (said := ask.work.said) is not None]  # fmt: skip
    if with_seen:
        rows = [ask.first for ask, _, _ in with_seen]
        numbers = torch.tensor([ask.work.penalties() for ask, _, _ in with_seen], device=logits.device)
        seen = torch.stack([seen for _, seen, _ in with_seen]).to(logits.device)
        said = torch.stack([said for _, _, said in with_seen]).to(logits.device)
        logits[rows] = sample.penalize(
            logits[rows], sample.Penalties(numbers[:, 0], numbers[:, 1], numbers[:, 2], seen, said)
        )
    return {ask.first for ask in asked if ask.work.adjusted}, _constrain_(logits, asked)


def _constrain_(logits: Tensor, asked: Sequence[SampleRequest]) -> dict[int, Invalid]:
    """Add biases, and exclude what grammars do not allow; returns by request why none of its tokens is left."""
    refused: dict[int, Invalid] = {}
    allowed: dict[int, Tensor] = {}  # by request: bool [V]
    for i, ask in enumerate(asked):
        if ask.work.matcher is not None:
            try:
                allowed[i] = ask.work.matcher.allowed()
            except Invalid as error:
                refused[i] = error
    for i, ask in enumerate(asked):
        if ask.work.bias is not None and i not in refused:
            row = logits[ask.first].clone()
            sample.bias_(row, ask.work.bias)
            if not bool((row > -torch.inf)[allowed[i].to(row.device) if i in allowed else ...].any()):
                refused[i] = Invalid("logit_bias", "excludes every possible next token")
                allowed.pop(i, None)
            else:
                logits[ask.first] = row
    if allowed:  # all of them in one pass
        rows = [asked[i].first for i in allowed]
        excluded = ~torch.stack(list(allowed.values())).to(logits.device)
        logits[rows] = logits[rows].masked_fill_(excluded, -torch.inf)
    return refused


def _told(logits: Tensor, asked: Sequence[SampleRequest]) -> dict[int, Tensor]:
    """The model's unmodified logits, of requests that want log probabilities."""
    return {i: logits[list(ask.rows)] for i, ask in enumerate(asked) if ask.work.parameters.logprobs is not None}


def _logprobs(logits: Tensor, ask: SampleRequest, tokens: list[int]) -> list[Logprob]:
    most = ask.work.parameters.logprobs or 0
    logs, top, ids = sample.logprobs(logits[: len(tokens)], torch.tensor(tokens, device=logits.device), most)
    ranked = [tuple(zip(i, t, strict=True)) for i, t in zip(ids.tolist(), top.tolist(), strict=True)]
    return [Logprob(t, log, best) for t, log, best in zip(tokens, logs.tolist(), ranked, strict=True)]
