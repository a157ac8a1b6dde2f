"""ImageReward and HPSv3: figures of the published implementations over the same weights, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from evaluation import features, judges
from evaluation.features import Unscorable
from evaluation.hpsv3 import HpsV3
from evaluation.image_reward import ImageReward
from evaluation.inception import WeightsError
from evaluation.pixels import PictureError
from tests.evaluation import reward_stand_ins
from tests.evaluation.conftest import read_json
from tests.pipeline.damage import Damage, edit, remove, write

PUBLISHED: dict[str, list[float]] = read_json(
    Path(__file__).with_name("published_rewards.json")
)  # by the published packages: see docs/evaluation.md
PAIRS = list(zip(reward_stand_ins.pictures(), reward_stand_ins.CAPTIONS, strict=True))
PT, SAFE = "ImageReward.pt", "HPSv3.safetensors"


@pytest.fixture(scope="module")
def exact(hpsv3: Path) -> HpsV3:
    return HpsV3(hpsv3, dtype=torch.float32)


def _scores(network: HpsV3 | ImageReward) -> list[float]:
    return [network.score(picture, caption) for picture, caption in PAIRS]


def _rotary(network: HpsV3) -> list[Any]:
    qwen: Any = network._network["qwen"]
    return [qwen.visual.rotary_pos_emb, qwen.language_model.rotary_emb]


@pytest.mark.long
def test_they_are_the_published_ones(image_reward: Path, exact: HpsV3) -> None:
    """Preparation of sizes and words, truncation, prompt, positions, both towers, head and scale."""
    assert _scores(ImageReward(image_reward)) == pytest.approx(PUBLISHED["imagereward"], abs=1e-5)
    assert _scores(exact) == pytest.approx(PUBLISHED["hpsv3"], abs=1e-4)


def test_safetensors_are_the_same(image_reward: Path, tmp_path: Path) -> None:
    for name in ("med_config.json", "vocab.txt"):
        shutil.copy(image_reward / name, tmp_path)
    save_file(torch.load(image_reward / PT), tmp_path / "ImageReward.safetensors")
    one, other = ImageReward(image_reward), ImageReward(tmp_path)
    assert one.score(*PAIRS[0]) == other.score(*PAIRS[0])
    assert one.digest != other.digest  # of the file


@pytest.mark.long
def test_hpsv3_computes_in_bf16(hpsv3: Path) -> None:
    """Its frequencies, too, which are rounded as published: shown alone, since other roundings of bf16 hide theirs."""
    network, rounded = judges.open_judge("hpsv3", hpsv3).scorer, HpsV3(hpsv3, dtype=torch.float32)
    assert isinstance(network, HpsV3)
    assert {b.dtype for module in _rotary(network) for b in module.buffers()} == {torch.bfloat16}
    assert {p.dtype for p in network._network["rm_head"].parameters()} == {torch.float32}
    assert _scores(network) == pytest.approx(PUBLISHED["hpsv3, bf16"], abs=0.2)
    for module in _rotary(rounded):
        module.to(torch.bfloat16)
    assert _scores(rounded) == pytest.approx(PUBLISHED["hpsv3, frequencies in bf16"], abs=1e-4)


@pytest.mark.parametrize(
    ("size", "caption", "message"),
    [
        ((64, 64), "a <|Reward|>", "its caption has <|Reward|>"),
        ((64, 64), "<|image_pad|>", "its caption has <|image_pad|>"),
        ((64, 64), "z" * 4096, "4096 are the most"),
        ((300, 1), "a cat", "absolute aspect ratio must be smaller than 200"),
    ],
)
def test_what_it_cannot_read_is_an_error_with_the_pictures_name(
    size: tuple[int, int], caption: str, message: str, exact: HpsV3, tmp_path: Path
) -> None:
    picture = np.zeros((size[1], size[0], 3), np.uint8)
    with pytest.raises(Unscorable, match=message.replace("|", r"\|")):
        exact.score(picture, caption)
    path = tmp_path / "one.png"
    Image.fromarray(picture).save(path)
    with pytest.raises(PictureError) as error:
        features.pair_scores([path], [caption], "d", exact, tmp_path / "kept", lambda done, total: None)
    assert str(error.value).startswith(f"{path}: hpsv3 cannot score it (") and message in str(error.value)


@pytest.mark.long
def test_scores_of_pairs_are_kept_until_a_caption_changes(exact: HpsV3, tmp_path: Path) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, (picture, _) in zip(files, PAIRS, strict=False):
        Image.fromarray(picture).save(path)

    def kept(captions: list[str]) -> Tensor:
        found = features.pair_scores(files, captions, "d", exact, tmp_path / "kept", lambda done, total: None)
        return found.clone()

    first = kept(["a cat", "a dog"])
    assert first.shape == (2, 1) and not torch.equal(first, kept(["a dog", "a cat"]))
    for path in files:
        path.unlink()
    assert torch.equal(kept(["a dog", "a cat"]), kept(["a dog", "a cat"]))  # of what is kept


def _changed(name: str, value: Tensor | None) -> Damage:
    """With another weight, or with one less."""

    def change(folder: Path) -> None:
        old = (folder / PT).exists()
        weights: dict[str, Any] = (torch.load(folder / PT) if old else load_file(folder / SAFE)) | {name: value}
        weights = {key: kept for key, kept in weights.items() if kept is not None}
        torch.save(weights, folder / PT) if old else save_file(weights, folder / SAFE)

    return change


@pytest.mark.parametrize(
    ("reward", "damage", "message"),
    [
        (ImageReward, remove(PT), "has no ImageReward.pt or ImageReward.safetensors"),
        (ImageReward, remove("med_config.json"), "has no med_config.json"),
        (ImageReward, write(PT, b"no weights"), "ImageReward.pt: is no file of weights"),
        (ImageReward, write("med_config.json", b"{}"), "is not the config of ImageReward's text encoder"),
        (
            ImageReward,
            write("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"),
            "has 5 tokens, where ImageReward.pt has 22",
        ),
        (ImageReward, _changed("blip.visual_encoder.patch_embed.proj.weight", None), "no blip.visual_encoder.patch"),
        (ImageReward, _changed("mlp.layers.6.bias", torch.zeros(3)), "(mlp.6.bias is [3], not [16])"),
        (ImageReward, _changed("mlp.layers.8.bias", torch.zeros(3)), "(has mlp.8.bias)"),
        (HpsV3, remove(SAFE), "has no HPSv3.safetensors"),
        (HpsV3, remove("vocab.json"), "tokenizer"),
        (HpsV3, edit("config.json", model_type="qwen2"), "Qwen2-VL"),
        (HpsV3, edit("config.json", image_token_id=5), "or the tokenizer beside it is not (<|image_pad|> is"),
        (
            HpsV3,
            edit("config.json", num_hidden_layers=3),
            "HPSv3.safetensors: is not HPSv3 (no qwen.language_model.layers.2.",
        ),
        (HpsV3, write(SAFE, b"none"), "is no file of weights"),
        (HpsV3, _changed("rm_head.3.bias", None), "(no rm_head.3.bias)"),
        (
            HpsV3,
            _changed("model.embed_tokens.weight", torch.zeros(336, 256)),
            "embed_tokens.weight is [336, 256], not [295, 256]",
        ),
    ],
)
def test_other_files_are_refused_by_name(
    reward: type, damage: Damage, message: str, image_reward: Path, hpsv3: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "reward"
    shutil.copytree(image_reward if reward is ImageReward else hpsv3, folder)
    damage(folder)
    with pytest.raises(WeightsError) as error:
        reward(folder)
    assert message in str(error.value) and str(folder) in str(error.value)
