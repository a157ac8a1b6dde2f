"""`diptych generate`: what pictures are conditioned on besides their prompts, and how prompts are read.

Control networks, image prompts, LoRAs, refiners, upscalers and textual inversions of folders: each changes the picture,
is named in it, and is refused by its option before anything is drawn.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.quantization import quantized
from tests.cli.shell import Shell, made_with
from tests.core.quant.stage import kernels
from tests.pipeline import controls, depths, ip_adapters
from tests.workers import assets

SIDE = 32


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of every kind, and pictures; arguments name them as @name."""
    place = assets.write(tmp_path_factory.mktemp("assets"))
    depths.save(place / "depth-model")
    Image.frombytes("RGB", (SIDE, SIDE), controls.drawn(SIDE)).resize((64, 64)).save(place / "lines.png")
    Image.new("RGB", (64, 32)).save(place / "wide.png")
    (place / "notes.txt").write_text("none")
    ip_adapters.picture(1).save(place / "cat.png")
    ip_adapters.picture(2, (900, 1000)).save(place / "large.jpg")
    return place


def placed(place: Path, options: str) -> list[str]:
    return [str(place / word[1:]) if word.startswith("@") else word for word in shlex.split(options)]


def drawn(shell: Shell, place: Path, options: str, prompt: str = "a fox") -> tuple[Any, Any, Image.Image]:
    """A picture: its parameters, its fingerprint, and itself."""
    path = shell.drawn(prompt, *placed(place, f"--seed 1 --precision fp32 --steps 5 {options}"))
    with Image.open(path) as image:
        image.load()
        return made_with(path), json.loads(image.text["fingerprint"]), image  # type: ignore[attr-defined]


CONTROL = "--control-dir @controls"
LINES = f"{CONTROL} --control @lines.png --control-model edges"
WIDE = f"{CONTROL} --control @wide.png --control-model edges --control-fit exact"
ADAPTER = "--ip-adapter-dir @adapters"
CAT = f"{ADAPTER} --image-prompt @cat.png --image-prompt-model"
LORA = "--lora-dir @loras"
ENLARGED = "--upscalers-dir @upscalers --upscale"

# By the field that says so: what it is with these options. Folders alone change nothing.
SAID: dict[str, list[tuple[str, Any]]] = {
    "control": [
        (CONTROL, []), (f"{LINES} --control-preprocessor depth --depth-model @depth-model", [1.0]),
        (f"{LINES} --control @lines.png --control-model pose --control-strength 0.5", [0.5, 0.5]),
    ],
    "image_prompts": [
        (ADAPTER, []), (f"{CAT} base --image-prompt @large.jpg --image-prompt-model plus", [(50, 41), (768, 853)]),
    ],
    "lora": [(LORA, None), (f"{LORA} --lora ink:0.8", "ink:0.8")],
    "refiner": [("", None), ("--refiner @refiner --refine-from 0.5", {"model": "refiner", "from": 0.5})],
    "upscale": [("--upscalers-dir @upscalers", None), (f"{ENLARGED} x4:1.5", {"model": "x4", "scale": 1.5})],
}  # fmt: skip


@pytest.mark.quick("control", "lora")
@pytest.mark.parametrize("field", SAID)
def test_pictures_follow_it_and_say_so(shell: Shell, place: Path, field: str) -> None:
    found = set()
    for options, expected in SAID[field]:
        made, printed, image = drawn(shell, place, options)
        said = made.get(field)
        if field == "control":
            said = [control.get("strength", 1.0) for control in said or ()]
        elif field == "image_prompts":
            said = [(prompt["width"], prompt["height"]) for prompt in said or ()]
        assert said == expected
        assert image.width == (round(SIDE * expected.get("scale", 4)) if field == "upscale" and expected else SIDE)
        if field == "refiner":
            assert bool(printed.get("refiner")) == bool(expected)
        found.add(image.tobytes())
    assert len(found) == len(SAID[field])
    assert drawn(shell, place, "")[2].tobytes() in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"{CONTROL} --control @lines.png", "--control-model: must name the network"),
        (f"{CONTROL} --control-model edges", "--control-model: is of a --control, and there is none"),
        (f"{CONTROL} --control @lines.png --control-model gone", "--control-model: gone: there is no folder gone"),
        (f"{WIDE} --size 32x32", "wide.png is 64x32, and the picture 32x32"),
        (f"{WIDE} --model @gone", "--control-fit: exact needs a --size"),
        (f"{CONTROL} --control @notes.txt --control-model edges", "notes.txt cannot be read as a picture"),
        (f"{LINES} --control-strength 99", "--control-strength: must"),
        (f"{LINES} --control-preprocessor depth", "--control-preprocessor: depth needs a --depth-model"),
        (f"{LINES} --control-model edges", "is given 2 times, for 1 of --control"),
        (LINES + " --control @lines.png" * 4, "--control: must be at most 4, not 5"),
        (f"{ADAPTER} --image-prompt-model base", "--image-prompt-model: is of --image-prompt, and there is none"),
        (f"{ADAPTER} --image-prompt @cat.png", "--image-prompt-model: must name the IP-Adapter"),
        (f"{ADAPTER} --image-prompt @none.png --image-prompt-model base", "none.png cannot be read as a picture"),
        (f"{CAT} other", "--image-prompt-model: other: there is no"),
        (f"{CAT} base --image-prompt-strength 11", "--image-prompt-strength: must be between 0 and 10"),
        (f"{LORA} --lora gone", "lora: gone: there is no gone.safetensors in the LoRA folder"),
        (f"{LORA} --lora damaged", "damaged: does not fit"),
        ("--lora ink", "DIPTYCH_LORA_DIR"),
        ("--refine-from 0.5", "--refine-from: needs a --refiner"),
        ("--refiner @refiner --refine-from 1.5", "--refine-from: must be more than 0 and less than 1"),
        ("--refiner @refiner --refine-from 0.01", "--refine-from: 0.01 of 2 steps leaves"),
        ("--model @refiner", "is a refiner, which draws nothing alone"),
        (f"{ENLARGED} x4:much", "--upscale: must look like NAME or NAME:2"),
        (f"{ENLARGED} gone", "--upscale: upscaler gone: there is no gone.safetensors"),
        ("--upscale x4", "DIPTYCH_UPSCALERS_DIR"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_drawn(
    shell: Shell, place: Path, options: str, message: str
) -> None:
    assert message in shell.refused("a fox", "--precision", "fp32", *placed(place, options))


def test_over_int8_loras_are_drawn_by_the_kernels(shell: Shell, place: Path, tmp_path: Path) -> None:
    kernels()
    model = tiny.save(tmp_path / "model", tiny.SHAPES[tiny.TINY])
    quantized.make(load(str(model)), ["a hat"], model)
    _, told, _ = drawn(shell, place, f"{LORA} --lora ink --model {model} --precision int8")
    assert (told["precision"], told["executable"], [*told["lora"]]) == ("int8", "kernels", ["ink"])


# -- how prompts are read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ("--syntax a1111", {"prompt_weighting": "a1111"}),
        ("--weighting", {"prompt_weighting": True}),
        ("--prompt-2 'a moor'", {"prompt_2": "a moor"}),
        ("--negative fog --negative-2 mist", {"negative_prompt": "fog", "negative_prompt_2": "mist"}),
        ("--clip-skip 1", {"clip_skip": 1}),
    ],
)
def test_how_prompts_are_read_is_said_in_the_picture(
    shell: Shell, place: Path, options: str, fields: dict[str, Any]
) -> None:
    made, _, _ = drawn(shell, place, options, "a [red] (fox:1.4)")
    assert {name: made[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("a" * 400, "PROMPT: has 400 tokens in 6 chunks of 75"),
        ("[a|b] --syntax a1111", "PROMPT: prompt editing"),
        ("a --negative-2 b", "--negative-2: needs a negative_prompt"),
        ("a --clip-skip 2", "--clip-skip: must be at most 1"),
        ("damaged --embeddings-dir @embeddings", "PROMPT: embedding damaged: damaged.safetensors is damaged"),
    ],
)
def test_what_cannot_be_read_of_prompts_is_named(shell: Shell, place: Path, options: str, message: str) -> None:
    assert message in shell.refused(*placed(place, options))


def test_textual_inversions_are_named_in_prompts(shell: Shell, place: Path) -> None:
    with_it, without = (
        drawn(shell, place, options, "a fox in ink") for options in ("--embeddings-dir @embeddings", "")
    )
    assert "embeddings" in with_it[1] and "embeddings" not in without[1]
    assert with_it[2].tobytes() != without[2].tobytes()
