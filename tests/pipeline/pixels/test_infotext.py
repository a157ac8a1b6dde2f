"""Parameters as AUTOMATIC1111's web UI writes them, read by its grammar."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from contract import a1111
from contract.image import Edit, ImageParameters
from contract.loras import is_name
from pipeline.pixels.picture import Picture
from pipeline.sampling import samplers

PRINT = {"model": "emoji-xl", "weights": "0123456789abcdef", "version": "0.2.0", "bucket": None}
MARK = "Negative prompt:"


def text_of(*, sampler: str = "euler", fingerprint: dict[str, Any] | None = None, **fields: Any) -> str:
    """The chunk of the PNG."""
    wanted = ImageParameters(**{"prompt": "a fox", "seed": 7, "width": 64, "height": 48, **fields})
    picture = Picture(Image.new("RGB", (64, 48)), wanted, fingerprint or PRINT, sampler=sampler)
    with Image.open(io.BytesIO(picture.png())) as image:
        return str(image.text["parameters"])  # type: ignore[attr-defined]


def read(text: str) -> dict[str, str]:
    """A reader of the grammar: lines stripped of blanks; values up to a comma, or JSON strings."""
    *lines, last = text.strip().split("\n")
    prompts: dict[str, list[str]] = {"Prompt": [], "Negative": []}
    into = "Prompt"
    for line in (line.strip() for line in lines):
        if line.startswith(MARK):
            into, line = "Negative", line[len(MARK) :].strip()
        prompts[into].append(line)
    found = {name: "\n".join(parts) for name, parts in prompts.items()}
    while last:
        name, _, last = last.partition(":")
        last = last.lstrip(" ")
        if last.startswith('"'):
            value, end = json.JSONDecoder().raw_decode(last)
            last = last[end:].lstrip(", ")
        else:
            value, _, last = last.partition(",")
        found[name.strip()] = value
    return found


def test_all_that_they_know_is_told() -> None:
    edit = Edit(bytes(3 * 64 * 48), None, 0.55)
    text = text_of(
        prompt="a red fox\nin snow", negative_prompt="blurry, text", steps=30, guidance_scale=6.5, seed=2**63 - 1,
        sampler="dpm++2m", schedule_type="karras", edit=edit, lora="ink:0.8,oil:-1",
        fingerprint={**PRINT, "lora": {"ink": "ab" * 32, "oil": "cd" * 32}},
    )  # fmt: skip
    assert text == (
        "a red fox\nin snow <lora:ink:0.8> <lora:oil:-1>\nNegative prompt: blurry, text\n"
        "Steps: 30, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, Seed: 9223372036854775807, Size: 64x48, "
        "Model hash: 0123456789, Model: emoji-xl, Denoising strength: 0.55, "
        'Lora hashes: "ink: abababababab, oil: cdcdcdcdcdcd", Version: Diptych 0.2.0'
    )
    assert text_of(fingerprint={"model": "m"}).endswith("Seed: 7, Size: 64x48, Model: m, Version: Diptych")


@pytest.mark.parametrize("name", samplers.SAMPLERS)
def test_every_sampler_has_their_name(name: str) -> None:
    told = read(text_of(sampler=name))["Sampler"]
    assert told in ("Euler", "Euler a", "DPM++ 2M", "DPM++ 2M SDE", "LCM", "TCD")


def stripped(prompt: str) -> str:
    """As their reader has it: every line without blanks at its ends."""
    return "\n".join(line.strip() for line in prompt.strip().split("\n"))


# What requests may have: no control characters but those.
SIGNS = st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from(
    ["\n", "\t", ":", '"', ",", "\\", "🦊", "Steps: 1, ", MARK, "(", "]", "BREAK"]
)
PROMPTS = st.lists(SIGNS, max_size=60).map("".join).filter(lambda text: bool(text.strip()))


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.none() | PROMPTS, st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20))
def test_prompts_and_values_of_any_signs_are_read_as_they_were_written(
    prompt: str, negative: str | None, model: str
) -> None:
    found = read(text_of(prompt=prompt, negative_prompt=negative, fingerprint={**PRINT, "model": model}))
    assert a1111.read(found["Prompt"]) == stripped(prompt)
    assert a1111.read(found["Negative"]) == ("" if negative is None else stripped(negative))
    assert found["Model"] == model or found["Model"].strip() == model.strip()
    assert (found["Steps"], found["Seed"], found["CFG scale"]) == ("20", "7", "5.0")


@given(st.lists(st.text(min_size=1, max_size=20).filter(is_name), min_size=1, max_size=4, unique=True))
def test_loras_are_read_by_their_names(names: list[str]) -> None:
    lora = ", ".join(f"{name}:0.5" for name in names)
    text = text_of(lora=lora, fingerprint={**PRINT, "lora": dict.fromkeys(names, "ab" * 32)})
    found = read(text)
    tags = re.findall(r"<(\w+):([^>]+)>", found["Prompt"])  # as their reader finds them
    assert tags == [("lora", f"{name}:0.5") for name in names] and found["Prompt"].startswith("a fox <")
    assert dict(pair.split(": ") for pair in found["Lora hashes"].split(", ")) == dict.fromkeys(names, "ab" * 6)


def test_latin_text_is_in_the_chunk_that_all_readers_know() -> None:
    for prompt, kind in (("a café", b"tEXtparameters\0a caf\xe9"), ("a 🦊", b"iTXtparameters\0")):
        picture = Picture(Image.new("RGB", (8, 8)), ImageParameters(prompt, 1, 8, 8), PRINT)
        assert kind in picture.png()
