"""emoji-xl-turbo as it ships: a student by its own config, right in one to four steps, small, near fp32 in INT8; and
emoji-z by its own defaults.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.image import ImageParameters
from core.batching.request import Request
from core.config import Settings
from tests.core.quant.stage import warm
from tests.pipeline.worlds import levels, psnr
from workers.build import build

CAPTIONS = ("panda", "red apple on a blue background", "thumbs up: dark skin tone", "sailboat", "rocket", "castle")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm(tmp_path_factory.mktemp("cache"))


@functools.cache
def drawn(cache: Path, model: str, precision: str, steps: int | None = None, **options: Any) -> list[np.ndarray]:
    """The pictures in levels."""
    with build(Settings(model=model, precision=precision, cache_dir=cache)) as runtime:  # type: ignore[arg-type]
        own = runtime.images.model.defaults
        given = {"steps": steps or own.steps, "guidance_scale": own.guidance_scale, **options}
        given["scheduler"] = own.scheduler or "euler"
        waiting = [
            runtime.engine.submit(Request(caption, "image", ImageParameters(caption, seed, 128, 128, **given)))
            for seed, caption in enumerate(CAPTIONS)
        ]
        return [levels(one.result(timeout=120)) for one in waiting]


@pytest.mark.parametrize(("model", "student", "steps"), [("emoji-xl-turbo", "lcm", 4), ("emoji-z", None, 8)])
def test_it_is_drawn_in_few_steps_without_guidance(model: str, student: str | None, steps: int, cache: Path) -> None:
    with build(Settings(model=model, precision="fp32", cache_dir=cache)) as runtime:
        own = runtime.images.model.defaults
    assert (own.student or None, own.scheduler or None, own.steps) == (student, student, steps)
    assert own.rows(own.guidance_scale) == 1


@pytest.mark.long
def test_it_draws_what_emoji_xl_draws(cache: Path) -> None:
    """Its teacher was emoji-xl before its last training: the same things, in other shades."""
    other = drawn(cache, "emoji-xl", "fp32", 8)
    assert all(picture.std() > 30 for picture in other), "a flat picture would prove nothing"
    for steps in (None, 1):  # its own number, four, and the least
        student = drawn(cache, "emoji-xl-turbo", "fp32", steps)
        nearest = [int(np.argmax([psnr(one, theirs) for theirs in other])) for one in student]
        assert nearest == list(range(len(CAPTIONS))), f"{steps or 4} steps"


@pytest.mark.long
def test_int8_and_the_tiny_decoder_are_near(cache: Path) -> None:
    plain = drawn(cache, "emoji-xl-turbo", "fp32")
    eight, tiny = drawn(cache, "emoji-xl-turbo", "int8"), drawn(cache, "emoji-xl-turbo", "fp32", vae="tiny")
    assert min(psnr(a, b) for a, b in zip(plain, eight, strict=True)) > 30
    found = [psnr(a, b) for a, b in zip(plain, tiny, strict=True)]
    assert min(found) > 22 and max(found) < 45, "another decoder shows, a little"
