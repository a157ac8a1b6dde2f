"""A style's LoRA begins as nothing, learns the style, and is served as diffusers draws with it."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from contract.image import ImageParameters
from core.batching.runner import Lane
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.extensions import lora as served
from tests.pipeline.worlds import Watching, levels, solo
from tests.training.world import Trained, adopted, surely_less
from training import lora, unet
from training.run import TrainingRun
from training.shapes import EMOJI

# EulerDiscreteScheduler converts tensors the old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
STYLE = "pencil"


def denoiser() -> torch.nn.Module:
    model: torch.nn.Module = tiny.parts(tiny.SHAPES[tiny.TINY])["unet"]
    return model.requires_grad_(False)


def predicted(model: torch.nn.Module) -> Tensor:
    shape = tiny.SHAPES[tiny.TINY]
    generator = torch.Generator().manual_seed(0)
    x, states, pooled = (
        torch.randn(size, generator=generator)
        for size in ((2, 4, 4, 4), (2, 77, 2 * shape.text_width), (2, shape.pooled_width))
    )
    told = {"text_embeds": pooled, "time_ids": torch.tensor([[32.0, 32, 0, 0, 32, 32]] * 2)}
    found: Tensor = model(x, torch.tensor([10, 900]), states, added_cond_kwargs=told, return_dict=False)[0]
    return found


def test_fresh_pairs_change_nothing_and_are_all_that_is_trained() -> None:
    plain = denoiser()
    adapted = copy.deepcopy(plain)
    pairs = lora.adapt_(adapted)
    assert torch.equal(predicted(plain), predicted(adapted))
    trained = {id(p) for p in adapted.parameters() if p.requires_grad}
    assert trained == {id(p) for p in pairs.parameters()} and trained
    names = {name.removeprefix("unet.") for name in lora.exported(pairs)}
    assert names == {*get_peft_model_state_dict(adapted)}
    assert any("conv1" in name for name in names) and any("attn2" in name for name in names)


def test_the_shipped_file_fits() -> None:
    from diffusers import UNet2DConditionModel

    run = TrainingRun(Path(), Path(), Path(), shapes=EMOJI)
    pairs = lora.adapt_(UNet2DConditionModel(**run.picture.unet()).requires_grad_(False))
    assert len(save(lora.exported(pairs))) < lora.MOST_BYTES - 1000


def test_it_learns_a_style_and_is_drawn_as_diffusers_draws_it(trained: Trained, tmp_path: Path) -> None:
    run = adopted(trained, tmp_path, 50, batch=8)
    parts = unet.load(run)

    def errors(model: torch.nn.Module) -> list[float]:
        """Of later batches than any that it is trained on."""
        losses = lora.StyleLoss(run, STYLE, dataclasses.replace(parts, unet=model))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            return [float(losses(10_000 + n, generator)[0]) for n in range(16)]

    before = errors(parts.unet)
    outcome = lora.train(run, STYLE)
    assert outcome.done and outcome.loss == outcome.loss
    after = errors(lora.load(run, STYLE)[0])
    assert surely_less(after, before), (np.mean(before), np.mean(after), outcome)
    assert not (run.work / "lora-mosaic").exists(), "each style has its own checkpoint"

    path = lora.export_style(run, STYLE)
    assert "not trained" in (path.parent / "README.md").read_text() and path.stat().st_size < lora.MOST_BYTES
    with safe_open(path, "pt") as file:
        assert file.metadata()["license"] == "apache-2.0" and file.metadata()["base_model"] == "emoji-xl"
    model = str(run.models / "emoji-xl")
    one = ImageParameters("red square", 1, 32, 32, steps=4)
    lane = Lane("tests")
    drawn = levels(solo(Watching(load(model, loras=served.find(STYLE, str(path.parent))), lane=lane), one))
    plain = levels(solo(Watching(load(model), lane=lane), one))
    each = Watching(load(model), lane=lane, loras=path.parent)
    named = levels(solo(each, dataclasses.replace(one, lora=STYLE)))
    lane.close()
    assert np.abs(drawn - plain).max() > 3 and np.abs(named - drawn).max() <= 1
    expected = stock(model, path, one)
    assert np.abs(drawn - expected).max() <= 1


def stock(model: str, path: Path, one: ImageParameters) -> np.ndarray:
    """What diffusers draws with the file."""
    from diffusers import StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline.from_pretrained(model, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(str(path.parent), weight_name=path.name)
    drawn = pipeline(
        one.prompt, width=one.width, height=one.height, num_inference_steps=one.steps, guidance_scale=5.0,
        generator=torch.Generator().manual_seed(one.seed),
    ).images[0]  # fmt: skip
    return np.asarray(drawn).astype(int)
