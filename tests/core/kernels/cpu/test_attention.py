"""Attention against torch's in 64 bits: any number of queries and keys, slices of wider tensors, hard and soft."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.kernels.cpu.program import Program
from tests.core.quant.stage import called, check_bytes, check_close, kernels, normal, threads


def exact(q: Tensor, k: Tensor, v: Tensor, images: int, heads: int, mask: Tensor | None = None) -> Tensor:
    """[images · tokens, heads · d] in 64 bits; `mask` [images, 1, tokens, keys] or one that broadcasts to it."""
    split = (x.double().view(images, -1, heads, q.shape[-1] // heads).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*split, attn_mask=mask).transpose(1, 2).reshape(q.shape)


def attention(p: Program, q: Tensor, k: Tensor, v: Tensor, images: int, heads: int, inverse: Tensor | None) -> Tensor:
    scale = 1 / math.sqrt(q.shape[-1] // heads)
    return p.attention(q, k, v, images=images, heads=heads, scale=scale, inverse=inverse)


@settings(max_examples=80)
@given(
    images=st.integers(1, 3), heads=st.integers(1, 3), d=st.sampled_from((16, 32, 48, 64)), tokens=st.integers(1, 40),
    keys=st.integers(1, 80), hardness=st.sampled_from((0.1, 1.0, 10.0)), floats=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention(
    images: int, heads: int, d: int, tokens: int, keys: int, hardness: float, floats: bool, seed: int
) -> None:
    width = heads * d
    q = normal(seed, images * tokens, width, scale=hardness)
    # Keys and values lie in something wider.
    k = normal(seed + 1, images * keys, 2 * width + 5)[:, 3 : 3 + width]
    v = normal(seed + 3, images * keys, width + 1)[:, 1:]
    inverse = normal(seed + 2, width, scale=40)
    found = called(lambda p: attention(p, q, k, v, images, heads, None if floats else inverse))
    wanted = exact(q, k, v, images, heads)
    if floats:
        check_close(found, wanted, relative=1e-6 * max(3, 2 * hardness))
    else:
        check_bytes(found, wanted * inverse.double())


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=4), padding=st.integers(0, 20), causal=st.booleans(),
    limited=st.booleans(), kv_heads=st.integers(1, 2), group=st.integers(1, 3), d=st.sampled_from((16, 48)),
    floats=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_masked_attention(
    lengths: list[int], padding: int, causal: bool, limited: bool, kv_heads: int, group: int, d: int, floats: bool,
    seed: int,
) -> None:  # fmt: skip
    """Lengths, causality and shared heads in any combination; keys behind a length are NaN."""
    images, tokens, heads = len(lengths), max(lengths) + padding, kv_heads * group
    q, inverse = normal(seed, images * tokens, heads * d), normal(seed + 2, heads * d, scale=40)
    k, v = (normal(seed + j, images * tokens, kv_heads * d + j)[:, j:].contiguous() for j in (1, 3))
    real = torch.arange(tokens) < torch.tensor(lengths)[:, None]  # [images, tokens]
    mask = torch.ones(images, 1, tokens, tokens, dtype=torch.bool)
    if limited:
        k.view(images, tokens, -1)[~real] = v.view(images, tokens, -1)[~real] = torch.nan
        mask &= real[:, None, None]
    if causal:
        mask = mask.tril()

    def write(p: Program) -> Tensor:
        return p.attention(
            q, k, v, images=images, heads=heads, kv_heads=kv_heads, scale=1 / math.sqrt(d), causal=causal,
            lengths=torch.tensor(lengths, dtype=torch.int32) if limited else None, inverse=None if floats else inverse,
        )  # fmt: skip

    found = called(write)
    wide = (x.nan_to_num().view(-1, kv_heads, d).repeat_interleave(group, 1).flatten(1) for x in (k, v))
    wanted = exact(q, *wide, images, heads, mask)
    if floats:
        check_close(found, wanted, relative=3e-6)
    else:
        check_bytes(found, wanted * inverse.double())


@pytest.mark.parametrize("causal", [False, True])
def test_an_images_bits_do_not_depend_on_its_padding(causal: bool) -> None:
    """Texts of different lengths padded to one are computed as each is alone."""
    lengths, tokens, heads, d = [1, 6, 16, 31, 33, 47, 50], 50, 4, 32
    images = len(lengths)
    q = normal(0, images * tokens, heads * d)
    k, v = normal(1, images * tokens, 2 * d), normal(2, images * tokens, 2 * d)
    options: dict[str, Any] = {"heads": heads, "kv_heads": 2, "scale": 0.2, "causal": causal, "inverse": None}

    def run(lengths: list[int]) -> Tensor:
        limits = torch.tensor(lengths, dtype=torch.int32)
        return called(lambda p: p.attention(q, k, v, images=images, lengths=limits, **options))

    together = run(lengths)
    for image, length in enumerate(lengths):
        rows = slice(image * tokens, image * tokens + length)
        alone = called(lambda p, r=rows: p.attention(q[r], k[r], v[r], images=1, **options))  # type: ignore[misc]
        assert torch.equal(alone, together[rows])
    with threads(2):
        assert torch.equal(run(lengths), together)
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


def test_lengths_are_read_when_a_program_runs() -> None:
    q, k, v, lengths = normal(0, 8, 32), normal(1, 20, 32), normal(2, 20, 32), torch.tensor([20], dtype=torch.int32)
    p = Program(kernels())
    found = p.attention(q, k, v, images=1, heads=2, scale=0.25, inverse=None, lengths=lengths)
    for length in (20, 3):
        lengths.fill_(length)
        p.run()
        check_close(found, exact(q, k[:length], v[:length], 1, 2), relative=3e-6)


def test_scores_beyond_what_exp_holds() -> None:
    """One key takes all: differences of scores far beyond ±88."""
    q, k, v = normal(0, 20, 32, scale=300), normal(1, 33, 32, scale=30), normal(2, 33, 32)
    found = called(lambda p: attention(p, q, k, v, 1, 2, None))
    check_close(found, exact(q, k, v, 1, 2), relative=1e-4)


@pytest.mark.parametrize("keys", [1, 15, 17, 40])
def test_scores_that_are_all_far_below_nought(keys: int) -> None:
    """What pads the keys to whole vectors scores nought, and may not be taken for the largest."""
    q, k, v = torch.full((7, 32), 10.0), normal(1, keys, 32) - 20, normal(2, keys, 32)
    found = called(lambda p: attention(p, q, k, v, 1, 1, None))
    check_close(found, exact(q, k, v, 1, 1), relative=1e-4)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_stays_nan(which: str) -> None:
    made = {"q": normal(0, 12, 32), "k": normal(1, 20, 32), "v": normal(2, 20, 32)}
    made[which][3, 5] = torch.nan
    found = called(lambda p: attention(p, made["q"], made["k"], made["v"], 2, 2, None))
    wanted = exact(made["q"], made["k"], made["v"], 2, 2)
    assert torch.equal(found.isnan(), wanted.isnan())
    check_close(found.nan_to_num(0), wanted.nan_to_num(0))


def test_an_images_bits_depend_neither_on_its_companions_nor_its_place_nor_threads() -> None:
    q, k, v = normal(0, 5 * 20, 48), normal(1, 5 * 37, 48), normal(2, 5 * 37, 48)
    together = called(lambda p: attention(p, q, k, v, 5, 3, None))
    for image in range(5):
        mine, read = slice(20 * image, 20 * image + 20), slice(37 * image, 37 * image + 37)
        alone = called(lambda p, m=mine, r=read: attention(p, q[m], k[r], v[r], 1, 3, None))  # type: ignore[misc]
        assert torch.equal(alone, together[mine])
    with threads(2):
        assert torch.equal(called(lambda p: attention(p, q, k, v, 5, 3, None)), together)


@pytest.mark.parametrize(
    ("shapes", "heads", "said"),
    [
        (((6, 24), (6, 24), (6, 24)), 1, "heads of width 24 do not fit the kernels: it must be a multiple of 16"),
        (((6, 40), (6, 40), (6, 40)), 2, "heads of width 20"),
        (((6, 33), (6, 33), (6, 33)), 2, "heads of width 16"),
        (((6, 32), (5, 32), (5, 32)), 2, "6 queries and 5 keys are not those of 2 images"),
        (((6, 32), (6, 32), (4, 32)), 2, r"v: must be torch.float32 \[6, 32\]"),
        (((6, 32), (6, 16), (6, 16)), 2, r"k: must be torch.float32 \[6, 32\]"),
    ],
)
def test_what_does_not_fit_is_refused(shapes: Any, heads: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attention(Program(kernels()), *(torch.zeros(shape) for shape in shapes), 2, heads, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_heads": 3}, "4 heads do not share 3 heads of keys evenly"),
        ({"kv_heads": 2}, r"k: must be torch.float32 \[8, 32\] on the CPU, not torch.float32 \[8, 64\]"),
        ({"causal": True}, "6 queries on 8 keys cannot be causal"),
        ({"lengths": torch.ones(2)}, r"lengths: must be torch.int32 \[2\]"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, r"lengths: must be torch.int32 \[2\]"),
    ],
)
def test_masks_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    q, k = torch.zeros(6, 64), torch.zeros(8, 64)
    with pytest.raises(ValueError, match=said):
        Program(kernels()).attention(q, k, k, images=2, heads=4, scale=1.0, inverse=None, **options)
