"""A rehearsal of `benchmarks.text_drafts`: drafts of a tiny model on the CPU, at an acceptance that is assumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.llm.drafts.test_draft_graphs import RuleDrafter, fuse, model

# isort: split
from benchmarks import gpu_tables, text_drafts
from benchmarks.text_load import Load
from core.batching.runner import Lane
from llm.backends.backend import TextBackend
from llm.drafts import draft_graphs, speculate
from llm.drafts.draft_graphs import Unread
from llm.drafts.drafter import DraftRequest
from llm.drafts.speculate import NO_TOKEN
from llm.runner import TextRunner
from llm.sampling import choose


def test_rounds_have_the_tokens_that_are_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert text_drafts.main(["--device", "cpu", "--tiny", "--results", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "text-drafts.json").read_text())
    rows = result["drafts"]
    assert [(row["draft"], row["guesses"]) for row in rows] == [
        (draft, case.name) for draft, cases in text_drafts.CASES.items() for case in cases
    ]
    # 23 tokens follow an answer's first; at most as many a round as assumed, and in the last one what is left.
    for row, (case, rounds) in zip(
        rows[1:5], zip(text_drafts.CASES["DFlash"], (23, 5, 4, 4), strict=True), strict=True
    ):
        assert row["tokens_a_round"] == pytest.approx(23 / rounds, abs=1e-3), case
    three, six, seven = (row["tokens_a_round"] for row in rows[6:])
    assert 1.5 < three <= six <= seven < 8 and rows[5]["tokens_a_round"] == rows[0]["tokens_a_round"] == 1
    assert all(row["tokens_s"] > 0 and row["verify_ms"] > 0 and row["draft_ms"] is None for row in rows)
    assert all(row["round_ms"] > 0 for row in rows) and "acceptance assumed" in capsys.readouterr().out
    lines = gpu_tables.TABLES["h200-text-drafts"].lines(result)
    assert len(lines) == 2 + len(rows) + 2 and "assumed" in lines[0] and "assumed, not measured" in lines[-1]
    assert vars(choose)["agreed"] is speculate.agreed and vars(draft_graphs)["agreeing"] is speculate.agreeing


def test_host_and_device_assume_the_same() -> None:
    assumed = text_drafts.AssumedAcceptance(torch.device("cpu"))
    guesses = torch.tensor([[7, 7, 7, 7], [7, 7, NO_TOKEN, NO_TOKEN]])
    for counts in ([0, 3, 9], [2]):
        assumed.assume(counts)
        best = [10, 11, 12, 13, 14]
        host = [len(assumed.agreed([7] * 4, best)) - 1 for _ in range(7)]
        device = [assumed.agreeing(guesses, guesses).tolist() for _ in range(7)]
        assert host == [min(4, counts[i % len(counts)]) for i in range(7)]
        assert device == [[count, min(count, 2)] for count in host]
    assert assumed.agreed([], best) == [10] and assumed.agreed([7, 7, 7], best) == [10, 11, 12]


@pytest.mark.parametrize("guesses", [3, 6, 7])
def test_guesses_that_are_right_in_turn_have_their_probability(guesses: int) -> None:
    right = [min(count, guesses) for count in text_drafts.geometric(0.8)]
    assert 1 + sum(right) / len(right) == pytest.approx((1 - 0.8 ** (guesses + 1)) / 0.2, rel=0.01)


class Draft(RuleDrafter):
    """Guesses on the device, and does not check what it reads: what is assumed to be right is not."""

    name, features = "rule", (0,)

    def _eager(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[0] * r.count for r in requests]

    def _check(self, features: Tensor, unread: Unread) -> None:
        pass


class DraftFactory:
    name, features, lookahead = "rule", (0,), 0

    def __call__(self, execution: TextBackend, *, sequences: int, **size: Any) -> Draft:
        return Draft(0, execution, sequences)


@pytest.mark.parametrize("right", [0, 3])
def test_rounds_on_the_device_have_what_is_assumed(right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where graphs count the right guesses, and are timed."""

    assumed = text_drafts.AssumedAcceptance(model().device)
    fuse(monkeypatch)
    monkeypatch.setattr(draft_graphs, "agreeing", assumed.agreeing)
    lane = Lane("text")
    runner = TextRunner(model(), lane=lane, draft=DraftFactory(), context=128, max_requests=4)
    try:
        case = text_drafts.Case("", Draft.most, [right])
        row = text_drafts.measure(runner, lane, Load(1, 16, 2 + 5 * (1 + right), waves=2), assumed, case)
    finally:
        runner.close()
        lane.close()
    assert row["tokens_a_round"] == pytest.approx((1 + 5 * (1 + right)) / 6, abs=1e-3)
    assert row["draft_ms"] > 0 and row["verify_ms"] > 0
