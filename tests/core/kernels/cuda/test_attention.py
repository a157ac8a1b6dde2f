"""Attention with lengths, causality and fewer heads of keys, against its plain twin: on a GPU, else interpreted."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.kernels.cuda.device import DTYPE, E4M3, EIGHT, INT8, draw, ints, normal

# isort: split
from core.kernels.cuda.attention import attention, attention_reference, variant_for
from core.kernels.cuda.attention_source import source
from tests.core.quant.stage import Seed


def drawn(seed: int, images: int, tokens: int, heads: int, kv_heads: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as slices of one fused projection."""
    generator = draw(seed)
    fused = normal(generator, images, tokens, heads + 2 * kv_heads, d)
    fused[:, :, :heads] *= 3
    q, k, v = fused.to(DTYPE).split([heads, kv_heads, kv_heads], dim=2)
    return q, k, v


def near(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    a, b = found.float(), wanted.float()
    assert torch.isfinite(a).all()
    limit = {torch.float32: 1e-5, torch.bfloat16: 0.01, INT8: 0.01, E4M3: 0.02}[found.dtype]
    assert (a - b).norm() <= limit * b.norm(), (a - b).norm() / b.norm()


def lengths_of(*counts: int) -> Tensor:
    return ints(counts)


@settings(max_examples=20)
@given(...)
def test_attention(
    counts: Annotated[list[int], st.lists(st.integers(0, 150), min_size=1, max_size=3)],
    more: Annotated[int, st.integers(0, 70)],
    heads: Annotated[tuple[int, int], st.sampled_from([(2, 2), (4, 2), (3, 1)])],
    d: Literal[8, 24, 64, 128], causal: bool, limited: bool,
    to: Annotated[torch.dtype, st.sampled_from([DTYPE, *EIGHT])], one: bool, seed: Seed,
) -> None:  # fmt: skip
    """With lengths and without."""
    tokens = max(1, max(counts) + more)
    q, k, v = drawn(seed, len(counts), tokens, *heads, d)
    generator = draw(seed)
    width = heads[0] * d
    inverse = 30 + 5 * normal(generator, 1 if one else width) if to in EIGHT else None
    options: dict[str, Any] = {"lengths": lengths_of(*counts) if limited else None, "causal": causal}
    found = attention(q, k, v, inverse, to, **options)
    near(found, attention_reference(q, k, v, inverse, to, **options))
    for image, count in enumerate(counts):
        assert not limited or not found[image, count:].float().any()


@pytest.mark.parametrize(("d", "causal"), [(32, False), (32, True), (64, True), (128, False)])
def test_an_images_bits_depend_neither_on_padding_nor_on_other_images(d: int, causal: bool) -> None:
    counts = (45, 160, 100)
    q, k, v = drawn(3, 3, 200, 2, 2, d)
    for x, count in itertools.product((q, k, v), enumerate(counts)):
        x[count[0], count[1] :] = 1000.0  # whatever earlier layers left there
    found = attention(q, k, v, None, DTYPE, lengths=lengths_of(*counts), causal=causal)
    for image, count in enumerate(counts):
        for tokens in (count, count + 30):
            alone = (x[image : image + 1, :tokens].clone() for x in (q, k, v))
            if tokens > count:
                alone = (torch.cat([x[:, :count], torch.zeros_like(x[:, count:])], dim=1) for x in alone)
            made = attention(*alone, None, DTYPE, lengths=lengths_of(count), causal=causal)
            assert torch.equal(made[0, :count], found[image, :count])


def test_shapes_that_disagree_are_refused() -> None:
    q, k, v = drawn(5, 2, 10, 2, 2, 16)
    for some in ((q[:, :, :1], k, v), (q, k, v[:, :5]), (q, k[..., :8], v[..., :8])):
        with pytest.raises(ValueError, match="queries"):
            attention(*some, None, DTYPE)
    for options in ({"causal": True}, {"lengths": lengths_of(3, 5)}):
        with pytest.raises(ValueError, match="self-attention"):
            attention(q[:, :5], k, v, None, DTYPE, **options)
    for lengths in (lengths_of(3), lengths_of(3, 5).long()):
        with pytest.raises(ValueError, match="for 2 images"):
            attention(q, k, v, None, DTYPE, lengths=lengths)


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("lengths", [False, True])
def test_hoppers_default_fits_and_is_one_for_all_lengths(head: int, lengths: bool) -> None:
    made = [variant_for(n, n, "int8", head, lengths=lengths) for n in (4224, 70)]
    for variant in made:
        assert variant.shared_bytes <= 227 * 1024
        assert variant.name in source(variant)
    assert made[0] == made[1] or not lengths


COMPILE = """
from core.kernels.cuda.flash_attention import _flash, shapes

types = dict.fromkeys(["q", "k", "v"], "*bf16") | dict.fromkeys(["queries", "keys"], "i32") | {"scale": "fp32"}
types |= {name: "i32:16" for name in _flash.arg_names if name[:2] in ("q_", "k_", "v_")}
for d, causal, out in ((64, True, "bf16"), (128, False, "i8"), (128, True, "fp8e4nv"), (96, False, "bf16")):
    rows, block, warps, stages = shapes[128 if d == 64 else 256]
    given = {"lengths": "*i32", "out": f"*{out}"} | ({} if out == "bf16" else {"inverse": "*fp32"})
    shape = dict(H=32, G=4, D=d, STEP=1, CAUSAL=causal, INT8=out == "i8", WIDTH=64 if d == 64 else 128, M=rows)
    shape |= {"BLOCK": block}
    made(_flash, types | given, shape, "wgmma.mma_async", stack=32, num_warps=warps, num_stages=stages)
"""
