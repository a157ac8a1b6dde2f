"""The IP-Adapter begins as captions' states, learns of pictures what captions say, and is served as it was exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from contract.image import ImageParameters
from contract.image_prompt import ImagePrompt
from core.batching.runner import Lane
from evaluation.scenes import emoji
from pipeline.checkpoints.load import load
from pipeline.extensions.ip_adapter_file import ENCODER
from tests.pipeline.worlds import Watching, levels, solo
from tests.training.world import Trained, adopted, surely_less
from training import ip_adapter, unet
from training.run import TrainingRun
from training.shapes import EMOJI
from unet_opt.unet import cross_attentions

# EulerDiscreteScheduler converts tensors the old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SCENE, SEED = 7, 1234
MODELS = "emoji-xl", "emoji-clip"


def test_the_shipped_adapter_fits() -> None:
    from diffusers import UNet2DConditionModel

    run = TrainingRun(Path(), Path(), Path(), shapes=EMOJI)
    denoiser = UNet2DConditionModel(**run.picture.unet())
    adapter = ip_adapter.adapt_(denoiser, run.picture.pooled_width)
    found = adapter.exported()
    assert sum(tensor.nbytes for tensor in found.values()) < ip_adapter.MOST_BYTES
    for number, attn in enumerate(cross_attentions(denoiser)):
        own = {name: found[f"ip_adapter.{2 * number + 1}.to_{name}_ip.weight"] for name in "kv"}
        assert torch.equal(own["k"], attn.to_k.weight.detach().half())
        assert torch.equal(own["v"], (ip_adapter.BEGUN * attn.to_v.weight.detach()).half())


def test_the_teacher_is_the_denoiser_without_an_adapter(trained: Trained, tmp_path: Path) -> None:
    run = adopted(trained, tmp_path, 1, models=MODELS)
    _, loss = ip_adapter.begun(run)
    denoiser = unet.load(run).unet
    same = []

    def noted(module: torch.nn.Module, given: Any, options: dict[str, Any], found: tuple[Tensor]) -> None:
        assert "image_embeds" not in options["added_cond_kwargs"] and not found[0].requires_grad
        same.append(torch.equal(found[0], denoiser(*given, **options)[0]))

    loss._teacher.at((run.size, run.size)).register_forward_hook(noted, with_kwargs=True)
    loss(0, torch.Generator().manual_seed(1))
    assert same == [True]


def test_tokens_begin_near_what_they_are_fitted_to() -> None:
    from diffusers.models.embeddings import ImageProjection

    torch.manual_seed(0)
    projection: Any = ImageProjection(8, 16, ip_adapter.TOKENS)
    seen = torch.randn(256, 8)
    states = 3 * (seen @ torch.randn(8, ip_adapter.TOKENS * 16)).view(256, ip_adapter.TOKENS, 16) + 1
    ip_adapter.start_(projection, seen + 2, states)
    with torch.no_grad():
        tokens = projection(seen + 2)
    own, others = ((tokens - states.roll(shift, 0)).square().mean((1, 2)).tolist() for shift in (0, 1))
    assert np.mean(own) < 0.5 * np.mean(others), (np.mean(own), np.mean(others))


def test_rows_lose_their_picture_and_their_text_as_often_as_said(trained: Trained, tmp_path: Path) -> None:
    """What the denoiser is told, of many rows."""
    run = dataclasses.replace(adopted(trained, tmp_path, 1, models=MODELS), batch=64)
    _, loss = ip_adapter.begun(run)
    told = []

    def noted(module: torch.nn.Module, given: tuple[Tensor, ...], options: dict[str, dict[str, Tensor]]) -> None:
        states, known = given[2], options["added_cond_kwargs"]
        told.append(torch.stack([states.abs().amax((1, 2)) > 0, known["image_embeds"][0].abs().amax((1, 2)) > 0], 1))

    loss._model.at((run.size, run.size)).register_forward_pre_hook(noted, with_kwargs=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for number in range(12):
            loss(number, generator)
    found = torch.cat(told)
    rows = len(found)
    shares = ((0, 0, ip_adapter.DROP_BOTH), (1, 0, ip_adapter.DROP_IMAGE), (0, 1, ip_adapter.DROP_TEXT))
    for text, image, share in shares:
        seen = int(((found[:, 0] == bool(text)) & (found[:, 1] == bool(image))).sum())
        assert abs(seen - share * rows) < 4 * (share * (1 - share) * rows) ** 0.5, (text, image)


def test_it_learns_what_pictures_show_and_serves_it(trained: Trained, tmp_path: Path) -> None:
    run = adopted(trained, tmp_path, 300, models=MODELS)

    def errors(loss: ip_adapter.ImagePromptLoss, name: str, shift: int = 0) -> list[float]:
        """Of later batches than any that it is trained on."""
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            return [float(loss(10_000 + n, generator, shift)[1][name]) for n in range(16)]

    fresh, held_out = ip_adapter.begun(run)
    layers: Any = fresh.layers
    for layer in layers:
        layer.scale = [0.0]
    alone = errors(held_out, "taught")
    assert alone == errors(held_out, "taught", 1), "an adapter of strength 0 adds something"
    outcome = ip_adapter.train(run)
    assert outcome.done and outcome.loss == outcome.loss
    adapter, trained_loss = ip_adapter.load(run)
    taught = errors(trained_loss, "taught")
    assert surely_less(taught, alone), (np.mean(taught), np.mean(alone))
    own, others = (errors(trained_loss, "eps", shift) for shift in (0, 1))
    assert surely_less(own, others), (np.mean(own), np.mean(others))

    path = ip_adapter.export(run)
    kept = load_file(path)
    assert all(torch.equal(kept[key], tensor) for key, tensor in adapter.exported().items()) and len(kept) > 4
    assert "`ip_adapter`: 300 iterations" in (path.parent / "README.md").read_text(encoding="utf-8")
    check_served(run, held_out)


def drawn_by_diffusers(run: TrainingRun, images: Sequence[Image.Image]) -> np.ndarray:
    """Images like each of these, uint8 levels, by the exported emoji-xl and adapter."""
    from diffusers import StableDiffusionXLPipeline
    from transformers import CLIPImageProcessor

    path = run.models / ip_adapter.FOLDER
    pipeline: Any = StableDiffusionXLPipeline.from_pretrained(run.models / "emoji-xl", local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.register_modules(feature_extractor=CLIPImageProcessor.from_pretrained(path / ENCODER))
    weights = f"{ip_adapter.NAME}.safetensors"
    pipeline.load_ip_adapter(str(path), subfolder="", weight_name=weights, image_encoder_folder=ENCODER)
    # As given: the pipeline repeats embeddings for all prompts, by which each would see all images.
    pipeline.prepare_ip_adapter_image_embeds = lambda image, embeds, *_: embeds
    seen = pipeline.encode_image(list(images), pipeline.device, 1)
    drawn: np.ndarray = pipeline(
        prompt=[ip_adapter.PLAIN] * len(images), ip_adapter_image_embeds=[torch.cat(seen[::-1])[:, None]],
        generator=[torch.Generator().manual_seed(SEED + number) for number in range(len(images))],
        height=run.size, width=run.size, num_inference_steps=4, guidance_scale=3.0, output_type="np",
    ).images  # fmt: skip
    return np.rint(drawn * 255).astype(np.uint8)


def check_served(run: TrainingRun, loss: ip_adapter.ImagePromptLoss) -> None:
    """The worker's path draws of the exported folder what diffusers draws of both pictures together, and of each its
    own.
    """
    shown = loss._stream.draw(loss._stream.at(SCENE))[:2]
    runner = Watching(
        load(str(run.models / "emoji-xl")), lane=Lane("tests"), image_prompts=run.models / ip_adapter.FOLDER
    )
    images = emoji.to_images(shown)
    drawn, expected = [], drawn_by_diffusers(run, images)
    for number, image in enumerate(images):
        given = ImagePrompt(model=ip_adapter.NAME, image=image.tobytes(), width=run.size, height=run.size)
        how = {"steps": 4, "guidance_scale": 3.0, "image_prompts": (given,)}
        one = ImageParameters(ip_adapter.PLAIN, SEED + number, run.size, run.size, **how)
        drawn.append(levels(solo(runner, one)))
        assert np.abs(drawn[-1] - expected[number].astype(int)).max() <= 1
    assert not np.array_equal(drawn[0], drawn[1])
