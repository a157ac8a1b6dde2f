"""Prompts of several chunks in whole pictures: as diffusers draws the reference's embeddings, alone and in company."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from contract.errors import Invalid
from contract.image import ImageParameters
from contract.plan import DeepCache
from core.batching.request import Request
from pipeline.checkpoints import tiny
from pipeline.families.sdxl.parts import text_encoders
from tests.pipeline.long_prompts import picture, words
from tests.pipeline.worlds import MORE, Crank, Watching, apart, model, options_of, solo, stock_picture, together

MORE["deep-text"] = replace(tiny.SHAPES[tiny.TINY], text_layers=(4, 5), heads=(1, 2))
SHORT = ImageParameters("a fox", 3, 32, 32, negative_prompt="fog", steps=4)
CASES = {
    "two": replace(SHORT, prompt=words(76), seed=4),
    "three": replace(SHORT, prompt=words(160), negative_prompt=words(80, 5), seed=5),
    "four": replace(SHORT, prompt=words(300), negative_prompt=None, seed=6),
    "negative": replace(SHORT, negative_prompt=words(90), seed=7),
    "second": replace(SHORT, prompt_2=words(100, 3), negative_prompt_2="mist", seed=8),
    "skip": replace(SHORT, prompt=words(100), clip_skip=2, seed=9),
    "unguided": replace(SHORT, prompt=words(200), guidance_scale=1.0, seed=10),
}
NAME = "deep-text"


@pytest.fixture(params=["torch", "kernels", "layers"])
def make(request: pytest.FixtureRequest, kernels: ctypes.CDLL) -> Callable[..., Watching]:
    """Runners on each backend: torch, the CPU kernels, and fused layers on torch's references."""
    return functools.partial(Watching, model(NAME), **options_of(request.param, kernels))


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_pictures_are_those_of_diffusers(make: Callable[..., Watching], case: str) -> None:
    assert apart(solo(make(), CASES[case]), picture(NAME, CASES[case])) <= 1


@pytest.mark.quick("kernels")
def test_pictures_are_those_of_diffusers_in_company_that_comes_and_goes(make: Callable[..., Watching]) -> None:
    runner = make()
    crank = Crank(runner)
    wanted = {"short": SHORT, **CASES, "other": replace(SHORT, seed=11, prompt="b")}
    for name, one in wanted.items():
        crank.submit(name, one)
        crank.turn()
    found = crank.pictures()
    for name, one in wanted.items():
        expected = picture(NAME, one) if name in CASES else stock_picture(NAME, one)
        assert apart(found[name], expected) <= 1, name
    mixed = any({"short", "three"} <= riders for riders in runner.companions)
    assert mixed is runner.backend.batch_invariant, "only where bits allow it do lengths share a forward"
    assert runner.holdings.memory.taken == 0


@pytest.mark.quick("block")
@pytest.mark.parametrize("depth", ["block", "resnet"])
def test_on_the_kernels_a_row_does_not_see_the_lengths_of_others(kernels: ctypes.CDLL, depth: str) -> None:
    wanted = [replace(one, deepcache=DeepCache(2, depth)) for one in (SHORT, *CASES.values())]
    runner, other = (Watching(model(NAME), kernels=kernels) for _ in range(2))
    for one, found in zip(wanted, together(runner, wanted, lambda: 0), strict=True):
        assert solo(other, one).png() == found.png(), one


@pytest.mark.quick("kernels", "layers")
def test_deterministic_ones_are_equal_in_any_company(make: Callable[..., Watching]) -> None:
    fixed = [replace(CASES[name], deterministic=True) for name in ("two", "three", "skip")]
    found, other = together(make(), [*fixed, SHORT, CASES["four"]], lambda: 0), make()
    assert [solo(other, one).png() for one in fixed] == [picture.png() for picture in found[:3]]


def test_memory_counts_the_longer_text(make: Callable[..., Watching]) -> None:
    runner = make()
    sizes = [runner.holdings.size_bytes(SHORT, chunks) for chunks in (1, 2, 4)]
    assert sizes == sorted(sizes) and sizes[2] > sizes[0]
    crank = Crank(runner)
    request = crank.submit("four", CASES["four"])
    crank.turn()
    held = [tensor for one in request.work.conditionings.values() for tensor in one.tensors.values()]
    assert runner.holdings.memory.taken >= max(tensor.nbytes for tensor in held)
    crank.run()
    assert runner.holdings.memory.taken == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": words(301)}, "prompt: has 301 tokens in 5 chunks of 75; at most 4 chunks, 300 tokens, are read"),
        ({"negative_prompt": words(900)}, "negative_prompt: has 900 tokens in 12 chunks"),
        ({"prompt_2": words(400)}, "prompt_2: has 400 tokens in 6 chunks"),
        ({"negative_prompt_2": words(400)}, "negative_prompt_2: has 400 tokens in 6 chunks"),
        (
            {"prompt": "a BREAK " * 500, "prompt_weighting": "a1111"},
            "prompt: has more than 3 BREAKs, and at most 4 chunks are read",
        ),
        ({"clip_skip": 4}, "clip_skip: must be at most 3 with this model's text encoders"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid, match=f"^{said}"):
        Watching(model(NAME)).check(Request("r", "image", replace(SHORT, **fields)))


def test_the_most_that_clip_skip_allows_is_drawn() -> None:
    most = min(encoder.config.num_hidden_layers for encoder in text_encoders(model(NAME))) - 1
    one, runner = replace(SHORT, clip_skip=most), Watching(model(NAME))
    assert apart(solo(runner, one), picture(NAME, one)) <= 1
    assert apart(solo(runner, replace(SHORT, clip_skip=0)), solo(runner, SHORT)) == 0
