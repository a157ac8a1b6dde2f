"""The GPU kernels against their plain PyTorch twins: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.kernels.cuda.device import CUDA, DEVICE, E4M3, EIGHT, INT8, draw, levels, normal, uniform

# isort: split
from core.kernels.cuda.attention import attention, attention_reference
from core.kernels.cuda.conv import (
    conv3x3_int8,
    conv3x3_int8_reference,
    upsample_conv3x3_int8,
    upsample_conv3x3_int8_reference,
)
from core.kernels.cuda.group_norm import group_norm_int8, group_norm_int8_reference
from core.kernels.cuda.layer_norm import layer_norm_int8, layer_norm_int8_reference
from core.kernels.cuda.linear import (
    Activation,
    linear_geglu_int8,
    linear_geglu_int8_reference,
    linear_int8,
    linear_int8_reference,
)
from core.kernels.cuda.quantize import (
    quantize,
    quantize_reference,
    quantize_rows,
    quantize_rows_reference,
)
from tests.core.quant.stage import Few, Seed, Several

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
To = Annotated[torch.dtype, st.sampled_from([*EIGHT, BF16])]


def eight_bits(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == INT8:
        return levels(generator, *shape)
    return normal(generator, *shape).to(dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, share: float = 0.0, slack: float = 0.0) -> None:
    """Equal up to one level, and that in no more than `share` of the places, where the last bit of fp32 decides.

    `slack`, of the largest value: Hopper's tensor cores keep some 14 bits of a sum of E4M3 products.
    """
    assert actual.dtype == expected.dtype == dtype and actual.shape == expected.shape
    if dtype == INT8:
        apart = (actual.int() - expected.int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() <= share, (apart.max(), (apart > 0).float().mean())
    else:
        a, e = actual.double(), expected.double()
        assert torch.isfinite(a).all()
        limit = {E4M3: 2.0**-3, BF16: 2.0**-7, FP16: 2.0**-9, FP32: 1e-5}[dtype]
        floor = e.abs().amax() * max(2.0**-9 if dtype != FP32 else 1e-6, slack)
        assert ((a - e).abs() <= limit * e.abs() + floor).all(), (a - e).abs().max()
        if CUDA and dtype != FP32:  # the interpreter truncates to bf16 instead of rounding
            assert (a != e).float().mean() <= max(share, 0.02)


def compare(
    kernel: Callable[..., Tensor], reference: Callable[..., Tensor], *arguments: Any, dtype: torch.dtype,
    share: float = 0.02, slack: float = 0.0, **options: Any,
) -> Tensor:  # fmt: skip
    """What the kernel makes, which is `close` to what its twin does."""
    expected = reference(*arguments, **options)  # first: the kernel may write over its arguments
    made = kernel(*arguments, **options)
    close(made, expected, dtype, share, slack)
    return made


@pytest.mark.parametrize("dtype", EIGHT)
@pytest.mark.parametrize("given", [BF16, FP16, FP32])
@pytest.mark.parametrize("per_channel", [False, True])
def test_quantize(dtype: torch.dtype, given: torch.dtype, per_channel: bool) -> None:
    g = draw(0)
    x = (normal(g, 3, 7, 40) * 4).to(given)
    inverse = uniform(g, 40 if per_channel else 1) * 40
    for some, by in ((x, inverse), (x[..., 8:32], inverse[: 24 if per_channel else 1])):
        assert torch.equal(quantize(some, by, dtype).float(), quantize_reference(some, by, dtype).float())


def test_halves_round_to_even_and_ends_saturate() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, 1e9, -1e9, -127.5, 0.0]], device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    assert quantize(x, one).tolist() == [[0, 2, 2, 0, -2, -2, 126, 127, 127, -127, -127, 0]]


@pytest.mark.parametrize("dtype", EIGHT)
@pytest.mark.parametrize("shape", [(5, 40), (3, 1280)])
def test_quantize_rows(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = normal(draw(1), *shape).to(BF16)
    x[1] = 0
    (q, scale), (q_expected, scale_expected) = quantize_rows(x, dtype), quantize_rows_reference(x, dtype)
    assert torch.allclose(scale, scale_expected, rtol=1e-6)  # on a GPU torch multiplies by 1/448 where it should divide
    close(q, q_expected, dtype, 0.01)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_scales_of_rows_that_are_not_finite_are_not_either() -> None:
    x = torch.ones(4, 40, device=DEVICE, dtype=BF16)
    x[0], x[1, 3], x[2, 39] = torch.nan, torch.nan, torch.inf
    assert quantize_rows(x)[1].isfinite().tolist() == [False, False, False, True]


@settings(max_examples=14)
@given(...)
def test_layer_norm(
    images: Few, each: Several, channels: Literal[40, 640, 1280], to: To, affine: bool, scaled: bool, seed: Seed
) -> None:
    """With and without parameters, times a scale of each image."""
    g = draw(seed)
    x = (normal(g, images * each, channels + 8) * 3 + 1).to(BF16)[:, :channels]
    weight, bias = (normal(g, channels).to(BF16) if affine else None for _ in range(2))
    row_scale = (1 + normal(g, images, channels)).to(BF16) if scaled else None
    given = (x, weight, bias, 1e-5, None if to == BF16 else uniform(g, channels) * 30 + 10, to)
    compare(layer_norm_int8, layer_norm_int8_reference, *given, row_scale=row_scale, dtype=to, share=0.03)


@pytest.mark.quick
@pytest.mark.parametrize("to", [*EIGHT, BF16])
@pytest.mark.parametrize(
    ("shape", "groups", "silu"),
    [((2, 5, 7, 40), 4, False), ((2, 5, 7, 40), 4, True), ((1, 16, 16, 96), 32, True), ((1, 8, 8, 960), 32, False)],
)
def test_group_norm(to: torch.dtype, shape: tuple[int, int, int, int], groups: int, silu: bool) -> None:
    g = draw(3)
    channels = shape[3]
    x = (normal(g, *shape[:3], channels + 16) * 2 + 1).to(BF16)[..., 8 : 8 + channels]
    weight, bias = normal(g, channels).to(BF16), normal(g, channels).to(BF16)
    inverse = uniform(g, channels) * 30 + 10
    given = (groups, weight, bias, 1e-5, None if to == BF16 else inverse, silu, to)
    compare(group_norm_int8, group_norm_int8_reference, x, *given, dtype=to)


@pytest.mark.quick
@pytest.mark.parametrize("kind", EIGHT)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("m", "n", "k"), [(70, 96, 80), (5, 40, 48), (300, 160, 144)])
def test_linear(kind: torch.dtype, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    g = draw(4)
    x, weight = eight_bits(g, kind, m, k), eight_bits(g, kind, n, k)
    scale = uniform(g, n) * 1e-3
    bias, row_scale = normal(g, n), uniform(g, m)
    wide = normal(g, m, n + 32).to(dtype)
    residual, loose = wide[:, 16 : 16 + n], {"share": 1.0, "slack": 1e-3} if kind == E4M3 else {}
    for arguments in ((None, None, None), (bias, None, residual), (bias, row_scale, None)):
        compare(linear_int8, linear_int8_reference, x, weight, scale, *arguments, dtype, dtype=dtype, **loose)
    expected = linear_int8_reference(x, weight, scale, bias, None, residual, dtype)
    same = linear_int8(x, weight, scale, bias, None, residual, dtype, out=residual)
    close(same, expected, dtype, **loose)
    assert same.data_ptr() == residual.data_ptr()


@pytest.mark.parametrize("kind", EIGHT)
@pytest.mark.parametrize("act", ["gelu", "silu"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(70, 96, 80), (5, 32, 48), *([(4096, 2560, 640), (300, 160, 144)] if CUDA else [])]
)
def test_gated_linear(kind: torch.dtype, act: Activation, m: int, n: int, k: int) -> None:
    g = draw(5)
    x, weight = eight_bits(g, kind, m, k), eight_bits(g, kind, 2 * n, k)
    scale = uniform(g, 2 * n) * (2.7e-3 if kind == INT8 else 1.8) / k**0.5
    bias, share = normal(g, 2 * n), 0.1 if kind == E4M3 else 0.03
    for inverse in (torch.full((1,), 20.0, device=DEVICE), uniform(g, n) * 30):
        given = (linear_geglu_int8, linear_geglu_int8_reference, x, weight, scale, bias, inverse)
        made = compare(*given, act=act, dtype=kind, share=share)
        added = normal(g, m, 2 * n).to(BF16)
        added[1::3] = 0  # rows that nothing is added to: as a request without a LoRA beside others
        found = compare(*given, act=act, added=added, dtype=kind, share=share)
        assert torch.equal(found[1::3].float(), made[1::3].float()), "zeros change no bit"
        assert not torch.equal(found[::3].float(), made[::3].float())


@pytest.mark.quick
@pytest.mark.parametrize("kind", EIGHT)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("shape", "n"), [((2, 6, 9, 32), 96), ((1, 17, 5, 48), 32)])
def test_conv(kind: torch.dtype, stride: int, shape: tuple[int, int, int, int], n: int) -> None:
    g = draw(6)
    x, weight = eight_bits(g, kind, *shape), eight_bits(g, kind, n, 3, 3, shape[3])
    scale, bias = uniform(g, n) * 1e-3, normal(g, n)
    tall, wide = (shape[1] + stride - 1) // stride, (shape[2] + stride - 1) // stride
    row_bias = normal(g, shape[0], n + 8)[:, :n]
    residual = normal(g, shape[0], tall, wide, n + 16).to(BF16)[..., 8 : 8 + n]
    given, loose = (conv3x3_int8, conv3x3_int8_reference, x, weight, scale), 1.0 if kind == E4M3 else 0.02
    compare(*given, None, None, None, stride, dtype=BF16, share=loose)
    compare(*given, bias, row_bias, residual, stride, dtype=BF16, share=loose)
    made = compare(*given, bias, row_bias, residual, stride, relu=True, dtype=BF16, share=loose)
    assert 0.2 < (made == 0).float().mean() < 0.8


@pytest.mark.parametrize("shape", [(3, 2, 1, 64), (2, 1, 1, 64), (1, 1, 1, 64), (2, 1, 4, 64)])
def test_the_stride_of_a_dimension_of_one_says_nothing(shape: tuple[int, int, int, int]) -> None:
    g = draw(16)
    wide = normal(g, *shape[:3], 2 * shape[3]).to(BF16)[..., : shape[3]]
    strides = [7 if size == 1 else stride for size, stride in zip(shape, wide.stride(), strict=True)]
    x = wide.as_strided(shape, strides)
    weight, inverse = normal(g, shape[3]).to(BF16), torch.full((1,), 20.0, device=DEVICE)
    given = (4, weight, weight, 1e-5, inverse, False, INT8)
    close(group_norm_int8(x, *given), group_norm_int8_reference(wide.contiguous(), *given), INT8, 0.02)
    x_q, weight_q = eight_bits(g, INT8, *shape), eight_bits(g, INT8, 64, 3, 3, shape[3])
    scale, bias = uniform(g, 64) * 1e-3, normal(g, 64)
    expected = conv3x3_int8_reference(x_q, weight_q, scale, bias, None, wide.contiguous())
    close(conv3x3_int8(x_q, weight_q, scale, bias, None, x), expected, BF16, 0.02)
    close(conv3x3_int8(x_q, weight_q, scale, bias, None, x, out=x), expected, BF16, 0.02)


@pytest.mark.parametrize("kind", EIGHT)
@pytest.mark.parametrize(("shape", "n"), [((2, 6, 9, 32), 96), ((1, 8, 5, 48), 32)])
def test_upsampling_conv(kind: torch.dtype, shape: tuple[int, int, int, int], n: int) -> None:
    g = draw(7)
    x, weight = eight_bits(g, kind, *shape), eight_bits(g, kind, 4, n, 2, 2, shape[3])
    scale, bias = uniform(g, 4, n) * 1e-3, normal(g, n)
    given, loose = (x, weight, scale, bias), 1.0 if kind == E4M3 else 0.02
    compare(upsample_conv3x3_int8, upsample_conv3x3_int8_reference, *given, dtype=BF16, share=loose)


@pytest.mark.parametrize("dtype", [BF16, *EIGHT])
@pytest.mark.parametrize(("queries", "keys"), [(70, 200), (300, 77), (128, 128), (193, 16)])
def test_attention(dtype: torch.dtype, queries: int, keys: int) -> None:
    g = draw(9)
    q, kv = normal(g, 2, queries, 3, 64).to(BF16), normal(g, 2, keys, 2, 3, 64).to(BF16)
    q *= 3
    k, v = kv[:, :, 0], kv[:, :, 1]
    for inverse in (torch.full((1,), 60.0, device=DEVICE), uniform(g, 192) * 60):
        given = None if dtype == BF16 else inverse
        expected, actual = attention_reference(q, k, v, given, dtype), attention(q, k, v, given, dtype)
        assert actual.dtype == dtype and actual.shape == (2, queries, 192)
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert error < (0.01 if dtype != E4M3 else 0.02), error
