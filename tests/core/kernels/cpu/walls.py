"""Runs every kernel on memory between pages that must not be touched: one byte too far ends the process.

All inputs, weights and outputs lie once at the end and once at the start of their pages. Knows addresses; that results
are right is tested elsewhere.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import mmap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.kernels.cpu.program import Weights, pack_float, pack_int8
from core.kernels.cpu.token_program import PAGE, PagedLayer, TokenPositions, TokenProgram

BYTES = ("int8", "int8 by row")
_PAGE, _NOTHING = mmap.PAGESIZE, 0  # PROT_NONE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_kept: list[mmap.mmap] = []


def walled(tensor: Tensor, *, at_end: bool) -> Tensor:
    """The same numbers in memory of their own, beside a page that must not be touched."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // _PAGE)
    memory = mmap.mmap(-1, (pages + 2) * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _kept.append(memory)
    for wall in (start, start + (pages + 1) * _PAGE):
        if _libc.mprotect(wall, _PAGE, _NOTHING):
            raise OSError(ctypes.get_errno(), "mprotect")
    at = start + _PAGE + (pages * _PAGE - size if at_end else 0)
    made = torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=tensor.dtype).view(tensor.shape)
    return made.copy_(tensor)


class Walled(TokenProgram):
    """A program whose buffers and weights lie so."""

    def __init__(self, kernels: ctypes.CDLL, *, at_end: bool) -> None:
        super().__init__(kernels)
        self._library, self._at_end = kernels, at_end

    def wall(self, tensor: Tensor) -> Tensor:
        return walled(tensor, at_end=self._at_end)

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.wall(torch.ones(shape, dtype=dtype))

    def ints(self, *values: int) -> Tensor:
        return self.wall(torch.tensor(values, dtype=torch.int32))

    def pack(self, kind: str, n: int, channels: int, taps: int = 1, *, geglu: bool = False) -> Weights:
        weight, ones = torch.ones(n, taps, channels), torch.ones(n)
        if kind in BYTES:
            by_row = kind == "int8 by row"
            made = pack_int8(self._library, weight.to(torch.int8), ones, ones, geglu=geglu, by_row=by_row)
        else:
            made = pack_float(self._library, weight.bfloat16() if kind == "bf16" else weight, None, geglu=geglu)
        offset, scale = (None if t is None else self.wall(t) for t in (made.offset, made.scale))
        return replace(made, packed=self.wall(made.packed), offset=offset, scale=scale, bias=self.wall(made.bias))

    def buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.wall(torch.zeros(shape, dtype=dtype))

    def give_back(self, *tensors: Tensor | None) -> None:
        """Keep all buffers."""

    def norm(self, norm: nn.Module) -> nn.Module:
        for name in ("weight", "bias"):
            setattr(norm, name, nn.Parameter(self.wall(getattr(norm, name).detach()), requires_grad=False))
        return norm


def products(p: Walled, kind: str, channels: int, n: int) -> None:
    def scales(rows: int) -> Tensor | None:
        return p.ones(rows) if kind == "int8 by row" else None

    inverse, dtype = p.ones(n), torch.uint8 if kind in BYTES else torch.float32
    for rows in (1, 7, 15):
        a, plain, residual = p.ones(rows, channels, dtype=dtype), p.pack(kind, n, channels), p.ones(rows, n)
        options: dict[str, Any] = {"grid": (1, 1, rows), "a_scale": scales(rows)}
        p.product(a, plain, row_bias=p.ones(1, n), residual=residual, act="silu", **options)
        p.product(a, plain, inverse=inverse, **options)
        p.product(a, p.pack(kind, 32 * n, channels, geglu=True), inverse=p.ones(16 * n), **options)
    for (h, w), stride, before, upsample in itertools.product(((2, 2), (3, 5), (4, 7)), (1, 2), (0, 1), (False, True)):
        a = p.ones(2 * h * w, channels, dtype=dtype)
        options = {"stride": stride, "before": before, "upsample": upsample, "a_scale": scales(2 * h * w)}
        for after in (None, inverse):
            p.product(a, p.pack(kind, n, channels, 9), grid=(2, h, w), inverse=after, **options)


def norms(p: Walled, channels: int) -> None:
    x, inverse, scale = p.ones(6, channels), p.ones(channels), p.ones(2, channels)
    p.quantize(x, inverse)
    p.quantize_rows(x)
    p.quantize_rows(x, (inverse, p.ints(0, 1)))
    for after in (None, inverse):
        p.layer_norm(x, p.norm(nn.LayerNorm(channels)), after)  # type: ignore[arg-type]
        plain = nn.LayerNorm(channels, elementwise_affine=False)
        p.layer_norm(x, plain, after, row_scale=scale, residual=x)
        p.rms_norm(x, inverse, 1e-6, after)
        p.rms_norm(x, inverse, 1e-6, after, row_scale=scale, residual=x)
        p.group_norm(x, None, p.norm(nn.GroupNorm(1, channels)), images=2, silu=True, inverse=after)  # type: ignore[arg-type]
        both, wide = p.norm(nn.GroupNorm(1, channels + 3)), None if after is None else p.ones(channels + 3)
        p.group_norm(x, p.ones(6, 3), both, images=2, silu=False, inverse=wide)  # type: ignore[arg-type]


def attentions(p: Walled, tokens: int, keys: int, d: int) -> None:
    q, k, v = (p.ones(2 * count, 2 * d) for count in (tokens, keys, keys))
    for inverse in (None, p.ones(2 * d)):
        p.attention(q, k, v, images=2, heads=2, scale=1.0, inverse=inverse)
        lengths = p.ints(keys, 1 + keys // 2)
        p.attention(q, k, v, images=2, heads=2, scale=1.0, inverse=inverse, lengths=lengths)
        shared = p.ones(2 * tokens, d)
        p.attention(q, shared, shared, images=2, heads=2, kv_heads=1, scale=1.0, inverse=inverse, causal=True)


def paged(p: Walled, heads: int, d: int, length: int, *, int8: bool) -> None:
    pages, dtype = -(-length // PAGE), torch.int8 if int8 else torch.float32
    keys, values = (p.ones(pages, 1, *sides, dtype=dtype) for sides in ((d, PAGE), (PAGE, d)))
    layer = PagedLayer(keys, values, *(p.ones(pages, 1, PAGE) if int8 else None for _ in range(2)))
    positions = p.ints(*range(length))
    places = TokenPositions(positions, p.ints(*[0] * length), p.ints(*range(pages))[None])
    qkv, angles, norm, k = p.ones(length, (heads + 2) * d), p.ones(length, d), p.ones(d), p.ones(length, d)
    q = p.rotate(qkv, angles, places, layer, heads=heads, q_norm=norm, k_norm=norm)
    for interleaved in (False, True):
        p.rotate_heads(
            p.ones(length, heads * d), k, angles, heads=heads, kv_heads=1, positions=positions, q_norm=norm,
            k_norm=norm, interleaved=interleaved,
        )  # fmt: skip
    for inverse in (None, p.ones(heads * d)):
        p.paged_attention(q, places, layer, heads=heads, scale=1.0, inverse=inverse)
        p.paged_attention(q, places, layer, heads=heads, scale=1.0, inverse=inverse, window=5, cap=2.0)


def rows(p: Walled, channels: int) -> None:
    indices = p.ints(2, 0, 2, 1)
    for dtype in (torch.float32, torch.bfloat16):
        made = p.embed(p.ones(3, channels, dtype=dtype), indices, positions=p.ones(2, channels))
    for x in (made, p.ones(4, channels, dtype=torch.uint8)):
        out = p.buffer(6, channels, dtype=x.dtype)
        p.place(x, out, images=2, at=1)
        p.place(x, out, images=2)
        p.take(out, images=2, at=2, rows=1)


def mixtures(p: Walled, inner: int, kind: str) -> None:
    experts = [(p.pack(kind, 2 * inner, 20, geglu=True), p.pack(kind, 20, inner)) for _ in range(3)]
    for rows in (1, 7):
        a = p.ones(rows, 20, dtype=torch.uint8 if kind in BYTES else torch.float32)
        scores, inverse = p.wall(torch.rand(rows, 3)), p.ones(inner) if kind in BYTES else None
        p.mixture(
            a, scores, experts, top=2, normalized=True, residual=p.ones(rows, 20), act="silu", inverse=inverse
        )  # fmt: skip


def touch(kernels: ctypes.CDLL) -> None:
    """Tell a kernel of a row too many, which ends the process where the walls stand."""
    faulthandler.disable()  # which would print where
    p = Walled(kernels, at_end=True)
    p.quantize(p.ones(3, 5), p.ones(5))
    p.last.rows += 1
    p.run()


def check(kernels: ctypes.CDLL) -> None:
    """Run every kernel; one that touches a wall ends the process."""
    kinds, all_widths = (*BYTES, "fp32", "bf16"), (1, 3, 16, 33, 47, 64)
    for at_end in (True, False):
        calls: list[Callable[[Walled], None]] = []
        for kind, channels, n in itertools.product(kinds, (4, 20), all_widths):
            calls.append(partial(products, kind=kind, channels=channels, n=n))
        for channels in (1, 5, 16, 31, 33, 50):
            calls += [partial(norms, channels=channels), partial(rows, channels=channels)]
        calls += [partial(mixtures, inner=inner, kind=kind) for inner in (16, 48) for kind in ("int8", "fp32")]
        for tokens, keys, d in itertools.product((1, 5, 6, 13), (1, 15, 32, 33), (16, 48)):
            calls.append(partial(attentions, tokens=tokens, keys=keys, d=d))
        for heads, d, length, int8 in itertools.product((1, 3, 7), (16, 48), (1, 16, 35), (False, True)):
            calls.append(partial(paged, heads=heads, d=d, length=length, int8=int8))
        for call in calls:
            p = Walled(kernels, at_end=at_end)
            call(p)
            p.run()
            _kept.clear()
