"""Latents of Z-Image outside the engine: diffusers' own, alone and together with prompts of other lengths."""

from __future__ import annotations

import pytest
import torch

from core.ops.cpu import CpuLowering
from core.ops.cuda import CudaLowering
from core.ops.ops import Lowering
from core.ops.reference import TorchLowering
from pipeline.checkpoints.load import load
from pipeline.drawing import Denoiser
from pipeline.families.zimage import FAMILY
from pipeline.pixels import vae
from tests.core.quant.stage import kernels
from tests.pipeline.families.zimage.models import SHAPES, model, stock

PROMPTS = ["a red cat", "two dogs " * 20, "x"]


def by_diffusers(name: str, prompt: str, seed: int, steps: int, guidance: float) -> torch.Tensor:
    side = SHAPES[name].native
    found: torch.Tensor = stock(name)(
        prompt, height=side, width=side, num_inference_steps=steps, guidance_scale=guidance,
        generator=torch.Generator().manual_seed(seed), output_type="latent",
    ).images  # fmt: skip
    return found


def lowering(on: str, network: torch.nn.Module) -> Lowering:
    if on == "cpu":
        return CpuLowering(kernels(), network)
    return TorchLowering(torch.float32) if on == "torch" else CudaLowering(torch.float32, 8)


@pytest.mark.quick
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("on", "steps", "guidance"),
    [("torch", 8, 0.0), ("torch", 2, 0.0), ("torch", 4, 3.0), ("cpu", 4, 3.0), ("cuda", 2, 3.0)],
)
def test_latents_are_those_of_diffusers(name: str, on: str, steps: int, guidance: float) -> None:
    """On the CPU's kernels, and on the references of the GPU's, too."""
    one = load(f"random:test-z-{name}") if on == "cuda" else model(name)  # whose lowering lays weights out anew
    network = FAMILY.network(lowering(on, one.denoiser), one.denoiser)
    drawing = Denoiser(one, network, guidance=guidance, steps=steps)
    together = drawing.latents(PROMPTS, [1, 2, 3])
    for index, prompt in enumerate(PROMPTS):
        expected = by_diffusers(name, prompt, index + 1, steps, guidance)
        for found in (together[index : index + 1], drawing.latents([prompt], [index + 1])):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(together[0], together[1], atol=0.1)


def test_pictures_are_those_of_diffusers() -> None:
    one, pipeline = model("tiny"), stock("tiny")
    latents = by_diffusers("tiny", "a red cat", 1, 2, 0.0)
    pixels = pipeline.vae.decode(latents / one.vae.config.scaling_factor + one.vae.config.shift_factor)[0]
    expected = vae.levels(pixels.detach().permute(0, 2, 3, 1))
    # Within a level in a few places: sums of floats have other bits where torch multiplies in other shapes.
    apart = (vae.decode(one, latents)[0].int() - expected.int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01
    assert expected.float().std() > 10, "a flat picture would prove nothing"


def test_encoding_undoes_decodings_scale() -> None:
    latents = torch.randn(2, 16, 4, 4)
    config = model("tiny").vae.config
    torch.testing.assert_close(vae.scale(vae.unscale(latents, config), config), latents, rtol=0, atol=1e-6)
    assert not torch.allclose(vae.unscale(latents, config), latents / config.scaling_factor, atol=0.01)
