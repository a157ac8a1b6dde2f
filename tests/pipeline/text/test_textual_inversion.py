"""Textual inversions: found by their names, drawn as diffusers draws them, and refused by file and field."""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from contract.errors import Invalid
from contract.image import ImageParameters
from core.batching.request import Request
from pipeline.checkpoints import tiny
from pipeline.runner import ImageRunner
from pipeline.text.textual_inversion import words
from tests.pipeline import embeddings
from tests.pipeline.embeddings import vectors, write
from tests.pipeline.long_prompts import words as letters
from tests.pipeline.worlds import Crank, levels, model, shape, solo

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
FOX = ImageParameters("a fox in ink", 3, 32, 32, negative_prompt="fog", steps=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(model("plain"), tmp_path, "ink", 3, seed=1)
    write(model("plain"), tmp_path, "oil.v2", 1, seed=2)
    return tmp_path


def runner_of(folder: Path | None) -> ImageRunner:
    return embeddings.runner_of(model("plain"), folder)


def stock_with(names: dict[str, dict[str, torch.Tensor]]) -> Any:
    """diffusers' pipeline, into which it has loaded these embeddings."""
    pipeline = tiny.make(shape("plain"))
    pipeline.set_progress_bar_config(disable=True)
    for name, found in names.items():
        for key, number in (("clip_l", ""), ("clip_g", "_2")):
            encoder, tokenizer = (getattr(pipeline, part + number) for part in ("text_encoder", "tokenizer"))
            pipeline.load_textual_inversion(found[key], token=name, text_encoder=encoder, tokenizer=tokenizer)
    return pipeline


@pytest.mark.quick(0, 3, 4)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "ink"},
        {"negative_prompt": "ink, ink"},
        {"prompt": "ink and oil.v2"},
        {"prompt_2": "a moor in ink"},
    ],
)
def test_pictures_are_those_of_diffusers(folder: Path, fields: dict[str, Any]) -> None:
    wanted = replace(FOX, **fields)
    one = model("plain")
    pipeline = stock_with({"ink": vectors(one, 3, 1), "oil.v2": vectors(one, 1, 2)})
    expected = pipeline(
        wanted.prompt, prompt_2=wanted.prompt_2, negative_prompt=wanted.negative_prompt, width=32, height=32,
        num_inference_steps=wanted.steps, guidance_scale=wanted.guidance_scale,
        generator=torch.Generator().manual_seed(wanted.seed),
    ).images[0]  # fmt: skip
    found = solo(runner_of(folder), wanted)
    assert np.abs(levels(found) - np.asarray(expected).astype(int)).max() <= 1
    assert levels(solo(runner_of(None), wanted)).tolist() != levels(found).tolist()


def test_the_fingerprint_names_those_that_a_prompt_names(folder: Path) -> None:
    found = solo(runner_of(folder), FOX)
    assert found.fingerprint["embeddings"] == {
        "ink": hashlib.sha256((folder / "ink.safetensors").read_bytes()).hexdigest()
    }
    plain = replace(FOX, prompt="a fox in inks")
    assert solo(runner_of(folder), plain).png() == solo(runner_of(None), plain).png()


def test_a_weight_applies_to_its_vectors(folder: Path) -> None:
    runner = runner_of(folder)
    drawn = [
        levels(solo(runner, replace(FOX, prompt=prompt, prompt_weighting="a1111"))).tolist()
        for prompt in ("a fox in ink", "a fox in (ink:1)", "a fox in (ink:1.5)", "a fox in (embedding:ink:1.5)")
    ]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_in_company_each_prompt_has_its_own(folder: Path) -> None:
    wanted = {
        "ink": FOX, "none": replace(FOX, prompt="a fox"), "oil": replace(FOX, prompt="oil.v2 ink"),
        "long": replace(FOX, prompt=f"{letters(74)} ink {letters(30)}"),
    }  # fmt: skip
    runner = runner_of(folder)
    crank = Crank(runner)
    for name, one in wanted.items():
        crank.submit(name, one)
    for name, picture in crank.pictures().items():
        assert np.abs(levels(picture) - levels(solo(runner_of(folder), wanted[name]))).max() <= 1, name


def test_a_file_that_changes_is_read_anew_and_running_requests_keep_theirs(folder: Path) -> None:
    runner = runner_of(folder)
    before = solo(runner_of(folder), FOX)
    crank = Crank(runner)
    crank.submit("old", FOX)
    crank.turn()
    write(model("plain"), folder, "ink", 2, seed=9)
    crank.submit("new", FOX)
    found = crank.pictures()
    assert found["old"].fingerprint["embeddings"] == before.fingerprint["embeddings"]
    assert np.abs(levels(found["old"]) - levels(before)).max() <= 1
    after = solo(runner_of(folder), FOX)
    assert found["new"].fingerprint["embeddings"] == after.fingerprint["embeddings"] != before.fingerprint["embeddings"]


def wide(one: Path) -> None:
    save_file({"clip_l": torch.zeros(2, 7), "clip_g": torch.zeros(2, 16)}, one)


def halved(one: Path) -> None:
    data = save({"clip_l": torch.zeros(2, 16), "clip_g": torch.zeros(2, 16)})
    one.write_bytes(data[: len(data) // 2])


def endless(one: Path) -> None:
    save_file({"clip_l": torch.full((1, 16), torch.nan), "clip_g": torch.zeros(1, 16)}, one)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (halved, "bad.safetensors is damaged"),
    "empty": (lambda one: one.write_bytes(b""), "bad.safetensors is damaged"),
    "wrong width": (wide, "bad.safetensors: clip_l is [2, 7], and this model needs [vectors, 16] in floats"),
    "nan": (endless, "bad.safetensors: clip_l holds what is no finite number"),
    "one encoder": (
        lambda one: save_file({"clip_l": torch.zeros(2, 16)}, one),
        "bad.safetensors has no clip_g; wanted are clip_l and clip_g",
    ),
    "too many": (
        lambda one: save_file({"clip_l": torch.zeros(76, 16), "clip_g": torch.zeros(76, 16)}, one),
        "bad.safetensors: clip_l has 76 vectors, at most 75 are allowed",
    ),
    "whole numbers": (
        lambda one: save_file({"clip_l": torch.zeros(2, 16, dtype=torch.int32), "clip_g": torch.zeros(2, 16)}, one),
        "bad.safetensors: clip_l is [2, 16], and this model needs",
    ),
    "pickle inside": (lambda one: one.write_bytes(pickle.dumps({})), "bad.safetensors is a pickle"),
    "torch's": (lambda one: torch.save({}, one), "bad.safetensors is a pickle"),
    "pickle": (lambda one: one.with_suffix(".pt").write_bytes(pickle.dumps({})), "bad.pt is a pickle"),
    "a folder": (lambda one: one.mkdir(), "bad.safetensors is no file"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "field"),
    [(damage, "prompt") for damage in DAMAGE] + [("nan", field) for field in ("negative_prompt", "prompt_2")],
)
def test_a_bad_file_is_refused_by_field_and_name(folder: Path, damage: str, field: str) -> None:
    spoil, said = DAMAGE[damage]
    spoil(folder / "bad.safetensors")
    runner = runner_of(folder)
    with pytest.raises(Invalid) as caught:
        runner.check(Request("r", "image", replace(FOX, **{field: "a bad thing"})))
    assert str(caught.value).startswith(f"{field}: embedding bad: {said}")
    assert levels(solo(runner, FOX)).any(), "others are drawn"


def test_a_folder_that_is_gone_has_no_names(tmp_path: Path) -> None:
    runner = runner_of(tmp_path / "gone")
    assert runner.extensions["embeddings"].asset_names() == []
    assert solo(runner, FOX).png() == solo(runner_of(None), FOX).png()


def test_names_are_found_as_words() -> None:
    pattern = words(["ink", "ink-2", "a.b"])
    assert pattern is not None and words([]) is None
    text = "ink-2 ink. INK ink, xink ink2 a.b a.bc embedding:ink-2 émbedding:ink ink.x"
    assert [match[1] for match in pattern.finditer(text)] == ["ink-2", "ink", "ink", "a.b", "ink-2", "ink"]


@pytest.mark.quick
@pytest.mark.parametrize("syntax", [False, "a1111"])
@pytest.mark.parametrize("name", ["Ink (v2)", "[old] ink", "tinte äöü", "ink+"])
def test_a_name_with_blanks_and_brackets_is_found_in_a_prompt(tmp_path: Path, name: str, syntax: str | bool) -> None:
    write(model("plain"), tmp_path, name, 3, seed=1)
    written = re.sub(r"([()\[\]])", r"\\\1", name) if syntax else name
    found = solo(runner_of(tmp_path), replace(FOX, prompt=f"a fox in {written}", prompt_weighting=syntax))
    (tmp_path / f"{name}.safetensors").rename(tmp_path / "ink.safetensors")
    same = solo(runner_of(tmp_path), replace(FOX, prompt_weighting=syntax))
    assert list(found.fingerprint["embeddings"]) == [name]
    assert np.abs(levels(found) - levels(same)).max() <= 1


@pytest.mark.parametrize(("first", "second"), [("text_encoders_0", "text_encoders_1"), ("text_encoders_0", "clip_g")])
def test_keys_of_training_scripts_are_taken(tmp_path: Path, first: str, second: str) -> None:
    made = vectors(model("plain"), 3, 1)
    save_file(made, tmp_path / "ink.safetensors")
    expected = solo(runner_of(tmp_path), FOX)
    save_file({first: made["clip_l"], second: made["clip_g"]}, tmp_path / "ink.safetensors")
    assert np.array_equal(levels(solo(runner_of(tmp_path), FOX)), levels(expected))
