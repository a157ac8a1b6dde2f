"""Recorded callables: what they read, when they copy it, and what happens where nothing is or can be recorded.

By a recorder with the semantics of CUDA graphs (tape.py); tests/gpu has the same on a GPU.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from core.cuda_graphs import CapturedGraph, GraphCache
from tests.core.tape import Tape


def blend(x: torch.Tensor, weight: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
    y = (x * weight).cos() * scale
    return {"sum": y.sum(1), "whole": y}


def draw(seed: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def test_its_arguments_may_change_one_by_one() -> None:
    captured = CapturedGraph(blend, (draw(1), draw(2)), {}, Tape())
    weight = draw(30)
    for seed in range(3, 6):  # the weight is the very tensor of the call before, and is not copied again
        x = draw(seed)
        for key, result in captured(x, weight).items():
            assert torch.equal(result, blend(x, weight)[key])
    assert torch.equal(captured(x, draw(31))["whole"], blend(x, draw(31))["whole"])


def test_another_tensor_at_the_same_address_is_another() -> None:
    memory = torch.empty(3, 4)
    captured = CapturedGraph(blend, (draw(1), draw(2)), {}, Tape())
    weight = draw(30)
    for seed in (3, 4):
        x = memory[:]  # as an allocator gives memory again that has become free
        x.copy_(draw(seed))
        assert torch.equal(captured(x, weight)["whole"], blend(draw(seed), weight)["whole"])


def test_a_tensor_is_held_until_another_has_taken_its_place() -> None:
    """Else another could come to be the same object to Python, at another time."""
    captured = CapturedGraph(blend, (draw(1), draw(2)), {}, Tape())
    x = draw(3)
    seen = weakref.ref(x)
    captured(x, draw(4))
    del x
    gc.collect()
    assert seen() is not None
    captured(draw(5), draw(4))
    gc.collect()
    assert seen() is None


def test_what_it_was_recorded_with_is_not_held() -> None:
    x = draw(1)
    seen = weakref.ref(x)
    captured = CapturedGraph(blend, (x, draw(2)), {}, Tape())
    del x
    gc.collect()
    assert seen() is None and captured is not None


def test_other_arguments_than_those_recorded_are_refused() -> None:
    captured = CapturedGraph(blend, (draw(1), draw(2)), {"scale": 2.0}, Tape())
    for arguments, options, why in (
        ((draw(1), draw(2)), {}, "differ in structure"),
        ((draw(1), draw(2)), {"scale": 3.0}, "3.0, but 2.0 was recorded"),
        ((draw(1, 4), draw(2)), {"scale": 2.0}, r"\[4, 4\], but .*\[3, 4\] was recorded"),
        ((draw(1).double(), draw(2)), {"scale": 2.0}, "float64"),
    ):
        with pytest.raises(ValueError, match=why):
            captured(*arguments, **options)


class Broken(Tape):
    def record(self, function):  # type: ignore[no-untyped-def]
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class Double:
    """Doubles a tensor, and keeps of how many rows each was."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        return x * 2


def test_what_is_not_recorded_is_called() -> None:
    for recorder in (None, Broken(), Tape()):
        double = Double()
        graphs = GraphCache({"double": double}, recorder)
        assert torch.equal(graphs.run("double", 3, draw(1)), 2 * draw(1)) and double.calls == [3]
        assert graphs.records == (recorder is not None) and not graphs.has("double", 3)


def test_what_is_recorded_runs_no_python_again() -> None:
    double, tape = Double(), Tape()
    graphs = GraphCache({"double": double}, tape)
    graphs.record("double", 3, draw(1))
    graphs.record("double", 3, draw(1))  # once is enough
    assert tape.recordings == 1 and graphs.has("double", 3)
    before = len(double.calls)
    for seed in range(4):
        assert torch.equal(graphs.run("double", 3, draw(seed)), 2 * draw(seed))
    assert len(double.calls) == before and tape.replays == 4
    assert torch.equal(graphs.run("double", 5, draw(9, 5)), 2 * draw(9, 5)) and double.calls[before:] == [5]


def test_a_recording_that_fails_leaves_nothing_behind() -> None:
    graphs = GraphCache({"double": lambda x: x * 2}, Broken())
    with pytest.raises(torch.OutOfMemoryError):
        graphs.record("double", 3, draw(1))
    assert len(graphs) == 0 and torch.equal(graphs.run("double", 3, draw(1)), 2 * draw(1))


def test_the_least_recently_used_is_let_go() -> None:
    graphs = GraphCache({"double": lambda x: x * 2}, Tape(), capacity=2)
    for rows in (1, 2):
        graphs.record("double", rows, draw(0, rows))
    graphs.run("double", 1, draw(0, 1))
    graphs.record("double", 3, draw(0, 3))
    assert [graphs.has("double", rows) for rows in (1, 2, 3)] == [True, False, True] and len(graphs) == 2
    for rows in (1, 2, 3):
        assert torch.equal(graphs.run("double", rows, draw(7, rows)), 2 * draw(7, rows))
