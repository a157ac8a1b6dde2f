"""Samples tokens: all rows in one pass, each by its own settings and seed, independent of the batch.

A row's token is a function of its logits, settings, seed and token index only: there is no generator state that other
rows could advance, and a retried iteration draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from contract.text import MAX_BIAS
from core.kernels.cuda.narrow_kernel import narrow
from core.kernels.cuda.token_kernels import draw as draw_rows
from core.kernels.kv_cache import on_device

TOKEN, DRAFT, ACCEPT = range(3)  # what a random number is used for

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Seeds = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SamplingSettings:
    """The settings of n rows that are not greedy, each field [n], on the host."""

    temperature: Tensor
    top_k: Tensor  # int64; 0: all
    top_p: Tensor
    min_p: Tensor
    seeds: Seeds

    def at(self, rows: Tensor) -> SamplingSettings:
        return SamplingSettings(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.seeds[rows.numpy()]
        )


class RowSettings(NamedTuple):
    """The settings of a row."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int

    @property
    def whole(self) -> bool:
        """Return whether no token is excluded."""
        return self.top_k == 0 and self.top_p >= 1 and self.min_p <= 0


def gathered(settings: Sequence[RowSettings]) -> SamplingSettings:
    """The settings of many rows."""
    temperature, top_k, top_p, min_p, seeds = zip(*settings, strict=True)
    return SamplingSettings(
        temperature=torch.tensor(temperature).clamp_min(1e-4),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p, dtype=torch.float64),
        min_p=torch.tensor(min_p),
        seeds=np.array(seeds, np.uint64),
    )


def uniform(seeds: Seeds, index: Counts, purpose: int) -> Tensor:
    """Numbers in [0, 1), [n] fp64: for the token of this index under this seed (SplitMix64; Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        state = _mixed(seeds + _GOLDEN) + (index.astype(np.uint64) * np.uint64(3) + np.uint64(purpose + 1)) * _GOLDEN
        return torch.from_numpy((_mixed(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mixed(z: Seeds) -> Seeds:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def likeliest(logits: Tensor) -> Tensor:
    """The most likely token of each row of logits [L, V], -1 where they are not all finite: int64 [L]."""
    return torch.where(logits.sum(-1).isfinite(), logits.argmax(-1), -1)


def probabilities(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """The distribution of each row's token, [n, V] fp32, not normalized: zero for excluded tokens.

    In the order of transformers' warpers: temperature, then the top k, then the fewest of these that reach `top_p`
    (Holtzman et al., 2020), then those of at least `min_p` times the most likely (Nguyen et al., 2024).
    """
    device = logits.device
    p = torch.softmax(logits.float() / on_device(settings.temperature, device)[:, None], dim=-1)
    narrow = ((settings.top_k > 0) | (settings.top_p < 1)).nonzero()[:, 0]  # settings are on the host: no device sync
    if len(narrow):
        _narrow_(p, narrow, settings.top_k[narrow], settings.top_p[narrow])
    if bool((settings.min_p > 0).any()):
        p.masked_fill_(p < on_device(settings.min_p, device)[:, None] * p.amax(-1, keepdim=True), 0)
    return p


def _narrow_(p: Tensor, rows: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Restrict these rows of p [n, V] to the top k, and of them the fewest that reach `top_p`; of equal ones those with
    the lowest token ids. `rows`, `top_k` and `top_p` are on the host.
    """
    selected = p if len(rows) == len(p) else p[on_device(rows, p.device)]
    rows, top_k, top_p = (on_device(x, p.device) for x in (rows, top_k, top_p))
    if p.is_cuda:  # sorting a large vocabulary takes longer than the model
        p[rows] = narrow(selected, top_k, top_p)
        return
    sums = selected.sum(-1, keepdim=True, dtype=torch.float64)
    ranked, order = selected.sort(dim=-1, descending=True, stable=True)
    limits = top_k.where(top_k > 0, p.shape[1])
    ranked = ranked.masked_fill(torch.arange(ranked.shape[1], device=p.device) >= limits[:, None], 0)
    sums = torch.where(top_k[:, None] > 0, ranked.sum(-1, keepdim=True, dtype=torch.float64), sums)
    before = ranked.cumsum(-1, dtype=torch.float64) - ranked
    # Where all are wanted, rounding must not lose the last of them.
    ranked.masked_fill_((before >= top_p[:, None] * sums) & (top_p[:, None] < 1), 0)
    p[rows] = torch.zeros_like(selected).scatter_(1, order, ranked)


def draw(p: Tensor, u: Tensor) -> Tensor:
    """A token of each row of p [n, V], which need not be normalized, by u [n] in [0, 1): int64 [n]."""
    sums = p.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(sums, (on_device(u, p.device) * sums[:, -1])[:, None], right=True)[:, 0]
    return tokens.clamp_(max=p.shape[1] - 1)


def draw_whole(logits: Tensor, rows: Sequence[int], settings: SamplingSettings, indices: Counts) -> Tensor:
    """The next tokens of these rows of logits [L, V] fp32 on a GPU, by settings that are `whole`: int64 [n]."""
    u = uniform(settings.seeds, indices, TOKEN)
    columns = torch.tensor(rows, dtype=torch.float64), settings.temperature.double(), u
    return draw_rows(logits, *on_device(torch.stack(columns), logits.device))  # one copy


@dataclass(frozen=True, eq=False)
class Penalties:
    """The penalties of n rows, [n]; `seen` bool [n, V]: tokens in prompt and answer, `counts` [n, V]: occurrences in
    the answer.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seen: Tensor
    counts: Tensor


def penalize(logits: Tensor, penalties: Penalties) -> Tensor:
    """Logits [n, V] with repetition penalties: Keskar et al. (2019), then OpenAI's."""
    repetition = penalties.repetition[:, None]
    weaker = torch.where(logits > 0, logits / repetition, logits * repetition)
    counts = penalties.counts.float()
    amounts = penalties.presence[:, None] * (counts > 0) + penalties.frequency[:, None] * counts
    return torch.where(penalties.seen, weaker, logits) - amounts


class LogitBias(NamedTuple):
    """OpenAI's `logit_bias` of one row, on the host: `values` [k] are added to the logits of `tokens` [k].

    Those of excluded tokens are -inf: -100 excludes its token, 100 all others, whose logits are excluded first where
    `only`.
    """

    tokens: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    only: bool

    @classmethod
    def of(cls, bias: Sequence[tuple[int, float]]) -> Self:
        tokens, values = np.array([token for token, _ in bias]), np.array([value for _, value in bias], np.float32)
        only = bool((values >= MAX_BIAS).any())
        excluded = (values < MAX_BIAS) if only else (values <= -MAX_BIAS)
        return cls(tokens, np.where(excluded, np.float32(-np.inf), values), only)

    def excludes_all(self, vocabulary: int) -> bool:
        """Return whether it excludes every token."""
        return not self.only and int((self.values == -np.inf).sum()) == vocabulary


def bias_(logits: Tensor, rows: Sequence[int], biases: Sequence[LogitBias]) -> None:
    """Add biases to these rows of logits [L, V] fp32, whatever the logits are."""
    places = np.concatenate([row * logits.shape[1] + bias.tokens for row, bias in zip(rows, biases, strict=True)])
    at = on_device(torch.from_numpy(places), logits.device)
    values = on_device(torch.from_numpy(np.concatenate([bias.values for bias in biases])), logits.device)
    biased = logits.view(-1)[at] + values
    if only := [row for row, bias in zip(rows, biases, strict=True) if bias.only]:
        logits.index_fill_(0, on_device(torch.tensor(only), logits.device), -torch.inf)
    logits.view(-1)[at] = biased


def ranked(logs: Tensor, tokens: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of tokens [n] among logs [n, V], and the `limit` most likely: [n], [n, limit], ids [n,
    limit].
    """
    top, ids = logs.topk(limit, dim=-1) if limit else (logs[:, :0], logs[:, :0].long())
    return logs.gather(1, tokens[:, None])[:, 0], top, ids
