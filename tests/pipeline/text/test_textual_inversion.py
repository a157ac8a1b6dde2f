"""Textual inversions: found by their names, drawn as diffusers draws them, and refused by file and field."""

from __future__ import annotations

import hashlib
import pickle
import re
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
from tests.pipeline.worlds import Crank, apart, levels, model, shape, solo, stock_options, together

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


@pytest.mark.quick(0, 2, 3)
@pytest.mark.parametrize(
    "fields", [{}, {"negative_prompt": "ink, ink"}, {"prompt": "ink and oil.v2"}, {"prompt_2": "a moor in ink"}]
)
def test_pictures_are_those_of_diffusers(folder: Path, fields: dict[str, Any]) -> None:
    wanted, one = replace(FOX, **fields), model("plain")
    pipeline = stock_with({"ink": vectors(one, 3, 1), "oil.v2": vectors(one, 1, 2)})
    expected = np.asarray(pipeline(**stock_options(wanted), prompt_2=wanted.prompt_2).images[0]).astype(int)
    found = solo(runner_of(folder), wanted)
    assert apart(found, expected) <= 1
    assert apart(found, solo(runner_of(None), wanted)) > 0


def test_the_fingerprint_names_those_that_a_prompt_names(folder: Path) -> None:
    found = solo(runner_of(folder), FOX)
    assert found.fingerprint["embeddings"] == {
        "ink": hashlib.sha256((folder / "ink.safetensors").read_bytes()).hexdigest()
    }
    plain = replace(FOX, prompt="a fox in inks")
    assert solo(runner_of(folder), plain).png() == solo(runner_of(None), plain).png()


def test_a_weight_applies_to_its_vectors(folder: Path) -> None:
    runner = runner_of(folder)
    plain, one, more, named = (
        solo(runner, replace(FOX, prompt=prompt, prompt_weighting="a1111"))
        for prompt in ("a fox in ink", "a fox in (ink:1)", "a fox in (ink:1.5)", "a fox in (embedding:ink:1.5)")
    )
    assert apart(plain, one) == apart(more, named) == 0 < apart(plain, more)


def test_in_company_each_prompt_has_its_own(folder: Path) -> None:
    runner = runner_of(folder)
    wanted = [FOX, *(replace(FOX, prompt=text) for text in ("a fox", "oil.v2 ink", f"{letters(74)} ink {letters(30)}"))]
    for one, picture in zip(wanted, together(runner, wanted), strict=True):
        assert apart(picture, solo(runner_of(folder), one)) <= 1, one


def test_a_file_that_changes_is_read_anew_and_running_requests_keep_theirs(folder: Path) -> None:
    before, crank = solo(runner_of(folder), FOX), Crank(runner_of(folder))
    crank.submit("old", FOX)
    crank.turn()
    write(model("plain"), folder, "ink", 2, seed=9)
    crank.submit("new", FOX)
    found = crank.pictures()
    assert apart(found["old"], before) <= 1
    old, new = (found[name].fingerprint["embeddings"] for name in ("old", "new"))
    after = solo(runner_of(folder), FOX).fingerprint["embeddings"]
    assert old == before.fingerprint["embeddings"] != after == new


PAIR = {"clip_l": torch.zeros(2, 16), "clip_g": torch.zeros(2, 16)}
DAMAGE: dict[str, tuple[bytes | dict[str, torch.Tensor], str]] = {
    "truncated": (save(PAIR)[:-1], " is damaged"),
    "empty": (b"", " is damaged"),
    "wrong width": (
        {**PAIR, "clip_l": torch.zeros(2, 7)}, ": clip_l is [2, 7], and this model needs [vectors, 16] in floats",
    ),
    "nan": ({**PAIR, "clip_l": torch.full((2, 16), torch.nan)}, ": clip_l holds what is no finite number"),
    "one encoder": ({"clip_l": torch.zeros(2, 16)}, " has no clip_g; wanted are clip_l and clip_g"),
    "too many": (dict.fromkeys(PAIR, torch.zeros(76, 16)), ": clip_l has 76 vectors, at most 75 are allowed"),
    "whole numbers": (
        {**PAIR, "clip_l": torch.zeros(2, 16, dtype=torch.int32)}, ": clip_l is [2, 16], and this model needs",
    ),
    "pickle inside": (pickle.dumps({}), " is a pickle"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "field"),
    [(damage, "prompt") for damage in DAMAGE] + [("nan", field) for field in ("negative_prompt", "prompt_2")],
)
def test_a_bad_file_is_refused_by_field_and_name(folder: Path, damage: str, field: str) -> None:
    content, said = DAMAGE[damage]
    data = content if isinstance(content, bytes) else save({key: tensor.clone() for key, tensor in content.items()})
    (folder / "bad.safetensors").write_bytes(data)
    runner = runner_of(folder)
    with pytest.raises(Invalid, match=f"^{field}: embedding bad: bad.safetensors{re.escape(said)}"):
        runner.check(Request("r", "image", replace(FOX, **{field: "a bad thing"})))
    assert levels(solo(runner, FOX)).any(), "others are drawn"


def test_a_folder_that_is_gone_has_no_names(tmp_path: Path) -> None:
    runner = runner_of(tmp_path / "gone")
    assert runner.extensions["embeddings"].asset_names() == []
    assert solo(runner, FOX).png() == solo(runner_of(None), FOX).png()


def test_names_are_found_as_words() -> None:
    pattern = words(["ink", "ink-2", "a.b"])
    assert pattern is not None and words([]) is None
    text = "ink-2 ink. INK ink, xink inkwell ink-blot (ink) re-ink ink2 a.b a.bc embedding:ink-2 émbedding:ink ink.x"
    expected = ["ink-2", "ink", "ink", "ink", "a.b", "ink-2", "ink"]
    assert [match[1] for match in pattern.finditer(text)] == expected


@pytest.mark.quick
@pytest.mark.parametrize("syntax", [False, "a1111"])
@pytest.mark.parametrize("name", ["Ink (v2)", "[old] ink", "tinte äöü", "ink+"])
def test_a_name_with_blanks_and_brackets_is_found_in_a_prompt(tmp_path: Path, name: str, syntax: str | bool) -> None:
    write(model("plain"), tmp_path, name, 3, seed=1)
    written = re.sub(r"([()\[\]])", r"\\\1", name) if syntax else name
    found = solo(runner_of(tmp_path), replace(FOX, prompt=f"a fox in {written}", prompt_weighting=syntax))
    (tmp_path / f"{name}.safetensors").rename(tmp_path / "ink.safetensors")
    assert list(found.fingerprint["embeddings"]) == [name]
    assert apart(found, solo(runner_of(tmp_path), replace(FOX, prompt_weighting=syntax))) <= 1


@pytest.mark.parametrize(("first", "second"), [("text_encoders_0", "text_encoders_1"), ("text_encoders_0", "clip_g")])
def test_keys_of_training_scripts_are_taken(tmp_path: Path, first: str, second: str) -> None:
    made = vectors(model("plain"), 3, 1)
    save_file(made, tmp_path / "ink.safetensors")
    expected = solo(runner_of(tmp_path), FOX)
    save_file({first: made["clip_l"], second: made["clip_g"]}, tmp_path / "ink.safetensors")
    assert apart(solo(runner_of(tmp_path), FOX), expected) == 0
