"""MLPerf's test as one command: what it needs is checked at once and before all else; a dry run gives no verdict."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from evaluation import fid, mlperf, mlperf_files, stand_ins
from evaluation.inception import WEIGHTS
from evaluation.mlperf_files import CAPTIONS, CLIP, LATENT, MODEL_FILE, MODEL_FOLDER, STATISTICS
from pipeline.checkpoints import sdxl, tiny
from tests.cli.shell import Shell
from tests.evaluation.conftest import read_json

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "emoji-xl"
EVERY = (CAPTIONS, LATENT, STATISTICS, WEIGHTS, CLIP)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of stand-ins, SDXL's latent among them."""
    folder = tmp_path_factory.mktemp("files")
    for name in EVERY:
        stand_ins.make(name, folder, model=sdxl.NAME, captions=3)
    return folder


def test_all_that_is_missing_is_told_at_once_with_its_source(shell: Shell) -> None:
    said = shell("evaluate", "mlperf", "--files", "nowhere", "--out", "out")
    assert said.code == 2 and "6 of what MLPerf's test needs cannot be used" in said.err
    for name in (*EVERY, MODEL_FOLDER):
        assert f"{name}: is missing; from " in said.err
    assert not (shell.folder / "out" / "accuracy").exists()


@pytest.mark.long
def test_other_files_than_the_published_ones_are_refused_and_in_a_dry_run_stand_ins(made: Path) -> None:
    refused = mlperf_files.check_all(made, str(EMBEDDED), None)
    told = {one.name: one.wrong for one in refused}
    assert told[STATISTICS] == "", "no checksum is published"
    for name in (CAPTIONS, LATENT, WEIGHTS, CLIP):
        assert "not the published one" in told[name]
    assert told[MODEL_FOLDER] == "is not the published model"
    found = mlperf_files.check_all(made, str(EMBEDDED), None, stand_ins=True)
    assert {one.name for one in found if one.stand_in} == {*EVERY, MODEL_FOLDER} - {STATISTICS}
    assert not any(one.wrong for one in found)
    assert mlperf_files._model(made, sdxl.NAME, None).stand_in


@pytest.mark.long
def test_files_that_cannot_be_read_are_wrong_even_in_a_dry_run(made: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    shutil.copytree(made, files)
    (files / CAPTIONS).write_text("id\tcaption\n1\t\n", "utf-8")
    np.save(files / LATENT, np.zeros((1, 4, 4, 4)))
    np.savez(files / STATISTICS, mu=np.zeros(3), sigma=np.eye(3))
    (files / WEIGHTS).write_text("weights")
    (files / CLIP / "config.json").unlink()
    shutil.copytree(EMBEDDED, files / MODEL_FOLDER, ignore=shutil.ignore_patterns("unet"))
    found = {one.name: one.wrong for one in mlperf_files.check_all(files, None, None, stand_ins=True)}
    for name, said in (
        (CAPTIONS, "row"), (LATENT, "float32"), (STATISTICS, "2048 wide"), (WEIGHTS, "no file of weights"),
        (CLIP, "CLIP"), (MODEL_FOLDER, "unet"),
    ):  # fmt: skip
        assert said in found[name], found


def test_the_model_is_the_folder_before_the_file_and_what_is_named_before_both(tmp_path: Path) -> None:
    assert mlperf_files.model_of(tmp_path, None).endswith(MODEL_FOLDER)
    (tmp_path / MODEL_FILE).write_bytes(b"x")
    assert mlperf_files.model_of(tmp_path, None).endswith(MODEL_FILE)
    (tmp_path / MODEL_FOLDER).mkdir()
    assert mlperf_files.model_of(tmp_path, None).endswith(MODEL_FOLDER)
    assert mlperf_files.model_of(tmp_path, "other") == "other"


def test_mlperfs_own_captions_and_latent_are_known_by_their_checksums() -> None:
    """Where the data set is here. Its digests are part of the code; a wrong one would refuse every official run."""
    data = Path(os.environ.get("DIPTYCH_TEST_MLPERF", "data/coco"))
    if not data.is_dir():
        pytest.skip("needs MLPerf's captions and latent in data/coco, or in the folder DIPTYCH_TEST_MLPERF names")
    found = {one.name: one for one in mlperf_files.check_all(data, sdxl.NAME, None)}
    for name in (CAPTIONS, LATENT):
        assert not found[name].wrong and not found[name].stand_in and "as published" in found[name].line


def test_a_latent_has_the_models_own_size() -> None:
    assert stand_ins.latent_side(tiny.TINY) == 4
    assert stand_ins.latent_side(sdxl.NAME) == stand_ins.latent_side("any/model") == mlperf_files.LATENT_SIDE == 128


@pytest.mark.long
def test_a_dry_run_goes_from_nothing_to_the_end_and_gives_no_verdict(shell: Shell) -> None:
    pytest.importorskip("mlperf_loadgen")
    words = f"evaluate mlperf --stand-ins --model {tiny.TINY} --limit 3 --resamples 2 --files nowhere --out dry".split()
    looked = shell(*words, "--check")
    assert looked.code == 0 and looked.out.count("a stand-in") == 6, looked
    said = shell(*words)
    assert said.code == 0, said
    assert "verdict      none (stand-ins for captions_source.tsv, latents.npy, val2014.npz" in said.out
    assert "LoadGen      Offline" in said.out and "(shortened)" in said.out
    found = read_json(shell.folder / "dry" / "verdict.json")
    assert [one["within"] for one in found["scores"]] == [None, None]
    assert all(one["value"] is not None for one in found["scores"]) and found["loadgen"]["scenario"] == "Offline"
    accuracy = shell.folder / "dry" / "accuracy"
    scores = read_json(accuracy / "scores.json")
    held = scores["against"][STATISTICS]
    assert (scores["lens"], *scores["scores"], held["kind"], *held["scores"]) == (
        "mlperf", "clip-score", "statistics", "fid",
    )  # fmt: skip
    seen = torch.from_numpy(np.load(accuracy / "features" / "inception.npy"))
    distance = fid.FrechetDistance(fid.read(shell.folder / "dry" / "stand-ins" / STATISTICS, 2048))(seen)
    assert held["scores"]["fid"]["value"] == pytest.approx(distance, rel=1e-6)
    assert any("fewer than the 2048 features" in note for note in scores["notes"])
    before = (accuracy / "scores.json").stat().st_mtime_ns
    again = shell(*words)
    assert again.code == 0 and read_json(shell.folder / "dry" / "verdict.json") == found
    assert (accuracy / "scores.json").stat().st_mtime_ns == before, "what is done stays"
    assert "--limit: is of a dry run" in shell("evaluate", "mlperf", "--out", "x", "--limit", "3").err


def test_stand_ins_are_named_among_what_makes_a_run_unofficial() -> None:
    from tests.evaluation.test_mlperf import OFFICIAL

    scores = OFFICIAL | {"stand_ins": ["val2014.npz", "clip-vit-base-patch32"]}
    assert mlperf.unofficial(scores) == ["stand-ins for val2014.npz, clip-vit-base-patch32"]
    assert [one.within for one in mlperf.verdicts(scores)] == [None, None]
