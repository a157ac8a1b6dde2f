"""The simulator as a person runs it: figures, table, plot, and refusals that name the option."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import cli
from contract.plan import AUTO, DeepCache
from core.config import Settings
from lab.bench.harness import record
from lab.simulation import costs, measure, simulate
from lab.simulation.runner import Device
from lab.simulation.traffic import Mix, WeightedChoice, always
from tests.lab.simulation.tables import OTHER, SIZE, WIDTHS, affine

ROOT = Path(__file__).resolve().parents[3]


def shell(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["bench", "simulate", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(affine().as_json()))
    return path


def test_a_sweep_is_reported(tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = shell(
        capsys, "--costs", str(table), "--load", "0.5,0.9", "--pictures", "200", "--steps", "4=3,6", "--deepcache",
        "off=2,3:resnet", "--guidance", "on=3,off", "--sizes", "64x64,96x64", "--deadlines", "none,30", "--priorities",
        "5=9,0", "--bursts", "2,4", "--results", str(tmp_path / "r"), "--name", "mine", "--image-jobs", "8",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "r" / "mine.json").read_text()) == result
    assert result["mix"]["deepcache"] == pytest.approx({"off": 2 / 3, "3:resnet": 1 / 3}, abs=1e-5)
    assert result["mix"]["steps"] == {"4": 0.75, "6": 0.25} and result["mix"]["deadline_s"] == {"none": 0.5, "30": 0.5}
    assert result["bursts"] == {"on_s": 2.0, "off_s": 4.0} and result["image_jobs"] == 8 and not result["notes"]
    assert [point["load"] for point in result["points"]] == [0.5, 0.9]
    for point in result["points"]:
        assert point["rate_per_s"] == pytest.approx(point["load"] * result["capacity_per_s"], rel=1e-3)
        for measured in point["policies"].values():
            percentiles = list(measured["percentiles_s"].values())
            assert percentiles == sorted(percentiles)
            assert 0 < measured["p50_s"] <= measured["p99_s"] and measured["p50_s"] == measured["percentiles_s"]["50"]
            assert 0 < measured["utilisation"] <= 1 and 1 <= measured["rows"] <= 32 and 0 <= measured["missed"] <= 1
    for word in ("p99", "missed", "bursts"):
        assert word in out
    drawn = ElementTree.fromstring((tmp_path / "r" / "mine.svg").read_text())
    lines = list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 2 and all(len((line.get("points") or "").split()) == 2 for line in lines)


def test_equal_seeds_give_equal_figures_on_every_machine() -> None:
    """In processes that order their sets differently."""
    code = (
        "import json, sys; from lab.simulation import simulate;"
        "from lab.simulation.traffic import Mix, WeightedChoice;"
        "from tests.lab.simulation.tables import OTHER, SIZE, affine; from contract.plan import AUTO;"
        "mix = Mix(WeightedChoice((SIZE, OTHER), (1, 1)), deepcache=WeightedChoice((None, AUTO), (1, 1)));"
        "plan = simulate.Plan(mix, gpus=(3,), loads=(0.9,), pictures=300, seed=int(sys.argv[1]));"
        "print(json.dumps([point for point, _ in simulate.points(affine(), plan) if point]));"
        "assert 'torch' not in sys.modules"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, seed], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": order},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed, order in (("1", "1"), ("2", "2"))
    ]  # fmt: skip
    mix = Mix(WeightedChoice((SIZE, OTHER), (1, 1)), deepcache=WeightedChoice((None, AUTO), (1, 1)))
    plan = simulate.Plan(mix, gpus=(3,), loads=(0.9,), pictures=300, seed=1)
    here = json.loads(json.dumps([point for point, _ in simulate.points(affine(), plan) if point]))
    assert here == json.loads(said[0]) != json.loads(said[1])


def test_deadlines_that_nobody_can_keep_are_said() -> None:
    plan = simulate.Plan(Mix(size=always(SIZE), deadline_s=always(1e-3)), pictures=50)
    (point,) = (point for point, _ in simulate.points(affine(), plan) if point)
    for measured in point["policies"].values():
        assert measured["missed"] == 1 and measured["p99_s"] is None and measured["throughput_per_s"] == 0


def test_what_was_not_measured_is_said() -> None:
    whole = affine()
    measured = {key: rows for key, rows in whole.measured.items() if key[0] != "encode"}
    measured["deep", SIZE] = {rows: s for rows, s in measured["deep", SIZE].items() if 2 <= rows <= 8}
    table = costs.Costs("part", measured)
    plan = simulate.Plan(Mix(size=always(SIZE), guided=always(False)), device=Device(memory_bytes=1))
    simulate.check(table, plan)
    assert simulate.notes(table, plan) == [
        "encode: not measured, counted as no time",
        "deep at 64x64: not measured over 8 rows, so no forward is wider",
        "deep at 64x64: not measured under 2 rows, which are extrapolated",
        "memory: the table does not tell what a picture holds, so memory bounds nothing",
    ]
    assert not simulate.notes(whole, simulate.Plan(Mix(size=always(SIZE)))) and max(WIDTHS) == Device().max_rows


def test_the_bound_is_that_of_the_best_width() -> None:
    table = costs.Costs("any", {("deep", SIZE): {2: 1.0, 4: 1.2, 8: 4.0}, ("vae", SIZE): {1: 0.5}})
    mix = Mix(size=always(SIZE), steps=always(10))
    assert simulate.capacity(table, Device(), mix) == pytest.approx(1 / (10 * 2 * 1.2 / 4 + 0.5))
    assert simulate.solo_s(table, mix.kinds()[0][0]) == pytest.approx(10.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "0"], "--gpus: must be between 1"),
        (["--gpus", "two"], "--gpus: must be whole numbers"),
        (["--gpus", "1,1"], "--gpus: must rise"),
        (["--gpus", "1,8", "--load", "0.5,0.8"], "--gpus, --load: only one"),
        (["--load", "nan"], "--load: must be between"),
        (["--load", "-1"], "--load: must be between"),
        (["--load", "x"], "--load: must be numbers"),
        (["--pictures", "0"], "--pictures: must be between 1"),
        (["--seed", "-1"], "--seed: must be at least 0"),
        (["--bursts", "5"], "--bursts: must be two numbers"),
        (["--bursts", "0,5"], "--bursts: must be two numbers"),
        (["--sizes", "64"], "--sizes: 64: must be a size"),
        (["--sizes", "32x32"], "deep.32x32: is not in the table; sizes that can be drawn: 64x64, 96x64"),
        (["--steps", "0"], "--steps: 0: must be a whole number"),
        (["--steps", "20=x"], "--steps: 20=x: the weight"),
        (["--guidance", "maybe"], "--guidance: maybe: must be on, off, or a share"),
        (["--deepcache", "often"], "--deepcache: must be off, auto"),
        (["--deadlines", "0"], "--deadlines: 0: must be seconds above 0"),
        (["--priorities", "10"], "--priorities: 10: must be a whole number between 0 and 9"),
        (["--image-jobs", "0"], "--image-jobs: "),
        (["--max-rows", "1"], "--max-rows: "),
        (["--name", "../x"], "--name: must be letters"),
        (["--costs", "/nowhere.json"], "--costs: /nowhere.json cannot be read"),
        (["--results", "/proc/nowhere"], "--results: /proc/nowhere cannot be written"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(
    words: list[str], said: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--costs": str(table), "--pictures": "5", "--results": str(tmp_path)}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    code, _, err = shell(capsys, *(f"{option}={value}" for option, value in given.items()))
    assert code == 2 and err.startswith("diptych: ") and said in err.splitlines()[-1]


def test_schedules_and_memory_are_checked_against_the_pictures() -> None:
    too_late = Mix(size=always(SIZE), steps=always(4), deepcache=always(DeepCache(deep_steps=(7,))))
    with pytest.raises(record.BenchError, match="--deepcache: must be different numbers between 0 and 3"):
        simulate.check(affine(), simulate.Plan(too_late))
    with pytest.raises(record.BenchError, match="--memory-mib: an image of 64x64"):
        simulate.check(affine(), simulate.Plan(Mix(size=always(SIZE)), device=Device(memory_bytes=5)))
    narrow = costs.Costs("narrow.json", {("deep", SIZE): {1: 1.0}, ("vae", SIZE): {1: 0.5}})
    with pytest.raises(record.BenchError, match=r"narrow\.json: deep.64x64: was measured to 1 row"):
        simulate.check(narrow, simulate.Plan(Mix(size=always(SIZE))))


def test_an_engine_is_measured_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    monkeypatch.setattr(measure, "_TOGETHER", (1, 2))
    monkeypatch.setattr(record, "alone", contextlib.nullcontext)
    for name, value in {"KERNELS": "false", "COMPILE": "false", "THREADS": "1", "PRECISION": "fp32"}.items():
        monkeypatch.setenv(f"DIPTYCH_{name}", value)
    file = tmp_path / "tiny.json"
    options = ["--model", "random:tiny", "--measure", str(file), "--pictures", "20", "--deepcache", "auto"]
    code, out, err = shell(capsys, *options, "--results", str(tmp_path))
    assert code == 0, err
    found = costs.read(file)
    native = found.sizes[0]
    assert {phase for phase, _ in found.measured} == {"encode", "deep", "shallow", "shallow-resnet", "vae"}
    assert set(found.measured["encode", (0, 0)]) == {2, 4} and found.widest("deep", native) == Settings().max_rows
    assert set(found.held_bytes[native]) == {"request", "row", "shallow", "shallow-resnet"}
    assert found.held_bytes[native]["shallow"] > found.held_bytes[native]["shallow-resnet"] > 0
    assert json.loads(out.splitlines()[-1])["costs"]["device"] == found.device
    code, _, err = shell(capsys, *options, "--sizes", "5000x5000")
    assert code == 2 and "--sizes: 5000x5000 is not offered" in err
