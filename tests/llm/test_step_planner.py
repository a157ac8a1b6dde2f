"""The chunk of a prompt: the largest that keeps the pace of all answers that are written beside it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from core.batching.cost import CostCurve
from llm.cache.pages import PAGE
from llm.drafts.speculator import Speculator
from llm.step_planner import StepPlanner


class NoGuesses:
    """A speculator without a draft."""

    active = False

    def lengths(self, decoding: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("decoding", "pace_s", "chunk"),
    [(0, 0.3, 256), (1, 0.256, 128), (1, 0.257, 256), (60, 0.3, 128), (200, 0.3, 64), (290, 0.3, PAGE),
     (1, 0.0005, 256)],
)  # fmt: skip
def test_a_chunk_and_the_answers_beside_it_keep_the_pace(decoding: int, pace_s: float, chunk: int) -> None:
    """A millisecond a row; a pace that not even one row keeps binds no chunk."""

    def cost(rows: int) -> float:
        return rows / 1000

    planner = StepPlanner(cast(Speculator, NoGuesses()), cast(CostCurve, cost), chunk=256, pace_s=pace_s)
    planner.plan_all([], decoding=decoding)
    assert planner.chunk == chunk
