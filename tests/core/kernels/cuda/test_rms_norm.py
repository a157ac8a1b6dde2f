"""The norms of transformers with adaLN against their plain twins and diffusers' block: on a GPU, else interpreted."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.kernels.cuda.device import DEVICE, DTYPE, E4M3, EIGHT, INT8, draw, normal

# isort: split
from core.kernels.cuda.layer_norm import layer_norm_int8
from core.kernels.cuda.rms_norm import residual_norm, residual_norm_reference, rms_norm, rms_norm_reference
from tests.core.quant.stage import Few, Seed, Several

KINDS = [*EIGHT, DTYPE]
Channels = Literal[40, 128, 640]
To = Annotated[torch.dtype, st.sampled_from(KINDS)]


def near(found: Tensor, wanted: Tensor) -> None:
    """Equal up to one level of 8 bits in a hundredth of the places, else to the type's last digits."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    a, b = found.float(), wanted.float()
    if found.dtype == INT8:
        assert (a - b).abs().max() <= 1 and (a != b).float().mean() <= 0.01
    else:
        slack = {E4M3: 0.13, torch.bfloat16: 2e-2, torch.float32: 2e-5}[found.dtype]
        torch.testing.assert_close(a, b, rtol=slack, atol=slack)


@settings(max_examples=12)
@given(...)
def test_rms_norm(
    images: Few, each: Several, channels: Channels, to: To, scaled: bool, added: bool, one: bool, seed: Seed
) -> None:
    g, rows = draw(seed), images * each
    x = (3 * normal(g, rows, channels + 16)).to(DTYPE)[:, 8:-8]
    weight = (1 + 0.2 * normal(g, channels)).to(DTYPE)
    row_scale = (1 + normal(g, images, 2 * channels))[:, channels:] if scaled else None
    residual = normal(g, rows, channels).to(DTYPE) if added else None
    inverse = 20 + 5 * normal(g, 1 if one else channels) if to in EIGHT else None
    wanted = rms_norm_reference(x, weight, 1e-5, inverse, to, row_scale=row_scale, residual=residual)
    near(rms_norm(x, weight, 1e-5, inverse, to, row_scale=row_scale, residual=residual), wanted)
    if residual is not None and to == DTYPE:
        assert rms_norm(x, weight, 1e-5, None, to, row_scale=row_scale, residual=residual, out=residual) is residual
        near(residual, wanted)


@settings(max_examples=12)
@given(...)
def test_residual_norm(
    images: Few, each: Several, channels: Channels, to: To, gated: bool, scaled: bool, seed: Seed
) -> None:
    g, rows = draw(seed), images * each
    x, y = (3 * normal(g, rows, channels)).to(DTYPE), normal(g, rows, channels).to(DTYPE)
    weight, next_weight = ((1 + 0.2 * normal(g, channels)).to(DTYPE) for _ in range(2))
    gate = normal(g, images, 4 * channels).tanh().to(DTYPE)[:, channels : 2 * channels] if gated else None
    scale = (1 + normal(g, images, channels)) if scaled else None
    inverse = 20 + 5 * normal(g, channels) if to in EIGHT else None
    options = {"gate": gate, "next_scale": scale}
    kept, wanted = residual_norm_reference(x, y, weight, next_weight, 1e-5, inverse, to, **options)
    found = residual_norm(x, y, weight, next_weight, 1e-5, inverse, to, **options, sum_out=x)
    assert found[0] is x
    near(found[0], kept)
    near(found[1], wanted)


@pytest.mark.parametrize("to", KINDS)
def test_an_images_rows_do_not_depend_on_the_others(to: torch.dtype) -> None:
    g, channels = draw(3), 640
    x, y = normal(g, 15, channels).to(DTYPE), normal(g, 15, channels).to(DTYPE)
    weight = normal(g, channels).to(DTYPE)
    gate, scale = normal(g, 3, channels), normal(g, 3, channels)
    inverse = 20 + normal(g, channels) if to in EIGHT else None
    whole = residual_norm(x, y, weight, weight, 1e-5, inverse, to, gate=gate, next_scale=scale)
    own, some = slice(5, 10), slice(1, 2)
    alone = residual_norm(x[own], y[own], weight, weight, 1e-5, inverse, to, gate=gate[some], next_scale=scale[some])
    assert all(torch.equal(a.float(), b.float()[own]) for a, b in zip(alone, whole, strict=True))


def test_shapes_that_disagree_are_refused() -> None:
    x, weight = torch.zeros(6, 32, device=DEVICE), torch.ones(32, device=DEVICE)
    for row_scale in (torch.ones(4, 32, device=DEVICE), torch.ones(3, 16, device=DEVICE)):
        with pytest.raises(ValueError, match="do not go with scales"):
            rms_norm(x, weight, 1e-5, None, x.dtype, row_scale=row_scale)
    with pytest.raises(ValueError, match="its residual or output"):
        rms_norm(x, weight, 1e-5, None, x.dtype, residual=x[:3])
    with pytest.raises(ValueError, match="go together"):
        layer_norm_int8(x, weight, None, 1e-5, None, x.dtype)


COMPILE = """
from core.kernels.cuda import layer_norm, rms_norm

strides = [name for name in rms_norm._rms_norm.arg_names if name.endswith("stride")]
types = {"y": "*bf16", "weight": "*bf16", "scale": "*fp32", "rows": "i32", "eps": "fp32"}
types |= dict.fromkeys(strides, "i32")
shape = dict(C=3840, STEP=1, INT8=True, ROWS=4, BLOCK=4096)
made(rms_norm._rms_norm, types | {"inverse": "*fp32", "out": "*i8"}, shape, num_warps=8)
made(rms_norm._rms_norm, types | {"residual": "*bf16", "out": "*bf16"}, shape, num_warps=8)
types |= {"residual": "*bf16", "sum_out": "*bf16", "next_weight": "*bf16", "next_scale": "*fp32", "inverse": "*fp32"}
for kind in ("i8", "fp8e4nv"):
    made(rms_norm._rms_norm, types | {"out": f"*{kind}"}, shape | {"INT8": kind == "i8"}, num_warps=8)
counts = dict.fromkeys(["rows", "stride", "per_image", "scale_stride"], "i32")
made(layer_norm._layer_norm, {"x": "*bf16", "row_scale": "*bf16", "out": "*bf16", "eps": "fp32"} | counts,
     dict(C=3840, STEP=0, IS_INT8=False, ROWS=1, BLOCK=4096), num_warps=4)
"""
