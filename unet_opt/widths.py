"""Finds how many rows of a UNet's forward a device's measured tiles were tuned for (`core/kernels/cuda/tiles.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.kernels.cuda import tiles
from core.ops.ops import bind
from core.ops.trace import trace
from unet_opt import recipe
from unet_opt import unet as network
from unet_opt.deepcache import input_shapes

_PRODUCTS = ("conv", "upsample", "gated", "linear")


def tuned_rows(unet: Any, height: int, width: int, device: str, multiprocessors: int) -> int | None:
    """Return the most rows of latents of this size for which all of the UNet's products have a measured tile.

    `device` is its name as CUDA gives it; a table may be a sibling's (`tiles.table`). Products that were measured
    at no width are left out; None where there is no other, as on a device without a table.
    """
    measured = tiles.table(device, multiprocessors)
    row_counts = []
    for kernel, columns, depth, positions in products(unet, height, width):
        rows = measured.get(kernel, {}).get(f"{columns},{depth}", {})
        if rows:
            row_counts.append(max(map(int, rows)) // positions)
    return min(row_counts, default=None)


def products(unet: Any, height: int, width: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield each product in 8 bits as tiles are looked up for it, with what one row of latents brings into it.

    Yields (kernel, columns N, depth K, positions of one row): tokens of linear layers, pixels of convolutions' output.
    """
    rules, names = recipe.unet(unet), {id(module): name for name, module in unet.named_modules()}
    for call in trace(bind(network.deep, unet), *input_shapes(unet, height, width)).calls:
        if call.operation not in _PRODUCTS or any(rules.rule(names[id(layer)]).reason for layer in call.layers):
            continue  # computes no product, or one in floats
        (*_, depth), (_, map_height, map_width, columns) = call.inputs, call.output
        positions = map_height * map_width
        match call.operation:
            case "conv":
                yield "conv", columns, 9 * depth, positions
            case "upsample":
                yield "upsample", columns, 4 * depth, positions
            case "gated":
                yield "geglu", 2 * columns, depth, positions
            case "linear":
                yield "linear", columns, depth, positions
