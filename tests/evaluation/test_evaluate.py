"""`diptych evaluate` through the real engine: what it leaves, that a kill costs nothing, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from evaluation import compare, report, scoring_networks
from evaluation.run import EvaluationRun
from pipeline import plans
from tests.cli.shell import Shell
from tests.evaluation.conftest import CAPTIONS, CLIP, QUICK, evaluate, read_json, table
from tests.forks import REAL, forker

ROOT = Path(__file__).resolve().parents[2]


def scores(folder: Path) -> dict[str, Any]:
    found = read_json(folder / "scores.json")
    del found["pictures_per_second"]  # the one figure that is the machine's
    return dict(found)


def test_a_run_holds_all_that_it_is(runs: dict[str, Path]) -> None:
    run = EvaluationRun.read(runs["base"])
    assert [caption.text for caption in run.captions] == list(CAPTIONS)
    assert [run.records[k].seed for k in range(len(CAPTIONS))] == list(range(len(CAPTIONS)))
    for path, text in zip(run.files(), CAPTIONS, strict=True):
        with Image.open(path) as image:
            image.load()
            drawn = json.loads(image.info["diptych"])
            assert (drawn["prompt"], drawn["steps"], image.size) == (text, 2, (32, 32))
            assert json.loads(image.info["fingerprint"]) == run.drawn_by
    found = scores(runs["base"])
    score = found["scores"]["emoji-clip-score"]
    assert score["low"] <= score["value"] <= score["high"]


def test_a_run_has_a_page_of_its_own(runs: dict[str, Path], shell: Shell) -> None:
    """With the figures of scores.json: against nobody, against one reference, and against several."""
    for name in ("base", "three steps"):
        text, found = (runs[name] / "report.html").read_text("utf-8"), scores(runs[name])
        assert all(caption in text for caption in CAPTIONS)
        shown = dict(found["scores"])
        for held in found["against"].values():
            shown |= held["scores"]
        heads = re.findall(r"<th>([^<]*)</th>", text)
        assert [head for head in heads if head in ("psnr, dB", "ssim")] == (
            ["psnr, dB", "ssim"] if "psnr" in shown else []
        )
        for figure, value in shown.items():
            assert figure in heads or figure in ("psnr", "ssim")
            assert f"{value['value']:.4g}" in text
    whole = read_json(runs["three steps"] / "scores.json")
    whole["against"]["twin"] = whole["against"]["base"]
    run = EvaluationRun.read(runs["three steps"])
    found = compare.of_one(run, scoring_networks.embedded(CLIP), whole)
    text = report.page(found, [run])
    assert "FID from <b>base and twin</b>" in text
    for reference in ("base", "twin"):
        assert f"<th>emoji-clip-fid, {reference}</th>" in text and f"<th>psnr, {reference}</th>" in text


def test_a_run_held_against_another_has_distances_and_pairs(runs: dict[str, Path]) -> None:
    held = scores(runs["three steps"])["against"]["base"]
    assert held["kind"] == "run" and held["pictures"] == len(CAPTIONS)
    found = held["scores"]
    own = {f"emoji-clip-{figure}" for figure in ("fid", "kid", "cmmd", "layers", "distance")}
    assert set(found) == {"psnr", "ssim", *own} and set(held["changes"]) == {"emoji-clip-score"}
    assert all(one["low"] <= one["value"] <= one["high"] for one in (found | held["changes"]).values())
    assert any("fewer than the 128 features" in note for note in scores(runs["three steps"])["notes"])


def test_a_killed_run_ends_with_the_scores_of_an_unbroken_one(shell: Shell) -> None:
    """kill -9 wherever it hits, a torn line and half a picture beside it, and the same command again."""
    captions = tuple(f"{text} {n}" for n in range(4) for text in CAPTIONS)
    words = ["evaluate", "--prompts", str(table(shell.folder, captions)), *QUICK, "--deterministic", "--steps", "6"]
    assert shell(*words, "--out", "whole/run").code == 0
    log = shell.folder / "broken" / "run" / "pictures.jsonl"
    with Path(os.devnull).open("w") as nowhere:
        process = forker(*REAL).start(
            ("-m", "cli", *words, "--out", str(log.parent)), env=os.environ, stderr=nowhere.fileno()
        )
    until = time.monotonic() + 180
    while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < 3):
        assert time.monotonic() < until
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert log.read_bytes().count(b"\n") < len(captions), "it was done before it was killed"
    with log.open("ab") as stream:
        stream.write(b'{"index": 40, "id": "40", "se')
    (log.parent / "pictures" / ".0123.part").write_bytes(b"half")
    said = shell(*words, "--out", "broken/run")
    assert said.code == 0 and f"of {len(captions)} pictures are there" in said.err
    assert scores(shell.folder / "broken/run") == scores(shell.folder / "whole/run")
    a, b = (EvaluationRun.read(shell.folder / name) for name in ("broken/run", "whole/run"))
    assert a.digest() == b.digest()
    assert not list((shell.folder / "broken/run/pictures").glob(".*"))


@pytest.mark.parametrize("places", [(0,), (0, 2)])
def test_captions_that_the_model_refuses_are_all_named_before_any_is_drawn(
    places: tuple[int, ...], shell: Shell
) -> None:
    """A run without one of its pictures has no scores."""
    captions = [f"a heart {number}" for number in range(5)]
    for place in places:
        captions[place] = f"{place} {'very long words here ' * 120}"
    said = evaluate(shell, "--out run", tuple(captions))
    assert said.code == 2 and f"--prompts: {len(places)} of 5 captions cannot be drawn" in said.err
    named = re.findall(r"^caption (\d+) \((\d+)\): has \d+ tokens", said.err, re.MULTILINE)
    assert named == [(str(place + 1), str(place)) for place in places]
    run = EvaluationRun.load(shell.folder / "run")
    assert not run.records and not [*run.pictures.iterdir()]


def test_a_finished_run_is_scored_again_without_a_model(runs: dict[str, Path], shell: Shell) -> None:
    """With a model that does not exist it would be refused; the settings name the model that drew, so they are kept."""
    before = (runs["base"] / "scores.json").read_bytes()
    said = evaluate(shell, f"--out {runs['base']}")
    assert said.code == 0 and "steps" not in said.err
    assert (runs["base"] / "scores.json").read_bytes() == before


def test_folders_and_statistics_are_references_too(runs: dict[str, Path], shell: Shell) -> None:
    real = shell.folder / "real"
    real.mkdir()
    draw = np.random.default_rng(0)
    for k in range(5):
        Image.fromarray(draw.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(real / f"{k}.png")
    (real / "notes.txt").write_text("not a picture")
    np.savez(shell.folder / "real.npz", mu=np.zeros(128), sigma=np.eye(128))
    said = evaluate(shell, f"--out {runs['base']} --against real --against real.npz")
    assert said.code == 0
    against = scores(runs["base"])["against"]
    assert against["real"]["pictures"] == 5 and "emoji-clip-kid" in against["real"]["scores"]
    assert set(against["real.npz"]["scores"]) == {"emoji-clip-fid"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--steps 0", "--steps: must be between 1"),
        ("--seed-offset -1", "--seed-offset: must be between 0"),
        ("--size 7", "--size: must look like"),
        ("--scheduler x", "--scheduler: must be one of"),
        ("--deepcache x", "must be off, auto, or an interval"),
        ("--limit 0", "--limit: must be at least 1"),
        ("--resamples 1", "--resamples: must be at least 2"),
        ("--lens nothing", "--lens: must be emoji-clip, mlperf"),
        ("--lens mlperf --inception gone.pth", "gone.pth: cannot be read"),
        ("--against nothing", "nothing: is neither a run, nor a folder"),
        ("--against empty", "empty: holds no pictures"),
        ("--against narrow.npz", "narrow.npz: has mu [4] and sigma [4, 4]; these features are 128 wide"),
        ("--prompts twice.tsv", "--prompts: twice.tsv: row 3 has the id '1' of row 2"),
        ("--model gone", "model:"),
    ],
)
def test_what_cannot_be_used_is_named_before_anything_is_drawn(words: str, said: str, shell: Shell) -> None:
    (shell.folder / "empty").mkdir()
    np.savez(shell.folder / "narrow.npz", mu=np.zeros(4), sigma=np.eye(4))
    (shell.folder / "twice.tsv").write_text("id\tcaption\n1\ta\n1\tb\n")
    answer = evaluate(shell, f"--out run {words}")
    assert answer.code == 2 and said in answer.err.strip().splitlines()[-1], answer
    assert not list((shell.folder / "run").glob("pictures/*.png"))


def test_other_settings_are_refused_with_the_difference(runs: dict[str, Path], shell: Shell) -> None:
    answer = evaluate(shell, f"--out {runs['base']} --guidance 3")
    assert answer.code == 2 and "guidance_scale is 5.0 there, 3.0 here" in answer.err


@pytest.mark.long
def test_a_tuned_plan_or_the_model_says_what_the_options_leave_open(shell: Shell) -> None:
    found = {"steps": 3, "guidance_interval": [0.0, 0.7], "deepcache": {"interval": 2}}
    plans.write(shell.folder / "mine.json", "fp32", {"plans": {"fast": found}})
    usual = ["--prompts", str(table(shell.folder)), "--limit", "2", *QUICK[:2], *QUICK[4:], "--plans", "mine.json"]

    def asked(words: str, run: str) -> dict[str, Any]:
        out = run.partition("/")[0]
        assert shell("evaluate", *words.split(), *usual, "--out", out).code == 0
        return {"guidance_interval": None, **EvaluationRun.read(shell.folder / run).settings}

    tuned = asked("--plan fast", "run")
    assert (tuned["steps"], tuned["plan"], tuned["deepcache"]["interval"]) == (3, "fast", 2)
    assert tuned["guidance_interval"] == [0.0, 0.7]
    swept = asked("sweep --variants fp32=off fp32=fast --steps 4", "swept/fp32-fast")
    assert (swept["steps"], swept["guidance_interval"], swept["deepcache"]["interval"]) == (4, [0.0, 0.7], 2)
    assert EvaluationRun.read(shell.folder / "swept" / "fp32-off").settings["deepcache"] == "off"
    refused = shell("evaluate", *usual, "--out", "other", "--plan", "best")
    assert refused.code == 2 and "--plan: must be one of off, auto, fast" in refused.err
    usual[usual.index("--model") + 1] = "random:tiny-z"
    own = asked("--guidance-interval 0:0.5", "own")
    assert (own["steps"], own["guidance_scale"], own["guidance_interval"]) == (8, 0.0, [0.0, 0.5])
    said = asked("--steps 2 --guidance 1.5 --guided-steps 1", "said")
    assert (said["steps"], said["guidance_scale"], said["guided_steps"]) == (2, 1.5, [1])
    assert said["guidance_interval"] is None


def test_only_one_word_is_needed_to_be_told_what_is_missing(shell: Shell) -> None:
    assert "--prompts: must be given" in shell("evaluate").err
    assert "--out: must be given" in shell("evaluate", "--prompts", str(CLIP / "README.md")).err
