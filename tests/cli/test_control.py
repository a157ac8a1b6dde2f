"""`diptych generate --control`: pictures that follow another, and what is said of what cannot be followed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from tests.cli.shell import Shell, made_with
from tests.pipeline import depths
from tests.pipeline.controls import controlnet, drawn, save

SIDE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("controls")
    for seed, name in enumerate(("edges", "pose")):
        save(controlnet(load(tiny.TINY), seed), folder, name)
    Image.frombytes("RGB", (SIDE, SIDE), drawn(SIDE)).resize((64, 64)).save(folder / "lines.png")
    Image.new("RGB", (64, 32)).save(folder / "wide.png")
    (folder / "notes.txt").write_text("none")
    depths.save(folder.with_name("depth-model"))
    return folder


def asked(folder: Path, *options: str) -> list[str]:
    return ["a fox", "--seed", "1", "--precision", "fp32", "--control-dir", str(folder), *options]


def pixels(shell: Shell) -> np.ndarray:
    (path,) = shell.pictures()
    with Image.open(path) as image:
        return np.asarray(image)


def test_pictures_follow_it_and_say_so(shell: Shell, folder: Path) -> None:
    lines, found = str(folder / "lines.png"), []
    for options, count in (
        ((), 0),
        (("--control", lines, "--control-model", "edges"), 1),
        (("--control", lines, "--control-model", "edges", "--control-preprocessor", "canny"), 1),
        (("--control", lines, "--control-model", "edges", "--control-preprocessor", "depth",
          "--depth-model", str(folder.with_name("depth-model"))), 1),
        (("--control", lines, "--control", lines, "--control-model", "edges", "--control-model", "pose",
          "--control-strength", "0.5"), 2),
    ):  # fmt: skip
        assert shell.generate(*asked(folder, *options)).code == 0
        (path,) = shell.pictures()
        assert len(made_with(path).get("control", ())) == count
        found.append(pixels(shell))
    assert [one["strength"] for one in made_with(path)["control"]] == [0.5, 0.5]
    for index, one in enumerate(found):
        assert not any(np.array_equal(one, other) for other in found[index + 1 :])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--control", "lines.png"), "--control-model: must name the network"),
        (("--control-model", "edges"), "--control-model: is of a --control, and there is none"),
        (("--control", "lines.png", "--control-model", "gone"), "--control-model: gone: there is no folder gone"),
        (("--control", "lines.png", "--control-model", "../x"), "--control-model: must be a name"),
        (("--control", "wide.png", "--control-model", "edges"), "wide.png is 64x32, and the picture 32x32"),
        (("--control", "notes.txt", "--control-model", "edges"), "notes.txt cannot be read as a picture"),
        (("--control", "gone.png", "--control-model", "edges"), "gone.png cannot be read as a picture"),
        (
            ("--control", "lines.png", "--control-model", "edges", "--control-strength", "99"),
            "--control-strength: must",
        ),
        (("--control", "lines.png", "--control-model", "edges", "--control-mode", "1"), "--control-mode: is for"),
        (
            ("--control", "lines.png", "--control-model", "edges", "--control-preprocessor", "depth"),
            "--control-preprocessor: depth needs a --depth-model",
        ),
        (("--control", "lines.png", *("--control-model", "edges") * 2), "is given 2 times, for 1 of --control"),
        (("--control", "lines.png") * 5 + ("--control-model", "edges"), "--control: must be at most 4, not 5"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_drawn(
    shell: Shell, folder: Path, options: tuple[str, ...], words: str
) -> None:
    given = [str(folder / one) if one.endswith((".png", ".txt")) else one for one in options]
    assert words in shell.refused(*asked(folder, *given))
