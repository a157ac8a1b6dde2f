"""What is described is what ships: each configuration in models/ is that of `EMOJI`, and the stand-in has its weights'
shapes.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from lab.training import draft, phrases
from lab.training.run import TrainingRun
from lab.training.shapes import EMOJI
from pipeline.checkpoints import tiny, tiny_zimage

MODELS = Path(__file__).parents[3] / "models"


def stored(*path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MODELS.joinpath(*path).read_text(encoding="utf-8"))
    return found


def described() -> dict[str, dict[str, Any]]:
    picture, words = EMOJI.picture, EMOJI.vocab
    return {
        "emoji-xl/unet": picture.unet(),
        "emoji-xl/vae": picture.vae(),
        "emoji-xl/text_encoder": picture.text(0, words, words - 1),
        "emoji-xl/text_encoder_2": picture.text(1, words, 0),
        "emoji-xl/scheduler": picture.sampling(),
        "emoji-z/transformer": tiny_zimage.EMOJI.transformer(),
        "emoji-z/text_encoder": tiny_zimage.EMOJI.text(2560, 2560 - len(tiny_zimage.SPECIAL)),
        "emoji-z/vae": tiny_zimage.EMOJI.vae(),
        "emoji-z/scheduler": tiny_zimage.EMOJI.sampling(),
        "emoji-lm": EMOJI.llama(EMOJI.lm, EMOJI.lm_vocab, 1, 5, 0),
        "emoji-lm-draft": EMOJI.llama(EMOJI.draft, EMOJI.lm_vocab, 1, 5, 0) | {"block_size": EMOJI.draft_block},
    }


@pytest.mark.parametrize("name", described())
def test_what_ships_is_what_is_described(name: str) -> None:
    found = stored(name, "scheduler_config.json" if name.endswith("scheduler") else "config.json")
    wanted = json.loads(json.dumps(described()[name]))
    if name.endswith("vae"):
        for measured in ("scaling_factor", "shift_factor"):  # of the codec's own latents, after it was trained
            wanted.pop(measured, None)
    assert {key: found[key] for key in wanted} == wanted


def test_both_towers_of_the_judge_are_the_described() -> None:
    found = stored("emoji-clip", "config.json")
    for part, wanted in (
        ("text_config", EMOJI.picture.text(1, EMOJI.vocab, 0)),
        ("vision_config", EMOJI.clip_vision(EMOJI.picture.native)),
    ):
        assert {key: found[part][key] for key in wanted} == wanted


@functools.cache
def stand_in(name: str) -> dict[str, Any]:
    made: dict[str, Any] = (
        tiny_zimage.parts(tiny_zimage.SHAPES[tiny_zimage.EMOJI_Z])
        if name == "emoji-z"
        else tiny.make(tiny.SHAPES[tiny.EMOJI_XL]).components
    )
    return made


def shipped(*folder: str) -> dict[str, list[int]]:
    """The shapes of the weights in a folder."""
    shapes: dict[str, list[int]] = {}
    for path in MODELS.joinpath(*folder).glob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            shapes |= {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
    return shapes


@pytest.mark.parametrize(
    "name",
    [f"emoji-xl/{part}" for part in ("unet", "vae", "text_encoder", "text_encoder_2")]
    + [f"emoji-z/{part}" for part in ("transformer", "vae", "text_encoder")],
)
def test_the_stand_in_has_the_shape_of_what_ships(name: str) -> None:
    """But for the words: a stand-in's tokens are bytes."""
    model, part = name.split("/")
    made, shapes = stand_in(model)[part].state_dict(), shipped(model, part)
    words = {key for key in made if key.endswith(("token_embedding.weight", "embed_tokens.weight"))}
    assert {key: list(made[key].shape) for key in made.keys() - words} == {k: shapes[k] for k in shapes.keys() - words}


def test_a_new_draft_has_the_shape_of_what_ships() -> None:
    made = draft.build(TrainingRun(Path(), Path(), Path())).state_dict()
    assert {key: list(tensor.shape) for key, tensor in made.items()} == shipped("emoji-lm-draft")


def test_emoji_lm_is_asked_in_the_words_that_it_was_trained_with() -> None:
    assert stored("emoji-lm", "config.json")["expansion_instruction"] == phrases.SYSTEM
