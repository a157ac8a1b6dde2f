"""`diptych generate --image-prompt`: pictures that are drawn like another, and what is said of wrong options."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from tests.cli.shell import Shell, made_with
from tests.cli.test_control import pixels
from tests.pipeline.ip_adapters import encoder, picture, save, state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    encoder(folder)
    for name, plus in (("base", False), ("plus", True)):
        save(state(load(tiny.TINY), plus=plus), folder, name)
    picture(1).save(folder / "cat.png")
    picture(2, (900, 1000)).save(folder / "large.jpg")
    return folder


def asked(folder: Path, *options: str) -> list[str]:
    return ["a fox", "--seed", "1", "--precision", "fp32", "--ip-adapter-dir", str(folder), *options]


def test_pictures_are_drawn_like_it_and_say_so(shell: Shell, folder: Path) -> None:
    cat, large, found = str(folder / "cat.png"), str(folder / "large.jpg"), []
    for options, sizes in (
        ((), []),
        (("--image-prompt", cat, "--image-prompt-model", "base"), [(50, 41)]),
        (("--image-prompt", cat, "--image-prompt", large, "--image-prompt-model", "base", "--image-prompt-model",
          "plus", "--image-prompt-strength", "0.5"), [(50, 41), (768, 853)]),
    ):  # fmt: skip
        assert shell.generate(*asked(folder, *options)).code == 0
        (path,) = shell.pictures()
        told = made_with(path).get("image_prompts", ())
        assert [(one["width"], one["height"]) for one in told] == sizes
        found.append(pixels(shell).tobytes())
    assert [one["strength"] for one in told] == [0.5, 0.5] and len({*found}) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--image-prompt-model", "base"), "--image-prompt-model: is of --image-prompt, and there is none"),
        (("--image-prompt", "cat.png"), "--image-prompt-model: must name the IP-Adapter"),
        (("--image-prompt", "none.png", "--image-prompt-model", "base"), "none.png cannot be read as a picture"),
        (("--image-prompt", "cat.png", "--image-prompt-model", "x/y"), "--image-prompt-model: must be a name"),
        (("--image-prompt", "cat.png", "--image-prompt-model", "other"), "--image-prompt-model: other: there is no"),
        (("--image-prompt", "cat.png", "--image-prompt-model", "base", "--image-prompt-strength", "11"),
         "--image-prompt-strength: must be between 0 and 10"),
        (("--image-prompt", "cat.png") * 5 + ("--image-prompt-model", "base"), "--image-prompt: must be at most 4"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(shell: Shell, folder: Path, options: tuple[str, ...], words: str) -> None:
    placed = [str(folder / one) if one.endswith((".png", ".txt")) else one for one in options]
    assert words in shell.refused(*asked(folder, *placed))
