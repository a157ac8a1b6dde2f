"""How wide forwards may be for the tiles that were measured."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch

from core.kernels.cuda import tiles
from core.ops import fused as layers
from core.ops.cuda import CudaLowering
from pipeline.checkpoints import tiny
from tests.unet_opt.shapes import deep, inputs, of_sdxl, quantized
from unet_opt.deepcache import SplitUNet
from unet_opt.widths import products, tuned_rows

SHAPE = tiny.SDXLShape(native=64, channels=(16, 32, 64), transformers=(1, 1, 2), heads=(1, 2, 4), resnets=2)


def test_sdxl_on_the_measured_device_ends_at_eight_pictures() -> None:
    """Two rows each; smaller pictures have room for more of them."""
    unet = of_sdxl()
    assert tuned_rows(unet, 128, 128, "NVIDIA H200", 132) == 16
    assert tuned_rows(unet, 64, 64, "NVIDIA H200", 132) == 64
    assert tuned_rows(unet, 128, 128, "Tesla T4", 40) is None


def test_every_measured_product_is_one_of_a_models() -> None:
    """So that none of the table's entries is left out of the bound, but for Z-Image's."""
    unet = of_sdxl()
    known = {(kernel, f"{columns},{depth}") for kernel, columns, depth, _ in products(unet, 128, 128)}
    known |= {("linear", "11520,3840"), ("linear", "3840,3840"), ("linear", "3840,10240"), ("geglu", "20480,3840")}
    assert {(kernel, key) for kernel, sizes in tiles.table("NVIDIA H200", 132).items() for key in sizes} <= known


def test_the_narrowest_measurement_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    unet = tiny.make(SHAPE).unet
    side = 8
    table: dict[str, dict[str, dict[str, list[int]]]] = defaultdict(dict)
    for kernel, columns, depth, positions in products(unet, side, side):
        table[kernel].setdefault(f"{columns},{depth}", {})[str(12 * positions)] = [1, 64, 1, 0]
    monkeypatch.setattr(tiles, "table", lambda device, _: table if device == "one" else {})
    assert tuned_rows(unet, side, side, "one", 1) == 12
    table["linear"]["32,128"] = {str(4 * 4 * 4): [1, 64, 1, 0], str(5 * 4 * 4): [1, 64, 1, 0]}
    assert tuned_rows(unet, side, side, "one", 1) == 5
    assert tuned_rows(unet, side, side, "another", 1) is None


def test_products_are_those_that_the_fused_layers_ask_tiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny.make(SHAPE).unet.requires_grad_(False)
    unet = quantized(copy.deepcopy(plain))
    asked: set[tuple[str, int, int, int]] = set()

    def watch(module: Any, name: str, kernel: str, rows: Any) -> None:
        own = getattr(module, name)

        def watched(x: Any, weight: Any, *rest: Any, **options: Any) -> Any:
            made = own(x, weight, *rest, **options)
            phases = 4 if kernel == "upsample" else 1
            columns = weight.shape[0] if phases == 1 else weight.shape[1]
            depth = weight.numel() // (columns * phases)
            asked.add((kernel, columns, depth, rows(made) // 2))
            return made

        monkeypatch.setattr(module, name, watched)

    watch(layers.linears, "linear_int8_reference", "linear", lambda made: made.shape[0])
    watch(layers.linears, "linear_geglu_int8_reference", "geglu", lambda made: made.shape[0])
    watch(layers.convs, "conv3x3_int8_reference", "conv", lambda made: made.shape[:3].numel())
    watch(layers.convs, "upsample_conv3x3_int8_reference", "upsample", lambda made: made.shape[:3].numel())
    deep(SplitUNet(CudaLowering(torch.float32, 2), unet), inputs(unet, 2, 8, 8))
    told = set(products(unet, 8, 8))
    assert told == set(products(plain, 8, 8)), "whether it is quantized or not"
    assert {kernel for kernel, *_ in asked} == {"linear", "geglu", "conv", "upsample"}
    assert told <= asked
