"""Each operation on each lowering: the CPU's programs and the fused layers compute what torch's modules compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.ops.cuda import CudaOps
from core.ops.ops import Walk
from tests.core.ops.stage import between, conv, eight, inverse, linear, lowerings, norm, point, run
from tests.core.quant.stage import Few, Many, Seed, Several, check_close, normal, seeded

few = settings(max_examples=40)
Sizes = Annotated[
    list[tuple[int, bool]], st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=3)
]


@dataclass(frozen=True)
class Drawn:
    """A map, and whether the layer that reads it is in INT8, which needs times four channels."""

    images: Few
    height: Several
    width: Several
    fours: Several
    int8: bool
    seed: Seed

    @property
    def channels(self) -> int:
        return 4 * self.fours

    @property
    def sides(self) -> tuple[int, int, int]:
        return self.images, self.height, self.width

    def layer(self, made: Any) -> Any:
        """In 8 bits or as it is."""
        return eight(made, inverse(self.seed, made.weight.shape[1])) if self.int8 else made

    def input(self, *sides: int) -> Tensor:
        return between(self.seed, inverse(self.seed, self.channels), *(sides or self.sides), self.channels)


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
    layers: Sequence[Any],
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
@given(...)
def test_linear(
    of: Drawn, sizes: Sizes, points: bool, act: Literal["silu"] | None, adds: bool, dimensions: Few
) -> None:
    """Of maps, tokens and vectors: linear layers and 1×1 convolutions, one or several, with biases or without."""
    layers = [
        of.layer(
            point(of.seed + i, of.channels, n)
            if points and dimensions == 3
            else linear(of.seed + i, of.channels, n, bias=bias)
        )
        for i, (n, bias) in enumerate(sizes)
    ]
    sides = of.sides[:dimensions]
    residual = [normal(of.seed, *sides, sum(n for n, _ in sizes))] if adds else []

    def walk(ops: Any, x: Any, residual: Any = None) -> Any:
        return ops.linear(x, *layers, residual=residual, act=act)

    check(walk, layers, of.input(*sides), *residual)


@few
@given(...)
def test_linear_within_the_range_of_its_scales(
    of: Drawn, named: Annotated[list[bool], st.lists(st.booleans(), min_size=1, max_size=4)], n: Many, bias: bool,
    adds: bool,
) -> None:  # fmt: skip
    """Of named images tokens beyond the range are not cut off; those of others are, as in a layer that knows none."""
    by, plain = inverse(of.seed, of.channels), linear(of.seed, of.channels, n, bias=bias)
    weight, own, layer = plain.weight.clone(), plain.bias, of.layer(plain)
    shape = len(named), of.width
    x = of.input(*shape) * (1 + 3 * torch.rand(*shape, 1, generator=seeded(of.seed)))
    within, residual = torch.tensor(named, dtype=torch.int32), normal(of.seed, *shape, n) * adds

    def walk(ops: Any, x: Any, residual: Any, within: Any = None) -> Any:
        return ops.linear(x, layer, residual=residual, within=within)

    exact = x.double() @ weight.double().T + (0 if own is None else own) + residual
    room = 1e-4 * exact.abs().amax() + 1e-4
    if of.int8:  # half a level of each input, and of each weight
        most = (x * by).abs().amax(-1, keepdim=True).clamp(min=127) / 127
        levels = 0.51 * (most / by).sum(-1, keepdim=True) * weight.abs().amax()
        room = room + levels + 0.51 * x.abs().sum(-1, keepdim=True) * layer.scale.amax() / by.amin() * by.amax()
    for name, lowering in lowerings(layer).items():
        (found,), (cut,) = run(lowering, walk, x, residual, within), run(lowering, walk, x, residual)
        assert ((found - exact).abs() <= room)[within != 0].all(), name
        slack = 0 if name == "cpu" else 1e-5
        torch.testing.assert_close(found[within == 0], cut[within == 0], rtol=slack, atol=slack)


@pytest.mark.parametrize("beyond", [1.0, 3.0, 40.0])
def test_a_bias_is_added_once_however_far_tokens_are_beyond_the_range(beyond: float) -> None:
    """Weights are next to nothing, and so the result is the bias."""
    by, plain = inverse(0, 8), linear(0, 8, 4)
    plain.weight.mul_(1e-6)
    assert plain.bias is not None
    plain.bias.copy_(torch.tensor([5.0, -3.0, 0.5, 100.0]))
    expected, layer = plain.bias.expand(2, 3, 4).clone(), eight(plain, by)
    x, within = beyond * 127 / by * torch.ones(2, 3, 8), torch.ones(2, dtype=torch.int32)

    def walk(ops: Any, x: Any, within: Any) -> Any:
        return ops.linear(x, layer, within=within)

    for name, lowering in lowerings(layer).items():
        (actual,) = run(lowering, walk, x, within)
        torch.testing.assert_close(actual.float(), expected, rtol=1e-2, atol=1e-2, msg=name)


@few
@given(...)
def test_conv(
    of: Drawn, n: Many, stride: Literal[1, 2],
    padding: Literal[0, 1], biased: bool, adds: bool,
    act: Literal["relu", "silu"] | None,
) -> None:  # fmt: skip
    """With a bias of each image, which is a part of several layers' side by side, a residual and an activation."""
    images, height, width = of.images, of.height + 1 - padding, of.width + 1 - padding
    layer = of.layer(conv(of.seed, of.channels, n, stride=stride, padding=padding))
    before, own, behind = linear(of.seed, 8, 5), linear(of.seed + 1, 8, n), linear(of.seed + 2, 8, 3)
    high, wide = ((side + padding - 2) // stride + 1 for side in (height, width))
    given_ = of.input(images, height, width), normal(of.seed, images, 8), normal(of.seed, images, high, wide, n)

    def walk(ops: Any, x: Any, emb: Any, residual: Any) -> Any:
        bias = ops.columns(ops.biases(emb, before, own, behind), 5, n) if biased else None
        return ops.conv(x, layer, bias=bias, act=act, residual=residual if adds else None)

    everything = layer, before, own, behind
    known = bool(padding) or not of.int8
    check(walk, everything, *given_, only=("cpu", "cuda") if known else ("cpu",))
    if not known:
        with pytest.raises(ValueError, match="8-bit kernels pad convolutions on all sides"):
            run(lowerings(*everything)["cuda"], walk, *given_)


@few
@given(...)
def test_upsample(of: Drawn, n: Many, cut: tuple[Literal[0, 1], Literal[0, 1]]) -> None:
    """Also to odd sides, of maps that were halved."""
    layer, x = of.layer(conv(of.seed, of.channels, n)), of.input()
    like = normal(of.seed, of.images, 2 * of.height - cut[0], 2 * of.width - cut[1], 4)

    def walk(ops: Any, x: Any, like: Any) -> Any:
        return ops.upsample(x, layer, target=like)

    rounded = of.int8 and cut == (0, 0)  # its summed taps are rounded once more
    check(walk, (layer,), x, like, only=("cpu",) if rounded else ("cpu", "cuda"))
    if rounded:
        (wanted,), (found,) = (run(lowerings(layer)[name], walk, x, like) for name in ("torch", "cuda"))
        assert found.shape == wanted.shape and (found - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("name", ["torch", "cpu", "cuda"])
@pytest.mark.parametrize("sides", [(4, 4), (7, 4), (6, 2)])
def test_no_map_is_stretched_to_sides_that_are_not_twice_its_own(name: str, sides: tuple[int, int]) -> None:
    layer, x, like = conv(0, 4, 6), normal(0, 2, 3, 2, 4), normal(1, 2, *sides, 4)

    with pytest.raises(ValueError, match=f"a map of 3×2 does not double to {sides[0]}×{sides[1]}"):
        run(lowerings(layer)[name], lambda ops, x, like: ops.upsample(x, layer, target=like), x, like)


@few
@given(...)
def test_gated(of: Drawn, sixteens: Few, then_int8: bool, apart: bool, act: Literal["gelu", "silu"]) -> None:
    """By one layer or by two, for a layer in floats or in INT8."""
    seed, wide, only = of.seed, 16 * sixteens, ("cpu", "cuda") if act == "gelu" else ("cpu",)
    layers = [of.layer(linear(seed + i, of.channels, wide if apart else 2 * wide)) for i in range(1 + apart)]
    then: Any = linear(seed + 2, wide, 12)
    then = eight(then, inverse(seed + 1, wide)) if then_int8 else then

    def walk(ops: Any, x: Any) -> Any:
        return ops.linear(ops.gated(x, *layers, act=act, to=then), then)

    check(walk, (*layers, then), of.input(), flips=Flips(then), only=only)


@few
@given(...)
def test_group_norm(of: Drawn, first: Few, second: Annotated[int, st.integers(0, 3)], silu: bool, convs: bool) -> None:
    """Of one map, or of two as one, for a linear layer or a convolution."""
    channels = 8 * (first + second)
    own = norm(of.seed, channels, groups=4)
    then = of.layer((conv if convs else linear)(of.seed, channels, 10))
    x, y = normal(of.seed, *of.sides, 8 * first, scale=3), normal(of.seed + 1, *of.sides, 8 * max(second, 1))

    def walk(ops: Any, x: Any, y: Any) -> Any:
        h = ops.group_norm(ops.cat(x, y) if second else x, own, silu=silu, to=(then,))
        return (ops.conv if convs else ops.linear)(h, then)

    # A group of few values that are nearly equal makes rounding large.
    check(walk, (own, then), x, y, flips=Flips(then), relative=1e-4)


@few
@given(...)
def test_layer_norm(of: Drawn, count: Few) -> None:
    """Of a sum, for one or several layers side by side."""
    own, layers = norm(of.seed, of.channels), [of.layer(linear(of.seed + i, of.channels, 6 + i)) for i in range(count)]

    def walk(ops: Any, x: Any, y: Any) -> Any:
        return ops.linear(ops.layer_norm(ops.add(x, y), own, to=layers), *layers)

    x, y = (normal(of.seed + i, *of.sides, of.channels, scale=3) for i in range(2))
    check(walk, (own, *layers), x, y, flips=Flips(layers[0], 6))


@few
@given(...)
def test_attend(of: Drawn, tokens: Several, heads: Few, sixteens: Few, itself: bool) -> None:
    """Of a map's pixels, on themselves as slices of one product or on other tokens, for a layer that reads it."""
    channels = 16 * sixteens * heads
    layer, then = linear(of.seed, 8, 3 * channels), of.layer(linear(of.seed + 1, channels, 12))

    def walk(ops: Any, x: Any, text: Any) -> Any:
        qkv = ops.linear(x, layer)
        q, k, v = (ops.columns(qkv, at * channels, channels) for at in range(3))
        if not itself:
            k, v = ops.columns(text, 0, channels), ops.columns(text, channels, channels)
        return ops.linear(ops.attend(q, k, v, heads=heads, to=(then,)), then)

    text = normal(of.seed, of.images, tokens, 2 * channels)
    check(walk, (layer, then), normal(of.seed, *of.sides, 8), text, flips=Flips(then))


@few
@given(...)
def test_what_is_concatenated(images: Few, height: Few, width: Few, first: Many, second: Many, seed: Seed) -> None:
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


def test_what_reads_one_array_must_be_quantized_alike() -> None:
    """On a GPU arrays are tensors, which do not know for whom they were made."""
    a: Any = eight(linear(0, 8, 6), inverse(0, 8))
    own, x = norm(0, 8), normal(0, 2, 3, 8)
    for b in (linear(1, 8, 6), eight(linear(1, 8, 6), inverse(1, 8))):

        def walk(ops: Any, x: Any, b: Any = b) -> Any:
            h = ops.layer_norm(x, own, to=(a, b) if isinstance(ops, CudaOps) else (a,))
            return ops.linear(h, a), ops.linear(h, b)

        for name, said in (("cuda", "quantized in different ways"),
                           ("cpu", r"^layer 1: 0 reads the same input, by other scales$|a: must be")):  # fmt: skip
            with pytest.raises(ValueError, match=said):
                run(lowerings(a, b, own)[name], walk, x)
