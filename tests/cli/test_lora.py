"""`diptych generate --lora`: pictures with LoRAs of a folder, and what is said of those that cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.quantization import quantized
from tests.cli.shell import Shell, made_with
from tests.core.quant.stage import kernels
from tests.pipeline import loras


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    loras.write(load(tiny.TINY), folder, "ink")
    (folder / "damaged.safetensors").write_bytes(b"none")
    return folder


def test_pictures_are_drawn_with_it_and_say_so(shell: Shell, folder: Path) -> None:
    drawn = []
    for options in (("--lora", "ink:0.8", "--lora-dir", str(folder)), ("--lora-dir", str(folder)), ()):
        assert shell.generate("a fox", "--seed", "1", *options).code == 0
        (path,) = shell.pictures()
        assert made_with(path).get("lora") == ("ink:0.8" if "--lora" in options else None)
        with Image.open(path) as image:
            drawn.append(image.tobytes())
    assert drawn[0] != drawn[1] == drawn[2]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("gone", "gone: there is no gone.safetensors in the LoRA folder"),
        ("damaged", "damaged: does not fit"),
        ("../ink", "a name is letters"),
        ("ink:loud", "ink: its scale must be a number"),
        ("ink,ink", "named twice"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_drawn(shell: Shell, folder: Path, named: str, words: str) -> None:
    line = shell.refused("a fox", "--lora", named, "--lora-dir", str(folder))
    assert "lora: " in line and words in line
    assert "DIPTYCH_LORA_DIR" in shell.refused("a fox", "--lora", "ink")


def test_over_int8_they_are_drawn_by_the_kernels(shell: Shell, folder: Path, tmp_path: Path) -> None:
    kernels()
    model = tiny.save(tmp_path / "model", tiny.SHAPES[tiny.TINY])
    quantized.make(load(str(model)), ["a hat"], model)
    asked = ["a fox", "--model", str(model), "--lora", "ink", "--lora-dir", str(folder)]
    assert shell.generate(*asked).code == 0
    (path,) = shell.pictures()
    with Image.open(path) as image:
        told = json.loads(image.text["fingerprint"])  # type: ignore[attr-defined]
    assert (told["precision"], told["executable"], [*told["lora"]]) == ("int8", "kernels", ["ink"])
