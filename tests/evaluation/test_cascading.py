"""Gates of cascades: their figures and the choice among them, by scores of made-up pictures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluation import cascading
from evaluation.cascading import Drawn, Seconds

SECONDS = Seconds(full=1.0, redrawn=0.5, draft=0.1, score=0.02)
FIGURE = "score"
SCORES = st.lists(
    st.tuples(st.floats(50, 100), st.floats(50, 100), st.integers(0, 20)), min_size=4, max_size=40
)  # of the full plan, of a draft, and what the gate says


def drawn_of(rows: list[tuple[float, float, int]]) -> Drawn:
    full, draft, gate = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return Drawn({FIGURE: full}, {FIGURE: full}, {FIGURE: draft}, gate)


@given(SCORES, st.floats(-1, 21))
def test_a_cascade_is_the_draft_where_that_scores_enough(rows: list[tuple[float, float, int]], gate: float) -> None:
    found = cascading.figures(drawn_of(rows), gate, SECONDS, resamples=10)
    kept = [score >= gate for _, _, score in rows]
    expected = sum(draft if keep else full for (full, draft, _), keep in zip(rows, kept, strict=True))
    assert found.ratios[FIGURE].value == pytest.approx(expected / sum(full for full, _, _ in rows))
    assert found.kept == pytest.approx(sum(kept) / len(kept))
    assert found.speedup == pytest.approx(1 / (0.12 + (1 - found.kept) * 0.5))
    change = (sum(draft for _, draft, _ in rows) / sum(full for full, _, _ in rows) - 1) * found.kept
    assert found.random[FIGURE] == pytest.approx(1 + change)


@given(SCORES, st.floats(0, 0.3))
def test_the_chosen_gate_is_the_lowest_that_passes(rows: list[tuple[float, float, int]], loss: float) -> None:
    drawn = drawn_of(rows)
    gate = cascading.choose(drawn, FIGURE, loss, resamples=10)

    def passes(gate: float) -> bool:
        return cascading.figures(drawn, gate, SECONDS, resamples=10).ratios[FIGURE].low >= 1 - loss

    assert passes(gate), "keeping nothing costs nothing where what is redrawn is the full plan's"
    assert not any(passes(float(score)) for score in drawn.draft_scores if score < gate)


def test_nothing_is_kept_where_the_plan_of_redrawing_loses_too_much() -> None:
    full = torch.full((8,), 80.0, dtype=torch.float64)
    drawn = Drawn({FIGURE: full}, {FIGURE: full - 2}, {FIGURE: full - 1}, torch.arange(8, dtype=torch.float64))
    gate = cascading.choose(drawn, FIGURE, 0.003)
    assert gate > 7 and cascading.figures(drawn, gate, SECONDS).kept == 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.sampled_from(cascading.SHARES))
def test_a_share_is_kept_by_its_gate(scores: list[int], share: float) -> None:
    """At least as many as the share, and more only where several have the score of the last one."""
    tensor = torch.tensor(scores, dtype=torch.float64)
    gate = cascading.gate_of(tensor, share)
    count = round(share * len(scores))
    assert sum(score > gate for score in scores) <= count <= sum(score >= gate for score in scores)
    assert count or not any(score >= gate for score in scores)


@given(SCORES)
def test_halves_and_models_alone(rows: list[tuple[float, float, int]]) -> None:
    drawn = drawn_of(rows)
    half = drawn.of(torch.arange(0, len(rows), 2))
    assert half.draft_scores.tolist() == [score for _, _, score in rows[::2]]
    assert half.drafts[FIGURE].tolist() == [draft for _, draft, _ in rows[::2]]
    alone = cascading.alone(drawn, SECONDS, resamples=10)
    assert (alone["redrawn"].speedup, alone["redrawn"].ratios[FIGURE].value) == (2, 1)
    everything = cascading.figures(drawn, -1, SECONDS, resamples=10)
    assert alone["draft"].ratios[FIGURE] == pytest.approx(everything.ratios[FIGURE])
    assert alone["draft"].speedup > everything.speedup
