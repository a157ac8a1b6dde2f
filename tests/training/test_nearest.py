"""Nearest training pictures: copies are found out, true pictures are not taken for copies."""

from __future__ import annotations

import dataclasses
import json
from itertools import chain
from pathlib import Path

import pytest
from PIL import Image

from evaluation import captions
from evaluation.run import EvaluationRun, RunError, RunWriter
from tests.training.test_judge_scenes import COUNT, MODELS
from training import nearest, scene_prompts
from training.judge_pictures import FeatureExtractor
from training.nearest import TrainingPictures
from training.render import Renderer
from training.run import TrainingRun
from training.stream import World

SCENES = 40


@pytest.fixture(scope="module")
def seeing(large: TrainingRun) -> TrainingRun:
    """With an emoji-clip."""
    return dataclasses.replace(large, models=MODELS)


@pytest.fixture(scope="module")
def training(seeing: TrainingRun) -> TrainingPictures:
    world = World.read(seeing)
    found = nearest.training_scenes(seeing, world, SCENES)
    return TrainingPictures(found, Renderer(world.images), FeatureExtractor(seeing))


def drawn(run: TrainingRun, folder: Path, images: list[Image.Image]) -> EvaluationRun:
    """A finished run of the unseen prompts with these pictures."""
    found = scene_prompts.groups(run, World.read(run).composer, COUNT, unseen=True)
    (folder / "unseen.tsv").write_text(scene_prompts.table(found), encoding="utf-8")
    wanted = captions.read(folder / "unseen.tsv")
    with RunWriter(folder / "copied", {"seed_offset": 0}, wanted) as writer:
        for caption, image in zip(wanted, images, strict=True):
            image.save(folder / "one.png")
            png = (folder / "one.png").read_bytes()
            writer.add(caption, caption.index, f"{caption.index}.png", png, session=0, seconds=0.0)
    return EvaluationRun.read(folder / "copied")


def test_no_held_out_emoji_is_among_them_and_the_stream_follows(seeing: TrainingRun) -> None:
    world = World.read(seeing)
    found = nearest.training_scenes(seeing, world, SCENES)
    single = found[: len(world.rows) - seeing.held_out]
    assert len(found) == len(single) + SCENES
    assert len({layer.row for scene in single for layer in scene.layers}) == len(single)
    assert found[len(single) + 5] == world.scene(5, (seeing.size, seeing.size))[0]


def test_training_pictures_find_themselves(training: TrainingPictures) -> None:
    rows = [0, 3, 17, len(training.scenes) - 1]
    found = training.nearest(training.images(rows))
    assert found.rows == rows
    assert found.distance.abs().max() < 1e-5 and found.psnr.tolist() == [100] * len(rows)


def test_a_model_that_copies_is_nearer_to_training_than_true_pictures_are(
    seeing: TrainingRun, training: TrainingPictures, tmp_path: Path
) -> None:
    rows = list(range(30, 30 + 3 * COUNT))
    copies = nearest.judge(seeing, drawn(seeing, tmp_path, training.images(rows)), SCENES, shown=4)
    assert copies["training_pictures"] == len(training.scenes)
    assert copies["samples"]["distance"][0] == pytest.approx(0, abs=1e-5)
    assert copies["samples"]["most_psnr_db"] == 100 > copies["true"]["most_psnr_db"]
    assert copies["less_than_true"][2] < 0 and copies["share_nearer_than_true"][0] == 1
    assert [one["nearest"] for one in copies["shown"]] == [training.scenes[row].caption for row in rows[:4]]
    kept = seeing.folder("judge") / "nearest-copied.json"
    assert json.loads(kept.read_text())["true"] == json.loads(json.dumps(copies["true"]))
    with Image.open(kept.with_suffix(".png")) as image:
        left, right = (image.convert("RGB").crop((72 * n, 0, 72 * n + 72, 72)) for n in (0, 1))
    assert left.tobytes() == right.tobytes(), "a copy beside its original"


def test_true_pictures_are_as_near_as_true_pictures(seeing: TrainingRun, tmp_path: Path) -> None:
    world = World.read(seeing)
    prompts = scene_prompts.groups(seeing, world.composer, COUNT, unseen=True).values()
    scenes = [prompt.scene for prompt in chain.from_iterable(prompts)]
    images = TrainingPictures(scenes, Renderer(world.images), FeatureExtractor(seeing)).images(range(len(scenes)))
    found = nearest.judge(seeing, drawn(seeing, tmp_path, images), SCENES)
    assert found["samples"] == found["true"] and found["less_than_true"] == (0, 0, 0)


def test_runs_of_other_prompts_are_refused_by_name(seeing: TrainingRun, tmp_path: Path) -> None:
    (tmp_path / "other.tsv").write_text("id\tcaption\nfox\ta fox\n", encoding="utf-8")
    with RunWriter(tmp_path / "run", {}, captions.read(tmp_path / "other.tsv")) as writer:
        composer = World.read(seeing).composer
        with pytest.raises(RunError, match=r"fox \('a fox'\) is no prompt"):
            nearest.prompts_of(seeing, composer, writer.run)
