"""Runs beside one another: the same figures as one by one, gates in every state, and a page that stands alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation import compare
from evaluation.bootstrap import Estimate
from evaluation.scoring_networks import embedded
from tests.cli.shell import Said, Shell
from tests.evaluation.conftest import CAPTIONS, CLIP, QUICK, evaluate, read_json, table
from tests.evaluation.test_lpips import alexnet_file as alexnet_file


@pytest.fixture(scope="module")
def compared(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """report.json and report.html of three runs, the base itself being "real"."""
    import cli

    out = tmp_path_factory.mktemp("compared")
    real = out / "real"
    real.mkdir()
    for path in sorted((runs["other seeds"] / "pictures").iterdir())[:9]:
        shutil.copy(path, real / path.name)
    given = " ".join(str(runs[name]) for name in ("base", "three steps", "other seeds"))
    words = f"evaluate compare {given} --real {real} --out {out / 'report'} --lens {CLIP} --resamples 20 --shown 4"
    assert cli.main(words.split()) == 0
    found = read_json(out / "report" / "report.json")
    return found, (out / "report" / "report.html").read_text("utf-8")


def test_figures_are_those_of_each_run_alone(compared: tuple[dict[str, Any], str], runs: dict[str, Path]) -> None:
    found, _ = compared
    for entry, name in zip(found["runs"], ("base", "three steps", "other seeds"), strict=True):
        alone = read_json(runs[name] / "scores.json")["scores"]["emoji-clip-score"]["value"]
        assert entry["scores"]["emoji-clip-score"]["value"] == pytest.approx(alone, rel=1e-12)
    base, three, seeds = found["runs"]
    assert "ratios" not in base and "gates" not in base
    ours, theirs = ({name: score["value"] for name, score in one["scores"].items()} for one in (three, base))
    for figure in ("emoji-clip-fid", "emoji-clip-score"):
        assert three["ratios"][figure]["value"] == pytest.approx(ours[figure] / theirs[figure], rel=1e-12)
    held = read_json(runs["three steps"] / "scores.json")["against"]["base"]["scores"]
    assert three["pairs"]["psnr"]["value"] == pytest.approx(held["psnr"]["value"])
    assert len(three["differences"]) == len(CAPTIONS)
    assert "pairs" not in seeds and "changes" not in seeds and seeds["gates"] == []
    score = "emoji-clip-score"
    assert three["changes"][score]["value"] == pytest.approx(ours[score] - theirs[score], rel=1e-9)
    psnr = {str(place): value for place, value, _ in three["differences"]}
    worst = {one["id"]: round(one["value"], 3) for one in three["pairs"]["psnr"]["worst"]}
    assert worst == dict(sorted(psnr.items(), key=lambda one: one[1])[:6])


def test_runs_that_differ_in_seeds_alone_are_the_spread(compared: tuple[dict[str, Any], str]) -> None:
    found, _ = compared
    base, three, seeds = found["runs"]
    spread = abs(seeds["scores"]["emoji-clip-fid"]["value"] / base["scores"]["emoji-clip-fid"]["value"] - 1)
    assert found["seed_spread"]["runs"] == ["base", "seeds"]
    assert found["seed_spread"]["fid"] == pytest.approx(spread)
    gate = next(gate for gate in three["gates"] if gate["figure"] == "emoji-clip-fid")
    assert gate["high"] == pytest.approx(1 + max(0.02, spread))


def test_the_page_needs_nothing_else(compared: tuple[dict[str, Any], str]) -> None:
    found, page = compared
    addresses = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert [one for one in addresses if not one.startswith(("data:", "row.images"))] == []
    assert "<!--" not in page and "-here" not in page
    # the grid, and one run's six lowest PSNRs and six greatest falls of the score
    assert page.count("data:image/webp") == 3 * 4 + 3 * 6 + 3 * 6
    for change in found["runs"][1]["changes"].values():
        assert f"{change['value']:+.4g}" in page
        assert all(f"{one['base']:.4g} → {one['run']:.4g} ({one['value']:+.4g})" in page for one in change["worst"])
    names = re.search(r"const names = (\[.*?\]), rows = (\[.*?\]);\n", page)
    assert names is not None and json.loads(names[1]) == ["base", "three", "seeds"]
    assert [set(row) for row in json.loads(names[2])] == [{"caption", "images"}] * 4


def figure(value: float, low: float, high: float) -> Estimate:
    """With this interval, or near it."""
    return Estimate(value, torch.linspace(low, high, 201, dtype=torch.float64) + value - (low + high) / 2)


@pytest.mark.parametrize(
    ("fid", "score", "spread", "expected"),
    [
        ((0.8, 0.7, 0.9), (1.0, 0.999, 1.001), None, ["holds", "holds"]),  # FID may fall as it likes
        ((1.01, 0.98, 1.04), (0.999, 0.997, 1.001), None, ["open", "open"]),
        ((1.03, 1.02, 1.04), (0.997, 0.996, 0.998), None, ["fails", "fails"]),
        ((1.3, 0.8, 1.9), (0.99, 0.95, 1.02), None, ["too few captions", "too few captions"]),  # also no change at all
        ((1.03, 1.02, 1.04), (1.003, 1.002, 1.004), 0.05, ["holds", "fails"]),  # as far apart as other seeds are
        ((1.01, 1.0, 1.015), (1.0, 0.999, 1.001), 0.001, ["holds", "holds"]),
    ],
)
def test_a_gate_holds_is_open_or_fails(
    fid: tuple[float, float, float], score: tuple[float, float, float], spread: float | None, expected: list[str]
) -> None:
    lens = embedded(CLIP)
    ratios = {lens.fid: figure(*fid), lens.score: figure(*score)}
    found = compare.check_gates(ratios, lens, compare.Gates().of({"deepcache": "off"}), spread)
    assert [gate["verdict"] for gate in found] == expected


def test_gates_are_wider_for_deepcache_and_as_asked() -> None:
    usual = compare.Gates()
    assert usual.of({"deepcache": "off"}) == usual.of({}) == (2.0, 0.2) and usual.of({"deepcache": "2"}) == (4.0, 0.5)
    assert compare.Gates(1.0, 0.0).of({"deepcache": "2"}) == (1.0, 0.0)


def test_captions_that_not_all_have_are_left_out(runs: dict[str, Path], shell: Shell) -> None:
    assert evaluate(shell, "--limit 4 --out four").code == 0
    said = shell(*f"evaluate compare {runs['base']} four --out r --lens {CLIP}".split())
    assert said.code == 0 and f"base: 4 of {len(CAPTIONS)} captions" in said.err
    found = read_json(shell.folder / "r" / "report.json")
    assert found["captions"] == 4 and found["real"] is None
    four = found["runs"][1]
    assert four["ratios"]["emoji-clip-score"]["value"] == pytest.approx(1, rel=1e-3)
    assert four["pairs"]["psnr"]["value"] > 60


def test_what_cannot_be_compared_is_named(runs: dict[str, Path], shell: Shell) -> None:
    for words, said in (
        ("nothing", "nothing is no run"),
        (str(runs["base"]), "two runs have the name 'base'"),
        ("--real nothing", "nothing: is neither a run"),
    ):
        answer = shell(*f"evaluate compare {runs['base']} {words} --out r --lens {CLIP}".split())
        assert answer.code == 2 and said in answer.err.splitlines()[-1]


def sweep(shell: Shell, words: str) -> Said:
    given = ["--prompts", str(table(shell.folder)), *QUICK, "--out", "runs", *words.split()]
    return shell("evaluate", "sweep", *given)


@pytest.mark.long
def test_a_sweep_draws_in_several_ways_and_compares_them(shell: Shell, alexnet_file: Path) -> None:
    words = "--steps 4 --limit 4 --variants fp32 fp32@50 fp32+3:resnet --lpips"
    refused = sweep(shell, f"{words} gone.pth")
    assert refused.code == 2 and "gone.pth: cannot be read" in refused.err
    said = sweep(shell, f"{words} {alexnet_file}")
    assert said.code == 0, said
    distances = ["psnr", "ssim", "lpips", "emoji-clip-layers", "emoji-clip-distance"]
    assert said.out.splitlines()[0].split()[3:-2] == distances
    runs = read_json(shell.folder / "runs" / "report.json")["runs"]
    assert [(run["name"], run["settings"]["deepcache"], run["settings"]["seed_offset"]) for run in runs] == [
        ("fp32", "off", 0), ("fp32@50", "off", 50), ("fp32+3-resnet", "3:resnet", 0),
    ]  # fmt: skip
    assert runs[1]["gates"] == [] and [gate["high"] for gate in runs[2]["gates"]] == [1.005]
    assert ["pairs" in run for run in runs] == [False, False, True]
    assert all(runs[2]["pairs"][distance]["value"] > 0 for distance in distances)
    assert "<th>lpips</th>" in (shell.folder / "runs" / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--variants int9", "--variants: must look like"),
        ("--variants fp32 fp32", "--variants: names one twice"),
        ("--variants fp32+x", "must be off, auto, or an interval"),
        ("--real nothing", "nothing: is neither a run"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_it_draws(words: str, said: str, shell: Shell) -> None:
    answer = sweep(shell, words)
    assert answer.code == 2 and said in answer.err, answer
    assert not list((shell.folder / "runs").rglob("*.png"))
