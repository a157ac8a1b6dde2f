"""`diptych generate`: how prompts are read, for each encoder, in each syntax, with textual inversions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from tests.cli.shell import Shell, made_with
from tests.pipeline import embeddings


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (("--syntax", "a1111"), {"prompt_weighting": "a1111"}),
        (("--syntax", "compel"), {"prompt_weighting": "compel"}),
        (("--prompt-2", "a moor"), {"prompt_2": "a moor"}),
        (("--negative", "fog", "--negative-2", "mist"), {"negative_prompt": "fog", "negative_prompt_2": "mist"}),
        (("--clip-skip", "1"), {"clip_skip": 1}),
    ],
)
def test_how_prompts_are_read_is_said_in_the_picture(
    shell: Shell, options: tuple[str, ...], fields: dict[str, Any]
) -> None:
    assert shell.generate("a [red] (fox:1.4)", *options, "--seed", "1", "--steps", "2").code == 0
    (path,) = shell.pictures()
    assert {name: made_with(path)[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("a" * 400,), "PROMPT: has 400 tokens in 6 chunks of 75"),
        (("[a|b]", "--syntax", "a1111"), "PROMPT: prompt editing"),
        (("a", "--prompt-2", "b" * 400), "--prompt-2: has 400 tokens"),
        (("a", "--negative-2", "b"), "--negative-2: needs a negative_prompt"),
        (("a", "--clip-skip", "2"), "--clip-skip: must be at most 1"),
        (("a (red)99", "--weighting"), "PROMPT: a weight is more than 10"),
    ],
)
def test_what_cannot_be_read_of_prompts_is_named(shell: Shell, options: tuple[str, ...], said: str) -> None:
    assert said in shell.refused(*options)


def test_textual_inversions_are_named_in_prompts(shell: Shell, tmp_path: Path) -> None:
    embeddings.write(load(tiny.TINY), tmp_path, "ink")
    (tmp_path / "bad.safetensors").write_bytes(b"none")
    drawn = []
    for options in (("--embeddings-dir", str(tmp_path)), ()):
        assert shell.generate("a fox in ink", "--seed", "1", "--steps", "2", *options).code == 0
        (path,) = shell.pictures()
        with Image.open(path) as image:
            assert ("embeddings" in json.loads(image.text["fingerprint"])) is bool(options)  # type: ignore[attr-defined]
            drawn.append(image.tobytes())
    assert drawn[0] != drawn[1]
    line = shell.refused("bad", "--embeddings-dir", str(tmp_path))
    assert "PROMPT: embedding bad: bad.safetensors is damaged" in line
