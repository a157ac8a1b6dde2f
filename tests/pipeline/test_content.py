"""Checkers of contents: their decisions are diffusers' and transformers' own, and what cannot be one is named."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL.Image import Image, fromarray
from safetensors.torch import load_file, save_file

from pipeline import content
from pipeline.checkpoints.folder import ModelError
from pipeline.content import ContentNetwork, Verdict, blurred
from tests.pipeline import checkers
from tests.pipeline.damage import Damage, edit, remove

CPU = torch.device("cpu")
COUNT = 240


@pytest.fixture(scope="module")
def images() -> list[Image]:
    return checkers.images(COUNT)


@pytest.fixture(scope="module")
def safety(tmp_path_factory: pytest.TempPathFactory, images: list[Image]) -> Path:
    return checkers.safety_checker(tmp_path_factory.mktemp("safety"), images)


def judged(network: ContentNetwork, images: Sequence[Image], batch: int = 1) -> list[Verdict]:
    pixels = [network.prepare(image) for image in images]
    parts = [torch.stack(pixels[k : k + batch]) for k in range(0, len(pixels), batch)]
    return [verdict for part in parts for verdict in network.verdicts(part)]


def test_decisions_of_a_safety_checker_are_those_of_diffusers(safety: Path, images: list[Image]) -> None:
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    theirs = StableDiffusionSafetyChecker.from_pretrained(safety, subfolder="safety_checker").eval()
    processor = CLIPImageProcessorPil.from_pretrained(safety, subfolder="feature_extractor")

    def decisions() -> list[bool]:
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        return [bool(flag) for flag in theirs(pixels, [np.zeros((1, 1, 3))] * COUNT)[1]]

    expected = decisions()
    assert 20 < sum(expected) < COUNT - 20
    for batch in (1, 7):
        verdicts = judged(content.load(safety, CPU, {}), images, batch)
        assert [verdict.flagged for verdict in verdicts] == expected
    for verdict in verdicts:  # which says by what, or what comes nearest
        assert {margin > 0 for margin in verdict.labels.values()} == {verdict.flagged}
        assert verdict.flagged or len(verdict.labels) == 1
    theirs.special_care_embeds_weights.data.fill_(2.0)  # beyond every cosine
    assert decisions() != expected, "nothing here depends on special care"


def test_a_safety_checker_is_found_in_every_folder_it_comes_in(
    safety: Path, images: list[Image], tmp_path: Path
) -> None:
    expected = judged(content.load(safety, CPU, {}), images[:24])
    assert judged(content.load(safety / "safety_checker", CPU, {}), images[:24]) == expected
    alone = shutil.copytree(safety / "safety_checker", tmp_path / "alone")
    shutil.copy(safety / "feature_extractor" / "preprocessor_config.json", alone)
    published = {  # the names of weights as CompVis published them, with an unread buffer of integers
        name.replace("vision_model.", "vision_model.vision_model.", 1): weight
        for name, weight in load_file(alone / "model.safetensors").items()
    }
    published["vision_model.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    save_file(published, alone / "model.safetensors", {"format": "pt"})
    assert judged(content.load(alone, CPU, {}), images[:24]) == expected


@pytest.mark.parametrize(
    ("labels", "config"),
    [
        (("normal", "nsfw"), {}),
        (("drawings", "hentai", "neutral", "porn", "sexy"), {}),
        (("gore", "nudity", "calm"), {"problem_type": "multi_label_classification"}),
    ],
)
def test_scores_of_a_classifier_are_those_of_the_pipeline(
    labels: Sequence[str], config: dict[str, Any], images: list[Image], tmp_path: Path
) -> None:
    from transformers import pipeline

    folder = checkers.classifier(tmp_path, labels, **config)
    theirs = pipeline("image-classification", model=str(folder), device="cpu")
    part, unsafe = images[:72], {*labels} - {"normal", "drawings", "neutral", "calm"}
    # Of thresholds of 0 each label is above, so each is told.
    told, usual = (judged(content.load(folder, CPU, each), part) for each in (dict.fromkeys(labels, 0.0), {}))
    for image, scores, verdict in zip(part, told, usual, strict=True):
        expected = {entry["label"]: entry["score"] for entry in theirs(image, top_k=len(labels))}
        assert scores.labels == pytest.approx(expected, abs=1e-4)
        assert verdict.flagged == any(expected[label] > 0.5 for label in unsafe) and {*verdict.labels} <= unsafe
    assert {verdict.flagged for verdict in usual} == {True, False}


def test_labels_are_inferred_by_their_words_and_overridden_by_the_setting(tmp_path: Path) -> None:
    inferred = {
        ("normal", "nsfw"): ("nsfw",), ("sfw", "NSFW"): ("NSFW",), ("safe", "unsafe"): ("unsafe",),
        ("not_nsfw", "explicit-nudity", "LABEL_2"): ("explicit-nudity",),
    }  # fmt: skip
    for number, (labels, expected) in enumerate(inferred.items()):
        folder = checkers.classifier(tmp_path / str(number), labels)
        assert content.load(folder, CPU, {}).labels == expected
        assert content.load(folder, CPU, {labels[0]: 0.25}).labels == labels[:1]


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_no_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight * float("nan") for name, weight in weights.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "labels", "reason"),
    [
        (shutil.rmtree, {}, "no such folder"),
        (as_pickle, {}, "pickles can run code and are not read"),
        (as_no_numbers, {}, "cannot check a picture .its scores are not finite"),
        (remove("config.json"), {}, "config.json is missing"),
        (remove("preprocessor_config.json"), {}, "preprocessor_config"),
        (edit("config.json", auto_map={"AutoConfig": "x.Y"}), {}, "code of its own"),
        (edit("config.json", problem_type="regression"), {}, "regression"),
        (edit("config.json", num_hidden_layers=3), {}, "missing keys"),
        (Path.exists, {"porn": 0.5}, "has no label porn; it has normal, nsfw"),
        (lambda folder: checkers.classifier(folder, ("a", "b")), {}, "DIPTYCH_CHECKER_LABELS names some of a, b"),
    ],
)
def test_what_is_no_checker_is_refused_with_the_reason(
    damage: Damage, labels: dict[str, float], reason: str, tmp_path: Path
) -> None:
    folder = checkers.classifier(tmp_path / "checker")
    damage(folder)
    with pytest.raises(ModelError, match=reason):
        content.load(folder, CPU, labels)


def test_a_safety_checker_needs_its_processor_and_has_no_labels(safety: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has its own thresholds"):
        content.load(safety, CPU, {"nsfw": 0.5})
    shutil.copytree(safety / "safety_checker", tmp_path / "safety_checker")
    with pytest.raises(ModelError, match=r"feature_extractor/preprocessor_config\.json is missing"):
        content.load(tmp_path, CPU, {})


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), sides=st.tuples(st.integers(1, 200), st.integers(1, 200)))
def test_a_blur_keeps_the_size_and_no_more_than_mean_colours(seed: int, sides: tuple[int, int]) -> None:
    chance = np.random.default_rng(seed)
    image = fromarray(chance.integers(0, 256, (sides[1], sides[0], 3), dtype=np.uint8))
    assert blurred(image).size == image.size
    part = int(chance.integers(1, 24))
    whole = chance.integers(0, 256, (8 * part, 8 * part, 3), dtype=np.uint8)
    tiles = whole.reshape(8, part, 8, part, 3).transpose(0, 2, 1, 3, 4).reshape(64, part * part, 3)
    shuffled = np.stack([chance.permutation(tile) for tile in tiles])
    other = shuffled.reshape(8, 8, part, part, 3).transpose(0, 2, 1, 3, 4).reshape(whole.shape)
    one, two = (np.asarray(blurred(fromarray(np.ascontiguousarray(each)))).astype(int) for each in (whole, other))
    assert abs(one - two).max() <= 4  # Pillow rounds between its passes
