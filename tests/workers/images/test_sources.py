"""What an edit begins with: fetched by key, checked, and drawn from by a real engine. No edit without a store."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contract.errors import Invalid
from contract.image import Edit, ImageJob
from core.artifacts import ArtifactError, Artifacts
from core.batching.request import Outcome
from core.config import Settings
from tests.workers.desk import JOB, drawn, torch_settings
from tests.workers.stage import handler_of
from workers.build import Runtime, build
from workers.images.handler import pictures
from workers.images.sources import read

PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
MASK = np.zeros((32, 32), np.uint8)
MASK[8:24, 4:20] = 255
ASKED = {**JOB, "guidance_scale": 2.0}


def png(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts(Settings(data_dir=tmp_path).artifacts)


@pytest.fixture
def works(tmp_path: Path) -> Iterator[Runtime]:
    with build(torch_settings(max_rows=8, data_dir=tmp_path)) as works:
        yield works


def asked(artifacts: Artifacts, **more: Any) -> dict[str, Any]:
    keys = {"image": artifacts.put(png(PIXELS), "image/png"), "mask": artifacts.put(png(MASK), "image/png")}
    return {**ASKED, "edit": {**keys, "strength": 0.75, **more}}


def edit(artifacts: Artifacts, fetch: Callable[[str], bytes], **more: Any) -> Edit | None:
    return read(ImageJob.read(asked(artifacts, **more)).picture, fetch).edit


def test_pixels_come_as_they_were_put(artifacts: Artifacts) -> None:
    assert edit(artifacts, artifacts.get) == Edit(PIXELS.tobytes(), MASK.tobytes(), 0.75)
    assert edit(artifacts, artifacts.get, mask=None) == Edit(PIXELS.tobytes(), None, 0.75)


def test_the_worker_draws_from_what_was_put(works: Runtime, artifacts: Artifacts) -> None:
    handler = handler_of(works)
    wanted = handler.requests(ImageJob.read(asked(artifacts)))
    assert [(one.seed, one.made) for one in wanted] == [(5, 3), (6, 3)]
    tally = handler.tally(wanted)
    first, second = (np.asarray(picture.image) for picture in drawn(works, wanted))
    assert all(np.array_equal(one[MASK == 0], PIXELS[MASK == 0]) for one in (first, second))
    assert not np.array_equal(first, second)
    told = tally.take(0, Outcome(progress=(3, 3)))
    assert told is not None and (told["steps_done"], told["steps"]) == (3, 6)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"image": None}, "image"),
        ({"image": "sha256/00/" + 62 * "0" + ".png"}, "image"),
        ({"mask": "../../etc/passwd"}, "mask"),
        ({"mask": png(PIXELS[::2])}, "mask"),
        ({"image": b"none"}, "image"),
    ],
)
def test_what_is_not_there_or_no_picture_is_named(artifacts: Artifacts, change: dict[str, Any], field: str) -> None:
    stored = {name: artifacts.put(data, "image/png") for name, data in change.items() if isinstance(data, bytes)}
    with pytest.raises(Invalid, match=f"^{field}: "):
        edit(artifacts, artifacts.get, **change | stored)


def test_a_store_that_fails_is_no_fault_of_the_job(artifacts: Artifacts) -> None:
    def broken(key: str) -> bytes:
        raise ArtifactError("the disk is gone")

    with pytest.raises(ArtifactError):
        edit(artifacts, broken)
    with pytest.raises(Invalid, match=r"^image: "):
        pictures(ImageJob.read(asked(artifacts)))
