"""What is asked for and what is refused: every field alone, strings of every kind, and the sizes on offer."""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.bounds import MAX_SEED
from contract.card import MAX_GUIDANCE, MAX_PROMPT_CHARACTERS, MAX_STEPS, ImageOffer
from contract.cascade import Cascade
from contract.control import Control
from contract.errors import Invalid
from contract.image import Edit, ImageJob, ImageParameters
from contract.image_prompt import ImagePrompt
from contract.image_request import EditRequest, ImageRequest
from contract.refining import Refining
from contract.upscale import Upscale
from pipeline.sizes import sizes

SIZES = sizes(64, 16)
OFFER = ImageOffer(SIZES, ("euler", "lcm"))
GOOD = ImageParameters("a fox", 7, 64, 64)
SECRET = "xyzzy"


def short(value: object) -> str:
    return "huge" if isinstance(value, int) and abs(value) > 10**20 else ascii(value)[:20]


def refusal(**fields: Any) -> str:
    with pytest.raises(Invalid) as caught:
        dataclasses.replace(GOOD, **fields).check(OFFER)
    return str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "x" * MAX_PROMPT_CHARACTERS},
        {"prompt": "tab\tand\r\nlines 🦊 一只狐狸"},
        {"negative_prompt": ""},
        {"negative_prompt": "blurry"},
        {"seed": 0},
        {"seed": MAX_SEED},
        {"steps": 1},
        {"steps": MAX_STEPS},
        {"guidance_scale": 0},
        {"guidance_scale": MAX_GUIDANCE},
        {"scheduler": "lcm"},
        {"width": 32, "height": 32},
        {"preview_every": 5},
        {"deterministic": True},
    ],
    ids=str,
)
def test_what_is_offered_is_taken(fields: dict[str, Any]) -> None:
    dataclasses.replace(GOOD, **fields).check(OFFER)


NOT_NUMBERS = [None, "7", "", True, False, float("nan"), float("inf"), 1j, [], {}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("prompt", value) for value in ("", " \t\n", "\u3000", None, 7, b"bytes", ["list"])),
        *(("prompt", value) for value in ("nul\0", "\ud800", "bell\a", "escape\x1b[31m", "\x7f", "\x85", "\x9b")),
        *((field, SECRET * 30_000) for field in ("prompt", "negative_prompt", "scheduler")),
        *(("negative_prompt", value) for value in (7, b"", "\0", "\udfff")),
        *(("seed", value) for value in (*NOT_NUMBERS, 7.0, -1, MAX_SEED + 1, 10**5000, -(10**5000))),
        *(("steps", value) for value in (*NOT_NUMBERS, 20.0, 0, -1, 10_000, 10**5000)),
        *(("preview_every", value) for value in (*NOT_NUMBERS, 1.5, -1, MAX_STEPS + 1)),
        *(("guidance_scale", value) for value in (*NOT_NUMBERS, -0.1, 100.1, -float("inf"), 10**5000, -(10**5000))),
        *(("scheduler", value) for value in ("", "ddim", "Euler", 7, [], {}, "\0")),
        *(("eta", value) for value in ("much", True, float("nan"), -0.1, 1.5)),
        *(("clip_skip", value) for value in ("1", True, 1.5, -1, 32)),
        *(("deterministic", value) for value in (None, 1, 0, "yes", [])),
        *(("vae", value) for value in ("", "tiny", "small", None, 7, [], {}, "\0")),
    ],
    ids=short,
)
def test_what_is_wrong_is_refused_by_its_name(field: str, value: Any) -> None:
    said = refusal(**{field: value})
    assert said.startswith(f"{field}: ")
    assert len(said) < 200 and said.isprintable() and SECRET not in said


@pytest.mark.parametrize("side", [*NOT_NUMBERS, 0, -64, 63, 65, 64.0, 10**5000, 2**40], ids=short)
@pytest.mark.parametrize("which", ["width", "height"])
def test_a_size_that_is_not_offered_is_refused_with_those_that_are(which: str, side: Any) -> None:
    said = refusal(**{which: side})
    assert said.startswith("size: ")
    assert "64x64" in said or "whole numbers" in said


@given(st.text(st.characters() | st.characters(categories=["Cs"]), max_size=60))
def test_a_prompt_is_taken_exactly_if_it_can_be_read_and_printed(text: str) -> None:
    bad = [c for c in text if unicodedata.category(c) in ("Cc", "Cs") and c not in "\t\r\n"]
    if bad or not text.strip():
        assert refusal(prompt=text).startswith("prompt: ")
    else:
        dataclasses.replace(GOOD, prompt=text).check(OFFER)
        text.encode()
    if bad:
        assert refusal(negative_prompt=text).startswith("negative_prompt: ")


@given(st.sampled_from("\0\a\x1b\x7f\x80\ud800\udfff"), st.integers(0, 30))
def test_what_is_said_of_a_prompt_never_echoes_it(character: str, place: int) -> None:
    text = f"{'é' * place}{character}{SECRET * 3}"
    said = refusal(prompt=text)
    assert f"character {place + 1} is U+{ord(character):04X}" in said
    assert SECRET not in said and "é" not in said
    said.encode()


@given(st.sampled_from([32, 64, 128, 256, 512, 768, 1024]), st.sampled_from([8, 16, 32]))
def test_sizes_are_of_the_native_area_and_on_the_grid(native: int, multiple: int) -> None:
    offered = sizes(native, multiple)
    assert (native, native) in offered
    assert len(set(offered)) == len(offered) and list(offered) == sorted(offered)
    for width, height in offered:
        assert (height, width) in offered
        assert width % multiple == height % multiple == 0
        assert 0.5 <= width / height <= 2
        if width != height:
            assert 0.85 <= width * height / native**2 <= 1.15 or native < 16 * multiple
    squares = {width for width, height in offered if width == height}
    assert squares <= {native, native // 2}


def test_sdxl_offers_the_sizes_that_people_ask_for() -> None:
    wanted = {(1024, 1024), (512, 512), (1152, 896), (1216, 832), (1344, 768), (832, 1216)}
    assert wanted <= set(sizes(1024, 32))


# -- the job as its record has it --------------------------------------------------------------------------------------

CHANGED: dict[str, Any] = {
    "prompt": "a hare", "seed": 9, "width": 32, "height": 96, "negative_prompt": "", "steps": 3, "guidance_scale": 1.5,
    "scheduler": "lcm", "deterministic": True, "preview_every": 2, "prompt_weighting": True, "lora": "ink:0.5",
    "guidance_interval": (0.25, 0.75), "schedule_type": "karras", "timesteps": (999, 500, 1), "sigmas": (2.5, 0.5, 0),
    "eta": 0.5, "vae": "tiny", "guided_steps": (0, 2), "prompt_2": "a moor", "negative_prompt_2": "fog", "clip_skip": 1,
    "upscale": Upscale(model="x4", scale=2.5), "refiner": Refining(model="refiner"),
    "edit": Edit("image", "mask", 0.5, True),
    "control": (Control(model="edges", strength=0.5, start=0.25, end=0.75, preprocessor="canny", image="key"),),
    "image_prompts": (ImagePrompt(model="base", strength=0.5, end=0.75, image="key"),),
    "pipeline_options": {"true_cfg_scale": 4.0, "max_sequence_length": 64},
}  # fmt: skip
BESIDE: dict[str, Any] = {
    "n": 3, "deepcache": {"interval": 3}, "expand_prompt": True, "output_format": "jpeg", "output_compression": 7,
    "cascade": Cascade(draft="sketcher", gate=20.5), "warnings": ("style: has no effect",), "checker": "blur",
}  # fmt: skip


def test_a_record_carries_every_field() -> None:
    """A field that is added is carried without a word about it; this test then asks for its value here."""
    named = {one.name for one in dataclasses.fields(ImageParameters)} - {"deepcache"}
    assert named == CHANGED.keys() and {one.name for one in dataclasses.fields(ImageJob)} - {"picture"} == BESIDE.keys()
    picture = dataclasses.replace(GOOD, **CHANGED)
    for job in (ImageJob(GOOD), ImageJob(picture), ImageJob(GOOD, **BESIDE), ImageJob(picture, **BESIDE)):
        assert ImageJob.read(json.loads(json.dumps(job.to_dict()))) == job


def test_a_record_tells_what_the_version_before_reads() -> None:
    assert ImageJob(GOOD).to_dict() == {
        "prompt": "a fox", "negative_prompt": None, "n": 1, "seed": 7, "steps": 20, "guidance_scale": 5.0, "width": 64,
        "height": 64, "scheduler": None, "deterministic": False,
    }  # fmt: skip
    whole = ImageJob(dataclasses.replace(GOOD, **CHANGED), **BESIDE).to_dict()
    assert whole["edit"] == {"strength": 0.5, "image": "image", "mask": "mask", "soft_mask": True}
    assert whole["control"] == [
        {"model": "edges", "strength": 0.5, "start": 0.25, "end": 0.75, "preprocessor": "canny", "image": "key"}
    ]
    assert whole["image_prompts"] == [{"model": "base", "strength": 0.5, "end": 0.75, "image": "key"}]
    assert {name: whole[name] for name in BESIDE} == BESIDE | {"cascade": {"draft": "sketcher", "gate": 20.5}}


def test_a_newer_versions_fields_are_passed_over() -> None:
    assert ImageJob.read({**ImageJob(GOOD).to_dict(), "aspect": "wide"}) == ImageJob(GOOD)


@given(st.integers(1, 40), st.sampled_from([None, (100, 50)]), st.booleans())
def test_what_is_asked_for_is_what_is_drawn(steps: int, edited: tuple[int, int] | None, masked: bool) -> None:
    """What one check has taken at the door no other refuses at the model."""
    offer = dataclasses.replace(OFFER, native=(64, 64))
    job = ImageRequest(prompt="a fox", steps=steps).complete(offer, edited, masked=masked)
    for picture in job.pictures():
        dataclasses.replace(picture, edit=None).check(offer)
    assert (job.picture.edit is not None) == (edited is not None)
    assert job.picture.made == (steps if edited is None or masked else max(1, int(steps * 0.8)))


@given(st.integers(1, 20), st.floats(0, 1), st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_an_interval_counts_the_steps_that_run(steps: int, strength: float, interval: tuple[float, float]) -> None:
    """What the API takes of an edit the worker takes, and the other way round."""
    edit = Edit(bytes(3 * 64 * 64), None, strength)
    picture = dataclasses.replace(GOOD, steps=steps, guidance_interval=interval, edit=edit)
    asked = EditRequest(prompt="x", steps=steps, strength=strength, guidance_interval=[*interval], size="64x64")

    def refuses(check: Callable[[], object]) -> bool:
        try:
            check()
        except Invalid:
            return True
        return False

    assert refuses(lambda: picture.check(OFFER)) == refuses(lambda: asked.complete(OFFER, (64, 64)))
