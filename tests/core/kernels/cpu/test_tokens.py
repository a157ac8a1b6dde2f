"""RMSNorm, rotary positions and attention over pages against torch in 64 bits; a row's bits are its own."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.kernels.cpu.program import Weights, pack_float, pack_int8
from core.kernels.cpu.token_program import PAGE, PagedLayer, TokenPositions, TokenProgram
from tests.core.quant.stage import Watched, called, check_bytes, check_close, kernels, normal, seeded, threads


class World(NamedTuple):
    """Sequences of given lengths in pages that lie in no order, and each sequence's own keys and values."""

    layer: PagedLayer
    table: Tensor
    keys: list[Tensor]  # [tokens, kv_heads, d] of each
    values: list[Tensor]


def world(lengths: list[int], kv_heads: int, d: int, *, int8: bool, seed: int = 0, scale: float = 1.0) -> World:
    most = -(-max(lengths) // PAGE)
    pages = len(lengths) * most + 2
    order = torch.randperm(pages, generator=seeded(seed))[: len(lengths) * most]
    table = order.view(len(lengths), most).to(torch.int32)
    keys, values = torch.full((pages, kv_heads, d, PAGE), 3e4), torch.full((pages, kv_heads, PAGE, d), 3e4)
    own = []
    for index, length in enumerate(lengths):
        pair = [normal(seed + 7 * index + j, length, kv_heads, d, scale=scale) for j in (1, 2)]
        for t in range(length):
            page = table[index, t // PAGE]
            keys[page, :, :, t % PAGE], values[page, :, t % PAGE] = pair[0][t], pair[1][t]
        own.append(pair)
    if not int8:
        return World(PagedLayer(keys, values), table, [k for k, _ in own], [v for _, v in own])
    factor = 3e4 / 127 if scale > 100 else 4 * scale / 127
    scales = [
        torch.full((pages, kv_heads, PAGE), factor) * (1 + torch.rand(1, generator=seeded(seed))) for _ in range(2)
    ]
    whole = [
        (keys / scales[0][:, :, None]).round().clamp(-127, 127).to(torch.int8),
        (values / scales[1][..., None]).round().clamp(-127, 127).to(torch.int8),
    ]
    exact = [whole[0].double() * scales[0][:, :, None], whole[1].double() * scales[1][..., None]]
    read = [
        [torch.stack([exact[0][table[i, t // PAGE], :, :, t % PAGE] for t in range(n)]) for i, n in enumerate(lengths)],
        [torch.stack([exact[1][table[i, t // PAGE], :, t % PAGE] for t in range(n)]) for i, n in enumerate(lengths)],
    ]
    return World(PagedLayer(whole[0], whole[1], scales[0], scales[1]), table, read[0], read[1])


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=60)
@given(
    images=st.integers(1, 3), tokens=st.integers(1, 5), channels=st.integers(1, 80), scaled=st.booleans(),
    added=st.booleans(), floats=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_rms_norm(images: int, tokens: int, channels: int, scaled: bool, added: bool, floats: bool, seed: int) -> None:
    rows = images * tokens
    x, weight, inverse, row_scale, residual = (
        normal(seed, rows, channels, scale=3),
        normal(seed + 1, channels),
        normal(seed + 2, channels) * 40,
        normal(seed + 3, images, channels + 4)[:, 1:-3],  # a slice of something wider
        normal(seed + 4, rows, channels),
    )

    def write(p: TokenProgram) -> Tensor:
        return p.rms_norm(
            x, weight, 1e-6, None if floats else inverse,
            row_scale=row_scale if scaled else None, residual=residual if added else None,
        )  # fmt: skip

    out = called(write)
    wanted = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    if scaled:
        wanted = wanted * row_scale.double().repeat_interleave(tokens, 0)
    if added:
        wanted = wanted + residual.double()
    if floats:
        check_close(out, wanted)
    else:
        check_bytes(out, wanted * inverse.double())


def test_a_gated_residual_may_be_written_over_what_it_is_added_to() -> None:
    x, y, weight, gate = normal(0, 6, 40), normal(1, 6, 40), normal(2, 40), normal(3, 2, 40)
    held, p = x.clone(), Watched()
    assert p.rms_norm(y, weight, 1e-5, None, row_scale=gate, residual=held, out=held) is held
    p.run()
    normed = y.double() * (y.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    check_close(held, x.double() + normed * gate.double().repeat_interleave(3, 0))


@pytest.mark.parametrize("floats", [True, False])
def test_a_modulated_rows_bits_depend_neither_on_its_companions_nor_threads(floats: bool) -> None:
    images, tokens, channels = 4, 7, 50
    x, row_scale, residual, norm = (
        normal(0, images * tokens, channels),
        normal(1, images, channels),
        normal(2, images * tokens, channels),
        torch.nn.LayerNorm(channels, elementwise_affine=False),
    )
    weight, inverse = normal(3, channels), None if floats else normal(4, channels, scale=20)

    def run(rows: slice, which: slice) -> list[Tensor]:
        p = Watched()
        options = {"row_scale": row_scale[which], "residual": residual[rows]}
        made = [p.rms_norm(x[rows], weight, 1e-5, inverse, **options), p.layer_norm(x[rows], norm, inverse, **options)]
        p.run()
        return made

    together = run(slice(None), slice(None))
    for image in range(images):
        rows = slice(image * tokens, (image + 1) * tokens)
        for alone, every in zip(run(rows, slice(image, image + 1)), together, strict=True):
            assert torch.equal(alone, every[rows])
    with threads(2):
        assert all(torch.equal(a, b) for a, b in zip(run(slice(None), slice(None)), together, strict=True))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4), kv_heads=st.integers(1, 3), group=st.integers(1, 7),
    d=st.sampled_from((16, 48, 128)), int8=st.booleans(), floats=st.booleans(), seed=st.integers(0, 99),
    window=st.one_of(st.just(0), st.integers(1, 60)), cap=st.sampled_from((0.0, 0.7, 50.0)),
)  # fmt: skip
def test_attention_over_pages(
    lengths: list[int], kv_heads: int, group: int, d: int, int8: bool, floats: bool, seed: int, window: int, cap: float
) -> None:
    """Any rows of any sequences, also several of one; what lies behind a row's position or before its window must not
    matter.
    """
    there = world(lengths, kv_heads, d, int8=int8, seed=seed)
    sequences = [i for i, n in enumerate(lengths) for _ in range(min(n, 3))]
    positions = [n - 1 - j for n in lengths for j in range(min(n, 3))]
    heads = kv_heads * group
    wide = normal(seed + 5, len(sequences), heads * d + 3)
    q, inverse = wide[:, 3:], normal(seed + 6, heads * d, scale=40)
    p, scale = Watched(), 1 / math.sqrt(d)
    places = TokenPositions(ints(positions), ints(sequences), there.table)
    out = p.paged_attention(
        q, places, there.layer, heads=heads, scale=scale, inverse=None if floats else inverse, window=window, cap=cap
    )
    p.run()
    wanted = []
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        k, v = (x[sequence][seen].double().repeat_interleave(group, 1) for x in (there.keys, there.values))
        scores = torch.einsum("hd,thd->ht", q[row].double().view(heads, d), k) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        wanted.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v).flatten())
    if floats:
        check_close(out, torch.stack(wanted), relative=4e-6)
    else:
        check_bytes(out, torch.stack(wanted) * inverse.double())


def test_scores_beyond_what_exp_holds() -> None:
    there = world([40], 1, 32, int8=False, scale=30)
    q, p = normal(9, 1, 32, scale=300), Watched()
    places = TokenPositions(ints([39]), ints([0]), there.table)
    out = p.paged_attention(q, places, there.layer, heads=1, scale=0.2, inverse=None)
    p.run()
    scores = (there.keys[0][:, 0].double() @ q[0].double()) * 0.2
    check_close(out[0], scores.softmax(0) @ there.values[0][:, 0].double(), relative=1e-4)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """As transformers does: [..., d] with halves apart."""
    half = x.shape[-1] // 2
    cosine, sine = (part.double().repeat(2) for part in angles.split(half))
    x = x.double()
    return x * cosine + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sine


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else torch.nn.functional.rms_norm(x.double(), weight.shape, weight.double(), 1e-6)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 16), (3, 3, 48), (8, 1, 64)])
def test_rotate_puts_keys_and_values_into_their_pages_and_nowhere_else(
    heads: int, kv_heads: int, d: int, norm: bool, int8: bool
) -> None:
    dtype = torch.int8 if int8 else torch.float32
    keys, values = (
        torch.full((6, kv_heads, d, PAGE), 7, dtype=dtype),
        torch.full((6, kv_heads, PAGE, d), 7, dtype=dtype),
    )
    scales = [torch.full((6, kv_heads, PAGE), 7.0) if int8 else None for _ in range(2)]
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32)
    positions, sequences = [0, 17, 15, 31], [0, 0, 1, 1]
    angles = torch.cat([normal(1, 32, d // 2).cos(), normal(1, 32, d // 2).sin()], dim=1)
    given_ = normal(2, 4, (heads + 2 * kv_heads) * d)
    qkv, p = given_.clone(), Watched()
    places = TokenPositions(ints(positions), ints(sequences), table)
    q_norm, k_norm = (normal(3, d), normal(4, d)) if norm else (None, None)
    layer = PagedLayer(keys, values, *scales)
    q = p.rotate(qkv, angles, places, layer, heads=heads, q_norm=q_norm, k_norm=k_norm, eps=1e-6)
    p.run()
    written = torch.zeros(6, PAGE, dtype=torch.bool)
    for row, (position, sequence) in enumerate(zip(positions, sequences, strict=True)):
        split = given_[row].view(-1, d)
        page, place = int(table[sequence, position // PAGE]), position % PAGE
        written[page, place] = True
        check_close(q[row], rotated(normed(split[:heads], q_norm), angles[position]).flatten())
        k = normed(split[heads : heads + kv_heads], k_norm)
        wanted = [rotated(k, angles[position]), split[heads + kv_heads :].double()]
        for found, scale, want in (
            (keys[page, :, :, place], scales[0], wanted[0]),
            (values[page, :, place], scales[1], wanted[1]),
        ):
            if scale is None:
                check_close(found, want)
            else:
                step = scale[page, :, place].double()
                torch.testing.assert_close(step, want.abs().amax(-1) / 127, rtol=1e-6, atol=0)
                assert ((found.double() * step[:, None] - want).abs() <= 0.5001 * step[:, None]).all()
    assert (keys.permute(0, 3, 1, 2)[~written] == 7).all() and (values.transpose(1, 2)[~written] == 7).all()


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


class Pack(NamedTuple):
    """Experts of int8 or float weights: each one's gate, up and down [n, k], and all of them packed."""

    plain: list[list[Tensor]]
    packed: list[tuple[Weights, Weights]]


def pack(experts: int, channels: int, inner: int, *, int8: bool) -> Pack:
    shapes = ((inner, channels), (inner, channels), (channels, inner))
    draw = seeded(5)
    plain = [
        [torch.randint(-127, 128, shape, generator=draw).float() / (1 if int8 else 999) for shape in shapes]
        for _ in range(experts)
    ]

    def one(weight: Tensor, *, geglu: bool) -> Weights:
        if not int8:
            return pack_float(kernels(), weight[:, None], None, geglu=geglu)
        scale = torch.full((len(weight),), 1e-4)
        return pack_int8(kernels(), weight.to(torch.int8)[:, None], scale, None, geglu=geglu)

    return Pack(plain, [
        (one(torch.cat([up, gate]), geglu=True), one(down, geglu=False)) for gate, up, down in plain
    ])  # fmt: skip


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
def test_mixture(int8: bool, normalized: bool) -> None:
    """Against each row's experts in 64 bits; a row alone, and with either number of threads, has the same bits."""
    rows, channels, inner, top = 11, 20, 48, 2
    experts = pack(4, channels, inner, int8=int8)
    x, scores, residual = normal(1, rows, channels), 3 * normal(2, rows, 4), normal(3, rows, channels)
    scores[:, 3] = -20  # nobody takes the last
    scores[4] = torch.nan
    levels, inverse = (30 * x).round().clamp(-127, 127), torch.full((inner,), 3000.0)

    def run(chosen: slice, count: int) -> Tensor:
        p = Watched()
        a = (levels + 128).to(torch.uint8) if int8 else x
        out = p.mixture(
            a[chosen].contiguous(), scores[chosen].contiguous(), experts.packed, top=top, normalized=normalized,
            inverse=inverse if int8 else None, residual=residual[chosen].contiguous(), act="silu",
        )  # fmt: skip
        with threads(count):
            p.run()
        return out.clone()

    whole = run(slice(None), 1)
    weights, best = scores.nan_to_num(-1e30).double().softmax(-1).topk(top)
    weights = weights / weights.sum(-1, keepdim=True) if normalized else weights
    for row in range(rows):
        if row != 4:
            expected = residual[row].double()
            for weight, index in zip(weights[row], best[row].tolist(), strict=True):
                gate, up, down = (part.double() for part in experts.plain[index])
                a, unit = (levels[row].double(), 1e-4) if int8 else (x[row].double(), 1.0)
                hidden = torch.nn.functional.silu(gate @ a * unit) * (up @ a * unit)
                hidden = (hidden * 3000).round().clamp(-127, 127) if int8 else hidden
                expected = expected + weight * (down @ hidden * unit)
            torch.testing.assert_close(whole[row].double(), expected, rtol=1e-4, atol=2e-2 if int8 else 1e-4)
        if row % 4 == 0:
            assert torch.equal(run(slice(row, row + 1), 1 + row // 8)[0], whole[row])
    assert whole.isfinite().all()
    with pytest.raises(ValueError, match="mixture: 5 of 4 experts of 96 and 20 columns do not fit"):
        TokenProgram(kernels()).mixture(
            levels.to(torch.uint8) if int8 else x, scores, experts.packed, top=5, normalized=True,
            inverse=inverse if int8 else None, residual=residual, act="silu",
        )  # fmt: skip


def test_what_does_not_fit_is_refused() -> None:
    p, there = TokenProgram(kernels()), world([20], 2, 32, int8=False)
    places = TokenPositions(ints([19]), ints([0]), there.table)
    with pytest.raises(ValueError, match="3 heads of width 32 on 2"):
        p.paged_attention(normal(0, 1, 96), places, there.layer, heads=3, scale=1.0, inverse=None)
    with pytest.raises(ValueError, match="positions"):
        p.paged_attention(normal(0, 2, 128), places, there.layer, heads=4, scale=1.0, inverse=None)
    with pytest.raises(ValueError, match="pages are fp32, or int8 with scales"):
        whole = PagedLayer(there.layer.keys.to(torch.int8), there.layer.values.to(torch.int8))
        p.rotate(normal(0, 1, 256), normal(1, 32, 32), places, whole, heads=4)
    with pytest.raises(ValueError, match="qkv"):
        p.rotate(normal(0, 1, 255), normal(1, 32, 32), places, there.layer, heads=4)
    with pytest.raises(ValueError, match=r"q_norm: must be torch.float32 \[32\]"):
        p.rotate(normal(0, 1, 256), normal(1, 32, 32), places, there.layer, heads=4, q_norm=normal(2, 64))
    with pytest.raises(ValueError, match="weight"):
        p.rms_norm(normal(0, 1, 8), normal(1, 9), 1e-6, None)
    with pytest.raises(ValueError, match=r"row_scale: must be torch.float32 \[2, 8\]"):
        p.rms_norm(normal(0, 4, 8), normal(1, 8), 1e-6, None, row_scale=normal(2, 2, 9))
    with pytest.raises(ValueError, match="rms_norm: 4 rows are not those of 3 images"):
        p.rms_norm(normal(0, 4, 8), normal(1, 8), 1e-6, None, row_scale=normal(2, 3, 8))
    with pytest.raises(ValueError, match=r"residual: must be torch.float32 \[4, 8\]"):
        p.rms_norm(normal(0, 4, 8), normal(1, 8), 1e-6, None, residual=normal(2, 3, 8))
    with pytest.raises(ValueError, match=r"out: must be torch.uint8"):
        p.rms_norm(normal(0, 4, 8), normal(1, 8), 1e-6, torch.ones(8), out=normal(2, 4, 8))
