"""Drawing: transformers' own warpers as the reference, chi-square for the draws, and each row as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llm.sampling import sample
from tests.core.quant.stage import normal


def settings(
    rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> sample.SamplingSettings:
    return sample.SamplingSettings(
        torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), min_p), np.arange(rows, dtype=np.uint64),
    )  # fmt: skip


def normalized(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True)


@examples(max_examples=80)
@given(
    rows=st.integers(1, 4), words=st.integers(2, 60), temperature=st.floats(0.1, 2), top_k=st.integers(0, 70),
    top_p=st.floats(0.05, 1), min_p=st.floats(0, 0.9), seed=st.integers(0, 999),
)  # fmt: skip
def test_the_same_tokens_are_left_in_as_by_transformers(
    rows: int, words: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = normal(seed, rows, words, scale=3)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    wanted = warpers(torch.zeros(rows, 1, dtype=torch.long), logits.clone()).softmax(-1)
    given_ = settings(rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = normalized(sample.probabilities(logits, given_))
    # Rounding may decide about one token at the edge of top_p or min_p, and about no other.
    edge = ((found > 0) != (wanted > 0)).sum(-1)
    assert (edge <= 1).all() and ((edge == 0) | torch.tensor(top_p < 1 or min_p > 0)).all()
    same = edge == 0
    torch.testing.assert_close(found[same], wanted[same], rtol=1e-4, atol=1e-6)


@examples(max_examples=80)
@given(words=st.integers(2, 400), top_k=st.integers(0, 300), top_p=st.floats(0.01, 0.999), seed=st.integers(0, 999))
def test_the_nucleus_is_the_fewest_that_reach_top_p(words: int, top_k: int, top_p: float, seed: int) -> None:
    """By the definition (Holtzman et al., 2020), of what top_k leaves; a millionth is left to rounding."""
    logits = normal(seed, 2, words)
    found = sample.probabilities(logits, settings(2, top_k=top_k, top_p=top_p))
    for row, kept in zip(logits.double().softmax(-1), found > 0, strict=True):
        pool = row.sort(descending=True).values[: top_k or None]
        wanted, left = top_p * pool.sum(), row[kept]
        assert left.sum() >= wanted - 1e-6, "they reach it"
        assert left.sum() - left.min() < wanted + 1e-6, "and one less would not"
        assert left.min() >= row[~kept].max() if not kept.all() else True, "the likeliest"


@examples(max_examples=30)
@given(words=st.integers(2, 3000), kinds=st.integers(1, 3), top_k=st.integers(1, 3000), seed=st.integers(0, 99))
def test_of_equals_at_the_border_those_of_the_least_numbers_are_left(
    words: int, kinds: int, top_k: int, seed: int
) -> None:
    """So that a seed means one text. With few different logits nearly all tokens have equals."""
    logits = torch.randint(0, kinds, (1, words), generator=torch.Generator().manual_seed(seed)).float()
    found = sample.probabilities(logits, settings(1, top_k=top_k))[0] > 0
    order = sorted(range(words), key=lambda token: (-float(logits[0, token]), token))
    assert found.nonzero()[:, 0].tolist() == sorted(order[:top_k])


def test_what_bounds_leave_in_at_their_very_edge() -> None:
    """min_p 1 leaves the likeliest, and all that are as likely; top_p 1 what is too small to count; and where the first
    two reach top_p exactly there is no third."""
    assert (sample.probabilities(torch.zeros(1, 4), settings(1, top_p=0.5)) > 0).tolist() == [
        [True, True, False, False]
    ]
    logits = torch.tensor([[2.0, 1.0, 2.0, -1.0]])
    assert (sample.probabilities(logits, settings(1, min_p=1.0)) > 0).tolist() == [[True, False, True, False]]
    far = torch.tensor([[0.0, -40.0, -50.0]])
    assert (sample.probabilities(far, settings(1, top_k=2, top_p=1.0)) > 0).tolist() == [[True, True, False]]


def test_a_row_is_drawn_as_if_it_were_alone() -> None:
    logits = normal(1, 40, 500, scale=2)
    many = sample.SamplingSettings(
        torch.linspace(0.2, 2, 40), torch.arange(40) % 7 * 9, torch.linspace(0.3, 1, 40, dtype=torch.float64),
        torch.linspace(0, 0.2, 40), np.arange(40, dtype=np.uint64),
    )  # fmt: skip
    index = np.arange(40, dtype=np.int64)
    u = sample.uniform(many.seeds, index, sample.TOKEN)
    together = sample.draw(sample.probabilities(logits, many), u)
    for row in range(40):
        one = torch.tensor([row])
        alone = sample.draw(sample.probabilities(logits[one], many.at(one)), u[one])
        assert alone[0] == together[row]
        assert sample.uniform(many.seeds[[row]], index[[row]], sample.TOKEN)[0] == u[row]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_draws_follow_the_distribution(seed: int) -> None:
    """Chi-square over the tokens of one seed."""
    from scipy import stats

    n, p = 40_000, torch.tensor([0.5, 0.2, 0.0, 0.15, 0.1, 0.05])
    u = sample.uniform(np.full(n, seed, np.uint64), np.arange(n), sample.TOKEN)
    counts = torch.bincount(sample.draw((7 * p).expand(n, -1), u), minlength=6)
    assert counts[2] == 0
    kept = p > 0
    assert stats.chisquare(counts[kept], (n * p[kept] / p.sum()).double()).pvalue > 1e-3


def test_numbers_are_splitmix64s_so_that_a_seed_means_one_text_in_every_version() -> None:
    """The published generator's first outputs under the seed 0, and then ours of it in whole numbers of any size."""
    golden, whole = 0x9E3779B97F4A7C15, 2**64

    def mixed(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % whole
        z = (z ^ z >> 27) * 0x94D049BB133111EB % whole
        return z ^ z >> 31

    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mixed(n * golden % whole) for n in (1, 2, 3)] == published
    for seed in (0, 1, 77, 2**63 - 1):
        for index in (0, 1, 5, 100_000):
            for purpose in (sample.TOKEN, sample.DRAFT, sample.ACCEPT):
                state = (mixed((seed + golden) % whole) + (3 * index + purpose + 1) * golden) % whole
                found = sample.uniform(np.array([seed], np.uint64), np.array([index]), purpose)
                assert found.tolist() == [(mixed(state) >> 11) / 2**53]


def test_certain_and_nearly_certain_rows() -> None:
    p = torch.zeros(3, 5)
    p[0, 4], p[1, 0], p[2, 2:4] = 1, 1e-30, torch.tensor([1.0, 1e-8])
    assert sample.draw(p, torch.tensor([0.999999999, 0.5, 0.0], dtype=torch.float64)).tolist() == [4, 0, 2]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.7])
def test_repetition_is_transformers(penalty: float) -> None:
    logits, ids = normal(2, 3, 30), torch.randint(0, 30, (3, 8), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(3, 30, dtype=torch.bool).scatter_(1, ids, True)
    zeros = torch.zeros(3)
    given_ = sample.Penalties(torch.full((3,), penalty), zeros, zeros, seen, torch.zeros(3, 30, dtype=torch.int32))
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    torch.testing.assert_close(sample.penalize(logits, given_), wanted)


def test_presence_and_frequency_are_openais() -> None:
    """μ − count · frequency − (count > 0) · presence, as in OpenAI's reference, of what the answer has, as in vLLM."""
    logits, counts = normal(3, 2, 6), torch.tensor([[0, 1, 2, 0, 5, 0], [3, 0, 0, 0, 0, 1]], dtype=torch.int32)
    presence, frequency = torch.tensor([0.5, -1.0]), torch.tensor([0.25, 2.0])
    seen = (counts > 0) | torch.tensor([[1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]], dtype=torch.bool)  # in prompts alone
    given_ = sample.Penalties(torch.ones(2), presence, frequency, seen, counts)
    wanted = logits - counts * frequency[:, None] - (counts > 0) * presence[:, None]
    torch.testing.assert_close(sample.penalize(logits, given_), wanted)


def test_log_probabilities_are_ranked() -> None:
    logs, tokens = normal(4, 3, 12).log_softmax(-1), torch.tensor([5, 0, 11])
    own, top, ids = sample.ranked(logs, tokens, 4)
    torch.testing.assert_close(own, logs[torch.arange(3), tokens])
    torch.testing.assert_close(top, logs.sort(descending=True).values[:, :4])
    assert torch.equal(logs.gather(1, ids), top)
    assert sample.ranked(logs, tokens, 0)[1].shape == (3, 0)
