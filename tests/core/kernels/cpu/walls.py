"""Runs every kernel on memory between pages that must not be touched: one byte too far ends the process.

All inputs, weights and outputs lie once at the end and once at the start of their pages. Knows addresses; that results
are right is tested elsewhere.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import mmap
from dataclasses import replace

import torch
from torch import Tensor, nn

from core.kernels.cpu.program import Weights, pack_float, pack_int8
from core.kernels.cpu.token_program import PAGE, PagedLayer, TokenPositions, TokenProgram

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
        self._at_end = at_end

    def wall(self, tensor: Tensor) -> Tensor:
        return walled(tensor, at_end=self._at_end)

    def weights(self, made: Weights) -> Weights:
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


def products(kernels: ctypes.CDLL, p: Walled, kind: str, channels: int, n: int) -> None:
    def pack(taps: int, n: int, *, geglu: bool = False) -> Weights:
        weight = torch.ones(n, taps, channels)
        if in_bytes:
            whole, ones = weight.to(torch.int8), torch.ones(n)
            return p.weights(pack_int8(kernels, whole, ones, ones, geglu=geglu, by_row=by_row))
        return p.weights(pack_float(kernels, weight.bfloat16() if kind == "bf16" else weight, None, geglu=geglu))

    def scales(rows: int) -> Tensor | None:
        return p.wall(torch.ones(rows)) if by_row else None

    by_row = kind == "int8 by row"
    in_bytes = by_row or kind == "int8"
    inverse, dtype = p.wall(torch.ones(n)), torch.uint8 if in_bytes else torch.float32
    for rows in (1, 7, 15):
        a, plain = p.wall(torch.zeros(rows, channels, dtype=dtype)), pack(1, n)
        row_bias, residual = p.wall(torch.zeros(1, n)), p.wall(torch.zeros(rows, n))
        own = scales(rows)
        p.product(a, plain, grid=(1, 1, rows), a_scale=own, row_bias=row_bias, residual=residual, act="silu")
        p.product(a, plain, grid=(1, 1, rows), a_scale=own, inverse=inverse)
        wide = pack(1, 32 * n, geglu=True)
        p.product(a, wide, grid=(1, 1, rows), a_scale=own, inverse=p.wall(torch.ones(16 * n)))
    for (h, w), stride, before, upsample in itertools.product(((2, 2), (3, 5), (4, 7)), (1, 2), (0, 1), (False, True)):
        a = p.wall(torch.zeros(2 * h * w, channels, dtype=dtype))
        options = {"stride": stride, "before": before, "upsample": upsample, "a_scale": scales(2 * h * w)}
        p.product(a, pack(9, n), grid=(2, h, w), **options)  # type: ignore[arg-type]
        p.product(a, pack(9, n), grid=(2, h, w), inverse=inverse, **options)  # type: ignore[arg-type]


def norms(p: Walled, channels: int) -> None:
    x, inverse = p.wall(torch.ones(6, channels)), p.wall(torch.ones(channels))
    p.quantize(x, inverse)
    p.quantize_rows(x)
    p.quantize_rows(x, (inverse, p.wall(torch.tensor([0, 1], dtype=torch.int32))))
    for after in (None, inverse):
        p.layer_norm(x, p.norm(nn.LayerNorm(channels)), after)  # type: ignore[arg-type]
        scale, plain = p.wall(torch.ones(2, channels)), nn.LayerNorm(channels, elementwise_affine=False)
        p.layer_norm(x, plain, after, row_scale=scale, residual=x)
        p.rms_norm(x, inverse, 1e-6, after, row_scale=scale, residual=x)
        p.group_norm(x, None, p.norm(nn.GroupNorm(1, channels)), images=2, silu=True, inverse=after)  # type: ignore[arg-type]
        both = p.norm(nn.GroupNorm(1, channels + 3))
        wide = None if after is None else p.wall(torch.ones(channels + 3))
        p.group_norm(x, p.wall(torch.ones(6, 3)), both, images=2, silu=False, inverse=wide)  # type: ignore[arg-type]


def attentions(p: Walled, tokens: int, keys: int, d: int) -> None:
    q, k, v = (p.wall(torch.ones(2 * count, 2 * d)) for count in (tokens, keys, keys))
    for inverse in (None, p.wall(torch.ones(2 * d))):
        p.attention(q, k, v, images=2, heads=2, scale=1.0, inverse=inverse)
        lengths = p.wall(torch.tensor([keys, 1 + keys // 2], dtype=torch.int32))
        p.attention(q, k, v, images=2, heads=2, scale=1.0, inverse=inverse, lengths=lengths)
        shared, wide = p.wall(torch.ones(2 * tokens, d)), p.wall(torch.ones(2 * tokens, 2 * d))
        p.attention(wide, shared, shared, images=2, heads=2, kv_heads=1, scale=1.0, inverse=inverse, causal=True)


def paged(p: Walled, channels: int, heads: int, d: int, length: int, *, int8: bool) -> None:
    x, weight = p.wall(torch.ones(3, channels)), p.wall(torch.ones(channels))
    for inverse in (None, weight):
        p.rms_norm(x, weight, 1e-6, inverse)
    pages, dtype = -(-length // PAGE), torch.int8 if int8 else torch.float32
    keys, values = (
        p.wall(torch.ones(pages, 1, d, PAGE, dtype=dtype)),
        p.wall(torch.ones(pages, 1, PAGE, d, dtype=dtype)),
    )
    scales = [p.wall(torch.ones(pages, 1, PAGE)) if int8 else None for _ in range(2)]
    table = p.wall(torch.arange(pages, dtype=torch.int32)[None])
    positions = p.wall(torch.arange(length, dtype=torch.int32))
    places = TokenPositions(positions, p.wall(torch.zeros(length, dtype=torch.int32)), table)
    layer = PagedLayer(keys, values, *scales)
    qkv, angles = p.wall(torch.ones(length, (heads + 2) * d)), p.wall(torch.ones(length, d))
    norm = p.wall(torch.ones(d))
    q = p.rotate(qkv, angles, places, layer, heads=heads, q_norm=norm, k_norm=norm)
    k = p.wall(torch.ones(length, d))
    for interleaved in (False, True):
        p.rotate_heads(
            p.wall(torch.ones(length, heads * d)), k, angles, heads=heads, kv_heads=1, positions=positions,
            q_norm=norm, k_norm=norm, interleaved=interleaved,
        )  # fmt: skip
    for inverse in (None, p.wall(torch.ones(heads * d))):
        p.paged_attention(q, places, layer, heads=heads, scale=1.0, inverse=inverse)
        p.paged_attention(q, places, layer, heads=heads, scale=1.0, inverse=inverse, window=5, cap=2.0)


def rows(p: Walled, channels: int) -> None:
    indices = p.wall(torch.tensor([2, 0, 2, 1], dtype=torch.int32))
    for dtype in (torch.float32, torch.bfloat16):
        table, positions = p.wall(torch.ones(3, channels, dtype=dtype)), p.wall(torch.ones(2, channels))
        made = p.embed(table, indices, positions=positions)
    for x in (made, p.wall(torch.ones(4, channels, dtype=torch.uint8))):
        out = p.buffer(6, channels, dtype=x.dtype)
        p.place(x, out, images=2, at=1)
        p.place(x, out, images=2)
        p.take(out, images=2, at=2, rows=1)


def mixtures(kernels: ctypes.CDLL, p: Walled, inner: int, *, int8: bool) -> None:
    def pack(n: int, channels: int, *, geglu: bool) -> Weights:
        weight = torch.ones(n, 1, channels)
        if int8:
            return p.weights(pack_int8(kernels, weight.to(torch.int8), torch.ones(n), torch.ones(n), geglu=geglu))
        return p.weights(pack_float(kernels, weight, None, geglu=geglu))

    experts = [(pack(2 * inner, 20, geglu=True), pack(20, inner, geglu=False)) for _ in range(3)]
    for rows in (1, 7):
        a = p.wall(torch.ones(rows, 20, dtype=torch.uint8 if int8 else torch.float32))
        scores, residual = p.wall(torch.rand(rows, 3)), p.wall(torch.zeros(rows, 20))
        p.mixture(
            a, scores, experts, top=2, normalized=True, residual=residual, act="silu",
            inverse=p.wall(torch.ones(inner)) if int8 else None,
        )  # fmt: skip


def touch(kernels: ctypes.CDLL) -> None:
    """Tell a kernel of a row too many, which ends the process where the walls stand."""
    faulthandler.disable()  # which would print where
    p = Walled(kernels, at_end=True)
    p.quantize(p.wall(torch.zeros(3, 5)), p.wall(torch.ones(5)))
    p.last.rows += 1
    p.run()


def check(kernels: ctypes.CDLL) -> None:
    """Run every kernel; one that touches a wall ends the process."""
    for at_end in (True, False):
        for kind, channels, n in itertools.product(
            ("int8", "int8 by row", "fp32", "bf16"), (4, 20), (1, 3, 16, 33, 47, 64)
        ):
            p = Walled(kernels, at_end=at_end)
            products(kernels, p, kind, channels, n)
            p.run()
            _kept.clear()
        for channels in (1, 5, 16, 31, 50):
            p = Walled(kernels, at_end=at_end)
            norms(p, channels)
            rows(p, channels)
            p.run()
        for inner, int8 in itertools.product((16, 48), (False, True)):
            p = Walled(kernels, at_end=at_end)
            mixtures(kernels, p, inner, int8=int8)
            p.run()
        for tokens, keys, d in itertools.product((1, 5, 6, 13), (1, 15, 32, 33), (16, 48)):
            p = Walled(kernels, at_end=at_end)
            attentions(p, tokens, keys, d)
            p.run()
        for (channels, heads), d, length, int8 in itertools.product(
            ((1, 1), (16, 3), (33, 7)), (16, 48), (1, 16, 35), (False, True)
        ):
            p = Walled(kernels, at_end=at_end)
            paged(p, channels, heads, d, length, int8=int8)
            p.run()
            _kept.clear()
