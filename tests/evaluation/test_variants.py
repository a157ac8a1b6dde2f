"""Many variants of one list of captions: drawn in pieces, each its own pictures, and scored against fp32."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from core.kernels.cpu.library import KernelsUnavailable, library
from evaluation import variants
from pipeline import quantized, tiny
from pipeline.load import load

CAPTIONS = [f"a {colour} hat" for colour in ("red", "green", "blue", "old", "new", "big")]
SIDE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its INT8 variant, its statistics, captions, and pictures that pass for real ones."""
    found = tmp_path_factory.mktemp("variants")
    try:
        library(found / "kernels")
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    model = tiny.save(found / "model", tiny.SDXLShape(channels=(16, 32), heads=(1, 2)))
    loaded = load(str(model))
    quantized.make(loaded, CAPTIONS[:2], model)
    quantized.watch(load(str(model)), CAPTIONS[:2], found / "statistics.safetensors")
    (found / "captions.json").write_text(json.dumps(CAPTIONS), "utf-8")
    (found / "real").mkdir()
    rng = np.random.default_rng(0)
    for number in range(8):
        picture = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(picture).save(found / "real" / f"{number}.png")
    return found


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, what: str, *more: str) -> None:
    words = [
        what, "--captions", folder / "captions.json", "--out", folder / "out", "--model", folder / "model",
        "--side", SIDE, "--work", folder / "work", "--statistics", folder / "statistics.safetensors",
        "--cache", folder / "kernels", "--processes", 1, "--batch", 4, "--real", folder / "real", "--resamples", 8,
        *more,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["variants", *map(str, words)])
    variants.main()


def test_variants_are_drawn_once_and_scored_against_fp32(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ("fp32", "fp32-seeds2", "int8", "int8-auto", "int8-plain")
    run(monkeypatch, folder, "draw", "--seconds", "0", "--only", *names)
    assert not list((folder / "work").glob("*.done")), "no time, no pictures"
    for _ in range(2):
        run(monkeypatch, folder, "draw", "--only", *names)
    said = capfd.readouterr().out
    for name in names:
        assert said.count(f"{name}, 6 pictures") == 1, "what is drawn is not drawn again"
    run(monkeypatch, folder, "score", "--only", *names)
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert found["captions"] == 6 and {*found["variants"]} == {*names} and found["halves_fid"] > 0
    scores = found["variants"]
    assert scores["fp32"]["psnr_db"] == 99 and scores["fp32"]["clip_ratio"] == [1, 1, 1]
    assert scores["fp32"]["fid_more"] == [0, 0, 0]
    assert 20 < scores["int8"]["psnr_db"] < 60 and scores["fp32-seeds2"]["psnr_db"] < scores["int8"]["psnr_db"]
    assert scores["int8-auto"]["psnr_db"] < scores["int8"]["psnr_db"] != scores["int8-plain"]["psnr_db"]
