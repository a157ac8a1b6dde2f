"""LoRA files of Z-Image: what diffusers' loader reads of each layout is what the layers get."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import lora_file
from tests.pipeline.families.zimage.models import model

LAYERS = ("layers.0.attention.to_q", "layers.1.attention.to_out.0", "noise_refiner.0.feed_forward.w2",
          "context_refiner.0.feed_forward.w1")  # fmt: skip


def write(path: Path, layout: str) -> dict[str, torch.Tensor]:
    """A file of random factors; returns what each layer's weight gets."""
    generator, tensors, expected = torch.Generator().manual_seed(1), {}, {}
    for name in LAYERS:
        weight = model("tiny").denoiser.get_submodule(name).weight
        down = torch.randn(2, weight.shape[1], generator=generator)
        up = torch.randn(weight.shape[0], 2, generator=generator)
        prefix, ends, alpha = f"transformer.{name}", ("lora_A.weight", "lora_B.weight"), 2.0
        if layout == "comfy":
            prefix, alpha = f"diffusion_model.{name}", 1.0
        if layout == "kohya":
            prefix, ends, alpha = f"lora_unet_{name.replace('.', '_')}", ("lora_down.weight", "lora_up.weight"), 1.0
        if layout != "peft":
            tensors[f"{prefix}.alpha"] = torch.tensor(alpha)
        tensors |= {f"{prefix}.{ends[0]}": down, f"{prefix}.{ends[1]}": up}
        expected[name] = alpha / 2 * up @ down
    save_file(tensors, path)
    return expected


@pytest.mark.parametrize("layout", ["peft", "comfy", "kohya"])
def test_layers_get_what_the_file_says(tmp_path: Path, layout: str) -> None:
    path, one = tmp_path / "lora.safetensors", model("tiny")
    expected = write(path, layout)
    factors = lora_file.read("lora", path.read_bytes(), one.parts, one.family.adapters)
    assert {part for part, _ in factors} == {"transformer"} and {name for _, name in factors} == set(LAYERS)
    changed = copy.deepcopy(one.denoiser)
    lora_file.add_({"transformer": changed}, factors, 0.5)
    for name, product in expected.items():
        own, other = (module.get_submodule(name).weight for module in (one.denoiser, changed))
        torch.testing.assert_close(other - own, 0.5 * product, rtol=0, atol=1e-5)


def test_a_lora_of_another_family_is_refused(tmp_path: Path) -> None:
    path, one = tmp_path / "sdxl.safetensors", model("tiny")
    save_file({"unet.conv_in.lora_A.weight": torch.randn(2, 4)}, path)
    with pytest.raises(ModelError, match=r"lora sdxl: does not fit .*is for no part of a Z-Image"):
        lora_file.read("sdxl", path.read_bytes(), one.parts, one.family.adapters)
