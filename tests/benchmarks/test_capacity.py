"""How many GPUs many models need; and the simulation beside what was measured through HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import capacity
from benchmarks.simulation import costs

# Four H100s of one host through HTTP, and each engine alone: issue 38's figures before its end.
MEASURED: dict[str, Any] = {
    "gpus": {
        "4": {"full": {"images_s": 10.73}, "half": {"images_s": 18.47}, "4-steps": {"images_s": 55.5}},
        "2": {"half": {"images_s": 9.33}, "4-steps": {"images_s": 27.45}},
    }
}
ENGINE = {"full": 2.79, "half": 5.23, "4-steps": 18.40}
for _count, _plans in MEASURED["gpus"].items():
    for _plan in _plans.values():
        _plan["in_flight"] = 48 * int(_count)


def points(folder: Path, *words: str) -> list[dict[str, Any]]:
    assert capacity.main([*words, "--results", str(folder)]) == 0
    return list(json.loads((folder / "capacity.json").read_text("utf-8"))["points"])


def test_the_measured_host_is_predicted_to_a_tenth() -> None:
    rows = capacity.check(MEASURED, ENGINE, costs.read(costs.find("h200")))
    assert [(row["gpus"], row["plan"]) for row in rows if row["calibrates"]] == [(2, "4-steps")]
    assert len(rows) == 5
    for row in rows:
        assert abs(row["error"]) <= capacity.TOLERANCE, row


def test_a_file_of_the_fleet_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rungs = {name: {"images_s": ENGINE[plan]} for name, plan in (("half", "half"), ("4-steps", "4-steps"))}
    (tmp_path / "fleet-engine.json").write_text(json.dumps({"rungs": rungs}))
    words = ["--check", "fleet", "--results", str(tmp_path)]
    assert capacity.main(words) == 2 and "fleet.json" in capsys.readouterr().err
    for images_s, code in ((18.47, 0), (30.0, 1)):
        MEASURED["gpus"]["4"]["half"]["images_s"] = images_s
        (tmp_path / "fleet.json").write_text(json.dumps(MEASURED))
        assert capacity.main(words) == code
    MEASURED["gpus"]["4"]["half"]["images_s"] = 18.47


def test_the_fewest_gpus_are_found(tmp_path: Path) -> None:
    words = ["--models", "6", "--rate", "8", "--seconds", "60", "--image-jobs", "8", "--load", "2"]
    tried = points(tmp_path, *words, "--p99", "4")
    answer = tried[-1]
    assert answer["p99_s"] <= 4 and all(point["p99_s"] > 4 for point in tried if point["gpus"] < answer["gpus"])
    (again,) = points(tmp_path, *words, "--gpus", str(answer["gpus"]))
    assert {**again, "simulated_in_s": 0} == {**answer, "simulated_in_s": 0}


def test_what_no_number_of_gpus_meets_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--models", "3", "--rate", "1", "--seconds", "60", "--load", "30", "--p99", "2"]
    assert capacity.main([*words, "--results", str(tmp_path)]) == 2
    assert "loads of models" in capsys.readouterr().err


def test_cascades_and_scaled_devices_have_figures(tmp_path: Path) -> None:
    words = ["--gpus", "4", "--rate", "4", "--seconds", "60", "--plan", "4-steps"]
    (plain,) = points(tmp_path, *words)
    (cascade,) = points(tmp_path, *words, "--accept", "0.5", "--redraw", "half")
    assert cascade["busy"] > 2 * plain["busy"]
    (scaled,) = points(tmp_path, *words, "--scale", "2", "--start", "5")
    assert scaled["device_s"] < plain["device_s"] and scaled["most_gpus"] <= 4


@pytest.mark.parametrize(
    "words",
    [[], ["--gpus", "0"], ["--gpus", "x"], ["--p99", "-1"], ["--gpus", "1", "--accept", "2"],
     ["--gpus", "1", "--rate", "0"], ["--gpus", "1", "--loaded", "0"], ["--gpus", "1", "--load", "-1"]],
)  # fmt: skip
def test_wrong_options_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert capacity.main(words) == 2
    option = next((word for word in reversed(words) if word.startswith("--")), "--gpus")
    assert option in capsys.readouterr().err
