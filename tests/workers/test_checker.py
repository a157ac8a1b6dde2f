"""The hook for a checker: what it refuses is not kept and not shown, and without one nobody is asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL.Image import Image

from contract.image import ImageJob
from core.artifacts import Artifacts
from core.batching.request import Request
from core.config import Settings
from core.config import read as read_settings
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.tiny import TINY
from tests.workers.stage import handler_of
from workers.artifact_writer import ArtifactWriter
from workers.build import Runtime, build
from workers.checker import UnsafeImage, load
from workers.tasks import _told

JOB = {
    "n": 2,
    "seed": 5,
    "prompt": "x",
    "width": 32,
    "height": 32,
    "steps": 2,
    "guidance_scale": 1.0,
    "preview_every": 1,
}


class Doorman:
    """Lets in so many."""

    def __init__(self) -> None:
        self.left = 0
        self.seen: list[Image] = []

    def __call__(self, image: Image) -> bool:
        self.seen.append(image)
        self.left -= 1
        return self.left >= 0


@pytest.fixture
def doorman(monkeypatch: pytest.MonkeyPatch) -> Doorman:
    module = ModuleType("a_doorman")
    module.let_in, module.number = Doorman(), 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_doorman", module)
    return module.let_in  # type: ignore[no-any-return, attr-defined]


@pytest.fixture
def works(doorman: Doorman, tmp_path: Path) -> Iterator[Runtime]:
    settings = Settings(
        model=TINY, compile=False, kernels=False, threads=1, data_dir=tmp_path, checker="a_doorman:let_in"
    )
    with build(settings) as works:
        yield works


def made(works: Runtime) -> list[Any]:
    wanted = handler_of(works).requests(ImageJob.read(JOB))
    assert [one.preview_every for one in wanted] == [0, 0], "a preview would be seen before anyone checked it"
    return [works.engine.submit(Request(f"{k}", "image", one)).result(60) for k, one in enumerate(wanted)]


@pytest.mark.parametrize("left", [0, 1])
def test_what_is_refused_is_not_kept_and_nor_is_the_rest(works: Runtime, doorman: Doorman, left: int) -> None:
    doorman.left, artifact_writer = left, ArtifactWriter(Artifacts("memory://"))
    with pytest.raises(UnsafeImage) as caught:
        handler_of(works).build_result(ImageJob.read(JOB), made(works), artifact_writer)
    assert artifact_writer.keys == [] and _told(caught.value)[0] == "content_filter"


def test_what_is_fine_is_kept_as_it_is(works: Runtime, doorman: Doorman) -> None:
    doorman.left, pictures, artifact_writer = 2, made(works), ArtifactWriter(Artifacts("memory://"))
    whole = [picture.png() for picture in pictures]
    assert len(handler_of(works).build_result(ImageJob.read(JOB), pictures, artifact_writer)["images"]) == 2
    assert [image.mode for image in doorman.seen] == ["RGB", "RGB"]
    doorman.seen[0].paste((0, 0, 0), (0, 0, 32, 32))
    assert [picture.png() for picture in pictures] == whole, "a checker can change nothing"


@pytest.mark.parametrize("name", ["no_such_module:x", "a_doorman:nobody", "a_doorman:number", "a_doorman:let_in.none"])
def test_a_checker_that_is_not_there_is_said_before_anything_is_drawn(doorman: Doorman, name: str) -> None:
    with pytest.raises(ModelError, match=f"^checker {name}: "):
        load(name)
    assert load("a_doorman:let_in") is doorman


def test_by_default_there_is_none() -> None:
    assert read_settings().checker == "" and load("") is None
    with pytest.raises(ValueError, match=r"DIPTYCH_CHECKER|checker"):
        read_settings(checker="os.system")
