"""ImageReward: figures of the published implementation over the same weights, and files that are not its."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from evaluation.image_reward import ImageReward
from evaluation.inception import WeightsError
from tests.evaluation import reward_stand_ins

PUBLISHED: dict[str, list[float]] = json.loads(
    Path(__file__).with_name("published_rewards.json").read_text("utf-8")
)  # see published_rewards.py


def test_it_is_the_published_one(image_reward: Path) -> None:
    """Preparation of sizes and words, truncation, both networks, head and scale."""
    reward = ImageReward(image_reward)
    pairs = zip(reward_stand_ins.pictures(), reward_stand_ins.CAPTIONS, strict=True)
    found = [reward.score(picture, caption) for picture, caption in pairs]
    assert found == pytest.approx(PUBLISHED["imagereward"], abs=1e-5)


def test_safetensors_are_the_same(image_reward: Path, tmp_path: Path) -> None:
    for name in ("med_config.json", "vocab.txt"):
        shutil.copy(image_reward / name, tmp_path)
    save_file(torch.load(image_reward / "ImageReward.pt"), tmp_path / "ImageReward.safetensors")
    one, other = ImageReward(image_reward), ImageReward(tmp_path)
    (picture, *_), (caption, *_) = reward_stand_ins.pictures(), reward_stand_ins.CAPTIONS
    assert one.score(picture, caption) == other.score(picture, caption)
    assert one.digest != other.digest  # of the file


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _changed(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found: dict[str, Any] = torch.load(folder / "ImageReward.pt") | {name: value}
        torch.save({key: kept for key, kept in found.items() if kept is not None}, folder / "ImageReward.pt")

    return change


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_without("ImageReward.pt"), "has no ImageReward.pt or ImageReward.safetensors"),
        (_without("med_config.json"), "has no med_config.json"),
        (_without("vocab.txt"), "has no vocab.txt"),
        (_written("ImageReward.pt", "no weights"), "ImageReward.pt: is no file of weights"),
        (_written("med_config.json", "{}"), "med_config.json: is not the config of ImageReward's text encoder"),
        (_written("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"), "has 5 tokens, where ImageReward.pt has 22"),
        (_changed("blip.visual_encoder.patch_embed.proj.weight", None), "no blip.visual_encoder.patch_embed"),
        (_changed("mlp.layers.6.bias", None), "ImageReward.pt: is not ImageReward (no mlp.6.bias)"),
        (_changed("mlp.layers.6.bias", torch.zeros(3)), "(mlp.6.bias is [3], not [16])"),
        (_changed("mlp.layers.8.bias", torch.zeros(3)), "(has mlp.8.bias)"),
    ],
)
def test_other_files_are_refused_by_name(
    damage: Callable[[Path], None], told: str, image_reward: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "imagereward"
    shutil.copytree(image_reward, folder)
    damage(folder)
    with pytest.raises(WeightsError) as error:
        ImageReward(folder)
    assert told in str(error.value) and str(folder) in str(error.value)
