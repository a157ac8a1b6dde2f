"""CLIP: against transformers over the same weights; and captions that were mixed up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from evaluation import bootstrap, references
from evaluation.clip import Clip
from evaluation.inception import WeightsError
from evaluation.run import EvaluationRun
from evaluation.scoring_networks import embedded
from tests.evaluation.conftest import CLIP, blocks, read_json


def test_mixed_up_captions_score_lower(emoji: Path) -> None:
    run, lens = EvaluationRun.read(emoji), embedded(CLIP)
    clip = references.run_features(run, lens, lambda done, total: None).clip
    captions = references.run_caption_features(run, lens.clip)
    counts = bootstrap.resamples(len(run.captions))
    right = bootstrap.mean(100 * (clip * captions).sum(1), counts).interval
    wrong = bootstrap.mean(100 * (clip * captions.roll(1, 0)).sum(1), counts).interval
    assert right.low > wrong.high and right.value > 60
    score = read_json(emoji / "scores.json")["scores"]["emoji-clip-score"]
    assert score["value"] == pytest.approx(right.value, rel=1e-6)


@pytest.mark.parametrize("size", [(128, 200), (300, 128), (64, 64), (257, 511)])
def test_pictures_of_any_size_are_fitted_as_the_models_processor_does_it(size: tuple[int, int]) -> None:
    from transformers import CLIPImageProcessor

    clip = Clip(CLIP)
    (picture,) = blocks(1, size)
    processor = CLIPImageProcessor(size={"shortest_edge": 128}, crop_size=128, resample=3)
    theirs = processor(Image.fromarray(picture), do_normalize=False, do_rescale=False, return_tensors="np")
    gap = np.abs(clip._fit(picture).astype(int) - theirs["pixel_values"][0].transpose(1, 2, 0).astype(int))
    assert gap.mean() < 1.0


@pytest.mark.parametrize("wide", [1, 2, 3, 5])
def test_the_middle_is_cut_out_as_torchvisions_center_crop_does_it(wide: int) -> None:
    """To the pixel: of so many pixels too many, half of them rounded to even is left out before the middle."""
    clip, first = Clip(CLIP), round(wide / 2)
    picture = np.random.default_rng(wide).integers(0, 256, (128, 128 + wide, 3), np.uint8)
    assert np.array_equal(clip._fit(picture), picture[:, first : first + 128])
    upright = picture.transpose(1, 0, 2)
    assert np.array_equal(clip._fit(upright), upright[first : first + 128])


def test_captions_beyond_the_context_are_read_up_to_its_last_token() -> None:
    """77 tokens with their beginning and end, as transformers' processor and OpenAI's CLIP truncate them."""
    from transformers import AutoTokenizer, CLIPModel

    model, tokenizer = CLIPModel.from_pretrained(CLIP).float().eval(), AutoTokenizer.from_pretrained(CLIP)
    caption = " ".join(["a cat", "a red boat", "two suns"] * 30)

    def cut(most: int) -> Tensor:
        tokens = tokenizer([caption], truncation=True, max_length=most, return_tensors="pt")
        assert tokens.input_ids.shape[1] == most
        with torch.inference_mode():
            return F.normalize(model.get_text_features(**tokens).pooler_output, dim=-1)

    clip = Clip(CLIP)
    found = clip.read([caption])
    padded = clip.read(["a cat", caption])
    torch.testing.assert_close(padded, torch.cat([clip.read(["a cat"]), found]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found, cut(77), rtol=1e-4, atol=1e-6)
    assert (found - cut(76)).abs().max() > 1e-3, "a token less would show"


def test_what_is_no_clip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="is not a CLIP model"):
        Clip(tmp_path)


def test_a_score_is_not_clamped() -> None:
    """torchmetrics counts a picture below 0 as 0; MLPerf does not."""
    for scores, expected in (([-50.0, 10.0], -20), ([-50.0, -50.0], -50)):
        found = bootstrap.mean(torch.tensor(scores), bootstrap.resamples(2))
        assert found.value == expected == bootstrap.interval_fields(found)["value"]
