"""RMSNorm, rotary positions and attention over pages against torch in 64 bits; a row's bits are its own."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.kernels.cpu.program import Weights, pack_float, pack_int8
from core.kernels.cpu.token_program import PAGE, PagedLayer, TokenPositions, TokenProgram
from tests.core.kernels.cpu.test_rotary import angles_of, normed
from tests.core.quant.stage import Few, Many, Seed, Several, Watched, called, check, kernels, normal, seeded, threads


class World(NamedTuple):
    """Sequences in pages that lie in no order, and each sequence's own keys and values, as they are read."""

    layer: PagedLayer
    table: Tensor
    keys: list[Tensor]  # [tokens, kv_heads, d] of each
    values: list[Tensor]


def world(lengths: list[int], kv_heads: int, d: int, *, int8: bool, seed: int = 0) -> World:
    most = -(-max(lengths) // PAGE)
    pages = len(lengths) * most + 2
    table = torch.randperm(pages, generator=seeded(seed))[: len(lengths) * most].view(len(lengths), most)
    kept = [normal(seed + j, pages, kv_heads, PAGE, d) for j in (1, 2)]
    scales = [(1 + torch.rand(pages, kv_heads, PAGE, generator=seeded(seed + j))) / 32 for j in (3, 4)]
    exact = [x.double() for x in kept]
    if int8:
        kept = [(x / scale[..., None]).round().clamp(-127, 127) for x, scale in zip(kept, scales, strict=True)]
        exact = [x.double() * scale[..., None] for x, scale in zip(kept, scales, strict=True)]
        kept = [x.to(torch.int8) for x in kept]
    layer = PagedLayer(kept[0].transpose(2, 3).contiguous(), kept[1], *(scales if int8 else ()))
    keys, values = ([x[own].transpose(1, 2).flatten(0, 1) for own in table] for x in exact)
    return World(layer, table.to(torch.int32), keys, values)


def ints(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=60)
@given(...)
def test_rms_norm(
    images: Few, tokens: Several, channels: Many, scaled: bool, added: bool, floats: bool, seed: Seed
) -> None:
    rows = images * tokens
    x, weight, residual = normal(seed, rows, channels, scale=3), normal(seed + 1, channels), None
    inverse = None if floats else normal(seed + 2, channels, scale=40)
    row_scale = normal(seed + 3, images, channels + 4)[:, 1:-3] if scaled else None  # a slice of something wider
    wanted = normed(x, weight, 1e-6)
    if row_scale is not None:
        wanted = wanted * row_scale.double().repeat_interleave(tokens, 0)
    if added:
        residual = normal(seed + 4, rows, channels)
        wanted = wanted + residual.double()
    check(
        called(lambda p: p.rms_norm(x, weight, 1e-6, inverse, row_scale=row_scale, residual=residual)), wanted, inverse
    )


@settings(max_examples=60)
@given(...)
def test_attention_over_pages(
    lengths: Annotated[list[int], st.lists(st.integers(1, 50), min_size=1, max_size=4)], kv_heads: Few, group: Several,
    d: Literal[16, 48, 128], int8: bool, floats: bool,
    hardness: Annotated[float, st.sampled_from((1.0, 1e4))],
    window: Annotated[int, st.one_of(st.just(0), st.integers(1, 60))],
    cap: Annotated[float, st.sampled_from((0.0, 0.7, 50.0))], seed: Seed,
) -> None:  # fmt: skip
    """Any rows of any sequences, also several of one; what lies behind a row's position or before its window must not
    matter. At the greatest hardness scores are beyond what exp holds.
    """
    there = world(lengths, kv_heads, d, int8=int8, seed=seed)
    sequences = [i for i, n in enumerate(lengths) for _ in range(min(n, 3))]
    positions = [n - 1 - j for n in lengths for j in range(min(n, 3))]
    heads, scale = kv_heads * group, 1 / math.sqrt(d)
    q = hardness * normal(seed + 5, len(sequences), heads * d + 3)[:, 3:]
    inverse = None if floats or hardness > 1 else normal(seed + 6, heads * d, scale=40)
    places = TokenPositions(ints(positions), ints(sequences), there.table)
    options = {"heads": heads, "scale": scale, "inverse": inverse, "window": window, "cap": cap}
    wanted = []
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        k, v = (x[sequence][seen].repeat_interleave(group, 1) for x in (there.keys, there.values))
        scores = torch.einsum("hd,thd->ht", q[row].double().view(heads, d), k) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        wanted.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v).flatten())
    found = called(lambda p: p.paged_attention(q, places, there.layer, **options))  # type: ignore[arg-type]
    check(found, torch.stack(wanted), inverse, relative=4e-6 * hardness)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 16), (3, 3, 48), (8, 1, 64)])
def test_rotate_puts_keys_and_values_into_their_pages_and_nowhere_else(
    heads: int, kv_heads: int, d: int, norm: bool, int8: bool
) -> None:
    """And turns queries and keys with the bits that they have without pages."""
    dtype = torch.int8 if int8 else torch.float32
    keys, values = (torch.full((6, kv_heads, *sides), 7, dtype=dtype) for sides in ((d, PAGE), (PAGE, d)))
    scales = [torch.full((6, kv_heads, PAGE), 7.0) if int8 else None for _ in range(2)]
    table, positions, sequences = ints([[4, 1], [0, 5]]), ints([0, 17, 15, 31]), ints([0, 0, 1, 1])
    q_norm, k_norm = (normal(3, d), normal(4, d)) if norm else (None, None)
    options: dict[str, Any] = {"heads": heads, "q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6}
    angles, qkv, p = angles_of(1, 32, d), normal(2, 4, (heads + 2 * kv_heads) * d), Watched()
    turned = qkv.clone()
    q, k, v = turned.split([heads * d, kv_heads * d, kv_heads * d], dim=1)
    p.rotate_heads(q, k, angles, kv_heads=kv_heads, positions=positions, **options)
    places, layer = TokenPositions(positions, sequences, table), PagedLayer(keys, values, *scales)
    found = p.rotate(qkv, angles, places, layer, **options)
    p.run()
    assert torch.equal(found, q)
    page, place = table[sequences, positions // PAGE], positions % PAGE
    for kept, scale, want in ((keys[page, :, :, place], scales[0], k), (values[page, :, place], scales[1], v)):
        want = want.view(4, kv_heads, d)
        if scale is None:
            assert torch.equal(kept, want)
        else:
            step = scale[page, :, place, None]
            torch.testing.assert_close(step, want.abs().amax(-1, keepdim=True) / 127, rtol=1e-6, atol=0)
            assert ((kept * step - want).abs() <= 0.5001 * step).all()
    keys[page, :, :, place], values[page, :, place] = 7, 7
    assert (keys == 7).all() and (values == 7).all()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_rows_bits_are_its_own(int8: bool, count: int) -> None:
    """Alone or among others, in these pages or in those, with one thread or with two."""
    lengths = [1, 33, 16, 50, 17]
    there = world(lengths, 2, 32, int8=int8)
    q = normal(3, len(lengths), 8 * 32)

    def run(rows: list[int], table: Tensor, layer: PagedLayer) -> Tensor:
        p = Watched()
        places = TokenPositions(ints([lengths[r] - 1 for r in rows]), ints(rows), table)
        out = p.paged_attention(q[rows].contiguous(), places, layer, heads=8, scale=0.2, inverse=None)
        with threads(count):
            p.run()
        return out.clone()

    together = run([0, 1, 2, 3, 4], there.table, there.layer)
    moved = torch.randperm(there.layer.keys.shape[0], generator=seeded(5))
    back = torch.argsort(moved).to(torch.int32)
    names = ("keys", "values", "key_scales", "value_scales")
    parts = [None if (x := getattr(there.layer, name)) is None else x[moved].contiguous() for name in names]
    elsewhere = PagedLayer(*parts)  # type: ignore[arg-type]
    for row in range(len(lengths)):
        assert torch.equal(run([row], there.table, there.layer)[0], together[row])
        assert torch.equal(run([row], back[there.table.long()], elsewhere)[0], together[row])


def pack(
    experts: int, channels: int, inner: int, *, int8: bool
) -> tuple[list[list[Tensor]], list[tuple[Weights, Weights]]]:
    """Experts of int8 or float weights: each one's gate, up and down [n, k], and all of them packed."""
    shapes, draw = ((inner, channels), (inner, channels), (channels, inner)), seeded(5)
    plain = [
        [torch.randint(-127, 128, shape, generator=draw).float() / (1 if int8 else 999) for shape in shapes]
        for _ in range(experts)
    ]

    def one(weight: Tensor, *, geglu: bool) -> Weights:
        if not int8:
            return pack_float(kernels(), weight[:, None], None, geglu=geglu)
        scale = torch.full((len(weight),), 1e-4)
        return pack_int8(kernels(), weight.to(torch.int8)[:, None], scale, None, geglu=geglu)

    return plain, [(one(torch.cat([up, gate]), geglu=True), one(down, geglu=False)) for gate, up, down in plain]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
def test_mixture(int8: bool, normalized: bool) -> None:
    """Against each row's experts in 64 bits; a row alone, and with either number of threads, has the same bits."""
    rows, channels, inner, top = 11, 20, 48, 2
    plain, packed = pack(4, channels, inner, int8=int8)
    x, scores, residual = normal(1, rows, channels), 3 * normal(2, rows, 4), normal(3, rows, channels)
    scores[:, 3] = -20  # nobody takes the last
    scores[4] = torch.nan
    levels, inverse = (30 * x).round().clamp(-127, 127), torch.full((inner,), 3000.0)

    a = (levels + 128).to(torch.uint8) if int8 else x

    def run(chosen: slice, top: int = top) -> Tensor:
        return called(lambda p: p.mixture(
            a[chosen].contiguous(), scores[chosen].contiguous(), packed, top=top, normalized=normalized, act="silu",
            inverse=inverse if int8 else None, residual=residual[chosen].contiguous(),
        ))  # fmt: skip

    whole = run(slice(None))
    weights, best = scores.nan_to_num(-1e30).double().softmax(-1).topk(top)
    weights = weights / weights.sum(-1, keepdim=True) if normalized else weights
    for row in range(rows):
        if row != 4:
            expected = residual[row].double()
            for weight, index in zip(weights[row], best[row].tolist(), strict=True):
                gate, up, down = (part.double() for part in plain[index])
                own, unit = (levels[row].double(), 1e-4) if int8 else (x[row].double(), 1.0)
                hidden = torch.nn.functional.silu(gate @ own * unit) * (up @ own * unit)
                hidden = (hidden * 3000).round().clamp(-127, 127) if int8 else hidden
                expected = expected + weight * (down @ hidden * unit)
            torch.testing.assert_close(whole[row].double(), expected, rtol=1e-4, atol=2e-2 if int8 else 1e-4)
        with threads(1 + row // 8):
            assert torch.equal(run(slice(row, row + 1))[0], whole[row])
    assert whole.isfinite().all()
    with pytest.raises(ValueError, match="mixture: 5 of 4 experts of 96 and 20 columns do not fit"):
        run(slice(None), top=5)


def test_what_does_not_fit_is_refused() -> None:
    there = world([20], 2, 32, int8=False)
    layer, places = there.layer, TokenPositions(ints([19]), ints([0]), there.table)
    whole = PagedLayer(layer.keys.to(torch.int8), layer.values.to(torch.int8))
    qkv, angles, x, weight = normal(0, 1, 256), normal(1, 32, 32), normal(0, 4, 8), normal(1, 8)
    reads: dict[str, Any] = {"heads": 4, "scale": 1.0, "inverse": None}
    for name, arguments, options, said in (
        ("paged_attention", (normal(0, 1, 96), places, layer), {**reads, "heads": 3}, "3 heads of width 32 on 2"),
        ("paged_attention", (normal(0, 2, 128), places, layer), reads, "positions"),
        ("rotate", (qkv, angles, places, whole), {"heads": 4}, "pages are fp32, or int8 with scales"),
        ("rotate", (qkv[:, 1:], angles, places, layer), {"heads": 4}, "qkv"),
        ("rotate", (qkv, angles, places, layer), {"heads": 4, "q_norm": qkv[0, :64]}, r"q_norm: must be .* \[32\]"),
        ("rms_norm", (x, qkv[0, :9], 1e-6, None), {}, "weight"),
        ("rms_norm", (x, weight, 1e-6, None), {"row_scale": normal(2, 2, 9)}, r"row_scale: must be .* \[2, 8\]"),
        ("rms_norm", (x, weight, 1e-6, None), {"row_scale": normal(2, 3, 8)}, "4 rows are not those of 3 images"),
        ("rms_norm", (x, weight, 1e-6, None), {"residual": x[:3]}, r"residual: must be torch.float32 \[4, 8\]"),
        ("rms_norm", (x, weight, 1e-6, torch.ones(8)), {"out": x}, r"out: must be torch.uint8"),
    ):
        with pytest.raises(ValueError, match=said):
            getattr(TokenProgram(kernels()), name)(*arguments, **options)
