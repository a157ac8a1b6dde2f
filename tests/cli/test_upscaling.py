"""`diptych generate --upscale`: pictures enlarged by a network of a folder, and what is said of those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.cli.shell import Shell, made_with
from tests.pipeline import upscalers


@pytest.fixture
def folder(tmp_path: Path) -> str:
    where = tmp_path / "upscalers"
    where.mkdir()
    upscalers.write(where, "x4")
    return str(where)


def test_pictures_are_enlarged_and_say_so(shell: Shell, folder: str) -> None:
    for text, side, told in (("x4", 128, {"model": "x4"}), ("x4:1.5", 48, {"model": "x4", "scale": 1.5})):
        assert shell.generate("a fox", "--seed", "1", "--upscale", text, "--upscalers-dir", folder).code == 0
        (path,) = shell.pictures()
        with Image.open(path) as image:
            assert image.size == (side, side)
        assert made_with(path)["upscale"] == told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x4:much", "--upscale: must look like NAME or NAME:2"),
        ("x4:9", "--upscale: must look like NAME or NAME:2"),
        ("../x4", "--upscale"),
        ("gone", "--upscale: upscaler gone: there is no gone.safetensors"),
        ("x4:5", "--upscale"),
    ],
)
def test_what_cannot_enlarge_is_refused(shell: Shell, folder: str, text: str, words: str) -> None:
    assert words in shell.refused("a fox", "--upscale", text, "--upscalers-dir", folder)


def test_a_folder_must_be_named(shell: Shell) -> None:
    assert "DIPTYCH_UPSCALERS_DIR" in shell.refused("a fox", "--upscale", "x4")
