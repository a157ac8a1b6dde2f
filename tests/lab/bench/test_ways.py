"""Every configuration: what its parts leave is collected, nothing is left out, and the page has all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lab.bench import figures, ways
from lab.bench.harness import provenance, record
from lab.bench.tables import quality
from lab.bench.ways import CONFIGURATIONS, GROUPS

FID, SCORE = "emoji-clip-fid", "emoji-clip-score"


def lines(name: str, result: dict[str, Any]) -> list[str]:
    return quality.TABLES[name].lines(result)


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.01, "high": value + 0.01}


def judged(name: str, rights: list[bool]) -> dict[str, Any]:
    """As `diptych evaluate scenes` writes it; of two seeds no pair is right in one kind."""
    share = [sum(rights) / len(rights), 0.1, 0.9]
    two = {"pairs": 2, "psnr_db": [11.0, 10.0, 12.0], "share_under_30_db": [1.0, 0.3, 1.0], "ssim": [0.5, 0.4, 0.6]}
    two["emoji-clip-layers"] = [4.0, 3.0, 5.0]
    kinds = {
        kind: {
            "subject": share, "all": share, "clip_prefers_caption": share, "right": rights,
            **({"colour": share} if kind == "colour_held_out" else {}),
        }
        for kind in GROUPS
    }  # fmt: skip
    if name == "int8":
        for kind, one in kinds.items():
            one["two_seeds"] = {"pairs": 0} if kind == "pair_held_out" else two
            one["two_true"] = two
    return {"name": name, "prompts": len(rights), "pictures": f"digest of {name}", **kinds}


@pytest.fixture
def collected(tmp_path: Path) -> dict[str, Any]:
    """What a finished work folder gives."""
    (tmp_path / "compared").mkdir()
    (tmp_path / "runs" / "fp32").mkdir(parents=True)
    (tmp_path / "halves.txt").write_text("real: FID between own and other by emoji-clip: 0.0093\n")
    (tmp_path / "runs" / "fp32" / "captions.json").write_text(json.dumps([[str(n), f"a fox {n}"] for n in range(20)]))
    runs = []
    for way in CONFIGURATIONS:
        rights = [True, False, way.name != "int8-fast"]
        path = tmp_path / "runs" / way.name / "scenes.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(judged(way.name, rights)))
        (tmp_path / "runs" / f"{way.name}.load").write_text("0.40")
        run: dict[str, Any] = {"name": way.name, "pictures_per_second": 6.0, "scores": {}}
        run["scores"] = {FID: estimate(0.0256), SCORE: estimate(78.4)}
        if way.name != "fp32":
            pairs = {"psnr": estimate(31.9) | {"worst": []}, "ssim": estimate(0.96) | {"worst": []}}
            run |= {"ratios": {FID: estimate(1.05), SCORE: estimate(0.999)}, "pairs": pairs}
            run["gates"] = [{"verdict": "fails"}, {"verdict": "holds"}]
        runs.append(run)
    report = {"captions": 9, "lens": {"fid": FID, "score": SCORE}, "runs": runs}
    (tmp_path / "compared" / "report.json").write_text(json.dumps(report))
    return ways.collected(tmp_path)


def test_every_way_is_on_the_page_with_all_of_its_figures(collected: dict[str, Any]) -> None:
    assert set(collected["ways"]) == {way.name for way in CONFIGURATIONS} and collected["judged"] == 9
    assert collected["shown"] == [f"a fox {n}" for n in range(8)]
    rows = lines("ways", collected)
    assert len(rows) == 2 + len(CONFIGURATIONS) + 2
    fast = next(row for row in rows if "`int8-fast`" in row)
    assert "78.40 (78.39 to 78.41)" in fast and "+5.00% (+4.00 to +6.00)" in fast and "fails, holds" in fast
    assert "0.0093" in rows[-1]


def test_pairs_are_of_the_same_model_and_noise_alone(collected: dict[str, Any]) -> None:
    rows = lines("ways-pairs", collected)
    named = {way.name for way in CONFIGURATIONS if f"`{way.name}`" in "\n".join(rows)}
    assert named == {way.name for way in CONFIGURATIONS if way.paired} - {"fp32"}
    assert "31.9 (31.9 to 31.9)" in rows[2] and "0.9600 (0.9500 to 0.9700)" in rows[2]


def test_what_a_way_gains_and_loses_is_counted_by_prompt(collected: dict[str, Any]) -> None:
    assert ways.compared([True, True, False, False], [True, False, True, True]) == {
        "right": 2, "of": 4, "gained": 1, "lost": 2,
    }  # fmt: skip
    rows = {row.split("|")[1].strip(): row for row in lines("ways-composition", collected)[2:-2]}
    assert "| 6 of 9 | – |" in rows["`fp32`"] and "| 3 of 9 | +0 -3 |" in rows["`int8-fast`"]
    table = lines("ways-diversity", collected)
    assert len(table) == 2 + 5, "no row of two seeds where no pair is right"


def test_a_judgement_that_was_stopped_is_none(collected: dict[str, Any], tmp_path: Path) -> None:
    """The fixture's folder is this test's."""
    path = tmp_path / "runs" / "int8" / "scenes.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({group: one for group, one in whole.items() if group != "pair_held_out"}))
    with pytest.raises(record.BenchError, match=r"int8/scenes\.json: has no pair_held_out; judge the run again"):
        ways.collected(tmp_path)


def test_its_script_names_options_that_exist() -> None:
    """lab/training/ways.sh runs this module's parts, and gives no others."""
    script = (provenance.ROOT / "lab" / "training" / "ways.sh").read_text("utf-8")
    assert re.findall(r"lab\.bench\.ways (\w+)", script) == ["draw", "names", "names", "collect"]


def test_the_page_has_all_tables_of_the_ways() -> None:
    page = (provenance.ROOT / "docs" / "quality.md").read_text("utf-8")
    wanted = {name for name, table in quality.TABLES.items() if table.files == ("ways",)}
    assert {mark[2] for mark in figures.BLOCK.finditer(page)} == wanted
