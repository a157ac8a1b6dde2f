"""Every question that is asked on a GPU, rehearsed on a CPU with small shapes: it runs, and stores what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.bench import engine, kernel_shapes, kernels, phases, stock
from lab.bench.harness import models
from lab.bench.tables import TABLES

WORDS = ["--device", "cpu", "--tiny", "--results"]


def stored(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text("utf-8"))
    assert found["provenance"]["machine"]["cores"]
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' samplers
def test_rungs_take_turns_and_are_counted_in_whole_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(engine.RUNGS, "4-steps+huge", ("int8", {"steps": 4, "scheduler": "none such"}))
    monkeypatch.setattr(models, "STEPS", 4)
    monkeypatch.setattr(models, "ranges", lambda source, prompts: _ranges(source))
    rungs = "diffusers-1,gate,4-steps+huge,4-steps"
    words = ["--rungs", rungs, "--window", "0.05", "--windows", "2", "--singles", "1", "--rows", "2"]
    engine.main([*WORDS, str(tmp_path), *words, "--in-flight", "gate=3", "--name", "plans"])
    said = capsys.readouterr()
    result = stored(tmp_path, "plans")
    assert json.loads(said.out.partition("\n")[0])["rungs"] == result["rungs"]
    stock, *ours = result["rungs"].items()
    assert stock[0] == "diffusers-1" and [name for name, _ in ours] == ["gate", "4-steps"]
    lines = said.err.splitlines()
    assert any(line.startswith("4-steps+huge is left out: scheduler") for line in lines)
    turns = [line.partition(" {")[0] for line in lines if line.startswith("window")]
    assert turns == [f"window {turn} of 2: {name}" for turn in (1, 2) for name, _ in ours]
    assert [rung["in_flight"] for _, rung in ours] == [3, 4]
    for _, rung in ours:
        assert len(rung["windows"]) == 2 and rung["single_s"] > 0 and rung["images_s"] > 0
        for window in rung["windows"]:
            assert window["pictures"] > 0 and window["pictures"] % rung["in_flight"] == 0
            assert window["seconds"] >= 0.05
    ran = {name: {phase.split(" ")[0] for phase in rung["windows"][0]["phases"]} for name, rung in ours}
    assert ran["gate"] == {"encode", "deep", "shallow-resnet", "vae"}
    assert ran["4-steps"] == {"encode", "deep", "vae"} and "costs_ms int8" in result
    scored = {"lens": {"score": "clip"}, "ways": {}}
    eager = {"name": "eager", "batch": 8, "images_s": 2.0}
    rows = TABLES["h200-engine"].lines(result, {"rows": [eager]}, scored)
    assert rows[2].startswith("| diffusers, bf16, eager, batches of 8 | 2.00 | 1.00× |")
    assert len(rows) == 2 + 3 and rows[3].startswith('| "half", guidance until half of the steps |')


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' samplers
def test_stock_is_measured_one_at_a_time_and_in_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eager alone: compiling takes a minute. What `compile_` compiles is the whole network and the decoder."""
    words = ["--device", "cpu", "--tiny", "--results", str(tmp_path), "--modes", "eager", "--batches", "2,1"]
    assert stock.main([*words, "--rounds", "1"]) == 0
    result = stored(tmp_path, "stock")
    assert [(row["name"], row["batch"]) for row in result["rows"]] == [("eager", 2), ("eager", 1)]
    assert all(row["images_s"] > 0 for row in result["rows"])
    with pytest.raises(SystemExit):
        stock.main([*words, "--modes", "quick"])


@pytest.mark.parametrize("words", [["--rungs", "half,stairs"], ["--in-flight", "half"], ["--in-flight", "stairs=2"]])
def test_wrong_words_are_refused_before_anything_is_loaded(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        engine.main([*words, "--model", "none"])


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("sdxl", {"deep 2", "shallow 1", "shallow-resnet 2", "keys 2", "vae 1", "text 2"}),
        ("zimage", {"bf16 deep 1", "int8 deep 2", "int8 shallow 2", "vae 1"}),
        ("llama", {"bf16 step 2 × 192"}),
    ],
)
def test_phases_are_compared_with_an_earlier_file(
    family: str, names: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path / "before.json"
    before.write_text(json.dumps({"ms": dict.fromkeys(names, 1e-09)}))
    monkeypatch.setattr(models, "ranges", lambda source, prompts: _ranges(source))
    phases.main([*WORDS, str(tmp_path), "--family", family, "--against", str(before)])
    result = stored(tmp_path, "phases")
    assert names <= result["ms"].keys() and min(result["ms"].values()) > 0 and result["family"] == family
    ratios = [line for line in capsys.readouterr().out.splitlines() if line.count("│") == 4]
    assert sum(bool(line.split("│")[3].strip()) for line in ratios) == len(names)


_RANGES: dict[str, Any] = {}


def _ranges(source: Any) -> Any:
    """Ranges of the tiny model, collected once: calibration is tests/pipeline's."""
    from pipeline.quantization import quantized
    from pipeline.quantization.calibration import default_prompts

    return _RANGES.setdefault(source.name, quantized.ranges(source, default_prompts()[:1]))


def test_every_shape_of_kernels_has_its_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main([*WORDS, str(tmp_path)])
    cases = {part: stored(tmp_path, f"kernels-{part}")["cases"] for part in kernels.PARTS}
    ran = {name.split()[1] for name in cases["products"]}
    assert ran == {product.kernel for _, shapes in kernel_shapes.PRODUCTS.values() for product in shapes}
    assert {name.split()[1] for name in cases["memory"]} == {n for one in kernel_shapes.MEMORY.values() for n, _ in one}
    for figures in (one for part in cases.values() for one in part.values()):
        assert figures["ms"] > 0 and not figures["failed"] and not figures["wrong"]
    said = capsys.readouterr().err
    assert all(f"{name}: " in said for part in cases.values() for name in part)


def test_the_best_tiles_are_merged_into_a_table(tmp_path: Path) -> None:
    cases = {
        "a": {"tile": ["linear", "64,32", "16"], "longer_ms": {"2,128,1,0,1": 1.0, "1,64,1,0,1": 2.0}, "wrong": []},
        "b": {"tile": ["geglu", "64,32", "16"], "longer_ms": {"default": 1.0, "1,64,2,0,8": 1.1}, "wrong": []},
        "c": {"tile": None, "longer_ms": {"2,128,1,0,1": 1.0}, "wrong": []},
        "d": {
            "tile": ["linear", "64,32", "32"],
            "longer_ms": {"default": 1.0, "1,64,1,0,1": 0.5},
            "wrong": ["1,64,1,0,1"],
        },
    }
    table = kernels.merged({"linear": {"64,32": {"8": [1, 64, 1, 0]}}}, cases)
    assert table == {
        "linear": {"64,32": {"8": [1, 64, 1, 0], "16": [2, 128, 1, 0]}},
        "geglu": {"64,32": {"16": [1, 64, 2, 0, 8]}},
    }
    kernels.write(table, 132, tmp_path / "table.json")
    assert json.loads((tmp_path / "table.json").read_text()) == {"multiprocessors": 132, **table}
