"""LoRA files of Z-Image: what diffusers' loader reads of each layout is what the layers get."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import lora_file
from tests.pipeline.families.zimage.models import model

LAYERS = ("layers.0.attention.to_q", "layers.1.attention.to_out.0", "noise_refiner.0.feed_forward.w2",
          "context_refiner.0.feed_forward.w1")  # fmt: skip
ENDS = {
    "kohya": ("lora_down.weight", "lora_up.weight"), "peft": ("lora_A.weight", "lora_B.weight"),
    "adapter": ("lora_A.default.weight", "lora_B.default.weight"), "old": ("lora.down.weight", "lora.up.weight"),
}  # fmt: skip


def write(path: Path, layout: str) -> dict[str, torch.Tensor]:
    """A file of random factors; returns what each layer's weight gets."""
    generator, tensors, expected = torch.Generator().manual_seed(1), {}, {}
    for name in LAYERS:
        weight = model("tiny").denoiser.get_submodule(name).weight
        down = torch.randn(2, weight.shape[1], generator=generator)
        up = torch.randn(weight.shape[0], 2, generator=generator)
        tensors |= {f"transformer.{name}.{end}": tensor for end, tensor in zip(ENDS[layout], (down, up), strict=True)}
        expected[name] = up @ down
    save_file(tensors, path)
    return expected


def test_layers_get_what_the_file_says(tmp_path: Path) -> None:
    path, one = tmp_path / "lora.safetensors", model("tiny")
    expected = write(path, "peft")
    factors = lora_file.read("lora", path.read_bytes(), one.parts, one.family.adapters)
    assert {*factors} == {("transformer", name) for name in LAYERS}
    changed = copy.deepcopy(one.denoiser)
    lora_file.add_({"transformer": changed}, factors, 0.5)
    for name, product in expected.items():
        own, other = (module.get_submodule(name).weight for module in (one.denoiser, changed))
        torch.testing.assert_close(other - own, 0.5 * product, rtol=0, atol=1e-5)


PREFIXES = {
    "SimpleTuner's LyCORIS": ("lycoris_", "_"), "sd-scripts": ("lora_unet_", "_"), "ComfyUI": ("diffusion_model.", "."),
    "a checkpoint's": ("model.diffusion_model.", "."), "peft": ("base_model.model.", "."),
    "diffusers": ("transformer.", "."), "both": ("transformer.base_model.model.", "."), "bare": ("", "."),
}  # fmt: skip
OTHERS = {  # in the authors' own code
    "layers.0.attention.out": ("layers.0.attention.to_out.0",),
    "noise_refiner.0.attention.qkv": tuple(f"noise_refiner.0.attention.to_{name}" for name in "qkv"),
    "x_embedder": ("all_x_embedder.2-1",),
    "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
}
NAMED = {**{name: (name,) for name in LAYERS}, **OTHERS, "cap_embedder.1": ("cap_embedder.1",)}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_of_all_tools_are_read(prefix: str, ends: str) -> None:
    one, generator, tensors, expected = model("tiny"), torch.Generator().manual_seed(1), {}, {}
    start, dot = PREFIXES[prefix]
    for name, targets in NAMED.items():
        weights = [one.denoiser.get_submodule(target).weight for target in targets]
        down = torch.randn(2, weights[0].shape[1], generator=generator)
        up = torch.randn(sum(map(len, weights)), 2, generator=generator)
        key = start + name.replace(".", dot)
        tensors |= {f"{key}.{end}": tensor for end, tensor in zip(ENDS[ends], (down, up), strict=True)}
        tensors[f"{key}.alpha"] = torch.tensor(3.0)
        for target, share in zip(targets, up.split([len(weight) for weight in weights]), strict=True):
            expected[target] = 1.5 * share @ down
    factors = lora_file.read("x", save(tensors), one.parts, one.family.adapters)
    assert {name for _, name in factors} == expected.keys()
    for (_, name), factor in factors.items():
        torch.testing.assert_close(factor.scale * factor.up @ factor.down, expected[name])


def test_kronecker_products_and_whole_differences_of_fused_layers_are_divided() -> None:
    one, generator = model("tiny"), torch.Generator().manual_seed(1)
    width = one.denoiser.dim
    first, second = torch.randn(3, 1, generator=generator), torch.randn(width, width, generator=generator)
    for tensors, whole in (
        ({"lycoris_layers_0_attention_qkv.lokr_w1": first, "lycoris_layers_0_attention_qkv.lokr_w2": second},
         torch.kron(first, second)),
        ({"diffusion_model.layers.0.attention.qkv.diff": second.repeat(3, 1)}, second.repeat(3, 1)),
    ):  # fmt: skip
        factors = lora_file.read("x", save(tensors), one.parts, one.family.adapters)
        for name, expected in zip("qkv", whole.split(width), strict=True):
            factor = factors["transformer", f"layers.0.attention.to_{name}"]
            torch.testing.assert_close(factor.scale * factor.up @ factor.down, expected, rtol=1e-4, atol=1e-4)


def test_a_fused_layer_beside_its_own_three_is_read_once() -> None:
    """Some files hold both, and diffusers reads the three."""
    one = model("tiny")
    width = one.denoiser.dim
    names = {"qkv": 3 * width, "to_q": width, "to_k": width, "to_v": width}
    tensors = {}
    for name, out in names.items():
        scale = 9.0 if name == "qkv" else 1.0
        tensors[f"diffusion_model.layers.0.attention.{name}.lora_A.weight"] = scale * torch.ones(2, width)
        tensors[f"diffusion_model.layers.0.attention.{name}.lora_B.weight"] = scale * torch.ones(out, 2)
    factors = lora_file.read("x", save(tensors), one.parts, one.family.adapters)
    assert len(factors) == 3 and all(bool((factor.up == 1).all()) for factor in factors.values())


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("lycoris_layers_9_attention_qkv.lora_up.weight", (4, 2), "names no layer"),
        ("diffusion_model.layers.0.attention.qkv.lora_B.weight", (5, 2), "has 5 outputs, and its layers"),
        ("diffusion_model.layers.0.attention.qkv.w_norm", (5,), "cannot be divided among 3 layers"),
        ("diffusion_model.layers.0.attention.qkv", (2, 2), "attention.qkv' cannot be divided among 3 layers"),
        ("lora_unet_layers_0_attention_qkv", (2, 2), "attention_qkv' cannot be divided among 3 layers"),
        ("lycoris_layers_0_attention_qkv", (2,), "attention_qkv' cannot be divided among 3 layers"),
        ("diffusion_model.layers.0.attention_norm1.w_norm", (32,), "changes a norm or a bias"),
        ("unet.conv_in.lora_A.weight", (2, 4), "lora x: does not fit .*is for no part of a Z-Image"),
    ],
)
def test_what_does_not_fit_is_refused_by_key(name: str, shape: tuple[int, ...], told: str) -> None:
    one = model("tiny")
    shape = (one.denoiser.dim,) if shape == (32,) else shape
    with pytest.raises(ModelError, match=told):
        lora_file.read("x", save({name: torch.ones(shape)}), one.parts, one.family.adapters)
