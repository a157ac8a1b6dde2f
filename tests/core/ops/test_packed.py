"""Layers: packed once, side by side where they read one input, refused by name where the kernels cannot read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from core.kernels.cpu.program import BF16, FP32, INT8
from core.ops.packed import PackedLayers
from core.quant.dynamic import Int8DynamicLinear
from core.quant.fp8 import Fp8Linear
from core.quant.linear import Int8Conv2d, Int8Linear
from core.quant.sparse import SparseInt8Linear
from tests.core.quant.stage import kernels


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 20), nn.Linear(8, 12, bias=False)
        self.conv, self.point = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(8, 6, 1)
        self.wide, self.dilated = nn.Conv2d(8, 6, 5), nn.Conv2d(8, 6, 3, dilation=2)
        self.odd, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.requires_grad_(False)


def layers(model: nn.Module, **options: Any) -> PackedLayers:
    return PackedLayers(kernels(), model, **options)


def test_a_sparse_layer_is_packed_as_the_dense_one_of_its_levels() -> None:
    sparse = SparseInt8Linear.of(Model().a, torch.ones(8))
    dense = Int8Linear(sparse.levels, sparse.scale, sparse.inverse, sparse.bias)
    packed = [layers(nn.ModuleList([layer]))(layer).weights.packed for layer in (sparse, dense)]
    assert torch.equal(*packed) and bool((sparse.levels == 0).sum() >= sparse.levels.numel() // 2)
    stacks = [layers(nn.ModuleList([layer])).stack(layer, 5) for layer in (sparse, dense)]
    assert all(torch.equal(a.weights.packed, b.weights.packed) for a, b in zip(*stacks, strict=True))


def test_kinds_and_sizes() -> None:
    model = Model()
    whole, half = layers(model), layers(model, half=True)
    model_int8 = Int8Linear.of(model.a, torch.ones(8))
    assert whole(model.a).weights.kind == FP32 and half(model.a).weights.kind == BF16
    assert half(model_int8).weights.kind == INT8 and torch.equal(half(model_int8).inverse, torch.ones(8))  # type: ignore[arg-type]
    assert whole.size_bytes == 4 * 32 * 8 and half.size_bytes == (2 + 1) * 32 * 8


def test_a_layer_is_packed_once_and_no_other_is_mistaken_for_it() -> None:
    model = Model()
    made = layers(model)
    assert made(model.a) is made(model.a) and made(model.a) is not made(model.a, model.b)
    assert made.columns(model.point, 5, 3, bias=True) is not made.columns(model.point, 5, 3, bias=False)
    for value in range(20):  # memory of what is gone is taken by what comes
        layer = nn.Linear(8, 16).requires_grad_(False)
        layer.weight.fill_(float(value))
        assert made(layer).weights.packed.unique().tolist() == [float(value)]
        del layer


def test_layers_that_the_kernels_cannot_read_are_refused_by_name() -> None:
    plain, model = Model(), Model()
    model.a = Fp8Linear.of(model.a, torch.ones(8))
    model.odd = Int8Linear.of(model.odd, torch.ones(6))
    model.wide = Int8Conv2d.of(model.wide, torch.ones(8))
    model.point = Int8Conv2d.of(model.point, torch.ones(8))
    for owner, module, message in (
        (plain, plain.wide, "^layer wide: convolutions of 5×5 are unknown to the kernels"),
        (plain, plain.dilated, "^layer dilated: only plain convolutions"),
        (plain, plain.norm, "^layer norm: the kernels do not support LayerNorm here"),
        (model, model.a, r"^layer a: the kernels do not support Fp8Linear here"),
        (model, model.odd, r"^layer odd: INT8 weights of 6 input channels do not fit the kernels: no multiple of 4"),
        (model, model.wide, "^layer wide: convolutions of 5×5 are unknown to the kernels"),
    ):
        with pytest.raises(ValueError, match=message):
            layers(owner)(module)
    with pytest.raises(ValueError, match=r"^layer point: the kernels do not support Int8Conv2d here"):
        layers(model).columns(model.point, 0, 4, bias=True)


def test_what_reads_one_input_is_quantized_alike_or_not_at_all() -> None:
    model = Model()
    quantized = Int8Linear.of(model.a, torch.ones(8))
    dynamic = Int8DynamicLinear.of(model.b, None)
    for other in (model.b, Int8Linear.of(model.b, torch.full((8,), 2.0)), dynamic):
        for call, pair in ((PackedLayers.__call__, (quantized, other)), (PackedLayers.inverse, (quantized, other)),
                           (PackedLayers.inverse, (other, quantized))):  # fmt: skip
            with pytest.raises(ValueError, match="must all be quantized, and by the same scales, or none"):
                call(layers(model), *pair)
    same = Int8Linear.of(model.b, torch.ones(8))
    assert layers(model)(quantized, same).weights.n == 32
    assert torch.equal(layers(model).inverse(quantized, same), torch.ones(8))  # type: ignore[arg-type]
    assert layers(model).inverse(model.a, model.b) is None and layers(model).inverse() is None
