"""`diptych quantize`: variants that load, of models that draw and of models that write, in a folder or in the cache."""

from __future__ import annotations

import ctypes
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from llm.checkpoints.load import load
from llm.families import tiny
from pipeline.checkpoints import tiny as tiny_image
from pipeline.checkpoints.load import load as load_image_model
from pipeline.checkpoints.tiny import TINY
from tests.cli.shell import Shell
from tests.core.quant import stage
from tests.pipeline.controls import controlnet, save


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "small", tiny.SHAPES[tiny.TINY])


def about(folder: Path) -> Any:
    """What a variant tells of itself."""
    return json.loads((folder / "quantization.json").read_text())


@pytest.mark.parametrize("scheme", ["int8", "w4a8", "nvfp4"])
def test_a_text_model_gets_a_variant_that_loads(shell: Shell, model: Path, scheme: str) -> None:
    (shell.folder / "prompts.txt").write_text("one\ntwo words\nthree whole words\n", "utf-8")
    prompts = str(shell.folder / "prompts.txt")
    said = shell.done(
        "quantize", "--text-model", str(model), "--scheme", scheme, "--prompts", prompts, "-o", str(model)
    )
    assert said.out.startswith("text: ") and f" layers in {scheme}, " in said.out
    plain, found = load(str(model)), load(str(model), precision=scheme)
    assert found.precision == scheme and found.digest != plain.digest


def test_a_text_models_weights_are_chosen_layer_by_layer(shell: Shell, model: Path) -> None:
    given = ("quantize", "--text-model", str(model), "--scheme", "w4a16", "--limit", "8", "-o", str(model))
    shell.done(*given, "--search", "--gptq")
    told = about(model / "model-w4a16")
    assert told["recipe"] == "llama-plain-searched-head8" and told["calibration"]["gptq"]
    assert told["layers"].pop("lm_head") == "Int8DynamicLinear" and {*told["layers"].values()} == {"Int4Linear"}
    assert load(str(model), precision="w4a16").precision == "w4a16"


def test_a_scheme_without_calibration_takes_none(shell: Shell, model: Path) -> None:
    given = ("quantize", "--text-model", str(model), "--scheme", "int8-dynamic", "-o", str(model))
    for option in ("--prompts prompts.txt", "--limit 2", "--alpha 0.5", "--plain"):
        assert f"{option.split()[0]}: is for calibration, and int8-dynamic needs none" in shell.refusal(
            *given, *option.split()
        )
    shell.done(*given, "--float-head")
    told = about(model / "model-int8-dynamic")
    assert told["calibration"] == {} and told["recipe"] == "llama-plain" and [*told["skipped"]] == ["lm_head"]
    assert load(str(model), precision="int8-dynamic").precision == "int8-dynamic"


# -- models that draw ----------------------------------------------------------------------------------------------


@pytest.fixture
def cached(shell: Shell, monkeypatch: pytest.MonkeyPatch, kernels: ctypes.CDLL) -> Path:
    """A cache that holds the kernels and nothing else."""
    folder = shell.folder / "cache"
    folder.mkdir()
    (folder / "kernels").symlink_to(stage.CACHE)
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def kernels() -> ctypes.CDLL:
    return stage.kernels()


def precisions(shell: Shell) -> set[str]:
    found = set()
    for path in shell.pictures():
        with Image.open(path) as image:
            found.add(json.loads(image.text["fingerprint"])["precision"])  # type: ignore[attr-defined]
    return found


@pytest.mark.usefixtures("cached")
def test_a_seeded_model_is_quantized_by_the_captions_that_come_with_the_code(shell: Shell) -> None:
    said = shell.done("quantize", "--model", TINY, "--limit", "9", "-o", "variant")
    assert said.out.startswith("unet: ") and "quantizing to int8" in said.err
    told = about(shell.folder / "variant" / "unet-int8")
    assert told["source"] == load_image_model(TINY).digest
    calibration = told["calibration"]
    assert calibration.pop("prompts_sha256")
    assert calibration == {
        "steps": 20, "watched_steps": 8, "guidance": 8.0, "batch": 8, "prompts": 9, "dtype": "float32",
    }  # fmt: skip
    drawn = shell.generate("a cat", "--precision", "int8", "--unet", "variant/unet-int8")
    assert drawn.code == 0 and "quantizing" not in drawn.err
    assert precisions(shell) == {"int8"}


def test_int8_of_a_plain_model_quantizes_it_once_into_the_cache(shell: Shell, cached: Path) -> None:
    """By `generate`, where `quantize` and `auto` find it."""
    first, *later = (shell.generate("a cat", "--seed", "1", "--precision", name) for name in ("int8", "int8", "auto"))
    assert {one.code for one in (first, *later)} == {0}, first.err
    assert "quantizing random:tiny to int8" in first.err and "64/64" in first.err
    assert not [one for one in later if "quantizing" in one.err]
    said = shell.done("quantize", "--model", TINY)
    assert said.out.startswith(str(cached / "quantized")) and "was there already" in said.out
    assert len(list((cached / "quantized").glob("*/unet-int8"))) == 1
    assert precisions(shell) == {"int8"}


def test_without_calibration_a_model_is_quantized_at_once_with_or_without_its_weights(
    shell: Shell, cached: Path
) -> None:
    made = shell.done("quantize", "--model", TINY, "--scheme", "int8-dynamic", "--scales-only", "-o", "variant")
    assert "layers in int8-dynamic" in made.out, made.err
    told = about(shell.folder / "variant" / "unet-int8-dynamic")
    assert told["calibration"] == {"dtype": "float32"} and not told["weights"]
    seen = []
    for options in (["--unet", "variant/unet-int8-dynamic"], []):
        if not options:
            assert "is made" in shell("quantize", "--model", TINY, "--scheme", "int8-dynamic").out
        drawn = shell.generate("a cat", "--precision", "int8-dynamic", "--seed", "1", *options)
        assert drawn.code == 0, drawn.err
        assert bool([*cached.glob("quantized/*/unet-int8-dynamic")]) == (not options)
        seen.append(shell.pictures()[-1].read_bytes())
        shell.pictures()[-1].unlink()
    with Image.open(BytesIO(seen[0])) as image, Image.open(BytesIO(seen[1])) as other:
        assert json.loads(image.text["fingerprint"])["precision"] == "int8-dynamic"  # type: ignore[attr-defined]
        assert image.tobytes() == other.tobytes()


@pytest.mark.long
@pytest.mark.usefixtures("cached")
def test_scales_are_searched_and_layers_left_in_floats_as_the_table_of_sensitivities_suggests(shell: Shell) -> None:
    given = ("quantize", "--model", TINY, "--limit", "2", "-o", "variant", "--search")
    said = shell.done(*given, "--sensitivity")
    head, *rows = said.out.splitlines()
    assert head.split()[-1] == "layers" and not (shell.folder / "variant" / "unet-int8").exists()
    errors = [float(row.split()[0]) for row in rows]
    assert len(rows) > 20 and errors == sorted(errors, reverse=True) and errors[0] > 0
    shell.done(*given)  # goes on from what the table was calibrated on
    worst = rows[0].split()[-1].replace(".", r"\.")
    shell.done(*given[:-3], "-o", "other", "--search", "--keep", worst)
    told = [about(shell.folder / name / "unet-int8") for name in
             ("variant", "other")]  # fmt: skip
    assert {*told[0]["layers"]} - {*told[1]["layers"]} == {*rows[0].split()[-1:]}
    assert all(one["recipe"] == "sdxl-unet-alpha0.65-searched" for one in told)
    drawn = shell.generate("a cat", "--precision", "int8", "--unet", "other/unet-int8")
    assert drawn.code == 0 and precisions(shell) == {"int8"}, drawn.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--search --plain -o out", "--search: chooses the smoothing itself; leave out --plain"),
        ("--search --scheme int8-dynamic -o out", "--search: is for calibration, and int8-dynamic needs none"),
        ("--sensitivity --text-model x -o out", "--sensitivity: is for models that draw, not for --text-model"),
        ("--scheme w4a16 -o out", "--scheme: w4a16 is for language models, with --text-model"),
        ("--gptq --scheme fp8 --text-model x -o out", "there are none with fp8"),
        ("--float-head -o out", "--float-head: is for language models, with --text-model"),
        ("--keep x --control canny -o out", "--keep: is for models that draw, not for --control"),
        ("--gptq --scales-only -o out", "--gptq: rounds integer weights that are stored, and there are none with --sc"),
        ("--scales-only --text-model x -o out", "--scales-only: "),
        ("--gptq --sensitivity -o out", "there are none with --sensitivity"),
        ("--keep [ -o out", "keep: '[' is no regular expression"),
        ("--keep conv_in -o out", "keep: no layer that would be quantized has a name that matches 'conv_in'"),
    ],
)
def test_options_for_layers_that_do_not_fit_are_refused(shell: Shell, cached: Path, options: str, said: str) -> None:
    told = shell("quantize", "--model", TINY, *options.split())
    assert told.code == 2 and said in told.err and cached.is_dir()
    assert not [*shell.folder.glob("out/*")]


@pytest.mark.parametrize("option", ["--limit 3", "--alpha 0.5", "--plain", "--scales-only", "--sensitivity", "--gptq"])
def test_what_the_cache_is_not_asked_for_needs_a_folder(shell: Shell, cached: Path, option: str) -> None:
    assert f"--out: is needed with {option.split()[0]}" in shell.refusal("quantize", "--model", TINY, *option.split())
    assert not (cached / "quantized").exists()


@pytest.mark.parametrize(("place", "verb"), [(1, ()), (3, ("--sensitivity",))], ids=["variant", "sensitivity"])
def test_a_prompt_that_the_model_does_not_read_is_named_before_any_is_drawn(
    shell: Shell, place: int, verb: tuple[str, ...]
) -> None:
    prompts = ["a fox", "a hat"]
    prompts.insert(place - 1, "word " * 540)
    shell.save("captions.txt", "\n".join(prompts))
    said = shell("quantize", "--model", TINY, "--prompts", "captions.txt", "-o", "made", *verb)
    assert said.code == 2 and f"diptych: --prompts: number {place} has 2160 tokens" in said.err
    assert "1/3" not in said.err and not (shell.folder / "made/unet-int8").exists()


def test_a_text_model_needs_a_folder(shell: Shell, model: Path) -> None:
    assert "--out: is needed with --text-model" in shell.refusal("quantize", "--text-model", str(model))


def test_a_control_network_is_quantized_beside_itself(shell: Shell, tmp_path: Path) -> None:
    model = tiny_image.save(tmp_path / "model", tiny_image.SHAPES[TINY])
    save(controlnet(load_image_model(str(model))), tmp_path / "controls", "edges")
    folder = str(tmp_path / "controls")
    asked = ["quantize", "--model", str(model), "--limit", "2", "--control-dir", folder, "--control"]
    done = shell.done(*asked, "edges")
    assert done.out.startswith("edges: ") and "layers in int8" in done.out
    assert (tmp_path / "controls" / "edges-int8" / "quantization.json").is_file()
    for wrong, words in (
        ([*asked, "gone"], "there is no folder gone"),
        ([*asked[:3], "--control", "x"], "--control-dir"),
    ):
        assert words in shell.refusal(*wrong)
