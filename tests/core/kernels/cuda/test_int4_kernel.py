"""Products with weights of 4 bits against the same weights as plain numbers: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.core.kernels.cuda.device import CUDA, DEVICE, DTYPE, draw, normal

# isort: split
from core.kernels.cuda import int4_kernel
from core.kernels.cuda.int4_kernel import (
    QUARTER,
    Int4Tile,
    Int4Weight,
    choose,
    gated,
    packed,
    packed_fp4,
    packed_w4a8,
    product,
    stream,
)
from core.quant.fp4 import Fp4Linear
from core.quant.int4 import BLOCK, Int4Linear
from core.quant.w4a8 import W4A8Linear

SLACK = 2e-2 if CUDA else 1e-5

COMPILE = """
from core.kernels.cuda.int4_kernel import _product
shape = {"N": 4096, "K": 4096, "BLOCKS": 16, "HALF": True, "PACKED": True, "WHOLE": True}
few = {**shape, "STEPS": 2, "GATED": False, "GELU": False, "BM": 8, "BN": 64, "EARLY": 1}
gate = {**shape, "N": 14336, "STEPS": 16, "GATED": True, "GELU": True, "BM": 64, "BN": 64, "EARLY": 0}
many = {**shape, "STEPS": 16, "GATED": False, "GELU": False, "BM": 128, "BN": 128, "EARLY": 0}
for kind, x, words, groups, sums, mma in (
    ("int4", "*bf16", "*i16", "*i32", "*fp32", "m16n8k16.row.col.f32.bf16.bf16"),
    ("w4a8", "*i8", "*i8", "*i16", "*i32", "m16n8k32.row.col.satfinite.s32.s8.s8"),
    ("fp4", "*bf16", "*i16", "*u8", "*fp32", "m16n8k16.row.col.f32.bf16.bf16"),
):
    types = {"x": x, "words": words, "groups": groups, "rows": "i32"}
    scale = {} if kind == "int4" else {"scale": "*fp32"}
    made(_product, {**types, "out": sums}, {**few, "KIND": kind}, mma, num_warps=4, num_stages=3, launch_pdl=True)
    made(_product, {**types, **scale, "zero" if kind == "int4" else "bias": "*i32" if kind == "int4" else "*fp32",
         "inverse": "*fp32", "out": "*bf16"}, {**gate, "KIND": kind}, "ldmatrix", num_warps=4, num_stages=3)
    # Unpacked operands go to the tensor cores from registers.
    made(_product, {**types, **scale, "residual": "*bf16", "out": "*bf16"}, {**many, "KIND": kind},
         "wgmma.mma_async.sync.aligned.m64n128", stack=8, num_warps=8, num_stages=3)
"""


KINDS = ("int4", "int4 with zeros", "w4a8", "fp4")


def weight(kind: str, seed: int, columns: int, depth: int) -> tuple[Int4Weight, Tensor, Tensor]:
    """A weight as the kernels read it, as plain numbers, and what a product's sums are multiplied by."""
    generator = draw(seed)
    if kind.startswith("int4"):
        layer, scale = Int4Linear.of_taps(normal(generator, columns, 1, depth), None), torch.ones(1, device=DEVICE)
        if kind == "int4":
            layer.scale = layer.scale.bfloat16()
        else:
            layer.zero = torch.randint(-8, 9, layer.scale.shape, generator=generator, device=DEVICE).to(torch.int8)
        return packed(layer.weight, layer.scale, layer.zero), layer.dense(), scale
    plain = normal(generator, columns, depth) * torch.logspace(-2, 2, columns, device=DEVICE)[:, None]
    if kind == "fp4":
        fp4 = Fp4Linear.of_taps(plain[:, None], None)
        made = packed_fp4(fp4.weight, fp4.scale, fp4.total)
        assert made.scale is not None
        return made, fp4.dense(), made.scale
    w4a8 = W4A8Linear.of_taps(plain[:, None], None)
    return packed_w4a8(w4a8.weight, w4a8.group, w4a8.scale), w4a8.dense(), w4a8.scale


def close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape and result.dtype == expected.dtype
    slack = SLACK * float(expected.abs().max())
    torch.testing.assert_close(result.float(), expected.float(), rtol=SLACK, atol=slack)


# Columns and depth that are no whole tiles among them; a depth of 2048 has several splits.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 64, 256), (20, 72, 320), (70, 130, 512), (3, 128, 2048)])
def test_it_is_the_product_with_plain_numbers(kind: str, rows: int, columns: int, depth: int) -> None:
    generator = draw(4)
    made, plain, scale = weight(kind, 5, columns, depth)
    x = normal(generator, rows, depth)
    x = (30 * x).round().clamp(-127, 127).to(torch.int8) if kind == "w4a8" else x.to(DTYPE)
    bias, residual = normal(generator, columns), normal(generator, rows, columns).to(DTYPE)
    sums = stream(x, made)
    assert len(sums) == choose(rows, columns, made.blocks).splits
    if kind == "w4a8":  # exact: INT8 weights times INT8 inputs
        levels = (plain / scale[:, None]).round()
        assert torch.equal(sums.sum(0).double(), x.double() @ levels.double().t())
    close(sums.sum(0) * scale, int4_kernel.product_reference(x, plain, torch.float32))
    if rows > 3:
        close(product(x, made, DTYPE, bias), int4_kernel.product_reference(x, plain, DTYPE, bias))
        expected = int4_kernel.product_reference(x, plain, DTYPE, bias, residual)
        assert product(x, made, DTYPE, bias, residual, out=residual) is residual
        close(residual, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 128, 256), (20, 72, 320)])
def test_gate_and_up_become_one(kind: str, rows: int, columns: int, depth: int) -> None:
    generator = draw(2)
    made, plain, scale = weight(kind, 3, columns, depth)
    x = normal(generator, rows, depth)
    if kind.startswith("int4"):
        x = (x / depth**0.5).to(DTYPE)
    else:
        x = (30 * x).round().clamp(-127, 127).to(torch.int8) if kind == "w4a8" else x.to(DTYPE)
        made, plain = made._replace(scale=scale * 1e-3), plain * 1e-3
    bias, inverse = normal(generator, columns), 1 + normal(generator, columns // 2).abs()
    for out in (DTYPE, torch.int8):
        expected = int4_kernel.gated_reference(x, plain, bias, inverse, out)
        close(gated(x, made, bias, inverse, out).float(), expected.float())
    expected = int4_kernel.gated_reference(x, plain, None, None, DTYPE, gelu=True)
    close(gated(x, made, None, None, DTYPE, gelu=True), expected)


def test_a_row_does_not_depend_on_its_companions() -> None:
    side = 4096 if CUDA else 512
    int4 = weight("int4 with zeros", 0, side, side)[0]
    x = normal(draw(1), 64, side).to(DTYPE)
    whole = stream(x, int4).sum(0)
    for first, count in ((0, 1), (5, 2), (20, 20)):
        assert torch.equal(stream(x[first : first + count].contiguous(), int4).sum(0), whole[first : first + count])


def test_splits_fit_the_shapes_of_8b() -> None:
    """Enough programs for every multiprocessor, equal splits for few rows, and no part without work."""
    assert 4 * QUARTER == BLOCK
    for columns, depth, is_gated in (
        (6144, 4096, False),
        (4096, 4096, False),
        (28672, 4096, True),
        (4096, 14336, False),
    ):
        tiles = [choose(rows, columns, depth // BLOCK, gated=is_gated) for rows in (1, 17, 33, 64, 65)]
        assert len({tile.splits for tile in tiles[:-1]}) == 1 and tiles[-1].splits == 1
        for tile in tiles[:-1]:
            assert depth // BLOCK % tile.splits == 0 and columns // tile.columns * tile.splits >= 132
    assert tiles[-1] == Int4Tile(128, 128, 1, 8, 3)
    for rows in (1, 32, 64, 65):  # an A100 and an Ada have less shared memory
        few, less = (choose(rows, 4096, 16, shared_bytes=size) for size in (163 << 10, 99 << 10))
        assert less.stages <= few.stages
        assert (less.stages - 1) * less.columns * 128 + less.stages * less.rows * 512 <= 99 << 10
