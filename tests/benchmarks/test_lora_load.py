"""What a LoRA that is read costs others, at small scale: what is told, and what cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import lora_load
from benchmarks.harness import models, record
from benchmarks.lora_load import LoraFile
from core.config import Settings
from tests.core.quant.stage import CACHE, kernels

SETTINGS = Settings(device="cpu", threads=1, cache_dir=CACHE.parent)


def test_steps_are_timed_with_a_load_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels()
    result = lora_load.run(SETTINGS, LoraFile(mib=2, rounds=1, steps=4, side=64), widths=models.SMALL, results=tmp_path)
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == json.loads((tmp_path / "lora-load.json").read_text())
    assert result["plain_steps"] >= 2 and len(result["loads_s"]) == 1
    assert 2**20 < result["size_bytes"] < 3 * 2**20 and result["precision"] == "int8"
    assert result["median_ratio"] == result["loading_median_ms"] / result["plain_median_ms"] > 0


def test_requests_that_fail_end_it(tmp_path: Path) -> None:
    kernels()
    with pytest.raises(record.BenchError, match="requests fail: size: 8x8 is not offered"):
        lora_load.run(SETTINGS, LoraFile(mib=2, side=8), widths=models.SMALL, results=tmp_path)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(record.BenchError, match="--mib, --rounds, --steps and --side must be at least 1"):
        lora_load.run(SETTINGS, LoraFile(rounds=0), results=tmp_path)
