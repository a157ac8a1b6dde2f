"""What LoRAs cost, at small scale: what is told, and what cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loras, record
from benchmarks.loras import LAYERS, Wanted
from core.config import Settings
from pipeline import tiny
from tests.core.quant.stage import CACHE, kernels

SETTINGS = Settings(model=tiny.TINY, precision="fp32", device="cpu", threads=1, cache_dir=CACHE.parent)
SMALL: dict[str, Any] = {
    **loras._WIDTHS, "block_out_channels": (32, 64, 64), "attention_head_dim": (1, 2, 2), "cross_attention_dim": 32,
    "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 6 * 8 + 24,
}  # fmt: skip


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("sdxl", [False, True])
def test_a_step_with_and_without_is_timed_in_turns(
    layers: str, sdxl: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels()
    wanted = Wanted(rows=3, loras=2, rank=2, layers=layers, rounds=2)
    result = loras.run(SETTINGS, wanted, sdxl=sdxl, widths=SMALL, side=8, results=tmp_path)
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == json.loads((tmp_path / "loras.json").read_text())
    assert len(result["plain_all_ms"]) == len(result["loras_all_ms"]) == 2 and min(result["plain_all_ms"]) > 0
    assert result["ratio"] == result["plain_ms"] / result["loras_ms"] and result["adapter_bytes"] > 0
    assert (result["model"], result["precision"]) == ((loras.SDXL, "int8") if sdxl else (tiny.TINY, "fp32"))


def test_more_layers_are_more_bytes(tmp_path: Path) -> None:
    kernels()
    sizes = [
        loras.run(SETTINGS, Wanted(2, 1, 2, layers, 1), side=4, results=tmp_path)["adapter_bytes"] for layers in LAYERS
    ]
    assert sizes == sorted({*sizes}) and [*LAYERS] == ["attention", "linear", "all"]


@pytest.mark.parametrize(
    ("settings", "wanted", "said"),
    [
        (SETTINGS, Wanted(rows=2, loras=3), "--loras must be between 1 and --rows"),
        (SETTINGS, Wanted(rank=0), "--rank and --rounds at least 1"),
        (SETTINGS.model_copy(update={"device": "cuda"}), Wanted(), "--device: a GPU"),
        (SETTINGS.model_copy(update={"model": "random:tiny-z"}), Wanted(), "has no UNet"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: Settings, wanted: Wanted, said: str, tmp_path: Path) -> None:
    with pytest.raises(record.BenchError, match=said):
        loras.run(settings, wanted, results=tmp_path)
