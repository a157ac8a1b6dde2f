"""A change that spoils 8-bit or cached pictures fails: of 6 or 64 pictures, beside fp32 and the stored figures."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from core.quant.linear import Int8Conv2d, Int8Linear
from evaluation.clip import Clip
from pipeline.checkpoints.load import load
from tests.models import gate

STORED: dict[str, dict[str, dict[str, gate.Figures]]] = json.loads(gate.STORED.read_text("utf-8"))
CASES = [(name, way) for name in gate.STEPS for way in gate.ways(name)]


@functools.cache
def clip() -> Clip:
    return Clip()


@functools.cache
def whole(name: str, count: int) -> gate.Pictures:
    return gate.draw(load(str(gate.ROOT / "models" / name)), count)


@functools.cache
def drawn(name: str, way: str, count: int) -> gate.Pictures:
    return gate.draw_way(name, way, count)


@pytest.mark.quick("emoji-xl-int8-6", "emoji-z-int8-6")
@pytest.mark.parametrize("count", [gate.FEW, len(gate.NAMES)])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_pictures_are_as_near_to_fp32_as_when_the_figures_were_stored(name: str, way: str, count: int) -> None:
    exact = whole(name, count)
    assert all(picture.std() > 20 for picture in exact), "a flat picture would prove nothing"
    found = gate.compare(exact, drawn(name, way, count), clip())
    assert gate.falls(found, STORED[str(count)][name][way]) == []


def _layers(network: Any, part: str) -> list[Int8Linear | Int8Conv2d]:
    found = [m for name, m in network.named_modules() if isinstance(m, (Int8Linear, Int8Conv2d)) and part in name]
    assert found
    return found


def scale_of_one_kind(network: Any) -> None:
    """Products of one kind of layer come out a fifth too large."""
    for layer in _layers(network, "ff.net.2"):
        layer.scale.mul_(1.2)


def inputs_that_overflow(network: Any) -> None:
    """One block's inputs are scaled as if they were a quarter as large: levels are cut off."""
    for layer in _layers(network, "mid_block"):
        layer.inverse.mul_(4)
        layer.scale.div_(4)


def seven_bits(network: Any) -> None:
    """Weights lose their last bit."""
    for layer in _layers(network, ""):
        layer.weight.copy_(layer.weight // 2 * 2)


@pytest.mark.quick(0)
@pytest.mark.parametrize("bug", [scale_of_one_kind, inputs_that_overflow, seven_bits])
def test_a_planted_bug_is_found(bug: Callable[[Any], None]) -> None:
    few = 4  # pictures, beside the same ones without the bug
    exact, without = whole("emoji-xl", gate.FEW)[:few], drawn("emoji-xl", "int8", gate.FEW)[:few]
    found = gate.compare(exact, gate.draw_way("emoji-xl", "int8", few, bug), clip())
    assert gate.falls(found, gate.compare(exact, without, clip())), found


def test_figures_that_are_no_numbers_fall() -> None:
    stored = STORED[str(gate.FEW)]["emoji-xl"]["int8"]
    assert [fall.figure for fall in gate.falls(dict.fromkeys(stored, float("nan")), stored)] == [*stored]
