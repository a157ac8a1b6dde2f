"""What loops count: whole rounds, what ends while they count, and what a request raises."""

from __future__ import annotations

import pytest

from core.config import Settings
from lab.bench.harness.loop import Loop, rate
from lab.bench.harness.traces import Order
from workers.build import build

TINY = Settings(model="random:tiny", compile=False, kernels=False, threads=1)


def test_a_rate_does_not_depend_on_where_a_cohort_ends() -> None:
    moments = [2.0 * (1 + i // 8) + 0.01 * (i % 8) for i in range(80)]  # eight at a time, every two seconds
    assert rate(moments, 8, 3) == (24, pytest.approx(6.0))
    assert rate(moments, 16, 2) == (32, pytest.approx(8.0))


def test_a_loop_counts_what_ends_while_it_counts() -> None:
    with build(TINY) as runtime:
        order = Order(runtime.images.model.native, 3, None)
        loop = Loop(runtime.engine, lambda number: order.request(f"n{number}", number), 2)
        loop.start()
        loop.reach(3)
        assert loop.ended == [] and loop.steps == 0
        loop.counts = True
        loop.reach(len(loop.moments) + 4)
        loop.counts = False
        counted = len(loop.ended)
        loop.close()
        assert len(loop.ended) == counted >= 4
        assert loop.steps >= 3 * (counted - 2), "the two under way may have begun before"
        assert runtime.engine.counts() == {"image": (0, 0)}
        loop.error = RuntimeError("lost")
        with pytest.raises(RuntimeError, match="lost"):
            loop.reach(10**6)
