"""What the shipped model draws on a GPU is what it draws in fp32 on a CPU, within what eight bits and bf16 may cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from contract.image import ImageParameters
from core.batching.request import Request
from core.config import read
from workers.build import build

PROMPTS = (
    "slice of pizza", "red heart", "cat face", "dog face on a pink background", "sunflower", "red apple",
    "banana on a blue background", "hot beverage",
)  # fmt: skip


def draw(device: str, precision: str) -> tuple[Any, dict[str, Any]]:
    """Images [N, H, W, 3] from the serving engine, and their fingerprint."""
    with build(read(device=device, precision=precision, compile=False)) as runtime:
        assert runtime.images.model.name == "emoji-xl", "of the stand-in's noise nothing follows"
        side = runtime.images.model.native
        options: dict[str, Any] = {"steps": 20, "guidance_scale": 4.0}
        requests = [
            Request(str(seed), "image", ImageParameters(prompt, seed, side, side, **options))
            for seed, prompt in enumerate(PROMPTS)
        ]
        images = [future.result() for future in [runtime.engine.submit(request) for request in requests]]
    return np.stack([np.asarray(image.image) for image in images]), dict(images[0].fingerprint)


@pytest.fixture(scope="module")
def reference() -> Any:
    return draw("cpu", "fp32")[0]


# Measured over 32 pictures on an H200: 50.3 dB in bf16, 38.4 dB in INT8.
@pytest.mark.parametrize(("precision", "mean_db", "least_db"), [("bf16", 44.0, 34.0), ("int8", 33.0, 24.0)])
def test_emoji_xl_is_close_to_fp32_on_a_cpu(reference: Any, precision: str, mean_db: float, least_db: float) -> None:
    levels, fingerprint = draw("cuda", precision)
    assert fingerprint["executable"] == "graphs" and fingerprint["precision"] == precision
    error = np.square(reference.astype(np.float64) - levels).mean((1, 2, 3))
    decibels = 10 * np.log10(255**2 / np.maximum(error, 255**2 / 1e10))
    assert decibels.mean() > mean_db and decibels.min() > least_db, decibels
    assert abs(float(levels.astype(np.float64).mean() - reference.mean())) < 2, "neither paler nor darker"
