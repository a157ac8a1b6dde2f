"""Each operation on each lowering: the CPU's programs and the fused layers compute what torch's modules compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.ops.ops import Activation, Walk
from tests.core.ops.stage import between, conv, eight, inverse, linear, lowerings, norm, point, run
from tests.core.quant.stage import check_close, normal, seeded

few = settings(max_examples=40)
seeds = st.integers(0, 999)
fours = st.integers(1, 8)  # times four channels, which INT8 needs
MAP = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6))


@dataclass
class Flips:
    """How far a result may be off where inputs lie on the edge of two levels: by so many steps of a layer's input."""

    layer: Any
    count: int = 3

    @property
    def room(self) -> float:
        weight, scale = getattr(self.layer, "weight", None), getattr(self.layer, "scale", None)
        if scale is None:
            return 0.0
        return self.count * float((weight.float().flatten(1).abs().amax(1) * scale).max())


def check(
    walk: Walk,
    layers: tuple[Any, ...],
    *x: Tensor,
    flips: Flips | None = None,
    only: tuple[str, ...] = ("cpu", "cuda"),
    relative: float = 1e-5,
) -> None:
    """These lowerings agree with torch."""
    found = {name: run(lowering, walk, *x) for name, lowering in lowerings(*layers).items() if name in ("torch", *only)}
    for name, results in found.items():
        assert len(results) == len(found["torch"])
        for result, wanted in zip(results, found["torch"], strict=True):
            assert result.dtype == torch.float32, name
            check_close(result, wanted, relative=relative, least=1e-5 + (flips.room if flips else 0.0))


@few
@given(
    MAP, fours, st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=3), st.booleans(),
    st.booleans(), st.sampled_from(["", "silu"]), st.booleans(), st.integers(2, 4), seeds,
)  # fmt: skip
def test_linear(
    sides: tuple[int, int, int], four: int, sizes: list[tuple[int, bool]], int8: bool, points: bool, act: str,
    adds: bool, dimensions: int, seed: int,
) -> None:  # fmt: skip
    """Of maps, tokens and vectors: linear layers and 1×1 convolutions, one or several, with biases or without."""
    channels, count = 4 * four, sum(n for n, _ in sizes)
    points = points and dimensions == 4
    layers: list[Any] = [
        point(seed + i, channels, n) if points else linear(seed + i, channels, n, bias=bias)
        for i, (n, bias) in enumerate(sizes)
    ]
    by, shape = inverse(seed, channels), sides[: dimensions - 1]
    if int8:
        layers = [eight(layer, by) for layer in layers]
    x = (
        (between(seed, by, *shape, channels), normal(seed, *shape, count))
        if adds
        else (between(seed, by, *shape, channels),)
    )

    def walk(ops: Any, x: Any, residual: Any = None) -> Any:
        return ops.linear(x, *layers, residual=residual, **({"act": act} if act else {}))

    check(walk, tuple(layers), *x)


@few
@given(st.lists(st.booleans(), min_size=1, max_size=4), st.integers(1, 9), fours, st.integers(1, 40), st.booleans(),
       st.booleans(), st.booleans(), seeds)  # fmt: skip
def test_linear_within_the_range_of_its_scales(
    named: list[bool], tokens: int, four: int, n: int, bias: bool, adds: bool, int8: bool, seed: int
) -> None:
    """Of named images tokens beyond the range are not cut off; those of others are, as in a layer that knows none."""
    channels = 4 * four
    by = inverse(seed, channels)
    plain: Any = linear(seed, channels, n, bias=bias)
    weight, own = plain.weight.clone(), plain.bias
    layer = eight(plain, by) if int8 else plain
    shape = len(named), tokens
    x = between(seed, by, *shape, channels) * (1 + 3 * torch.rand(*shape, 1, generator=seeded(seed)))
    within, residual = torch.tensor(named, dtype=torch.int32), normal(seed, *shape, n)
    last = residual if adds else torch.zeros_like(residual)

    def walk(ops: Any, x: Any, residual: Any, within: Any) -> Any:
        return ops.linear(x, layer, residual=residual, within=within)

    def without(ops: Any, x: Any, residual: Any) -> Any:
        return ops.linear(x, layer, residual=residual)

    exact = x.double() @ weight.double().T + (0 if own is None else own) + last
    room = 1e-4 * exact.abs().amax() + 1e-4
    if int8:  # half a level of each input, and of each weight
        most = (x * by).abs().amax(-1, keepdim=True).clamp(min=127) / 127
        levels = 0.51 * (most / by).sum(-1, keepdim=True) * weight.abs().amax()
        room = room + levels + 0.51 * x.abs().sum(-1, keepdim=True) * layer.scale.amax() / by.amin() * by.amax()
    for name, lowering in lowerings(layer).items():
        (found,), (cut,) = run(lowering, walk, x, last, within), run(lowering, without, x, last)
        assert ((found - exact).abs() <= room)[within != 0].all(), name
        if name == "cpu":
            assert torch.equal(found[within == 0], cut[within == 0])
        else:
            assert torch.allclose(found[within == 0], cut[within == 0], rtol=1e-5, atol=1e-5)


@few
@given(
    MAP, fours, st.integers(1, 40), st.booleans(), st.sampled_from([1, 2]), st.sampled_from([0, 1]), st.booleans(),
    st.booleans(), st.sampled_from([None, "relu", "silu"]), seeds,
)  # fmt: skip
def test_conv(
    sides: tuple[int, int, int], four: int, n: int, int8: bool, stride: int, padding: int, biased: bool, adds: bool,
    act: Activation | None, seed: int,
) -> None:  # fmt: skip
    """With a bias of each image, which is a part of several layers' side by side, a residual and an activation."""
    channels, (images, height, width) = 4 * four, sides
    if not padding:
        height, width = height + 1, width + 1
    layer: Any = conv(seed, channels, n, stride=stride, padding=padding)
    by = inverse(seed, channels)
    layer = eight(layer, by) if int8 else layer
    before, own, behind = linear(seed, 8, 5), linear(seed + 1, 8, n), linear(seed + 2, 8, 3)
    x, emb = between(seed, by, images, height, width, channels), normal(seed, images, 8)
    high, wide = ((side + padding - 2) // stride + 1 for side in (height, width))
    residual = normal(seed, images, high, wide, n)

    def walk(ops: Any, x: Any, emb: Any, residual: Any) -> Any:
        bias = ops.columns(ops.biases(emb, before, own, behind), 5, n) if biased else None
        return ops.conv(x, layer, bias=bias, act=act, residual=residual if adds else None)

    everything = layer, before, own, behind
    if padding or not int8:
        check(walk, everything, x, emb, residual)
    else:
        check(walk, everything, x, emb, residual, only=("cpu",))
        with pytest.raises(ValueError, match="8-bit kernels pad convolutions on all sides"):
            run(lowerings(*everything)["cuda"], walk, x, emb, residual)


@few
@given(MAP, fours, seeds)
def test_convolutions_in_8_bits_around_an_activation(sides: tuple[int, int, int], four: int, seed: int) -> None:
    """It acts before the result is rounded to the next layer's levels."""
    by, next_by = inverse(seed, 4 * four), inverse(seed + 1, 8)
    first = eight(conv(seed, 4 * four, 8), by)
    second = eight(conv(seed + 1, 8, 5), next_by)

    def walk(ops: Any, x: Any) -> Any:
        return ops.conv(ops.conv(x, first, act="relu"), second)

    check(walk, (first, second), between(seed, by, *sides, 4 * four), flips=Flips(second))


@few
@given(MAP, fours, st.integers(1, 40), st.booleans(), st.tuples(*2 * [st.integers(0, 1)]), seeds)
def test_upsample(
    sides: tuple[int, int, int], four: int, n: int, int8: bool, cut: tuple[int, int], seed: int
) -> None:  # fmt: skip
    """Also to odd sides, of maps that were halved."""
    by = inverse(seed, 4 * four)
    layer: Any = conv(seed, 4 * four, n)
    layer = eight(layer, by) if int8 else layer
    x = between(seed, by, *sides, 4 * four)
    like = normal(seed, sides[0], 2 * sides[1] - cut[0], 2 * sides[2] - cut[1], 4)

    def walk(ops: Any, x: Any, like: Any) -> Any:
        return ops.upsample(x, layer, target=like)

    check(walk, (layer,), x, like, only=("cpu",) if int8 and cut == (0, 0) else ("cpu", "cuda"))
    if int8 and cut == (0, 0):  # its summed taps are rounded once more
        (wanted,), (found,) = (run(lowerings(layer)[name], walk, x, like) for name in ("torch", "cuda"))
        assert found.shape == wanted.shape and (found - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("name", ["torch", "cpu", "cuda"])
@pytest.mark.parametrize("sides", [(4, 4), (7, 4), (6, 2)])
def test_no_map_is_stretched_to_sides_that_are_not_twice_its_own(name: str, sides: tuple[int, int]) -> None:
    layer, x, like = conv(0, 4, 6), normal(0, 2, 3, 2, 4), normal(1, 2, *sides, 4)

    def walk(ops: Any, x: Any, like: Any) -> Any:
        return ops.upsample(x, layer, target=like)

    with pytest.raises(ValueError, match=f"a map of 3×2 does not double to {sides[0]}×{sides[1]}"):
        run(lowerings(layer)[name], walk, x, like)


@few
@given(
    MAP, fours, st.integers(1, 3), st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["gelu", "silu"]), seeds
)
def test_gated(
    sides: tuple[int, int, int], four: int, sixteens: int, int8: bool, then_int8: bool, apart: bool, act: str, seed: int
) -> None:
    """By one layer or by two, for a layer in floats or in INT8."""
    channels, wide = 4 * four, 16 * sixteens
    by, then_by = inverse(seed, channels), inverse(seed + 1, wide)
    layers: list[Any] = [linear(seed, channels, wide), linear(seed + 1, channels, wide)]
    layers = layers if apart else [linear(seed, channels, 2 * wide)]
    then: Any = linear(seed + 2, wide, 12)
    layers = [eight(layer, by) for layer in layers] if int8 else layers
    then = eight(then, then_by) if then_int8 else then

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(ops.gated(x, *layers, act=act, to=then), then)

    only = ("cpu", "cuda") if act == "gelu" else ("cpu",)
    check(walk, (*layers, then), between(seed, by, *sides, channels), flips=Flips(then), only=only)


@few
@given(MAP, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans(), st.booleans(), seeds)
def test_group_norm(
    sides: tuple[int, int, int], first: int, second: int, pair: bool, silu: bool, int8: bool, convs: bool, seed: int
) -> None:
    """Of one map, or of two as one, for a linear layer or a convolution."""
    channels = 8 * (first + second if pair else first)
    own = norm(seed, channels, groups=4)
    then: Any = conv(seed, channels, 10) if convs else linear(seed, channels, 10)
    then = eight(then, inverse(seed, channels)) if int8 else then
    x, y = normal(seed, *sides, 8 * first, scale=3), normal(seed + 1, *sides, 8 * second)

    def walk(ops: Any, x: Any, y: Any) -> Any:
        h = ops.group_norm(ops.cat(x, y) if pair else x, own, silu=silu, to=(then,))
        return ops.conv(h, then) if convs else ops.linear(h, then)

    # A group of few values that are nearly equal makes rounding large.
    check(walk, (own, then), x, y, flips=Flips(then), relative=1e-4)


@few
@given(MAP, fours, st.booleans(), st.integers(1, 3), seeds)
def test_layer_norm(sides: tuple[int, int, int], four: int, int8: bool, count: int, seed: int) -> None:
    """For one or several layers side by side."""
    channels, own = 4 * four, norm(seed, 4 * four)
    layers: list[Any] = [linear(seed + i, channels, 6 + i) for i in range(count)]
    layers = [eight(layer, inverse(seed, channels)) for layer in layers] if int8 else layers

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(ops.layer_norm(x, own, to=layers), *layers)

    check(walk, (own, *layers), normal(seed, *sides, channels, scale=3), flips=Flips(layers[0], 6))


@few
@given(
    st.integers(1, 3), st.integers(1, 7), st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3),
    st.booleans(), st.booleans(), seeds,
)  # fmt: skip
def test_attend(
    images: int, height: int, width: int, tokens: int, heads: int, sixteens: int, itself: bool, int8: bool, seed: int
) -> None:
    """Of a map's pixels, on themselves as slices of one product or on other tokens, for a layer that reads it."""
    channels = 16 * sixteens * heads
    layer = linear(seed, 8, 3 * channels)
    then: Any = linear(seed + 1, channels, 12)
    then = eight(then, inverse(seed, channels)) if int8 else then
    x, text = normal(seed, images, height, width, 8), normal(seed, images, tokens, 2 * channels)

    def walk(ops: Any, x: Any, text: Any) -> Any:
        qkv = ops.linear(x, layer)
        q, k, v = (ops.columns(qkv, at * channels, channels) for at in range(3))
        if not itself:
            k, v = ops.columns(text, 0, channels), ops.columns(text, channels, channels)
        return ops.linear(ops.attend(q, k, v, heads=heads, to=(then,)), then)

    check(walk, (layer, then), x, text, flips=Flips(then))


@few
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 20), seeds)
def test_what_is_concatenated(images: int, height: int, width: int, first: int, second: int, seed: int) -> None:
    """In slots that lie side by side or not, and read by a norm, a 1×1 convolution and as a result's part."""
    first, second = 4 * first, 4 * second
    layers = conv(seed, 4, first), point(seed + 1, 4, second), point(seed + 2, first + second, 7)
    own = norm(seed, first + second, groups=4)
    then = conv(seed + 3, first + second, 5)

    def walk(joint: bool) -> Callable[..., Any]:
        def walked(ops: Any, x: Any, skip: Any) -> Any:
            left, right = ops.joint(x, (first, second), 0) if joint else (None, None)
            h = ops.conv(x, layers[0], out=left)
            both = ops.cat(h, ops.place(skip, right))
            normed = ops.conv(ops.group_norm(both, own, silu=True, to=(then,)), then)
            other = ops.linear(x, layers[1], out=right)
            return normed, ops.linear(ops.cat(h, other), layers[2]), h

        return walked

    x, skip = normal(seed, images, height, width, 4), normal(seed + 1, images, height, width, second)
    for joint in (False, True):
        check(walk(joint), (*layers, own, then), x, skip)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_what_reads_one_array_must_be_quantized_alike(name: str) -> None:
    """Whether it was made for all who read it, or for one of them alone."""
    a: Any = eight(linear(0, 8, 6), inverse(0, 8))
    own, x = norm(0, 8), normal(0, 2, 3, 8)
    for b in (linear(1, 8, 6), eight(linear(1, 8, 6), inverse(1, 8))):

        def both(ops: Any, x: Any, b: Any = b) -> Any:
            h = ops.layer_norm(x, own, to=(a, b))
            return ops.linear(h, a), ops.linear(h, b)

        def one(ops: Any, x: Any, b: Any = b) -> Any:
            h = ops.layer_norm(x, own, to=(a,))
            return ops.linear(h, a), ops.linear(h, b)

        with pytest.raises(ValueError, match=r"must all be quantized|quantized in different ways"):
            run(lowerings(a, b, own)[name], both, x)
        if name == "cpu":  # on a GPU arrays are tensors, which do not know for whom they were made
            with pytest.raises(ValueError, match=r"^layer 1: 0 reads the same input, by other scales$|a: must be"):
                run(lowerings(a, b, own)[name], one, x)
