"""The UNet on the CPU kernels: equal to diffusers in floats, near it in INT8, a row's bits the same in any company."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from core.ops.reference import TorchLowering
from core.quant.convert import Recipe, Rule, quantize_
from core.quant.store import round_
from tests.core.quant.stage import check_close, threads
from tests.pipeline.worlds import model
from tests.unet_opt.shapes import UNETS, calibrated, in_8_bits, inputs, on_kernels, ours, row_errors, stock, unet
from unet_opt.deepcache import SplitUNet
from unet_opt.layout import _SUPPORTED, check_unet
from unet_opt.unet import cross_attentions


@pytest.mark.quick(*range(6), 7, 10)
@pytest.mark.parametrize(("name", "on"), [(name, on) for name in UNETS for on in ("kernels", "torch")])
def test_in_floats_it_equals_diffusers(name: str, on: str) -> None:
    """For several sizes, numbers of rows and lengths of prompts, one after another on the same programs.

    In 64 bits: in 32 its own error would count too, which is another one on each processor.
    """
    one = unet(name)
    exact = copy.deepcopy(one).double()
    split = on_kernels(one) if on == "kernels" else SplitUNet(TorchLowering(torch.float32), one)
    for rows, height, width, tokens in ((1, 4, 4, 7), (3, 8, 4, 77), (5, 4, 12, 1), (2, 7, 9, 40), (3, 5, 6, 5)):
        given = inputs(one, rows, height, width, tokens=tokens, seed=rows)
        wanted = stock(exact, given.double())
        assert wanted.std() > 0.05, "an output of nothing would prove nothing"
        assert (ours(split, given) - wanted).abs().max() <= 1e-5


MORE = [("three-levels", (8, 8), "int8"), ("plain", (5, 6), "int8"), ("conv1x1", (5, 6), "int8-dynamic")]


@pytest.mark.quick("two-resnets-(9, 7)-int8", "distilled-(9, 7)-int8", 7, 8, 9)
@pytest.mark.parametrize(("name", "sides", "scheme"), [*((name, (9, 7), "int8") for name in UNETS), *MORE], ids=str)
def test_in_8_bits_it_equals_the_quantized_modules_and_is_near_the_model(
    name: str, sides: tuple[int, int], scheme: str
) -> None:
    plain, one = unet(name), in_8_bits(name, scheme)
    programs = on_kernels(one)
    given = inputs(one, 8, *sides, tokens=77, seed=50)
    found, modules, wanted = ours(programs, given), stock(one, given), stock(plain, given)

    # Most rows are equal. In others some value lies between two levels and falls to either side.
    assert row_errors(found, modules).median() < 1e-5
    assert row_errors(found, modules).max() < 1.5 * row_errors(modules, wanted).max()
    assert row_errors(found, wanted).max() < 0.15


@pytest.mark.parametrize("name", UNETS)
def test_cross_attentions_are_in_the_order_of_diffusers(name: str) -> None:
    one = unet(name)
    layers = [one.get_submodule(path.removesuffix(".processor")) for path in one.attn_processors]
    assert cross_attentions(one) == tuple(layer for layer in layers if layer.is_cross_attention)


@pytest.mark.quick("int8", "int8-dynamic", "half")
@pytest.mark.parametrize("scheme", ["floats", "int8", "int8-dynamic", "half"])
def test_a_rows_bits_depend_on_nothing_but_the_row(scheme: str) -> None:
    """Not on how many ride along, on its place among them, on threads, or on what ran before."""
    one = unet("three-levels")
    programs = on_kernels(in_8_bits("three-levels", scheme) if "int8" in scheme else one, half=scheme == "half")
    given = inputs(one, 5, 8, 12, tokens=77)
    together = ours(programs, given)
    for which in ([0], [4], [2, 3], [4, 3, 2, 1, 0], [1, 1, 3]):
        assert torch.equal(ours(programs, given.rows(which)), together[which])
    with threads(2):
        assert torch.equal(ours(programs, given), together)
    assert torch.equal(ours(programs, given), together)


def test_half_is_exact_for_weights_that_bf16_holds() -> None:
    one = unet("plain")
    given = inputs(one, 2, 8, 8)
    apart = ours(on_kernels(one, half=True), given)
    round_(one)
    whole, half = on_kernels(one), on_kernels(one, half=True)
    assert torch.equal(ours(half, given), ours(whole, given))
    assert half.lowering.size_bytes[0] * 2 == whole.lowering.size_bytes[0]
    check_close(apart, ours(whole, given), relative=2e-2)  # vectors were never rounded, and keys were not here


def test_results_are_the_callers_own() -> None:
    """A later run does not write into an earlier result: with one channel, channels first and last are the same."""
    one = unet("plain")
    one = type(one).from_config({**one.config, "out_channels": 1}).requires_grad_(False)
    programs = on_kernels(one)
    for height, width in ((2, 2), (8, 4)):
        first = ours(programs, inputs(one, 1, height, width, seed=1))
        before = first.clone()
        second = ours(programs, inputs(one, 1, height, width, seed=9))
        assert torch.equal(first, before) and not torch.equal(first, second)
        assert second.is_contiguous()


def test_heads_that_are_no_multiple_of_16_are_refused_by_the_layers_name() -> None:
    said = r"unet down_blocks\.1\.attentions\.0\.transformer_blocks\.0\.attn1: heads of width 8 are no multiple of 16"
    with pytest.raises(ValueError, match=said):
        on_kernels(model("plain").denoiser)


class Other:
    """A UNet with another config, and maybe other modules."""

    def __init__(self, of: Any, **config: Any) -> None:
        self.config = SimpleNamespace(**{**of.config, **config})
        self.named_modules = of.named_modules
        self.down_blocks, self.up_blocks = of.down_blocks, of.up_blocks


@pytest.mark.parametrize("name", _SUPPORTED)
def test_what_the_programs_would_compute_otherwise_is_refused(name: str) -> None:
    one = unet("plain")
    check_unet(one)
    check_unet(Other(one))
    with pytest.raises(ValueError, match=f"unet: {name} is 'something else'; supported is "):
        check_unet(Other(one, **{name: "something else"}))


def test_blocks_that_are_unknown_are_refused() -> None:
    one = unet("plain")
    with pytest.raises(ValueError, match="unet: unsupported blocks: AttnDownBlock2D, SkipUpBlock2D"):
        check_unet(Other(one, down_block_types=["AttnDownBlock2D"], up_block_types=["SkipUpBlock2D"]))


@pytest.mark.parametrize(
    "what", ["group_norm", "spatial_norm", "norm_cross", "norm_q", "norm_k", "residual_connection"]
)
def test_attention_that_is_not_plain_is_refused(what: str) -> None:
    one = unet("plain")
    attention = one.mid_block.attentions[0].transformer_blocks[0].attn1
    setattr(attention, what, nn.Identity() if "norm" in what and what != "norm_cross" else True)
    with pytest.raises(ValueError, match=rf"mid_block\.attentions\.0\.transformer_blocks\.0\.attn1: {what} is set"):
        check_unet(one)
    setattr(attention, what, None)
    attention.rescale_output_factor = 2.0
    with pytest.raises(ValueError, match=r"rescale_output_factor is 2\.0, not 1"):
        check_unet(one)


def test_other_channels_are_refused() -> None:
    one = unet("three-levels")
    given = inputs(one, 1, 8, 8)._replace(sample=torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"sample \[1, 3, 8, 8\] does not fit: 4 channels are wanted"):
        ours(on_kernels(one), given)


def with_int8(layers: str) -> Any:
    """A UNet with these layers in INT8, which recipes leave in floats."""
    one, recipe = unet("plain"), Recipe("some", (Rule(layers, alpha=None), Rule(".*", reason="left")))
    assert quantize_(one, recipe, calibrated(one, recipe, inputs(one, 2, 8, 8))).changed
    return one


@pytest.mark.quick(0, 2, 5)
@pytest.mark.parametrize(
    "layers",
    [
        r"conv_in",
        r"conv_out",
        r"(time|add)_embedding\.linear_[12]",
        r".*\.time_emb_proj",
        r".*\.attn2\.to_[kv]",
        r"down_blocks\..*\.conv_shortcut",
    ],
)
def test_layers_in_int8_may_be_anywhere(layers: str) -> None:
    one = with_int8(layers)
    given = inputs(one, 3, 8, 8)
    found, wanted = ours(on_kernels(one), given), stock(one, given)
    error, rounding = (found - wanted).norm(), (stock(unet("plain"), given) - wanted).norm()
    assert rounding > 1e-4 * wanted.norm(), "it would prove nothing"
    assert error < 0.5 * rounding


def test_what_is_released_was_packed_and_programs_run_on() -> None:
    one = unet("three-levels")
    programs, given = on_kernels(one), inputs(one, 2, 8, 8)
    wider = inputs(one, 3, 4, 12)
    before, keys, wanted = ours(programs, given), programs.prepare_text(given.hidden), ours(on_kernels(one), wider)
    programs.lowering.layers.release()
    matrices = [name for name, weight in one.named_parameters() if weight.dim() > 1 and weight.numel()]
    assert not matrices, "what is still held was never packed"
    assert torch.equal(ours(programs, given), before)
    assert torch.equal(programs.prepare_text(given.hidden), keys)
    assert ours(programs, wider).equal(wanted), "a program that was not written before"
