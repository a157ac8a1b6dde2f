"""Attention with heads of 64 whose result is bf16 or already quantized for the next layer.

On Hopper the kernel of `attention_source.py` runs, elsewhere torch's followed by `quantize`.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.cuda import driver
from core.kernels.cuda.attention_source import AttentionVariant, source
from core.kernels.cuda.quantize import per_channel, quantize, quantize_reference, to_levels
from core.kernels.device import ATTENTION, TORCH, KernelChoice, say

_HEAD = 64
_OUTPUTS = {torch.bfloat16: "bf16", torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}


class AttentionArguments(ctypes.Structure):
    """The kernel's argument, field by field as in `attention_source.py`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "inverse")),
        *((name, ctypes.c_longlong) for name in ("out_image", "out_row", "out_head")),
        *((name, ctypes.c_int) for name in ("images", "heads", "queries", "keys")),
        ("scale", ctypes.c_float),
        ("inverse_step", ctypes.c_int),
    )


@functools.cache
def _kernel(variant: AttentionVariant, device: int) -> driver.Kernel:
    with torch.cuda.device(device):
        threads, shared = variant.threads, variant.shared_bytes
        return driver.Kernel(source(variant), variant.name, threads=threads, shared_bytes=shared)


def _map(x: Tensor, rows: int) -> driver.TensorMap:
    """x [B, S, H, 64] with any strides but of the head's dimension, in boxes of `rows` tokens of one head."""
    size = x.element_size()
    sizes = (_HEAD, x.shape[2], x.shape[1], x.shape[0])
    return driver.tensor_map(x, sizes, [x.stride(i) * size for i in (2, 1, 0)], (_HEAD, 1, rows, 1))


def variant_for(queries: int, keys: int, output: str) -> AttentionVariant:
    """Three consumers for long sequences, one block of 80 keys for a prompt of 77."""
    if keys <= 80:
        return AttentionVariant(3, 80, 2, output)
    return AttentionVariant(3, 128, 3, output)


def lacks(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the Hopper kernel does not support this attention, or None."""
    if (why := driver.lacks(q.device)) is not None:
        return why
    for x in (q, k, v):
        if x.dtype != torch.bfloat16 or x.shape[3] != _HEAD or x.stride(3) != 1:
            return "not bf16 heads of 64"
        if x.data_ptr() % 16 or any(x.stride(i) * 2 % 16 for i in range(3)):
            return "an address or a stride is not a multiple of 16 bytes"
    return None


def attention_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_inv_scale: Tensor | None,
    dtype: torch.dtype = torch.int8,
    *,
    variant: AttentionVariant | None = None,
) -> Tensor:
    """softmax(q · kᵀ / √d) · v as `dtype` [B, Sq, H·64]: int8 or E4M3 times `out_inv_scale`, or bf16 without it.

    q [B, Sq, H, 64], k and v [B, Sk, H, 64]: bf16, may be slices of one fused tensor. out_inv_scale: fp32, one number
    or [H·64]. No mask. Probabilities are rounded to bf16 before the product with the values; sums are fp32.
    """
    images, queries, heads, _ = q.shape
    channels = heads * q.shape[3]
    step = 0 if out_inv_scale is None else per_channel(out_inv_scale, channels)
    if (why := lacks(q, k, v)) is not None:
        say(KernelChoice(ATTENTION, TORCH, why))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        y = y.transpose(1, 2).reshape(images, queries, channels)
        if out_inv_scale is None:
            return y.to(dtype)
        return (quantize if y.is_cuda else quantize_reference)(y, out_inv_scale, dtype)
    out = torch.empty((images, queries, channels), dtype=dtype, device=q.device)
    variant = variant or variant_for(queries, k.shape[1], _OUTPUTS[dtype])
    problem = AttentionArguments(
        out=out.data_ptr(),
        inverse=None if out_inv_scale is None else out_inv_scale.data_ptr(),
        out_image=queries * channels,
        out_row=channels,
        out_head=_HEAD,
        images=images,
        heads=heads,
        queries=queries,
        keys=k.shape[1],
        scale=math.log2(math.e) / math.sqrt(_HEAD),
        inverse_step=step,
    )
    tiles = images * heads * math.ceil(queries / variant.rows)
    blocks = min(tiles, driver.multiprocessors(q.device.index))
    maps = (_map(q, variant.rows), _map(k, variant.keys), _map(v, variant.keys))
    _kernel(variant, q.device.index).launch(blocks, *maps, problem)
    return out


def attention_int8_reference(
    q: Tensor, k: Tensor, v: Tensor, out_inv_scale: Tensor | None, dtype: torch.dtype = torch.int8
) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / math.sqrt(_HEAD)
    y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float()).flatten(2)
    return y.to(dtype) if out_inv_scale is None else to_levels(y * out_inv_scale, dtype)
