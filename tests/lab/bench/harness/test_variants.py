"""The search for the fastest variant of a pipeline."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from lab.bench.harness.turns import LeftOut
from lab.bench.harness.variants import BestVariant, Variant


def test_a_variant_that_fails_is_left_out_and_the_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure costs its process, whose late answer would be taken for the next variant's."""
    started: list[Variant] = []

    def start(variant: Variant, stack: ExitStack) -> Any:
        started.append(variant)
        stack.callback(lambda: ended.append(variant))
        return Silent()

    class Silent:
        def ask(self, request: Any) -> None:
            if request["variant"]["channels_last"]:
                raise LeftOut("took more than 300 s")

    ended: list[Variant] = []
    monkeypatch.setattr(BestVariant, "_tried", lambda self, processes, variant, *_: float(variant.batch))
    search = BestVariant(start, [{"batch": 2}, {"channels_last": True}, {"batch": 4}], Variant())
    assert search.find(processes=False) == (Variant(batch=4), 1)
    assert started == ended == [Variant(), Variant(batch=2)]
    assert [trial["left_out"] for trial in search.trials] == ["took more than 300 s"]
