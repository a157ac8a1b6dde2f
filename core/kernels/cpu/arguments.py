"""Checks the tensors of a kernel call and turns them into the fields of its argument structure."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Activation = Literal["silu", "gelu", "quick_gelu", "gelu_tanh", "tanh", "relu"]
ACTIVATIONS: dict[Activation | None, int] = {
    None: 0, "silu": 1, "gelu": 2, "quick_gelu": 3, "gelu_tanh": 4, "tanh": 5, "relu": 6
}  # fmt: skip


def dtype_for(as_bytes: bool) -> torch.dtype:
    return torch.uint8 if as_bytes else torch.float32


def ends(out: Tensor, inverse: Tensor | None) -> dict[str, int | None]:
    """A call's output: bytes with `inverse`, else floats."""
    as_bytes = inverse is not None
    return {
        "inverse": pointer(inverse),
        "bytes": out.data_ptr() if as_bytes else None,
        "floats": None if as_bytes else out.data_ptr(),
    }


def check(
    name: str, tensor: Tensor | None, *shape: int, dtype: torch.dtype = torch.float32, rows_apart: bool = False
) -> None:
    """Reject a tensor of another shape, type or layout than the kernels read. `rows_apart` allows slices."""
    if tensor is None:
        return
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
        actual = f"{tensor.dtype} {[*tensor.shape]} on {tensor.device}"
        raise ValueError(f"{name}: must be {dtype} {[*shape]} on the CPU, not {actual}")
    if not (tensor.stride(-1) == 1 or tensor.shape[-1] == 1 if rows_apart else tensor.is_contiguous()):
        raise ValueError(f"{name}: its memory layout is not the kernels' (strides {[*tensor.stride()]})")


def modulation(name: str, x: Tensor, row_scale: Tensor | None, residual: Tensor | None) -> dict[str, int | None]:
    """The steps after a normalization of x [rows, channels]: `row_scale` [images, channels], `residual` [rows,
    channels].

    Raises ValueError for shapes that the kernels do not support.
    """
    rows, channels = x.shape
    images = 1 if row_scale is None else row_scale.shape[0]
    check("row_scale", row_scale, images, channels, rows_apart=True)
    check("residual", residual, rows, channels)
    if not images or rows % images:
        raise ValueError(f"{name}: {rows} rows are not those of {images} images")
    return {
        "row_scale": pointer(row_scale),
        "residual": pointer(residual),
        "tokens": rows // images,
        "scale_stride": 0 if row_scale is None else row_scale.stride(0),
    }


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def as_floats(name: str, tensor: Tensor | None) -> Tensor:
    """A parameter in contiguous fp32. Raises ValueError, naming `name`, if there is none."""
    if tensor is None:
        raise ValueError(f"the kernels do not support {name}")
    return tensor.detach().float().contiguous()


def output_size(
    height: int, width: int, taps: int, stride: int, before: int, upsample: bool, cut: tuple[int, int] = (0, 0)
) -> tuple[int, int]:
    """Height and width that a product gives; `before` is its padding above and to the left.

    `cut` rows and columns, 0 or 1 each, are missing from the end of the upsampled map.
    """
    if taps == 1:
        if stride != 1 or upsample:
            raise ValueError("product: a linear layer has no stride and doubles nothing")
        return height, width
    if stride not in (1, 2) or before not in (0, 1):
        raise ValueError(f"product: stride {stride} and padding {before} are unknown to the kernels")
    if not {*cut} <= {0, int(upsample)}:
        raise ValueError(f"product: {cut[0]} rows and {cut[1]} columns cannot be cut from a map")
    sides = (side * (2 if upsample else 1) - less for side, less in zip((height, width), cut, strict=True))
    h, w = ((side + before - 2) // stride + 1 for side in sides)
    return h, w
