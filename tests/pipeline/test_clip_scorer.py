"""A CLIP that scores pictures: as the evaluation's over the same weights, for any shape, and what is no CLIP."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from core.failures import NotFinite
from evaluation.clip import Clip
from pipeline.checkpoints.folder import ModelError
from pipeline.clip_scorer import ClipScorer
from tests.evaluation.conftest import CLIP


@pytest.fixture(scope="module")
def scorer() -> ClipScorer:
    return ClipScorer(CLIP)


@pytest.fixture(scope="module")
def clip() -> Clip:
    return Clip(CLIP)


@settings(max_examples=6)
@given(
    st.sampled_from([(128, 128), (64, 64), (96, 168), (300, 128)]), st.integers(0, 99),
    st.sampled_from(["a red cat", "", "cat " * 200, "\u2602 on the left"]),
)  # fmt: skip
def test_a_score_is_that_of_the_evaluation(
    scorer: ClipScorer, clip: Clip, size: tuple[int, int], seed: int, prompt: str
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    expected = 100 * float(clip.see([pixels])[0] @ clip.read([prompt])[0])
    # Sides are rounded down here, as transformers does, and cut from another pixel where that leaves half of one.
    tolerance = 1e-3 if size[0] == size[1] else 2.0
    assert scorer.score(Image.fromarray(pixels), prompt) == pytest.approx(expected, abs=tolerance)


def test_a_score_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    folder = shutil.copytree(CLIP, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["visual_projection.weight"].fill_(torch.nan)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(NotFinite, match=r"^the fp32 CLIP broken returned NaN or infinity$"):
        ClipScorer(folder).score(Image.new("RGB", (64, 64)), "a cat")


def test_what_is_no_clip_is_named(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "none", "no such folder"), (tmp_path, "config.json")):
        with pytest.raises(ModelError, match=said):
            ClipScorer(folder)
