"""Prompts of Z-Image on the text path's kernels: transformers' embeddings, the torch backend's pictures."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from contract.image import ImageParameters
from core.config import Settings
from pipeline.backends.graphs import GraphBackend
from pipeline.backends.phases import TEXT
from pipeline.checkpoints import tiny, tiny_zimage
from pipeline.checkpoints.load import load
from pipeline.families.family import ImageModel
from pipeline.families.zimage.conditioning import embed
from tests.core.quant.stage import CACHE, kernels
from tests.pipeline.families.zimage.test_adapters import write
from tests.workers.desk import drawn
from workers.backends import GRAPHS, PROGRAMS, TORCH
from workers.build import build
from workers.images.text_encoder import on_kernels

SETTINGS = Settings(model=tiny_zimage.TINY_Z, device="cpu", precision="fp32", compile=False, cache_dir=CACHE.parent)
PROMPTS = ("a red cat", "two dogs " * 20, "x", "a hat, 中文")


@pytest.fixture
def model() -> ImageModel:
    kernels()  # skips where there are none
    return load(tiny_zimage.TINY_Z)


def ids(length: int, rows: int = 1) -> list[torch.Tensor]:
    return [torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(length))]


@pytest.mark.parametrize("backend", [PROGRAMS, GRAPHS])
@pytest.mark.parametrize("length", [1, 32, 77, 512])
def test_embeddings_are_transformers(model: ImageModel, backend: str, length: int) -> None:
    """Of prompts as short and as long as there are; on CPUs in batches bit for bit what they are alone."""
    with torch.inference_mode():
        (wanted,) = embed(model, ids(length, rows=2))
    made = on_kernels(SETTINGS, model, backend, release=False)
    assert made.embed is not None
    (found,) = made.embed(ids(length, rows=2))
    assert found.shape == wanted.shape and (found - wanted).norm() <= 1e-5 * wanted.norm()
    if backend == PROGRAMS:
        for row in range(2):
            (alone,) = made.embed([ids(length, rows=2)[0][row : row + 1]])
            assert torch.equal(alone[0], found[row])


def test_torchs_backend_and_other_text_encoders_are_left_alone(model: ImageModel) -> None:
    assert on_kernels(SETTINGS, model, TORCH, release=True) is model
    sdxl = load(tiny.TINY)
    assert on_kernels(SETTINGS, sdxl, PROGRAMS, release=True) is sdxl


def test_what_the_kernels_lack_is_logged_and_left_to_torch(model: ImageModel, caplog: pytest.LogCaptureFixture) -> None:
    model.parts["text_encoder"].config.hidden_act = "gelu"
    with caplog.at_level(logging.INFO, "workers"):
        assert on_kernels(SETTINGS, model, PROGRAMS, release=True) is model
    assert "torch encodes prompts: " in caplog.text and "GeGLU by tanh, not gelu" in caplog.text


def test_graphs_encode_by_it_and_record_none_of_it(model: ImageModel) -> None:
    backend = GraphBackend(on_kernels(SETTINGS, model, GRAPHS, release=False))
    (found,) = backend.phases[TEXT](ids(40))
    (wanted,) = embed(model, ids(40))
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_worker_encodes_on_kernels_and_draws_diffusers_pictures(caplog: pytest.LogCaptureFixture) -> None:
    """Of prompts of several lengths that share forwards. What only the torch encoder reads is dropped."""
    kernels()
    side = tiny_zimage.SHAPES[tiny_zimage.TINY_Z].native
    with caplog.at_level(logging.INFO, "workers"), build(SETTINGS) as runtime:
        text = runtime.images.model.parts["text_encoder"]
        assert text.layers[0].mlp.up_proj.weight.numel() == 0 and text.embed_tokens.weight.numel()
        wanted = [
            ImageParameters(prompt=prompt, seed=seed, width=side, height=side, steps=3, guidance_scale=2.0 * (seed % 2))
            for seed, prompt in enumerate(PROMPTS)
        ]
        found = [np.asarray(one.image).astype(int) for one in drawn(runtime, wanted)]
    assert "our kernels encode prompts in float32" in caplog.text
    pipeline = tiny_zimage.make(tiny_zimage.SHAPES[tiny_zimage.TINY_Z])
    pipeline.set_progress_bar_config(disable=True)
    for one, picture in zip(wanted, found, strict=True):
        expected = pipeline(
            one.prompt, height=side, width=side, num_inference_steps=3, guidance_scale=one.guidance_scale,
            generator=torch.Generator().manual_seed(one.seed),
        ).images[0]  # fmt: skip
        assert abs(picture - np.asarray(expected)).max() <= 1
        assert picture.std() > 10, "a flat picture would prove nothing"


@pytest.mark.parametrize("kernels_on", [True, False])
def test_requests_with_loras_read_the_encoder_that_others_read(tmp_path: Path, kernels_on: bool) -> None:
    """A LoRA of the transformer alone: on the kernels, whose weights are packed only, as over torch's fused ones."""
    kernels()
    write(tmp_path / "ink.safetensors", "peft")
    wanted = ImageParameters("a hat", 3, 32, 32, steps=3, lora="ink")
    own = SETTINGS.model_copy(update={"lora_dir": str(tmp_path), "kernels": kernels_on})
    fused = SETTINGS.model_copy(update={"lora_dir": str(tmp_path), "lora": "ink", "kernels": False})
    with build(own) as runtime:
        pictures = [drawn(runtime, [one])[0] for one in (wanted, replace(wanted, lora=""))]
        held = runtime.images.model.parts["text_encoder"].layers[0].mlp.up_proj.weight.numel()
        assert (held == 0) == kernels_on
    with build(fused) as runtime:
        pictures += drawn(runtime, [replace(wanted, lora="")])
    found, without, right = (np.asarray(one.image).astype(int) for one in pictures)
    assert np.abs(found - right).max() <= 1 and np.abs(found - without).max() > 3
