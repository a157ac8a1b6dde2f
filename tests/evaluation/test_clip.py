"""CLIP: against a forward written anew over the same weights, against torchmetrics; and captions that were mixed up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from evaluation import bootstrap, fid, pixels, references
from evaluation.clip import Clip
from evaluation.inception import WeightsError
from evaluation.run import EvaluationRun
from evaluation.scoring_networks import embedded
from tests.evaluation.conftest import CLIP


def block(w: dict[str, Tensor], name: str, x: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    """A layer of a pre-norm transformer, [B, N, C]."""

    def linear(x: Tensor, part: str) -> Tensor:
        return x @ w[f"{name}.{part}.weight"].T + w[f"{name}.{part}.bias"]

    def norm(x: Tensor, part: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.{part}.weight"], w[f"{name}.{part}.bias"], 1e-5)

    b, n, c = x.shape
    y = norm(x, "layer_norm1")
    q, k, v = (linear(y, f"self_attn.{p}_proj").view(b, n, heads, -1).transpose(1, 2) for p in "qkv")
    weights = q @ k.transpose(-1, -2) / (c // heads) ** 0.5
    if mask is not None:
        weights = weights.masked_fill(mask, -torch.inf)
    x = x + linear((weights.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c), "self_attn.out_proj")
    return x + linear(F.gelu(linear(norm(x, "layer_norm2"), "mlp.fc1")), "mlp.fc2")


def see(w: dict[str, Tensor], config: dict[str, int], pictures: np.ndarray) -> Tensor:
    x = torch.tensor(pictures).permute(0, 3, 1, 2).float() / 255 * 2 - 1
    x = F.conv2d(x, w["vision_model.embeddings.patch_embedding.weight"], stride=config["patch_size"])
    x = x.flatten(2).transpose(1, 2)
    start = w["vision_model.embeddings.class_embedding"].expand(len(x), 1, -1)
    x = torch.cat([start, x], 1) + w["vision_model.embeddings.position_embedding.weight"]
    # the misspelling is the format's own
    x = F.layer_norm(x, x.shape[-1:], w["vision_model.pre_layrnorm.weight"], w["vision_model.pre_layrnorm.bias"], 1e-5)
    for k in range(config["num_hidden_layers"]):
        x = block(w, f"vision_model.encoder.layers.{k}", x, config["num_attention_heads"], None)
    first = x[:, 0]
    first = F.layer_norm(
        first, first.shape[-1:], w["vision_model.post_layernorm.weight"], w["vision_model.post_layernorm.bias"], 1e-5
    )
    return F.normalize(first @ w["visual_projection.weight"].T, dim=-1)


def read(w: dict[str, Tensor], config: dict[str, int], ids: list[int]) -> Tensor:
    x = (
        w["text_model.embeddings.token_embedding.weight"][ids]
        + w["text_model.embeddings.position_embedding.weight"][: len(ids)]
    )
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    x = x[None]
    for k in range(config["num_hidden_layers"]):
        x = block(w, f"text_model.encoder.layers.{k}", x, config["num_attention_heads"], mask)
    last = F.layer_norm(
        x[0, -1], x.shape[-1:], w["text_model.final_layer_norm.weight"], w["text_model.final_layer_norm.bias"], 1e-5
    )
    return F.normalize(last @ w["text_projection.weight"].T, dim=-1)


def test_features_are_those_of_an_independent_forward(emoji: Path) -> None:
    from tokenizers import Tokenizer

    run, clip = EvaluationRun.read(emoji), Clip(CLIP)
    w = {name: value.float() for name, value in load_file(CLIP / "model.safetensors").items()}
    config = json.loads((CLIP / "config.json").read_text())
    pictures = [pixels.read(path) for path in run.files()[:4]]
    theirs = see(w, config["vision_config"], np.stack(pictures))
    torch.testing.assert_close(clip.see(pictures), theirs, rtol=1e-4, atol=1e-6)
    tokenizer = Tokenizer.from_file(str(CLIP / "tokenizer.json"))
    captions = [caption.text for caption in run.captions]  # of several lengths: padding must not show
    words = torch.stack([read(w, config["text_config"], tokenizer.encode(text).ids) for text in captions])
    torch.testing.assert_close(clip.read(captions), words, rtol=1e-4, atol=1e-6)
    score = 100 * (theirs * words[:4]).sum(1).double().mean()
    ours = 100 * (clip.see(pictures).double() * clip.read(captions)[:4].double()).sum(1).mean()
    assert float(ours) == pytest.approx(float(score), rel=1e-6)


def test_the_score_is_torchmetrics(emoji: Path) -> None:
    from torchmetrics.multimodal.clip_score import CLIPScore
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel, CLIPProcessor

    class Bare(CLIPModel):
        """Answers with features alone, as torchmetrics expects it of older models."""

        def get_image_features(self, *given: Any, **named: Any) -> Any:
            return super().get_image_features(*given, **named).pooler_output

        def get_text_features(self, *given: Any, **named: Any) -> Any:
            return super().get_text_features(*given, **named).pooler_output

    run = EvaluationRun.read(emoji)
    processor = CLIPProcessor(CLIPImageProcessor.from_pretrained(CLIP), AutoTokenizer.from_pretrained(CLIP))
    metric = CLIPScore(lambda: (Bare.from_pretrained(CLIP), processor))
    pictures = [torch.tensor(pixels.read(path)).permute(2, 0, 1) for path in run.files()]
    metric.update(pictures, [caption.text for caption in run.captions])
    found = json.loads((emoji / "scores.json").read_text())["scores"]["emoji-clip-score"]["value"]
    assert found == pytest.approx(float(metric.compute()), rel=1e-4)


def test_mixed_up_captions_score_lower(emoji: Path) -> None:
    run, lens = EvaluationRun.read(emoji), embedded(CLIP)
    clip = references.run_features(run, lens, lambda done, total: None).clip
    captions = references.run_caption_features(run, lens.clip)
    counts = bootstrap.resamples(len(run.captions))
    right = bootstrap.mean(100 * (clip * captions).sum(1), counts).interval
    wrong = bootstrap.mean(100 * (clip * captions.roll(1, 0)).sum(1), counts).interval
    assert right.low > wrong.high and right.value > 60


def test_noise_in_pictures_raises_the_distance_the_more_there_is(emoji: Path) -> None:
    lens = embedded(CLIP)
    clean = [pixels.read(path) for path in EvaluationRun.read(emoji).files()]
    real = fid.FrechetDistance(lens.distance.see(clean))
    draw = np.random.default_rng(0)
    noise = [draw.normal(0, 1, picture.shape) for picture in clean]
    found = []
    for amount in (0, 8, 16, 32, 64):
        noisy = [
            np.clip(picture + amount * n, 0, 255).round().astype(np.uint8)
            for picture, n in zip(clean, noise, strict=True)
        ]
        found.append(real(lens.distance.see(noisy)))
    assert found[0] == pytest.approx(0, abs=1e-6) and found == sorted(found) and found[-1] > 0.01


@pytest.mark.parametrize("size", [(128, 200), (300, 128), (64, 64), (257, 511)])
def test_pictures_of_any_size_are_fitted_as_the_models_processor_does_it(size: tuple[int, int]) -> None:
    from transformers import CLIPImageProcessor

    clip = Clip(CLIP)
    draw = np.random.default_rng(1)
    picture = np.kron(draw.integers(0, 256, (8, 8, 3)), np.ones((64, 64, 1)))[: size[1], : size[0]].astype(np.uint8)
    processor = CLIPImageProcessor(size={"shortest_edge": 128}, crop_size=128, resample=3)
    theirs = processor(Image.fromarray(picture), do_normalize=False, do_rescale=False, return_tensors="np")
    gap = np.abs(clip._fit(picture).astype(int) - theirs["pixel_values"][0].transpose(1, 2, 0).astype(int))
    assert gap.mean() < 1.0


@pytest.mark.parametrize("wide", [1, 2, 3, 5, 8])
def test_the_middle_is_cut_out_as_torchvisions_center_crop_does_it(wide: int) -> None:
    """To the pixel: of so many pixels too many, half of them rounded to even is left out before the middle."""
    clip, first = Clip(CLIP), round(wide / 2)
    picture = np.random.default_rng(wide).integers(0, 256, (128, 128 + wide, 3), np.uint8)
    assert np.array_equal(clip._fit(picture), picture[:, first : first + 128])
    upright = picture.transpose(1, 0, 2)
    assert np.array_equal(clip._fit(upright), upright[first : first + 128])


def test_captions_beyond_the_context_are_read_up_to_its_last_token() -> None:
    """77 tokens with their beginning and end, as transformers' processor and OpenAI's CLIP truncate them."""
    from tokenizers import Tokenizer

    clip, tokenizer = Clip(CLIP), Tokenizer.from_file(str(CLIP / "tokenizer.json"))
    w = {name: value.float() for name, value in load_file(CLIP / "model.safetensors").items()}
    config = json.loads((CLIP / "config.json").read_text())["text_config"]
    caption = " ".join(["a cat", "a red boat", "two suns"] * 30)
    ids, limit = tokenizer.encode(caption).ids, config["max_position_embeddings"]
    assert len(ids) > limit == 77
    torch.testing.assert_close(
        clip.read([caption])[0], read(w, config, [*ids[: limit - 1], ids[-1]]), rtol=1e-4, atol=1e-6
    )
    one_less = read(w, config, [*ids[: limit - 2], ids[-1]])
    assert (clip.read([caption])[0] - one_less).abs().max() > 1e-3, "a token less would show"


def test_what_is_no_clip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="is not a CLIP model"):
        Clip(tmp_path)


def test_a_score_is_not_clamped() -> None:
    """torchmetrics counts a picture below 0 as 0; MLPerf does not."""
    assert bootstrap.mean(torch.tensor([-50.0, 10.0]), bootstrap.resamples(2)).value == -20
    assert (
        bootstrap.interval_fields(bootstrap.mean(torch.tensor([-50.0, -50.0]), bootstrap.resamples(2)))["value"] == -50
    )
