"""The judge of scenes finds what is true, and does not find it in images of other captions; by its command too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evaluation import captions, judges, pixels
from evaluation.run import EvaluationRun, RunWriter
from lab.scenes.judge import SceneJudge
from lab.training import scene_prompts
from lab.training.run import TrainingRun
from lab.training.scenes import is_held_out
from lab.training.stream import World
from tests.cli.shell import Shell
from tests.evaluation.conftest import read_json

COUNT = 2
KINDS = ("colour_held_out", "count_held_out", "pair_held_out")


@pytest.fixture(scope="module")
def real(large: TrainingRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of prompts, and two true images of each."""
    folder = tmp_path_factory.mktemp("real")
    world = World.read(large)
    found = scene_prompts.groups(large, world.composer, COUNT, unseen=True)
    (folder / "scenes.tsv").write_text(scene_prompts.table(found, in_turns=True), encoding="utf-8")
    assert scene_prompts.write_real(large, world, found, folder) is None, "there is no emoji-clip"
    return folder


def drawn(real: Path, folder: Path, *, half: str = "own", shift: int = 0) -> EvaluationRun:
    """A finished run whose images are the true ones, or each that of a caption so many further on in its group."""
    wanted = captions.read(real / "scenes.tsv")
    with RunWriter(folder, {"precision": "fp32", "steps": 4, "guidance_scale": 5.0}, wanted) as writer:
        for caption in wanted:
            kind, _, number = caption.id.rpartition("-")
            png = (real / half / f"{kind}-{(int(number) + shift) % COUNT}.png").read_bytes()
            writer.add(caption, caption.index, f"{caption.index}.png", png, session=0, seconds=0.0)
    return EvaluationRun.read(folder)


def test_groups_are_of_families_that_training_saw_or_never_saw(large: TrainingRun) -> None:
    composer = World.read(large).composer
    found = scene_prompts.groups(large, composer, COUNT)
    assert set(scene_prompts.groups(large, composer, COUNT, unseen=True)) == set(KINDS) < set(found)
    for name, prompts in found.items():
        assert len(prompts) == COUNT
        for prompt in prompts:
            assert any(map(is_held_out, composer.families(prompt.truth))) == name.endswith("held_out")


@pytest.mark.long
def test_true_images_are_right_and_those_of_other_captions_are_not(
    large: TrainingRun, real: Path, shell: Shell
) -> None:
    """By the command; the embedded emoji-clip knows none of these nouns, and sees the images all the same."""
    drawn(real, shell.folder / "true")
    drawn(real, shell.folder / "again", half="other")
    drawn(real, shell.folder / "wrong", shift=1)
    words = f"evaluate scenes true wrong --data {large.data} --threads 1 --again again --real {real}"
    done = shell(*words.split())
    assert done.code == 0, done
    assert "colour held out" in done.out and "100.0 (" in done.out
    right, wrong = (read_json(shell.folder / name / "scenes.json") for name in ("true", "wrong"))
    assert set(right) == {"name", "precision", "steps", "guidance_scale", "pictures", "prompts", *KINDS}
    for kind in KINDS:
        figures = right[kind]
        assert figures["all"][0] == 1 and figures["right"] == [True] * COUNT and "clip_prefers_caption" in figures
        assert figures["two_seeds"]["pairs"] == COUNT and figures["two_seeds"]["psnr_db"][0] < 60
        assert figures["two_seeds"] == figures["two_true"], "both are the same two true images"
        assert figures["two_seeds"]["ssim"][0] < 1 and figures["two_seeds"]["emoji-clip-layers"][0] > 0
        assert wrong[kind]["all"][0] < 1 and "two_seeds" not in wrong[kind]


def test_as_a_scorer_of_pairs_it_says_whether_all_is_right(large: TrainingRun, real: Path, tmp_path: Path) -> None:
    judge = judges.open_judge("scenes", large.data)
    assert judge.figure == "scenes" and judge.scorer.digest == SceneJudge(large.data).digest
    texts = {caption.id: caption.text for caption in captions.read(real / "scenes.tsv")}
    picture = pixels.read(real / "own" / "pair_held_out-0.png")
    assert [judge.scorer.score(picture, texts[f"pair_held_out-{n}"]) for n in range(2)] == [1, 0]
    (tmp_path / "emoji").mkdir()
    with pytest.raises(judges.WeightsError, match="has no emoji to check scenes by"):
        judges.open_judge("scenes", tmp_path)


def test_what_it_cannot_judge_is_named(large: TrainingRun, real: Path, shell: Shell) -> None:
    drawn(real, shell.folder / "run")
    (shell.folder / "other.tsv").write_text("id\tcaption\nfox-0\ta fox that sings\n", encoding="utf-8")
    wanted = captions.read(shell.folder / "other.tsv")
    with RunWriter(shell.folder / "other", {}, wanted) as writer:
        png = next((real / "own").iterdir()).read_bytes()
        writer.add(wanted[0], 0, "0.png", png, session=0, seconds=0.0)
    words = f"evaluate scenes run --data {large.data}"
    for more, said in (
        ("--count 0", "--count: must be at least 1, not 0"),
        ("--again other", "--again: other: has other captions than run"),
        ("--data nowhere", "--data: nowhere/emoji/captions.tsv"),
    ):
        done = shell(*f"{words} {more}".split())
        assert done.code == 2 and said in done.err, done
    shutil.rmtree(shell.folder / "run")
    done = shell(*words.replace(" run ", " other ").split())
    assert done.code == 2 and "caption 'a fox that sings' is not of the grammar" in done.err, done
