"""The benchmarks of text run, on models that mean nothing, and say what they were asked for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.config import Settings
from lab.bench import cohost, text
from lab.bench.harness import record
from llm.families import tiny
from pipeline.checkpoints.tiny import TINY
from workers import build
from workers.build import Runtime


def settings(folder: Path, **more: Any) -> Settings:
    return Settings(
        threads=1, compile=False, kernels=False, cache_dir=folder, device="cpu", model=TINY, text_model=tiny.TINY,
        text_memory_mib=8, **more,
    )  # fmt: skip


def test_rungs_write_all_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rungs = (
        "transformers-static-batch",
        "transformers-generate_batch",
        "diptych",
        "diptych-int8",
        "diptych-speculative",
    )
    made = text.run(settings(tmp_path), model=tiny.TINY, requests=3, turns=1, results=tmp_path, rungs=rungs)
    stored = json.loads((tmp_path / "text-llama-tiny.json").read_text())
    assert stored == json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(json.dumps(made))
    assert set(made["tokens_per_s"]) == set(rungs) - {"diptych-int8"}
    assert made["left_out"] == {"diptych-int8": "INT8 does not run here without our kernels"}
    assert made["draft"] == "lookup" and made["tokens"] > 0


def test_rungs_and_models_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(record.BenchError, match="--rungs: there is no vllm"):
        text.run(settings(tmp_path), model=tiny.TINY, rungs=("vllm",))
    with pytest.raises(record.BenchError, match="no such folder"):
        text.run(settings(tmp_path), model="none", rungs=("diptych",))


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """Both panels, built once for the benchmark's runs."""
    with build.build(settings(tmp_path_factory.mktemp("cohost")), text=True, measure_s=0.2) as shared:
        yield shared


@pytest.fixture
def shared(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(build, "build", lambda *given, **options: contextlib.nullcontext(runtime))
    return runtime


@pytest.mark.long
def test_both_panels_are_measured(shared: Runtime, tmp_path: Path) -> None:
    assert shared.texts is not None
    result = cohost.run(settings(tmp_path), seconds=0.3, steps=2, results=tmp_path, turns=1)
    assert result == json.loads((tmp_path / "cohost.json").read_text())
    assert result["images_per_s"]["together"] > 0 and result["tokens_per_s"]["together"] > 0
    assert result["sum"] == pytest.approx(result["image_share"] + result["text_share"], abs=1e-3)
    assert result["tpot_p99_s"] > 0 and result["image_p99_s"] > 0
    objectives = result["objectives"]
    assert objectives["tpot_s"] == max(objectives["tpot_set_s"], objectives["tpot_free_s"])


def test_a_strict_pace_is_that_of_the_settings(shared: Runtime, tmp_path: Path) -> None:
    assert shared.texts is not None
    shared.texts.pace_s = 1e-4
    objectives = cohost.run(settings(tmp_path), seconds=0.1, steps=2, results=tmp_path, turns=1, strict=True)[
        "objectives"
    ]
    assert objectives["tpot_s"] == 1e-4 < objectives["tpot_free_s"]


def test_without_a_text_model_nothing_is_measured(
    shared: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "texts", None)
    with pytest.raises(record.BenchError, match="there is no text model"):
        cohost.run(settings(tmp_path), seconds=0.1)
