"""Guesses change no distribution: chi-square against the target's own, for good, bad and certain guesses."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm.checkpoints.load import TextModel
from llm.drafts.speculate import (
    MOST,
    MOST_AT_ONCE,
    AcceptanceRate,
    DraftLengths,
    DraftTokens,
    ForwardTimes,
    PromptLookup,
    accepted,
    agreed,
)
from llm.drafts.speculator import Speculator
from llm.parameters import TextParameters
from llm.sampling import sample
from tests.core.quant.stage import normal
from tests.llm import stage
from tests.llm.sampling.test_sample import settings

WORDS, N = 5, 20_000


@pytest.mark.quick("bad", "certain")
@pytest.mark.parametrize("kind", ["bad", "good", "certain", "disjoint"])
def test_rejection_sampling_follows_the_target(kind: str) -> None:
    """Two guesses and what follows: the first three tokens' joint distribution, over many seeds."""
    target = normal(1, 3, WORDS).softmax(-1)
    target[0, 3] = 0  # what cannot be said must not be
    target /= target.sum(-1, keepdim=True)
    q = {"bad": normal(2, 2, WORDS).softmax(-1), "good": (0.9 * target[:2] + 0.1 / WORDS),
         "certain": torch.eye(WORDS)[[1, 4]], "disjoint": torch.eye(WORDS)[[3, 0]]}[kind]  # fmt: skip
    q = q / q.sum(-1, keepdim=True)
    index = np.full(N, 17, np.int64)
    seeds = settings(N)
    u = [sample.uniform(seeds.seeds, index + k, sample.DRAFT) for k in (0, 1)]
    drafts = torch.stack([sample.draw(q[k].expand(N, -1), u[k]) for k in (0, 1)], 1).tolist()
    guesses = [DraftTokens(tokens, None if kind in ("certain", "disjoint") else q) for tokens in drafts]
    made = accepted(target.repeat(N, 1), range(0, 3 * N, 3), guesses, seeds, index)
    # Where a guess was rejected the answer ends early: its other tokens come from later forwards.
    heads = torch.bincount(torch.tensor([tokens[0] for tokens in made]), minlength=WORDS)
    assert heads[3] == 0
    fits(heads[[0, 1, 2, 4]], target[0, [0, 1, 2, 4]] * N)
    pairs = Counter(tuple(tokens[:2]) for tokens in made if len(tokens) > 1)
    for head in {pair[0] for pair in pairs}:
        count = torch.tensor([pairs[head, b] for b in range(WORDS)])
        if count.sum() > 500:
            fits(count, target[1] * int(count.sum()))
    thirds = torch.bincount(torch.tensor([t[2] for t in made if len(t) > 2] or [0]), minlength=WORDS)
    if thirds.sum() > 500:
        fits(thirds, target[2] * int(thirds.sum()))
    if kind == "good":
        assert sum(map(len, made)) > 2.6 * N, "good guesses are mostly taken"
    if kind == "disjoint":
        assert all(len(tokens) == 1 for tokens in made)


def fits(counts: torch.Tensor, expected: torch.Tensor) -> None:
    from scipy import stats

    expected = expected.double() * (counts.sum() / expected.double().sum())
    assert stats.chisquare(counts.double(), expected).pvalue > 1e-4, (counts.tolist(), expected.tolist())


few_tokens = st.integers(0, 2)


@given(st.data(), st.integers(0, MOST), st.integers(0, MOST))
def test_greedy_takes_any_number_of_guesses(data: st.DataObject, count: int, right: int) -> None:
    """As many as are ever made, of which the first `right` are the best tokens, against the definition in words."""
    best = data.draw(st.lists(few_tokens, min_size=count + 1, max_size=count + 1))
    guesses = [token if j < right else data.draw(few_tokens) for j, token in enumerate(best[:-1])]
    made = agreed(guesses, best)
    kept = len(made) - 1
    assert kept >= min(right, count)
    assert made == best[: kept + 1], "only what the model itself would have said, one after the other"
    assert guesses[:kept] == best[:kept]
    assert kept == count or guesses[kept] != best[kept], "and it stops at no guess that was right"


def check_samples(model: TextModel, text: str, draft: Any, count: int, *, temperature: float) -> Speculator:
    """Two tokens after one prompt, under many seeds, against their exact likelihoods by transformers."""
    prompt = stage.plain(model, text)
    wanted = TextParameters(prompt, 3, temperature=temperature, top_k=4, ignore_end=True)
    with stage.serving(model, draft=draft, kernels=stage.kernels()) as (engine, runner):
        texts = stage.answers(engine, [replace(wanted, seed=seed) for seed in range(count)])

    def after(tokens: tuple[int, ...]) -> dict[int, float]:
        top = (stage.logits(model, tokens)[-1] / temperature).topk(4)
        return dict(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))

    likely = {(a, b): p * q for a, p in after(prompt).items() for b, q in after((*prompt, a)).items()}
    counts = Counter(text.tokens[:2] for text in texts)
    assert {*counts} <= {*likely}
    fits(torch.tensor([counts[pair] for pair in likely]), torch.tensor([*likely.values()]) * count)
    return runner.guessing


def test_the_engine_draws_from_the_model() -> None:
    assert check_samples(stage.small(), "ababab", stage.other(), 2000, temperature=1.5).guessed > 100


def test_lookup_is_what_a_search_from_the_end_finds() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(100):
        tokens = torch.randint(0, 4, (30,), generator=draw).tolist()
        known = PromptLookup(tokens[:10])
        known.extend(tokens[10:])
        wanted: list[int] = []
        for n in (3, 2):
            ends = [i for i in range(n, 30) if tokens[i - n : i] == tokens[-n:]]
            if ends:
                wanted = tokens[ends[-1] : ends[-1] + 4]
                break
        assert known.guess(4) == wanted


def test_pace_comes_to_the_true_rate() -> None:
    draw = np.random.default_rng(0)
    for rate in (0.1, 0.5, 0.9):
        pace, seen = AcceptanceRate(), []
        for _ in range(2000):
            run = next((j for j in range(3) if draw.random() > rate), 3)
            pace.learn(3, run)
            seen.append(pace.acceptance)
        assert np.mean(seen[200:]) == pytest.approx(rate, abs=0.06)


def test_times_are_those_measured_and_lines_between_and_behind_them() -> None:
    times = ForwardTimes()
    for rows, seconds in ((1, 5.0), (1, 1.0), (3, 2.0), (8, 1.5), (12, 4.0)):
        times.observe(rows, seconds)
    assert times(np.array([1.0, 2, 3, 8, 10, 12, 16])) == pytest.approx([1, 1.25, 1.5, 1.5, 2.75, 4, 4 + 12 / 11])


def test_lengths_bring_the_most_tokens_a_second() -> None:
    def of(forward_s: float, guess_s: float) -> DraftLengths:
        return DraftLengths(forward_s + guess_s * np.arange(MOST_AT_ONCE + 1))

    for forward_s, guess_s in ((1, 0.01), (1, 0.2), (0.3, 1)):
        lengths = of(forward_s, guess_s)
        for acceptance in (0.0, 0.3, 0.6, 0.9, 0.99):
            level = round(acceptance / 0.99 * 31) / 31 * 0.99

            def rate(k: int, a: float = level, f: float = forward_s, g: float = guess_s) -> float:
                return sum(a**j for j in range(k + 1)) / (f + k * g)

            assert rate(lengths(acceptance)) == pytest.approx(max(rate(k) for k in range(MOST_AT_ONCE + 1)))
    for one, two in itertools.pairwise(of(1, 0.1)(a / 100) for a in range(100)):
        assert one <= two
    assert of(1, 5)(0.9) == 0 and of(1, 0.05)(0.9) > of(1, 0.12)(0.5) > 0
