"""`diptych generate --refiner`: pictures whose last steps a second model takes, and models that are no refiners."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from pipeline.checkpoints import tiny
from tests.cli.shell import Shell, made_with
from tests.pipeline.refiners import second


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models") / "tiny-refiner"
    second(tiny.SHAPES[tiny.TINY]).save_pretrained(where)
    return where


def test_pictures_are_refined_and_say_so(shell: Shell, folder: Path) -> None:
    drawn = []
    for options in (("--refiner", str(folder), "--refine-from", "0.5"), ("--refiner", str(folder)), ()):
        assert shell.generate("a fox", "--seed", "1", "--steps", "5", "--precision", "fp32", *options).code == 0
        (path,) = shell.pictures()
        told = made_with(path).get("refiner")
        with Image.open(path) as image:
            drawn.append(image.tobytes())
            named = json.loads(image.text["fingerprint"]).get("refiner")  # type: ignore[attr-defined]
        if not options:
            assert told is None and named is None
            continue
        assert told == {"model": "tiny-refiner", "from": 0.5 if len(options) > 2 else 0.8}
        assert named["model"] == "tiny-refiner" and named["precision"] == "fp32"
    assert len({*drawn}) == 3


def test_what_cannot_be_is_refused(shell: Shell, folder: Path) -> None:
    base = tiny.save(folder.with_name("base"), tiny.SHAPES[tiny.TINY])
    for options, said in (
        (("--refine-from", "0.5"), "--refine-from: needs a --refiner"),
        (("--refiner", str(folder), "--refine-from", "1.5"), "--refine-from: must be more than 0 and less than 1"),
        (("--refiner", str(folder), "--refine-from", "0.01"), "--refine-from: 0.01 of 2 steps leaves"),
        (("--refiner", "gone"), "gone: no such folder"),
        (("--refiner", str(base)), "base: is no SDXL refiner"),
        (("--model", str(folder)), "is a refiner, which draws nothing alone"),
    ):
        assert said in shell.refused("a fox", *options), options
