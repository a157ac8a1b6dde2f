"""Selects each part's next tokens from a forward's logits: penalties, biases, grammars, greedy and sampled, in one
pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from contract.errors import Invalid
from core.kernels.kv_cache import on_device
from llm.drafts.speculate import accepted, agreed
from llm.parameters import Logprob
from llm.sampling import sample
from llm.sampling.pending import PendingTokens, RowLogprobs
from llm.sampling.token_counts import TokenCounts
from llm.step import Output


class SampledTokens(NamedTuple):
    """The next tokens, and their log probabilities where requested."""

    tokens: list[int]
    logprobs: Sequence[Logprob] = ()


def greedy_tokens(logits: Tensor, parts: Sequence[Output], known_tokens: Tensor | None = None) -> list[int]:
    """The most likely token of each row of logits [L, V], -1 where they are not all finite: one copy from the device.

    `known_tokens` are these, if the forward computed them. If no part is greedy, any token may stand for the most
    likely one.
    """
    if known_tokens is None and any(part.sequence.settings is None for part in parts):
        known_tokens = sample.likeliest(logits)
    if known_tokens is None:
        known_tokens = logits.sum(-1).isfinite().long() - 1
    tokens: list[int] = known_tokens.tolist()
    return tokens


def choose(
    logits: Tensor,
    parts: Sequence[Output],
    best: Sequence[int] | None = None,
    counts: TokenCounts | None = None,
) -> list[SampledTokens | Invalid]:
    """The next tokens of each part, all of whose logits must be finite. logits [L, V] fp32 may be overwritten.

    `best` is the result of `greedy_tokens`, if it was called. `Invalid`: the request's constraints leave no token.
    """
    if not parts:
        return []
    best = greedy_tokens(logits, parts) if best is None else best
    if all(part.plain for part in parts):  # most steps of most servers: hundreds of rows without any adjustment
        return [SampledTokens([best[part.first]]) for part in parts]
    told = [i for i, part in enumerate(parts) if part.sequence.parameters.logprobs is not None]
    rows = [row for i in told for row in parts[i].rows]
    logs = logits[rows].log_softmax(-1) if told else None  # of unmodified logits
    _adjust_(logits, parts, counts)
    refused = _constrain_(logits, parts)
    tokens = _greedy(logits, parts, best) | _sampled(logits, parts)
    results = [SampledTokens(tokens[i]) for i in range(len(parts))]
    if logs is not None:
        entries = _sampled_logprobs(logs, [(parts[i], tokens[i]) for i in told])
        for i, logprobs in zip(told, entries, strict=True):
            results[i] = SampledTokens(tokens[i], logprobs)
    return [refused.get(i, result) for i, result in enumerate(results)]


def draw_on_device(logits: Tensor, parts: Sequence[Output], best: Tensor, counts: TokenCounts) -> PendingTokens:
    """The next token of each part, all of which are `drawn_on_device`, at its row, without waiting for the device.

    `best` [L] is `sample.likeliest` of logits [L, V] fp32, which may be overwritten, and what other rows get.
    """
    if all(part.sequence.plain for part in parts):
        return PendingTokens(best)
    unmodified = [(group, logits[_rows(group, logits)]) for group in _by_logprobs(parts)]
    _adjust_(logits, parts, counts)
    tokens = best.clone()
    anew = [part for part in parts if part.sequence.settings is None and part.sequence.modifies_logits]
    if anew:
        rows = _rows(anew, logits)
        tokens[rows] = logits[rows].argmax(-1)
    if sampled := [part for part in parts if part.sequence.settings is not None]:
        for some, drawn in _drawn_alone(logits, sampled):
            tokens[_rows(some, logits)] = drawn
    tokens = torch.where(best < 0, -1, tokens)
    logprobs = []
    for group, original in unmodified:
        its_tokens = tokens[_rows(group, logits)].clamp_(min=0)
        numbers = sample.ranked(original.log_softmax(-1), its_tokens, group[0].sequence.parameters.logprobs or 0)
        logprobs.append(RowLogprobs([part.first for part in group], *numbers))
    return PendingTokens(tokens, logprobs)


def _rows(parts: Sequence[Output], logits: Tensor) -> Tensor:
    """The rows of their logits [n], on the device. They have no guesses."""
    return on_device(torch.tensor([part.first for part in parts]), logits.device)


def _by_logprobs(parts: Sequence[Output]) -> list[list[Output]]:
    """Group parts with log probabilities by how many of the most likely tokens are requested."""
    groups: dict[int, list[Output]] = {}
    for part in parts:
        if (count := part.sequence.parameters.logprobs) is not None:
            groups.setdefault(count, []).append(part)
    return list(groups.values())


class _Distributions(NamedTuple):
    """The distributions of sampled requests' next tokens, one after each of their guesses."""

    p: Tensor  # [rows, V], normalized
    settings: sample.SamplingSettings  # of requests
    indices: sample.Counts  # of each request's next token: see `_indices`

    @classmethod
    def of(cls, logits: Tensor, parts: Sequence[Output]) -> Self:
        rows = [row for part in parts for row in part.rows]
        settings = sample.gathered([s for part in parts if (s := part.sequence.settings) is not None])
        owners = torch.tensor([i for i, part in enumerate(parts) for _ in part.rows])
        selected = logits if rows == list(range(len(logits))) else logits[on_device(torch.tensor(rows), logits.device)]
        p = sample.probabilities(selected, settings if len(owners) == len(parts) else settings.at(owners))
        p /= p.sum(-1, keepdim=True)
        return cls(p, settings, _indices(parts))


def _indices(parts: Sequence[Output]) -> sample.Counts:
    """The places of the parts' next tokens."""
    return np.array([part.position for part in parts], np.int64)


def _drawn_alone(logits: Tensor, parts: Sequence[Output]) -> Iterator[tuple[list[Output], Tensor]]:
    """The next tokens of sampled parts without guesses, int64 on the device, in groups.

    Which kernel draws a part's token depends on its own settings alone.
    """
    whole: list[Output] = []
    others: list[Output] = []
    for part in parts:
        settings = part.sequence.settings
        (whole if logits.is_cuda and settings is not None and settings.whole else others).append(part)
    if whole:
        gathered = sample.gathered([s for part in whole if (s := part.sequence.settings) is not None])
        yield whole, sample.draw_whole(logits, [part.first for part in whole], gathered, _indices(whole))
    if others:
        p, gathered, indices = _Distributions.of(logits, others)
        yield others, sample.draw(p, sample.uniform(gathered.seeds, indices, sample.TOKEN))


def _greedy(logits: Tensor, parts: Sequence[Output], best: Sequence[int]) -> dict[int, list[int]]:
    """The next tokens of greedy parts, by their place in `parts`; `best` is anew where logits were adjusted."""
    greedy = [i for i, part in enumerate(parts) if part.sequence.settings is None]
    anew = [i for i in greedy if parts[i].sequence.modifies_logits]
    again = logits[_rows([parts[i] for i in anew], logits)].argmax(-1).tolist() if anew else []
    tokens = {i: [token] for i, token in zip(anew, again, strict=True)}
    for i in greedy:
        if i not in tokens:
            tokens[i] = agreed(parts[i].guess.tokens, [best[row] for row in parts[i].rows])
    return tokens


def _sampled(logits: Tensor, parts: Sequence[Output]) -> dict[int, list[int]]:
    """The next tokens of all other parts, by their place in `parts`."""
    places = [i for i, part in enumerate(parts) if part.sequence.settings is not None]
    return dict(zip(places, _drawn(logits, [parts[i] for i in places]), strict=True)) if places else {}


def _drawn(logits: Tensor, parts: Sequence[Output]) -> list[list[int]]:
    tokens: dict[int, list[int]] = {}  # by the rows where the parts begin
    if alone := [part for part in parts if not part.guess.tokens]:
        for some, drawn in _drawn_alone(logits, alone):
            tokens |= {part.first: [token] for part, token in zip(some, drawn.tolist(), strict=True)}
    if guessing := [part for part in parts if part.guess.tokens]:
        firsts = np.cumsum([0, *(len(part.rows) for part in guessing[:-1])]).tolist()
        p, settings, indices = _Distributions.of(logits, guessing)
        after = accepted(p, firsts, [part.guess for part in guessing], settings, indices)
        tokens |= {part.first: each for part, each in zip(guessing, after, strict=True)}
    return [tokens[part.first] for part in parts]


def _adjust_(logits: Tensor, parts: Sequence[Output], counts: TokenCounts | None) -> None:
    """Apply penalties and biases, which only parts without guesses have, without waiting for the device."""
    if penalized := [part for part in parts if part.sequence.parameters.penalized]:
        counts = counts or TokenCounts(logits.shape[1], logits.device)
        requested = [part.sequence.parameters for part in penalized]
        numbers = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in requested]
        repetition, presence, frequency = on_device(torch.tensor(numbers), logits.device).unbind(1)
        penalties = sample.Penalties(
            repetition, presence, frequency, *counts.seen([part.sequence for part in penalized])
        )
        rows = _rows(penalized, logits)
        logits[rows] = sample.penalize(logits[rows], penalties)
    biases = [(part.first, bias) for part in parts if (bias := part.sequence.bias(part.position)) is not None]
    if biases:
        sample.bias_(logits, *zip(*biases, strict=True))


def _constrain_(logits: Tensor, parts: Sequence[Output]) -> dict[int, Invalid]:
    """Exclude what grammars do not allow; returns by part why none of its tokens is left."""
    refused: dict[int, Invalid] = {}
    allowed: dict[int, Tensor] = {}  # by part: bool [V]
    for i, part in enumerate(parts):
        sequence = part.sequence
        if sequence.matcher is not None:
            try:
                allowed[i] = sequence.matcher.allowed()
            except Invalid as error:
                refused[i] = error
                continue
        if sequence.bias(part.position) is not None:
            left = logits[part.first] > -torch.inf
            if not bool((left & allowed[i].to(left.device) if i in allowed else left).any()):
                refused[i] = Invalid("logit_bias", "excludes every possible next token")
                allowed.pop(i, None)
    if allowed:  # all of them in one pass
        rows = [parts[i].first for i in allowed]
        excluded = ~torch.stack(list(allowed.values())).to(logits.device)
        logits[rows] = logits[rows].masked_fill_(excluded, -torch.inf)
    return refused


def prompt_logprobs(logits: Tensor, tokens: list[int], count: int) -> list[Logprob]:
    """Log probabilities of a prompt's tokens [n] under the logits [n, V] before them, with the `count` largest."""
    return _logprobs(logits.log_softmax(-1), tokens, count)


def _sampled_logprobs(logs: Tensor, chosen: Sequence[tuple[Output, list[int]]]) -> list[list[Logprob]]:
    """The log probabilities of each part's tokens, all of whose rows logs [n, V] has in order: one copy from the
    device.
    """
    # Rows after guesses that were not accepted have no token.
    padded = [[*tokens, *[0] * (len(part.rows) - len(tokens))] for part, tokens in chosen]
    counts = [part.sequence.parameters.logprobs or 0 for part, _ in chosen]
    entries = iter(_logprobs(logs, [*chain(*padded)], max(counts)))
    results = []
    for (part, tokens), count in zip(chosen, counts, strict=True):
        rows = [*islice(entries, len(part.rows))][: len(tokens)]
        results.append([Logprob(e.token, e.logprob, e.top[:count]) for e in rows])
    return results


def _logprobs(logs: Tensor, tokens: list[int], count: int) -> list[Logprob]:
    """The entries of logs [n, V] for tokens [n], each with the `count` largest of its row."""
    own, top, ids = sample.ranked(logs, on_device(torch.tensor(tokens), logs.device), count)
    numbers = torch.cat((own[:, None], top, ids.int().view(torch.float32)), 1).cpu()
    columns = numbers[:, 0], numbers[:, 1 : 1 + count], numbers[:, 1 + count :].view(torch.int32)
    return RowLogprobs(range(len(tokens)), *columns).read(tokens)
