"""emoji-xl-turbo as it ships: a student by its own config, right in one to four steps, small, near fp32 in INT8."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.image import ImageParameters
from core.batching.request import Request
from core.config import Settings
from tests.core.quant.stage import warm
from workers.build import build

MODELS = Path(__file__).resolve().parents[2] / "models"
CAPTIONS = ("panda", "red apple on a blue background", "thumbs up: dark skin tone", "sailboat", "rocket", "castle")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm(tmp_path_factory.mktemp("cache"))


@functools.cache
def drawn(cache: Path, model: str, precision: str, steps: int | None = None, **options: Any) -> list[Any]:
    with build(Settings(model=model, precision=precision, cache_dir=cache)) as runtime:  # type: ignore[arg-type]
        own = runtime.images.model.defaults
        waiting = [
            runtime.engine.submit(
                Request(
                    caption, "image",
                    ImageParameters(
                        caption, seed, 128, 128, steps=steps or own.steps, guidance_scale=own.guidance_scale,
                        scheduler=own.scheduler or "euler", **options,
                    ),
                )
            )
            for seed, caption in enumerate(CAPTIONS)
        ]  # fmt: skip
        return [np.asarray(one.result(timeout=120).image).astype(float) for one in waiting]


def psnr(a: Any, b: Any) -> float:
    return 10 * math.log10(255**2 / float(((a - b) ** 2).mean()))


def test_it_is_a_student_of_four_steps_without_guidance(cache: Path) -> None:
    with build(Settings(model="emoji-xl-turbo", precision="fp32", cache_dir=cache)) as runtime:
        own = runtime.images.model.defaults
    assert (own.student, own.steps, own.scheduler, own.rows(own.guidance_scale)) == ("lcm", 4, "lcm", 1)


@pytest.mark.long
def test_it_draws_what_emoji_xl_draws(cache: Path) -> None:
    """Its teacher was emoji-xl before its last training: the same things, in other shades."""
    other = drawn(cache, "emoji-xl", "fp32", 8)
    assert all(picture.std() > 30 for picture in other), "a flat picture would prove nothing"
    for steps in (None, 1):  # its own number, four, and the least
        student = drawn(cache, "emoji-xl-turbo", "fp32", steps)
        nearest = [int(np.argmax([psnr(one, theirs) for theirs in other])) for one in student]
        assert nearest == list(range(len(CAPTIONS))), f"{steps or 4} steps"


def test_int8_and_the_tiny_decoder_are_near(cache: Path) -> None:
    plain = drawn(cache, "emoji-xl-turbo", "fp32")
    eight, tiny = drawn(cache, "emoji-xl-turbo", "int8"), drawn(cache, "emoji-xl-turbo", "fp32", vae="tiny")
    assert min(psnr(a, b) for a, b in zip(plain, eight, strict=True)) > 30
    found = [psnr(a, b) for a, b in zip(plain, tiny, strict=True)]
    assert 22 < min(found) and max(found) < 45, "another decoder shows, a little"


def test_its_files_are_small() -> None:
    files = [path for path in (MODELS / "emoji-xl-turbo").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 21_000_000
