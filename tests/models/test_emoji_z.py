"""emoji-z as it ships, through the settings: found by name, in INT8 near fp32, with its own defaults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.image import ImageParameters
from contract.plan import DeepCache
from core.batching.request import Request
from core.config import Settings
from tests.core.quant.stage import warm
from workers.build import build

CAPTIONS = ("panda", "red apple", "thumbs up", "sailboat")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm(tmp_path_factory.mktemp("cache"))


def drawn(cache: Path, precision: str, **options: Any) -> list[np.ndarray[Any, Any]]:
    with build(Settings(model="emoji-z", precision=precision, cache_dir=cache)) as runtime:  # type: ignore[arg-type]
        card = runtime.images.model.defaults
        assert (card.steps, card.guidance_scale) == (8, 0.0)
        waiting = [
            runtime.engine.submit(
                Request(
                    caption, "image",
                    ImageParameters(
                        prompt=caption, seed=seed, width=128, height=128, steps=card.steps,
                        guidance_scale=card.guidance_scale, **options,
                    ),
                )
            )
            for seed, caption in enumerate(CAPTIONS)
        ]  # fmt: skip
        return [np.asarray(one.result(timeout=120).image).astype(float) for one in waiting]


def psnr(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return 10 * math.log10(255**2 / float(((a - b) ** 2).mean()))


@pytest.mark.long
def test_int8_and_cached_steps_are_near_the_whole_model(cache: Path) -> None:
    plain = drawn(cache, "fp32")
    assert all(picture.std() > 30 for picture in plain), "a flat picture would prove nothing"
    eight, cached = drawn(cache, "int8"), drawn(cache, "fp32", deepcache=DeepCache())
    assert min(psnr(a, b) for a, b in zip(plain, eight, strict=True)) >= 35
    found = [psnr(a, b) for a, b in zip(plain, cached, strict=True)]
    assert 30 < min(found) and max(found) < 90, "features of another step must matter, a little"
