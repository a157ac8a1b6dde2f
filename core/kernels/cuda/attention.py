"""Attention whose result is bf16 or already quantized for the next layer.

On Hopper the kernel of `attention_source.py` runs, for heads of 64 and 128, with a length for each image or without;
elsewhere Triton's where there are lengths, and torch's followed by `quantize` where there are none.
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
from core.kernels.cuda.flash_attention import flash
from core.kernels.cuda.quantize import per_channel, quantize, quantize_reference, to_levels
from core.kernels.device import ATTENTION, TORCH, TRITON, KernelChoice, say

_SLICE = 64  # dimensions that lie side by side in shared memory
_OUTPUTS = {torch.bfloat16: "bf16", torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}


class AttentionArguments(ctypes.Structure):
    """The kernel's argument, field by field as in `attention_source.py`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "inverse")),
        *((name, ctypes.c_longlong) for name in ("out_image", "out_row", "out_head")),
        *((name, ctypes.c_int) for name in ("images", "heads", "queries", "keys")),
        ("scale", ctypes.c_float),
        ("inverse_step", ctypes.c_int),
        ("lengths", ctypes.c_void_p),  # read by kernels with lengths alone
    )


@functools.cache
def _kernel(variant: AttentionVariant, device: int) -> driver.Kernel:
    with torch.cuda.device(device):
        threads, shared = variant.threads, variant.shared_bytes
        return driver.Kernel(source(variant), variant.name, threads=threads, shared_bytes=shared)


def _map(x: Tensor, rows: int) -> driver.TensorMap:
    """x [B, S, H, d] with any strides but of the head's dimension, in boxes of `rows` tokens of one head's slice."""
    size = x.element_size()
    sizes = (x.shape[3], x.shape[2], x.shape[1], x.shape[0])
    return driver.tensor_map(x, sizes, [x.stride(i) * size for i in (2, 1, 0)], (_SLICE, 1, rows, 1))


def variant_for(queries: int, keys: int, output: str, head: int = 64, *, lengths: bool = False) -> AttentionVariant:
    """Three consumers for long sequences, one block of 80 keys for a prompt of 77; two for heads of 128.

    With lengths the same for all numbers of tokens, since an image's bits depend on the size of the blocks.
    """
    if head == 128:
        return AttentionVariant(2, 128, 2, output, head=128, lengths=lengths)
    if lengths:
        return AttentionVariant(3, 128, 3, output, lengths=True)
    if keys <= 80:
        return AttentionVariant(3, 80, 2, output)
    return AttentionVariant(3, 128, 3, output)


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the Hopper kernel does not support this attention, or None."""
    if (reason := driver.unsupported_reason(q.device)) is not None:
        return reason
    for x in (q, k, v):
        if x.dtype != torch.bfloat16 or x.shape[3] not in (64, 128) or x.stride(3) != 1:
            return "not bf16 heads of 64 or 128"
        if x.shape[2] != q.shape[2]:
            return "fewer heads of keys than of queries"
        if x.data_ptr() % 16 or any(x.stride(i) * 2 % 16 for i in range(3)):
            return "an address or a stride is not a multiple of 16 bytes"
    return None


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse: Tensor | None,
    dtype: torch.dtype,
    lengths: Tensor | None,
    variant: AttentionVariant | None,
) -> Tensor:
    images, queries, heads, d = q.shape
    out = torch.empty((images, queries, heads * d), dtype=dtype, device=q.device)
    variant = variant or variant_for(queries, k.shape[1], _OUTPUTS[dtype], d, lengths=lengths is not None)
    problem = AttentionArguments(
        out=out.data_ptr(),
        inverse=None if inverse is None else inverse.data_ptr(),
        out_image=queries * heads * d,
        out_row=heads * d,
        out_head=d,
        images=images,
        heads=heads,
        queries=queries,
        keys=k.shape[1],
        scale=math.log2(math.e) / math.sqrt(d),
        inverse_step=0 if inverse is None else per_channel(inverse, heads * d),
        lengths=None if lengths is None else lengths.data_ptr(),
    )
    tiles = images * heads * math.ceil(queries / variant.rows)
    blocks = min(tiles, driver.multiprocessors(q.device.index))
    maps = (_map(q, variant.rows), _map(k, variant.keys), _map(v, variant.keys))
    _kernel(variant, q.device.index).launch(blocks, *maps, problem)
    return out


def _torch(q: Tensor, k: Tensor, v: Tensor, inverse: Tensor | None, dtype: torch.dtype, *, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    y = y.transpose(1, 2).flatten(2)
    if inverse is None:
        return y.to(dtype)
    return (quantize if y.is_cuda else quantize_reference)(y, inverse, dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse: Tensor | None,
    dtype: torch.dtype,
    *,
    lengths: Tensor | None = None,
    causal: bool = False,
    variant: AttentionVariant | None = None,
) -> Tensor:
    """softmax(q · kᵀ / √d) · v as `dtype` [B, Sq, H · d], or times `inverse` in its levels.

    q [B, Sq, H, d], k and v [B, Sk, KV, d]: bf16, may be slices of one fused tensor; KV divides H. `inverse`: fp32, one
    number or [H · d], with int8 or E4M3. `lengths` [B] int32, for self-attention: the tokens of each image; those
    beyond are no keys, and their rows get zeros; they must be finite. An image's bits depend neither on Sq nor on the
    other images. With lengths they may differ from those without: images that may be batched with shorter ones always
    get them. `causal`: no key after the query. `variant` overrides the default on Hopper. Raises `ValueError` for
    shapes that disagree.
    """
    if q.shape[2] % k.shape[2] or k.shape != v.shape or q.shape[3] != k.shape[3]:
        raise ValueError(f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}")
    if (lengths is not None or causal) and q.shape[1] != k.shape[1]:
        raise ValueError(f"{q.shape[1]} queries, {k.shape[1]} keys: lengths and causality are for self-attention")
    if lengths is not None and (lengths.shape != q.shape[:1] or lengths.dtype != torch.int32):
        raise ValueError(f"{lengths.dtype} lengths {tuple(lengths.shape)} for {len(q)} images")
    reason = "causal" if causal else unsupported_reason(q, k, v)
    if reason is None:
        return _launch(q, k, v, inverse, dtype, lengths, variant)
    if lengths is None:
        say(KernelChoice(ATTENTION, TORCH, reason))
        return _torch(q, k, v, inverse, dtype, causal=causal)
    say(KernelChoice(ATTENTION, TRITON, reason))
    out = torch.empty((*q.shape[:2], q.shape[2] * q.shape[3]), dtype=dtype, device=q.device)
    flash(q, k, v, lengths, inverse, out, causal=causal)
    return out


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse: Tensor | None,
    dtype: torch.dtype,
    *,
    lengths: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    tokens = torch.arange(k.shape[1], device=q.device)
    k, v = (x.float().repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) / math.sqrt(q.shape[3])
    if causal:
        scores = scores.masked_fill(tokens > tokens[:, None], -math.inf)
    if lengths is not None:
        beyond = tokens >= lengths[:, None]
        scores = scores.masked_fill(beyond[:, None, None], torch.finfo(torch.float32).min)
        v = v.masked_fill(beyond[:, :, None, None], 0.0)
    y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
    y = y if lengths is None else y.masked_fill(beyond[:, :, None], 0.0)
    return y.to(dtype) if inverse is None else to_levels(y * inverse, dtype)
