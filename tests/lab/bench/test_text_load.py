"""A rehearsal of `lab.bench.text_load`: closed loops of a tiny model on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.bench import text_load
from lab.bench.tables import TABLES


def test_loads_are_measured_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--tiny", "--loads", "3:9/5:2,1:4/7:2,4:4/7:2@40", "--results", str(tmp_path)]
    assert text_load.main(words) == 0
    results = json.loads((tmp_path / "text-load.json").read_text())
    for name, (flight, written) in {"3 × 9/5": (3, 5), "1 × 4/7": (1, 7)}.items():
        load = results["loads"][name]
        assert load["requests"] == 2 * flight and 0 < load["first_p50_s"] <= load["first_p99_s"] < load["seconds"]
        assert load["tokens_s"] == pytest.approx(2 * flight * written / load["seconds"], rel=0.02)
    timed = results["loads"]["4 × 4/7 @ 40/s"]
    assert timed["requests"] == 8 and timed["token_p99_ms"] > 0 and timed["seconds"] > 0.04  # 8 arrivals
    assert "3 × 9/5" in capsys.readouterr().out
    assert len(TABLES["h200-text-load"].lines(results)) == 2 + 3 + 2


def test_the_hosts_part_is_measured_without_forwards(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--tiny", "--host-only", "--loads", "3:9/5:2", "--results", str(tmp_path)]
    assert text_load.main(words) == 0
    (load,) = json.loads((tmp_path / "text-load.json").read_text())["loads"].values()
    assert load["requests"] == 6 and load["step_cpu_ms"] > 0


@pytest.mark.parametrize("text", ["256", "2:3", "0:3/4", "a:1/1", "1:2/3@0"])
def test_what_is_no_load_is_named(text: str) -> None:
    with pytest.raises(SystemExit, match=r"--loads: .* such as 256:128/128"):
        text_load.main(["--device", "cpu", "--tiny", "--loads", text])
