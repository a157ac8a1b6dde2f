"""The judge of scenes finds what is true, and does not find it in pictures of other prompts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from evaluation.captions import read
from evaluation.clip import EMBEDDED
from evaluation.truth import Truth
from training import judge_scenes, scene_prompts
from training.render import Renderer
from training.run import TrainingRun
from training.scenes import Prompt, held
from training.stream import World

COUNT = 2
MODELS = EMBEDDED.parent  # whose emoji-clip knows none of the nouns below, and sees pictures all the same


def test_groups_are_of_families_that_training_saw_or_never_saw(large: TrainingRun) -> None:
    composer = World.read(large).composer
    found = scene_prompts.groups(large, composer, COUNT)
    assert set(scene_prompts.groups(large, composer, COUNT, unseen=True)) == {
        n for n in found if n.endswith("held_out")
    }
    for name, prompts in found.items():
        assert len(prompts) == COUNT
        for prompt in prompts:
            assert any(map(held, composer.families(prompt.truth))) == name.endswith("held_out")


def test_tables_are_read_back_group_by_group_and_in_turns(large: TrainingRun, tmp_path: Path) -> None:
    found = scene_prompts.groups(large, World.read(large).composer, COUNT)
    wanted = {f"{name}-{n}": one.caption for name, group in found.items() for n, one in enumerate(group)}
    for in_turns in (False, True):
        path = tmp_path / "scenes.tsv"
        path.write_text(scene_prompts.table(found, in_turns=in_turns), encoding="utf-8")
        captions = read(path)
        assert {one.id: one.text for one in captions} == wanted
        first = [one.id.rpartition("-")[0] for one in captions][: len(found)]
        assert (first == list(found)) == in_turns


def test_true_pictures_are_right_and_those_of_other_prompts_are_not(large: TrainingRun) -> None:
    world = World.read(large)
    renderer = Renderer(world.images)

    def true(name: str, prompts: list[Prompt], half: str = "own") -> torch.Tensor:
        size = (large.size, large.size)
        return (scene_prompts.true_pictures(world.composer, renderer, name, prompts, size)[half] + 1) / 2

    def other(name: str, prompts: list[Prompt]) -> torch.Tensor:
        return true(name, prompts, "other")

    seeing = dataclasses.replace(large, models=MODELS)
    right = judge_scenes.judge(seeing, COUNT, true, {"name": "true"}, other, truth=False, unseen=True)
    assert set(right) == {"name", "prompts", "colour_held_out", "count_held_out", "pair_held_out"}
    kept = json.loads((large.folder("judge") / "scenes-true.json").read_text())
    for name, figures in right.items():
        if isinstance(figures, dict):
            assert figures["all"][0] == 1, name
            assert figures["two_seeds"]["pairs"] == COUNT and figures["two_seeds"]["psnr_db"][0] < 60
            assert figures["two_seeds"] == figures["two_true"], "both are the same two true pictures"
            assert figures["two_seeds"]["ssim"][0] < 1 and figures["two_seeds"]["emoji-clip-layers"][0] > 0
            assert kept[name]["two_seeds"] == json.loads(json.dumps(figures["two_seeds"]))

    def swapped(name: str, prompts: list[Prompt]) -> torch.Tensor:
        return true(name, prompts).flip(0)

    wrong = judge_scenes.judge(large, COUNT, swapped, {"name": "wrong"}, truth=False, unseen=True)
    truths: dict[str, list[Truth]] = {
        name: [one.truth for one in group]
        for name, group in scene_prompts.groups(large, world.composer, COUNT, unseen=True).items()
    }
    for name, (first, second) in truths.items():
        if {thing.subject for thing in first.things} != {thing.subject for thing in second.things}:
            assert wrong[name]["all"][0] < 1, name
