"""Attention against torch's in 64 bits: any number of queries and keys, slices of wider tensors, hard and soft."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.kernels.cpu.program import Program
from tests.core.quant.stage import Few, Many, Seed, called, check, kernels, normal, threads


def exact(
    q: Tensor, k: Tensor, v: Tensor, images: int, heads: int, *, kv_heads: int = 0, mask: Tensor | None = None
) -> Tensor:
    """[images · tokens, heads · d] in 64 bits; `mask` broadcasts to [images, heads, tokens, keys]."""

    def split(x: Tensor, count: int) -> Tensor:
        return x.double().view(images, -1, count, q.shape[1] // heads).transpose(1, 2)

    kv = (split(x, kv_heads or heads) for x in (k, v))
    made = F.scaled_dot_product_attention(split(q, heads), *kv, attn_mask=mask, enable_gqa=True)
    return made.transpose(1, 2).reshape(q.shape)


@settings(max_examples=160)
@given(...)
def test_attention(
    lengths: Annotated[list[int], st.lists(st.integers(1, 45), min_size=1, max_size=4)],
    more: Annotated[int, st.integers(0, 40)], tokens: Many, limited: bool, causal: bool, kv_heads: Few, group: Few,
    d: Literal[16, 32, 48, 64],
    hardness: Annotated[float, st.sampled_from((0.1, 1.0, 10.0, 1e4))], far: bool, floats: bool, seed: Seed,
) -> None:  # fmt: skip
    """Lengths, causality and shared heads in any combination; keys and values lie in something wider, NaN behind a
    length. At the greatest hardness one key takes all. Scores `far` below nought are below those of padded vectors.
    """
    images, heads, keys, width = len(lengths), kv_heads * group, max(lengths) + more, kv_heads * d
    tokens = keys if causal else tokens
    floats = floats or far or hardness > 10  # such sums are rounded too far for bytes
    q, inverse = normal(seed, images * tokens, heads * d, scale=hardness), normal(seed + 2, heads * d, scale=40)
    k = normal(seed + 1, images * keys, 2 * width + 5)[:, 3 : 3 + width]
    v = normal(seed + 3, images * keys, width + 1)[:, 1:]
    if far:
        q.abs_(), k.sub_(20)
    real = torch.ones(images, keys, dtype=torch.bool)
    if limited:
        real = torch.arange(keys) < torch.tensor(lengths)[:, None]
    mask = real[:, None, None].expand(-1, -1, tokens, -1)
    wanted = exact(q, k, v, images, heads, kv_heads=kv_heads, mask=mask.tril() if causal else mask)
    for x in (k, v):
        x[~real.flatten()] = torch.nan

    def write(p: Program) -> Tensor:
        return p.attention(
            q, k, v, images=images, heads=heads, kv_heads=kv_heads, scale=1 / math.sqrt(d), causal=causal,
            lengths=torch.tensor(lengths, dtype=torch.int32) if limited else None, inverse=None if floats else inverse,
        )  # fmt: skip

    relative = 1e-6 * max(3, 2 * hardness) * (40 if far else 1)
    check(called(write), wanted, None if floats else inverse, relative=relative)


@pytest.mark.parametrize("causal", [False, True])
def test_an_images_bits_depend_neither_on_its_padding_nor_companions_nor_place_nor_threads(causal: bool) -> None:
    """Texts of different lengths padded to one are computed as each is alone."""
    lengths, tokens, heads, d = [1, 6, 16, 31, 33, 47, 50], 50, 4, 32
    images = len(lengths)
    q = normal(0, images * tokens, heads * d)
    k, v = normal(1, images * tokens, 2 * d), normal(2, images * tokens, 2 * d)
    options: dict[str, Any] = {"heads": heads, "kv_heads": 2, "scale": 0.2, "causal": causal, "inverse": None}

    def run(lengths: list[int] | None) -> Tensor:
        limits = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        return called(lambda p: p.attention(q, k, v, images=images, lengths=limits, **options))

    together = run(lengths)
    for image, length in enumerate(lengths):
        rows = slice(image * tokens, image * tokens + length)
        alone = called(lambda p, r=rows: p.attention(q[r], k[r], v[r], images=1, **options))  # type: ignore[misc]
        assert torch.equal(alone, together[rows])
    with threads(2):
        assert torch.equal(run(lengths), together)
    assert torch.equal(run(None), run([tokens] * images))
    assert run([0, -1, 99, 31, 33, 47, 50]).isfinite().all()  # lengths are clamped to what there is


def test_a_causal_rows_bits_do_not_depend_on_later_tokens() -> None:
    q, k, v = normal(0, 40, 48), normal(1, 40, 48), normal(2, 40, 48)
    options: dict[str, Any] = {"images": 1, "heads": 1, "scale": 0.2, "causal": True, "inverse": None}
    whole = called(lambda p: p.attention(q, k, v, **options))
    for count in (1, 5, 6, 7, 16, 39):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[count:] = torch.inf
        assert torch.equal(called(lambda p: p.attention(*later, **options))[:count], whole[:count])  # noqa: B023
        assert torch.equal(called(lambda p: p.attention(q[:count], k[:count], v[:count], **options)), whole[:count])  # noqa: B023


@pytest.mark.parametrize("which", range(3))
def test_nan_stays_nan(which: int) -> None:
    given_ = normal(0, 12, 32), normal(1, 20, 32), normal(2, 20, 32)
    given_[which][3, 5] = torch.nan
    found = called(lambda p: p.attention(*given_, images=2, heads=2, scale=0.25, inverse=None))
    wanted = exact(*given_, 2, 2)
    assert torch.equal(found.isnan(), wanted.isnan())
    check(found.nan_to_num(0), wanted.nan_to_num(0))


@pytest.mark.parametrize(
    ("shapes", "options", "said"),
    [
        ([(6, 24)] * 3, {"heads": 1}, "heads of width 24 do not fit the kernels: it must be a multiple of 16"),
        ([(6, 33)] * 3, {}, "heads of width 16"),
        ([(6, 32), (5, 32), (5, 32)], {}, "6 queries and 5 keys are not those of 2 images"),
        ([(6, 32), (6, 32), (4, 32)], {}, r"v: must be torch.float32 \[6, 32\]"),
        ([(6, 32), (6, 16), (6, 16)], {}, r"k: must be torch.float32 \[6, 32\]"),
        ([(6, 32), (8, 32), (8, 32)], {"causal": True}, "6 queries on 8 keys cannot be causal"),
        ([(6, 64)] * 3, {"heads": 4, "kv_heads": 3}, "4 heads do not share 3 heads of keys evenly"),
        (
            [(6, 64)] * 3,
            {"heads": 4, "kv_heads": 2},
            r"k: must be torch.float32 \[6, 32\] .* not .* \[6, 64\]",
        ),
        ([(6, 32)] * 3, {"lengths": torch.ones(2)}, r"lengths: must be torch.int32 \[2\]"),
        ([(6, 32)] * 3, {"lengths": torch.ones(3, dtype=torch.int32)}, r"lengths: must be torch.int32 \[2\]"),
    ],
)
def test_what_does_not_fit_is_refused(shapes: list[tuple[int, int]], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Program(kernels()).attention(
            *map(torch.zeros, shapes), images=2, scale=1.0, inverse=None, **{"heads": 2, **options}
        )
