"""The benchmark of plans on a GPU, as it runs on a CPU: what its windows count, and what it stores and prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.h200 import plans, tables
from pipeline import tiny


def test_plans_take_turns_and_are_counted_in_whole_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(plans.RUNGS, "4-steps+huge", {"steps": 4, "scheduler": "none such"})
    words = ["--rungs", "half,gate,4-steps+huge,4-steps", "--window", "0.1", "--windows", "2", "--singles", "1"]
    plans.main(["--model", tiny.TINY, *words, "--rows", "4", "--in-flight", "gate=5", "--out", str(tmp_path)])
    said = capsys.readouterr().out.splitlines()
    rungs = json.loads((tmp_path / "plans.json").read_text("utf-8"))["rungs"]
    assert [*rungs] == ["half", "gate", "4-steps"]
    assert any(line.startswith("4-steps+huge is left out: scheduler") for line in said)
    turns = [line.partition(" {")[0] for line in said if line.startswith("window")]
    assert turns == [f"window {turn} of 2: {name}" for turn in (1, 2) for name in rungs]
    assert [line.split()[0] for line in said[-4:]] == ["plan", *rungs]
    assert [one["in_flight"] for one in rungs.values()] == [10, 5, 8]
    for one in rungs.values():
        assert len(one["windows"]) == 2 and one["single_s"] > 0
        for window in one["windows"]:
            assert window["pictures"] > 0 and window["pictures"] % one["in_flight"] == 0
            assert window["seconds"] >= 0.1 and window["images_s"] > 0
    phases = {name: {phase.split(" ")[0] for phase in one["windows"][0]["phases"]} for name, one in rungs.items()}
    assert phases["half"] == phases["gate"] == {"encode", "deep", "shallow-resnet", "vae"}
    assert phases["4-steps"] == {"encode", "deep", "vae"}
    rows = tables.TABLES["h200-plans"].rows({"rungs": rungs})
    assert len(rows) == 2 + 3 and rows[2].startswith('| 20 steps with guidance, DeepCache "half" |')


def test_a_rate_does_not_depend_on_where_a_cohort_ends() -> None:
    moments = [2.0 * (1 + i // 8) + 0.01 * (i % 8) for i in range(80)]  # eight at a time, every two seconds
    assert plans._rate(moments, 8, 3) == (24, pytest.approx(6.0))
    assert plans._rate(moments, 16, 2) == (32, pytest.approx(8.0))


def test_what_a_request_raises_ends_the_window() -> None:
    class Broken:
        error, moments = RuntimeError("lost"), [1.0]

    with pytest.raises(RuntimeError, match="lost"):
        plans._wait(Broken(), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [["--rungs", "half,stairs"], ["--in-flight", "half"], ["--in-flight", "stairs=2"]])
def test_wrong_words_are_refused_before_anything_is_loaded(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        plans.main([*words, "--model", "none"])
