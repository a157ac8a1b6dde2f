"""What is described is what ships: each configuration in models/ is that of `EMOJI`, and the stand-in has its weights'
shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from pipeline import tiny
from training.shapes import EMOJI

MODELS = Path(__file__).parents[2] / "models"


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
        "emoji-lm": EMOJI.llama(EMOJI.lm, EMOJI.lm_vocab, 1, 5, 0),
        "emoji-lm-draft": EMOJI.llama(EMOJI.draft, EMOJI.lm_vocab, 1, 5, 0),
    }


@pytest.mark.parametrize("name", described())
def test_what_ships_is_what_is_described(name: str) -> None:
    found = stored(name, "scheduler_config.json" if name.endswith("scheduler") else "config.json")
    wanted = json.loads(json.dumps(described()[name]))
    if name.endswith("vae"):
        del wanted["scaling_factor"]  # of the codec's own latents, measured after it was trained
    assert {key: found[key] for key in wanted} == wanted


def test_both_towers_of_the_judge_are_the_described() -> None:
    found = stored("emoji-clip", "config.json")
    for part, wanted in (
        ("text_config", EMOJI.picture.text(1, EMOJI.vocab, 0)),
        ("vision_config", EMOJI.clip_vision(EMOJI.picture.native)),
    ):
        assert {key: found[part][key] for key in wanted} == wanted


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "text_encoder_2"])
def test_the_stand_in_has_the_shape_of_what_ships(part: str) -> None:
    """But for the words: a stand-in's tokens are bytes."""
    made = getattr(tiny.make(tiny.SHAPES[tiny.EMOJI_XL]), part).state_dict()
    shapes: dict[str, list[int]] = {}
    for path in (MODELS / "emoji-xl" / part).glob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            shapes |= {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
    words = {key for key in made if key.endswith("token_embedding.weight")}
    assert {key: list(made[key].shape) for key in made.keys() - words} == {k: shapes[k] for k in shapes.keys() - words}
