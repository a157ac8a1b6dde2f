"""The parts of the GPU's service benchmark that can be wrong without a GPU: what its windows and its PSNR say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.h200 import fidelity
from benchmarks.h200.clients import Load


def test_a_window_counts_what_is_finished_in_it() -> None:
    load = Load(ended=[(9.9, 1.0), (10.0, 2.0), (11.0, 4.0), (14.9, 3.0), (15.0, 9.0)])
    found = load.window(10.0, 15.0)
    assert found["pictures"] == 3 and found["pictures_per_s"] == 0.6
    assert found["p50_s"] == 3.0 and found["longest_s"] == 4.0
    assert load.window(20.0, 21.0) == {"seconds": 1.0, "pictures": 0, "pictures_per_s": 0.0}


def test_psnr_is_of_each_picture() -> None:
    black = np.zeros((3, 4, 4, 3), np.uint8)
    other = black.copy()
    other[1] += 1
    other[2] += 255
    assert fidelity.psnr(black, other) == pytest.approx([100.0, 20 * np.log10(255), 0.0])
    found = fidelity.summary(black, other)
    assert found["psnr_min_of"] == fidelity.prompts(3)[2] and found["brighter_levels"] == pytest.approx(
        256 / 3, abs=1e-3
    )


def test_prompts_are_all_different() -> None:
    assert len(set(fidelity.prompts(64))) == 64


def test_the_sheet_shows_each_variant_beside_the_reference(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 255, (4, 32, 32, 3), dtype=np.uint8) for name in ("fp32", "int8")}
    for name, pictures in columns.items():
        np.savez(tmp_path / f"{name}.npz", pictures=pictures)
    found = fidelity.compare(tmp_path / "fp32.npz", [tmp_path / "int8.npz"], tmp_path / "sheet.png")
    assert found.keys() == {"int8"} and found["int8"]["pictures"] == 4
    with Image.open(tmp_path / "sheet.png") as page:
        shown = np.asarray(page)
    for row, index in enumerate((0, 1)):
        assert (shown[16 + 32 * row : 48 + 32 * row, 32:64] == columns["int8"][index]).all()
