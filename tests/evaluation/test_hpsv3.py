"""HPSv3: figures of the published implementation over the same weights, and what it cannot read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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
from evaluation.inception import WeightsError
from evaluation.pixels import PictureError
from tests.evaluation import reward_stand_ins

PUBLISHED: dict[str, list[float]] = json.loads(
    Path(__file__).with_name("published_rewards.json").read_text("utf-8")
)  # see published_rewards.py


@pytest.fixture(scope="module")
def exact(hpsv3: Path) -> HpsV3:
    return HpsV3(hpsv3, dtype=torch.float32)


def _scores(network: HpsV3) -> list[float]:
    pairs = zip(reward_stand_ins.pictures(), reward_stand_ins.CAPTIONS, strict=True)
    return [network.score(picture, caption) for picture, caption in pairs]


def _rotary(network: HpsV3) -> list[Any]:
    qwen: Any = network._network["qwen"]
    return [qwen.visual.rotary_pos_emb, qwen.language_model.rotary_emb]


def test_it_is_the_published_one(exact: HpsV3) -> None:
    """Preparation of sizes, prompt, both towers, positions, and the head."""
    assert _scores(exact) == pytest.approx(PUBLISHED["hpsv3"], abs=1e-4)


def test_its_frequencies_are_rounded_as_published(hpsv3: Path) -> None:
    """Alone, since other roundings of bf16 hide theirs."""
    network = HpsV3(hpsv3, dtype=torch.float32)
    for module in _rotary(network):
        module.to(torch.bfloat16)
    assert _scores(network) == pytest.approx(PUBLISHED["hpsv3, frequencies in bf16"], abs=1e-4)


def test_it_computes_in_bf16(hpsv3: Path) -> None:
    network = judges.open_judge("hpsv3", hpsv3).scorer
    assert isinstance(network, HpsV3)
    assert {b.dtype for module in _rotary(network) for b in module.buffers()} == {torch.bfloat16}
    assert {p.dtype for p in network._network["rm_head"].parameters()} == {torch.float32}
    assert _scores(network) == pytest.approx(PUBLISHED["hpsv3, bf16"], abs=0.2)


@pytest.mark.parametrize(
    ("size", "caption", "told"),
    [
        ((64, 64), "a <|Reward|>", "its caption has <|Reward|>"),
        ((64, 64), "<|image_pad|>", "its caption has <|image_pad|>"),
        ((64, 64), "z" * 4096, "4096 are the most"),
        ((300, 1), "a cat", "absolute aspect ratio must be smaller than 200"),
    ],
)
def test_what_it_cannot_read_is_an_error_with_the_pictures_name(
    size: tuple[int, int], caption: str, told: str, exact: HpsV3, tmp_path: Path
) -> None:
    picture = np.zeros((size[1], size[0], 3), np.uint8)
    with pytest.raises(Unscorable, match=told.replace("|", r"\|")):
        exact.score(picture, caption)
    Image.fromarray(picture).save(tmp_path / "one.png")
    with pytest.raises(PictureError) as error:
        features.pair_scores([tmp_path / "one.png"], [caption], "d", exact, tmp_path / "kept", lambda done, total: None)
    assert str(error.value).startswith(f"{tmp_path / 'one.png'}: hpsv3 cannot score it (") and told in str(error.value)


def test_scores_of_pairs_are_kept_until_a_caption_changes(exact: HpsV3, tmp_path: Path) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, picture in zip(files, reward_stand_ins.pictures(), strict=False):
        Image.fromarray(picture).save(path)

    def kept(captions: list[str]) -> Tensor:
        return features.pair_scores(
            files, captions, "digest", exact, tmp_path / "kept", lambda done, total: None
        ).clone()

    first = kept(["a cat", "a dog"])
    assert first.shape == (2, 1) and not torch.equal(first, kept(["a dog", "a cat"]))
    for path in files:
        path.unlink()
    assert torch.equal(kept(["a dog", "a cat"]), kept(["a dog", "a cat"]))  # of what is kept


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")

    return change


def _changed(name: str, value: Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found: dict[str, Any] = load_file(folder / "HPSv3.safetensors") | {name: value}
        save_file({key: kept for key, kept in found.items() if kept is not None}, folder / "HPSv3.safetensors")

    return change


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_without("HPSv3.safetensors"), "has no HPSv3.safetensors"),
        (_without("config.json"), "has no config.json"),
        (_without("vocab.json"), "tokenizer"),
        (_config(model_type="qwen2"), "Qwen2-VL"),
        (_config(image_token_id=5), "or the tokenizer beside it is not (<|image_pad|> is"),
        (_config(num_hidden_layers=3), "HPSv3.safetensors: is not HPSv3 (no qwen.language_model.layers.2."),
        (lambda folder: (folder / "HPSv3.safetensors").write_bytes(b"none") and None, "is no file of weights"),
        (_changed("rm_head.3.bias", None), "(no rm_head.3.bias)"),
        (_changed("rm_head.5.weight", torch.zeros(1, 16)), "(rm_head.5.weight is [1, 16], not [2, 16])"),
        (_changed("extra", torch.zeros(1)), "(has extra)"),
        (
            _changed("model.embed_tokens.weight", torch.zeros(336, 256)),
            "embed_tokens.weight is [336, 256], not [295, 256]",
        ),
    ],
)
def test_other_files_are_refused_by_name(
    damage: Callable[[Path], None], told: str, hpsv3: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hpsv3"
    shutil.copytree(hpsv3, folder)
    damage(folder)
    with pytest.raises(WeightsError) as error:
        HpsV3(folder)
    assert told in str(error.value) and str(folder) in str(error.value)
