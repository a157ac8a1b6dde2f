"""Which graph a step of a decoder fits."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.kernels.cuda.chunk_kernel import tiles
from llm.backends.step_graphs import StepGraphs, StepInputs

USERS, GUESSES, GROUP = 8, 15, 4


def graphs(users: int = USERS) -> StepGraphs:
    model: Any = SimpleNamespace(
        vocabulary=50, group=GROUP, feature_width=0, dtype=torch.float32, ranks=None, ops=SimpleNamespace(branches=None)
    )
    return StepGraphs(model, users, 1024, 512, torch.device("cpu"))


def verification(counts: list[int]) -> StepInputs:
    """A step of sequences with so many rows each, all of whose logits are wanted."""
    starts = np.cumsum([0, *counts])
    rows = int(starts[-1])
    several = [(int(start), count, 100) for start, count in zip(starts, counts, strict=False) if count > 1]
    singles = np.array([start for start, count in zip(starts, counts, strict=False) if count == 1], np.int32)
    columns = np.zeros((3, rows), np.int32)
    cut = np.array(list(chain(*tiles(several, GROUP))), np.int32).reshape(-1, 3)
    return StepInputs(columns, np.arange(rows, dtype=np.int32), singles, cut, 1)


@given(st.lists(st.integers(1, GUESSES + 1), min_size=1, max_size=USERS))
def test_guesses_of_all_sequences_fit_a_graph(counts: list[int]) -> None:
    """Also where there are no more sequences than these."""
    step = verification(counts)
    for each in (graphs(), graphs(len(counts))):
        shape = each._shape(step)
        assert shape is not None and shape.rows >= sum(counts)
        assert len(each._padded(step, shape)) <= len(each._inputs)
