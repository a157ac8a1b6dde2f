"""Recipes: every layer of a UNet and of a decoder is decided about; what they make is small and comes back equal."""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.quant.convert import QuantizationReport, RecipeError, largest_weights, quantize_
from core.quant.linear import Int8Conv2d, Int8Linear
from core.quant.store import Manifest, load_, round_, save
from pipeline.checkpoints import tiny
from tests.core.quant.stage import ROOT
from tests.unet_opt.shapes import UNETS, calibrated, inputs, on_kernels, ours, quantized, stock, unet, vae
from unet_opt import recipe


@pytest.mark.parametrize("name", UNETS)
def test_every_layer_of_a_unet_is_decided_about(name: str) -> None:
    one = unet(name)
    made = recipe.unet(one)
    targets = made.targets(one)
    layers = [n for n, m in one.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    left = {n: made.rule(n).reason for n in layers if n not in targets}
    assert all(left.values()) and len(left) + len(targets) == len(layers)
    assert {"conv_in", "conv_out", "time_embedding.linear_1", "add_embedding.linear_2"} <= left.keys()
    kinds = {re.sub(r"^.*\.\d+\.(?=[a-z])", "", n) for n in targets}
    assert kinds == {
        "conv1", "conv2", "conv", "proj_in", "proj_out", "attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0",
        "attn2.to_q", "attn2.to_out.0", "proj", "ff.net.2",
    }  # fmt: skip


def test_scales_are_shared_by_queries_keys_and_values_of_self_attention_alone() -> None:
    made = recipe.unet(unet("plain"))
    at = "mid_block.attentions.0.transformer_blocks.0."
    assert len({made.shares(f"{at}attn1.to_{one}") for one in "qkv"}) == 1
    assert made.shares(f"{at}attn2.to_q") == f"{at}attn2.to_q"
    assert made.shares(f"{at}attn1.to_q") != made.shares(at.replace("blocks.0", "blocks.1") + "attn1.to_q")


@pytest.mark.parametrize("name", UNETS)
def test_halves_begin_where_the_skip_does(name: str) -> None:
    """The widths of what is concatenated, seen while the UNet works."""
    one = unet(name)
    made, seen = recipe.unet(one), {}
    for i, block in enumerate(one.up_blocks):

        def hook(_: Any, arguments: Any, options: Any, i: int = i) -> None:
            hidden, skips = options["hidden_states"], options["res_hidden_states_tuple"]
            seen[f"up_blocks.{i}.resnets.0.conv1"] = (hidden.shape[1], hidden.shape[1] + skips[-1].shape[1])

        block.register_forward_pre_hook(hook, with_kwargs=True)
    stock(one, inputs(one, 1, 8, 8))
    for layer, (begins, width) in seen.items():
        assert made.halves(layer) == begins and one.get_submodule(layer).in_channels == width
    assert len(seen) == len(one.up_blocks) and made.halves("down_blocks.0.resnets.0.conv1") is None


def test_layers_are_smoothed_by_the_papers_formula_at_the_alpha_that_models_are_shipped_with() -> None:
    """What models/emoji-xl says it was made with, and what the scales of a UNet come to that is quantized here."""
    shipped = json.loads((ROOT / "models" / "emoji-xl" / "unet-int8" / "quantization.json").read_text())
    plain = unet("plain")
    assert shipped["recipe"] == recipe.unet(plain).name == "sdxl-unet-alpha0.65"
    assert recipe.unet(plain, alpha=None).name == "sdxl-unet-plain"
    unsmoothed = quantized(unet("plain"), alpha=None).mid_block.attentions[0].transformer_blocks[0].attn1.to_q
    assert len({*unsmoothed.inverse.tolist()}) == 1
    made, after = recipe.unet(plain), copy.deepcopy(plain)
    statistics = calibrated(plain, made, inputs(plain, 4, 8, 8))
    quantize_(after, made, statistics)
    at = "mid_block.attentions.0.transformer_blocks.0"
    for alpha, together in (
        (0.65, [f"{at}.attn1.to_q", f"{at}.attn1.to_k", f"{at}.attn1.to_v"]), (0.65, [f"{at}.attn2.to_q"]),
        (0.65, [f"{at}.attn1.to_out.0"]), (0.65, [f"{at}.ff.net.0.proj"]), (0.65, [f"{at}.ff.net.2"]),
        (0.65, ["mid_block.attentions.0.proj_in"]), (0.65, ["mid_block.attentions.0.proj_out"]),
        (0.5, ["mid_block.resnets.0.conv1"]), (0.5, ["mid_block.resnets.0.conv2"]),
        (0.5, ["down_blocks.0.downsamplers.0.conv"]),
    ):  # fmt: skip
        x = statistics.largest[together[0]][0].double()  # one batch of one step: what was seen is the range
        w = torch.stack([largest_weights(name, plain.get_submodule(name)).double() for name in together]).amax(0)
        s = x**alpha / w ** (1 - alpha)
        wanted = 127 / (x / s).max() / s
        for name in together:
            torch.testing.assert_close(after.get_submodule(name).inverse.double(), wanted, rtol=1e-4, atol=0)


def test_a_decoder_is_quantized_behind_its_first_block() -> None:
    one = vae("plain")
    made = recipe.decoder(one)
    targets = made.targets(one)
    assert targets and all(re.match(r"decoder\.up_blocks\.[123]\..*conv", name) for name in targets)
    assert not any("shortcut" in name for name in targets)
    with pytest.raises(RecipeError, match="sdxl-vae-decoder: no rule for layer"):
        made.targets(unet("plain"))


@functools.cache
def emoji() -> tuple[Any, Any, QuantizationReport]:
    """A random UNet of the shape of models/emoji-xl, and the same in INT8."""
    plain = tiny.make(tiny.SHAPES[tiny.EMOJI_XL]).unet.eval().requires_grad_(False)
    made = copy.deepcopy(plain)
    wanted = recipe.unet(made)
    return plain, made, quantize_(made, wanted, calibrated(made, wanted, inputs(made, 2, 16, 16, tokens=77)))


def manifest(made: Any, report: QuantizationReport) -> Manifest:
    layers = {name: type(made.get_submodule(name)).__name__ for name in report.changed}
    return Manifest("int8", "sdxl-unet", "digest", layers, report.skipped, {})


def test_what_is_stored_is_small_and_comes_back_equal(tmp_path: Path) -> None:
    """Less than 0.3 of fp32, or a hundredth with scales alone; and then programs draw bit for bit the same."""
    plain, made, report = emoji()
    assert len(report.changed) == 196
    assert sum(isinstance(made.get_submodule(name), Int8Conv2d) for name in report.changed) > 30
    assert sum(isinstance(made.get_submodule(name), Int8Linear) for name in report.changed) > 100
    whole = 4 * sum(parameter.numel() for parameter in plain.parameters())
    stored = save(made, tmp_path / "weights", manifest(made, report))
    scales = save(made, tmp_path / "scales", manifest(made, report), weights=False)
    assert stored <= 0.30 * whole and scales <= 0.004 * whole
    print(f"fp32 {whole / 1e6:.1f} MB, INT8 {stored / 1e6:.1f} MB, scales {scales / 1e3:.0f} kB")
    rounded = copy.deepcopy(made)
    round_(rounded)
    given = inputs(plain, 3, 16, 16, tokens=77, seed=5)
    wanted = ours(on_kernels(rounded, half=True), given)
    for folder in ("weights", "scales"):
        again = copy.deepcopy(plain)
        load_(again, tmp_path / folder, source="digest")
        assert torch.equal(ours(on_kernels(again, half=True), given), wanted)
    exact = stock(plain, given)
    assert (wanted - exact).norm() < 0.08 * exact.norm()
