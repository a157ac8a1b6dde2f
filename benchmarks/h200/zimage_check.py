"""Checks the kernels at Z-Image's widths on a GPU: every tile, every variant of attention, the norms, odd shapes.

Called by `benchmarks.h200.zimage_kernels`. Outputs are poisoned: what a kernel leaves unwritten is an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200.kernels import BF16, E4M3, INT8, draw
from core.kernels.cuda import attention, flash_attention, layer_norm, linear, rms_norm, rotary, tiles
from core.kernels.cuda.attention_source import AttentionVariant

WIDTH, HEADS = 3840, 30
SHAPES = ((2, 128, 0), (2, 160, 0), (1, 256, 0), (2, 128, 1), (2, 160, 1))
GROUPS = (1, 8, 16)

Note = Callable[..., None]  # part, name, and what was found


def candidates(gated: bool) -> list[tiles.Tile]:
    """Tiles that are tried for a product; all of Z-Image's have an even number of tiles of columns."""
    return [
        tiles.Tile(blocks, columns, cluster, turns, group)
        for (blocks, columns, turns), cluster, group in itertools.product(SHAPES, (1, 2), GROUPS)
        if not (gated and columns % 64)
    ]


def key(tile: tiles.Tile) -> str:
    """The tile as in the table of `tiles.py`."""
    return f"{tile.blocks},{tile.columns},{tile.cluster},{tile.turns},{tile.group}"


def variants(output: str, lengths: bool) -> list[AttentionVariant]:
    """Those of attention that are tried for heads of 128: all that compile without spilling registers."""
    tried = (
        (2, 128, 2, 0),
        (2, 128, 2, 1),
        (2, 128, 2, 2),
        (2, 144, 2, 0),
        (2, 160, 2, 0),
        (3, 64, 3, 0),
        (3, 80, 2, 0),
    )
    return [AttentionVariant(c, keys, stages, output, e, 128, lengths) for c, keys, stages, e in tried]


def error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the expected values' norm; infinite where a number is not finite."""
    a, e = actual.double().flatten(), expected.double().flatten()
    found = float((a - e).norm() / e.norm())
    return found if math.isfinite(found) else math.inf


def check(note: Note) -> None:
    """Compare with exact references at odd shapes. `wrong` marks what is further off than levels that flipped."""

    def compare(name: str, make: Callable[[], Any], expected: Any) -> None:
        pairs = expected if isinstance(expected, tuple) else (expected,)
        for one in pairs:  # what the kernel's own allocations of this size find: no numbers
            torch.full((one.numel() * one.element_size(),), 0xFF, dtype=torch.uint8, device="cuda")
        try:
            actual = make()
            made = actual if isinstance(actual, tuple) else (actual,)
            worst = max(error(a, e) for a, e in zip(made, pairs, strict=True))
        except Exception as failure:
            note("check", name, failure=str(failure)[:120])
            return
        note("check", name, error=f"{worst:.1e}", wrong=worst > (0.04 if made[-1].dtype == E4M3 else 0.02))

    _check_elementwise(compare)
    _check_products(compare)
    _check_attention(compare, note)


def _check_elementwise(compare: Callable[..., None]) -> None:
    x, y = (torch.randn(999, WIDTH, device="cuda", dtype=BF16) * 3 for _ in range(2))
    weight, other = (torch.randn(WIDTH, device="cuda", dtype=BF16) for _ in range(2))
    gate, scale = torch.randn(3, 2, WIDTH, device="cuda", dtype=BF16).unbind(1)
    inverse = 20 + 3 * torch.randn(WIDTH, device="cuda")
    for kind in (INT8, E4M3, BF16):
        by = None if kind == BF16 else inverse
        made: Any = rms_norm.rms_norm_reference(x, weight, 1e-5, by, kind, row_scale=scale)
        compare(f"rms_norm {kind}", partial(rms_norm.rms_norm, x, weight, 1e-5, by, kind, row_scale=scale), made)
        given = (x, y, weight, other, 1e-5, by, kind)
        made = rms_norm.residual_norm_reference(*given, gate=gate, next_scale=scale)
        run: Any = partial(rms_norm.residual_norm, *given, gate=gate, next_scale=scale)
        compare(f"residual_norm {kind}", run, made)
        made = layer_norm.layer_norm_int8_reference(x, None, None, 1e-6, by, kind, row_scale=scale)
        run = partial(layer_norm.layer_norm_int8, x, None, None, 1e-6, by, kind, row_scale=scale)
        compare(f"layer_norm {kind}", run, made)
    qkv, turn = torch.randn(999, 3 * WIDTH, device="cuda", dtype=BF16), torch.randn(999, 64, device="cuda") * 9
    angles, norms = torch.cat([turn.cos(), turn.sin()], 1), torch.randn(2, 128, device="cuda", dtype=BF16)
    for interleaved in (False, True):
        options: Any = {"norms": norms, "eps": 1e-5, "interleaved": interleaved}
        made = rotary.rotate_heads_reference(qkv, angles, HEADS, HEADS, **options)
        out = torch.full((999, 2 * WIDTH), torch.nan, device="cuda", dtype=BF16)
        run = partial(rotary.rotate_heads, qkv, angles, HEADS, HEADS, **options, out=out)
        compare(f"rotate_heads interleaved={interleaved}", run, made)


def _check_products(compare: Callable[..., None]) -> None:
    for kind, gated in itertools.product((INT8, E4M3), (False, True)):
        for tile in (t for t in candidates(gated) if t.group == 8 or (kind == INT8 and t.group == 1)):
            for m in (300, 5000):
                n, k = 6 * tile.columns, 640
                x, w = draw(kind, m, k), draw(kind, n, k)
                spread = 28.0 if kind == INT8 else 100.0
                s = torch.rand(n, device="cuda") * (6 / (spread**2 * math.sqrt(k)))
                b, inverse = torch.randn(n, device="cuda"), torch.rand(n // 2, device="cuda") * 4
                name = f"{'swiglu' if gated else 'linear'} {kind} {key(tile)} {m}"
                if gated:
                    made = linear.linear_geglu_int8_reference(x, w, s, b, inverse, act="silu")
                    compare(name, partial(linear.linear_geglu_int8, x, w, s, b, inverse, act="silu", tile=tile), made)
                else:
                    made = linear.linear_int8_reference(x, w, s, b)
                    compare(name, partial(linear.linear_int8, x, w, s, b, tile=tile), made)


def by_triton(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, inverse: Tensor | None, kind: torch.dtype) -> Tensor:
    """The attention that runs where Hopper's cannot."""
    out = torch.empty((*q.shape[:2], q.shape[2] * q.shape[3]), dtype=kind, device=q.device)
    flash_attention.flash(q, k, v, lengths, inverse, out, causal=False)
    return out


def _check_attention(compare: Callable[..., None], note: Note) -> None:
    scale = torch.rand(5 * 128, device="cuda") * 60
    outputs = (("bf16", BF16), ("int8", INT8), ("e4m3", E4M3))
    for tokens, counts in ((300, (300, 129, 64)), (1000, (999, 32, 700))):
        lengths = torch.tensor(counts, dtype=torch.int32, device="cuda")
        q, k, v = (torch.randn(3, tokens, 3, 5, 128, device="cuda", dtype=BF16) * 2).unbind(2)
        for (output, kind), some in itertools.product(outputs, (None, lengths)):
            inverse = None if kind == BF16 else scale
            made = attention.attention_reference(q, k, v, inverse, kind, lengths=some)
            tag = f"{tokens} {output} {'all' if some is None else 'lengths'}"
            if some is not None and output == "int8":
                compare(f"attention triton {tag}", partial(by_triton, q, k, v, lengths, inverse, kind), made)
            for variant in variants(output, some is not None)[: 1 if output == "e4m3" else None]:
                run = partial(attention.attention, q, k, v, inverse, kind, lengths=some, variant=variant)
                compare(f"{variant.name} {tag}", run, made)
        try:
            whole = attention.attention(q, k, v, None, BF16, lengths=lengths)
            for image, count in enumerate(counts):
                q1, k1, v1 = (x[image : image + 1, :count].contiguous() for x in (q, k, v))
                own = lengths[image : image + 1].clone()
                one = attention.attention(q1, k1, v1, None, BF16, lengths=own)
                same = torch.equal(one[0], whole[image, :count])
                note("check", f"attention of {count} in {tokens}: bits as alone", wrong=not same)
        except Exception as failure:
            note("check", f"attention {tokens}: bits as alone", failure=str(failure)[:120])
