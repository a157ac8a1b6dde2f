"""Figures in README.md and docs/ are those of the JSON files, which say at which commit they were measured."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.bench import figures, results
from lab.bench.harness import provenance
from lab.bench.tables import TABLES
from lab.simulation.costs import SHIPPED

ROOT = provenance.ROOT
# Each starts git, and many files are of one commit.
has_full_history, has_commit = functools.cache(provenance.has_full_history), functools.cache(provenance.has_commit)


def pages() -> dict[str, str]:
    return {name: (ROOT / name).read_text("utf-8") for name in figures.PAGES}


def cited() -> set[str]:
    return {plot.file for plot in figures.PLOTS.values()}.union(*map(figures.cited, pages().values()))


def stored() -> set[str]:
    names = {"results": "", "results/h200": "h200/", "history": "history/"}
    folders = {ROOT / "lab" / "bench" / folder: prefix for folder, prefix in names.items()}
    return {prefix + path.stem for folder, prefix in folders.items() for path in folder.glob("*.json")}


def about(name: str) -> dict[str, Any]:
    found = figures.Results()(name)
    assert found is not None, name
    return dict(found["provenance"])


def test_a_page_that_differs_from_its_files_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `make check`, which runs this on README.md and docs/: what is committed may lag behind in tests."""
    stale, fresh = tmp_path / "stale.md", tmp_path / "fresh.md"
    stale.write_text("1.0")
    fresh.write_text("2.0")
    monkeypatch.setattr(figures, "written", lambda: iter([(stale, "1.1"), (fresh, "2.0")]))
    assert figures.main(["--check"]) == 1 and stale.read_text() == "1.0"
    assert capsys.readouterr().err.startswith("stale.md: run `make figures`.")
    monkeypatch.setattr(figures, "written", lambda: iter([(fresh, "2.0")]))
    assert figures.main(["--check"]) == 0


def test_every_page_is_among_those_that_are_checked() -> None:
    assert [path for path, _ in figures.written()] == [ROOT / name for name in (*figures.PAGES, *figures.PLOTS)]


def test_every_page_says_where_its_single_figures_are_from() -> None:
    for name, page in pages().items():
        assert figures.cited_inline(page) <= figures.cited(page), name


def test_sources_of_figures_from_elsewhere_are_read_by_people() -> None:
    """Not in a comment alone; what others published with its address."""
    for name, page in pages().items():
        for mark in figures.ELSEWHERE.finditer(page):
            source, _, address = mark[2].partition("; ")
            assert f"<sub>Source: {f'[{source}]({address})' if address else source}.</sub>" in mark[3], (name, source)
            assert address.startswith("https://") or "MLPerf" not in source, (name, source)


def test_a_source_is_written_once_and_below_a_table() -> None:
    page = "a <!-- elsewhere: MLPerf; https://x.y -->2.40<!-- end -->\n<!-- elsewhere: a run -->\n| 1 |\n<!-- end -->\n"
    once = figures.fill(page, figures.Results())
    assert "2.40 <sub>Source: [MLPerf](https://x.y).</sub><!-- end -->" in once
    assert "| 1 |\n\n<sub>Source: a run.</sub>\n<!-- end -->" in once
    assert figures.fill(once, figures.Results()) == once


@pytest.mark.parametrize("name", sorted(cited() & stored()))
def test_figures_are_of_a_commit(name: str) -> None:
    """One that this repository has, with the rooms as they were measured."""
    commit, rooms = about(name)["commit"], about(name)["rooms"]
    clean = bool(commit) and not commit.endswith(provenance.DIRTY) and bool(rooms)
    assert clean, f"{name}: measured at {commit}: no commit holds what was measured; measure it again"
    if not has_full_history():
        pytest.skip("no history here to hold the digests against")
    assert has_commit(commit), f"{name}: there is no commit {commit}; was it rewritten?"
    assert provenance.differing(commit, rooms) == [], f"{name}: what was measured is not what {commit} holds"


def test_no_file_lies_about_that_nothing_is_made_from() -> None:
    """But of studies that are over: their files stay."""
    assert {name for name in stored() - cited() if not name.startswith("history/")} == set()
    assert cited() <= stored(), "a page cites a file that is missing"


def test_every_file_has_its_command() -> None:
    """Except those of studies that are over, of lab/training/ways.sh, and what `fleet` stores beside its own."""
    runs = {*results.RUNS, *(f"h200/{name}" for name in results.GPU_RUNS)}
    assert {name for name in stored() if not name.startswith("history/")} - {"ways", "h200/fleet-engine"} == runs


@pytest.mark.parametrize("command", [*results.RUNS.values(), *results.GPU_RUNS.values()], ids=" ".join)
def test_every_command_can_be_given(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The module reads these options; it is left before it measures anything."""
    _, module, *words = command
    parse = argparse.ArgumentParser.parse_args

    class Parsed(Exception):
        pass

    def parse_args(self: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(self, *arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [module, *words])
    main = importlib.import_module(module).main
    if words:
        with pytest.raises(Parsed):
            main()


def test_without_being_told_what_to_run_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(results, "_run", lambda *words: pytest.fail(f"ran {words}"))
    for options, runs, prefix in (([], results.RUNS, ""), (["--gpu"], results.GPU_RUNS, "h200/")):
        assert results.main(options) == 0
        header, *lines = capsys.readouterr().out.splitlines()
        assert header.split() == ["name", "commit", "date", "minutes"]
        rows = {name: fields for name, *fields in map(str.split, lines)}
        assert rows.keys() == runs.keys()
        for name, (commit, date, _) in rows.items():
            assert (commit, date) == tuple(about(prefix + name)[key] for key in ("commit", "date"))
    assert results.main(["--gpu", "--results", str(tmp_path)]) == 0
    assert all(line.split()[1:] == ["-", "-", "-"] for line in capsys.readouterr().out.splitlines()[1:])


@pytest.mark.parametrize(("words", "count"), [(["--all"], 2), (["--only", "first"], 1)])
def test_what_is_told_to_run_runs_and_its_minutes_are_noted(
    words: list[str], count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[str] = []

    def run(*arguments: str) -> bool:
        if arguments[0] == "-m":
            return True  # the figures
        runs.append(arguments[0])
        (tmp_path / f"{arguments[0]}.json").write_text('{"provenance": {"commit": "abc", "date": "2026-01-02"}}')
        return True

    monkeypatch.setattr(results, "_run", run)
    monkeypatch.setattr(results, "_RESULTS", tmp_path)
    monkeypatch.setattr(results, "RUNS", {"first": ["first"], "second": ["second"]})
    assert results.main(words) == 0 and len(runs) == count
    assert results.main([]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    noted = [["first", "abc", "2026-01-02", "0.0"], ["second", "abc", "2026-01-02", "0.0"]]
    assert rows == noted[:count] + [["second", "-", "-", "-"]] * (2 - count)


@pytest.mark.parametrize("words", [["--only", ""], ["--only", "attic"], ["--only", "ladder", "--all"]])
def test_what_there_is_not_to_run_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_run", lambda *words: pytest.fail(f"ran {words}"))
    with pytest.raises(SystemExit) as exit_info:
        results.main(words)
    assert exit_info.value.code == 2


def test_cost_tables_that_are_cited_are_shipped() -> None:
    rooms = {provenance.moved(room) for name in stored() for room in about(name)["rooms"]}
    tables = {Path(room).stem for room in rooms if room.startswith("lab/simulation/tables/")}
    assert tables and tables <= {path.stem for path in SHIPPED.glob("*.json")}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    row = {"median_ms": 1.234, "mean_ms": 1.5, "p99_ms": 2.0, "max_ms": 3.0}
    room = "lab/bench/figures.py"
    known = {
        "commit": "0123456789", "date": "2026-01-02", "command": "python -m lab.bench.scheduling",
        "rooms": {room: provenance.digest(provenance.files(room))}, "machine": None,
    }  # fmt: skip
    folder = tmp_path / "lab" / "bench" / "results"
    folder.mkdir(parents=True)
    (folder / "scheduling.json").write_text(
        json.dumps({"waiting": {"8": row}, "p_s": [0.0125], "provenance": known}), "utf-8"
    )
    return tmp_path


PAGE = (
    "a\n<!-- figures: scheduling -->\nold\n<!-- end -->\nb <!-- = scheduling | p_s | 0 | 1000*.1f -->9<!-- / --> ms c\n"
)


def test_marks_are_filled_and_can_be_filled_again(tree: Path) -> None:
    once = figures.fill(PAGE, figures.Results(tree))
    assert "| 8 | 1.234 ms | 1.500 ms | 2.000 ms | 3.000 ms |" in once and "old" not in once
    assert "<!-- = scheduling | p_s | 0 | 1000*.1f -->12.5<!-- / --> ms c" in once
    assert "at commit `0123456789` on 2026-01-02 by `python -m lab.bench.scheduling`" in once
    assert figures.fill(once, figures.Results(tree)) == once
    assert figures.cited(once) == figures.cited_inline(once) == {"scheduling"}


def test_what_has_changed_since_is_said_room_by_room(tree: Path) -> None:
    results = figures.Results(tree)
    assert "Nothing that was measured has changed since." in figures.fill(PAGE, results)
    path = results.path("scheduling")
    found = json.loads(path.read_text())
    found["provenance"]["rooms"] |= {"core/batching": "0", "llm": "0"}
    path.write_text(json.dumps(found))
    assert "Changed since: `core/batching`, `llm`." in figures.fill(PAGE, figures.Results(tree))
    found["provenance"]["rooms"] = {"core/quant/gone/all.py": "0", "contract/plan.py": "0"}
    path.write_text(json.dumps(found))
    assert "Changed since: `contract/plan.py`, `core/quant`." in figures.fill(PAGE, figures.Results(tree)), (
        "what is gone"
    )


def test_what_was_moved_is_the_same_where_its_content_is_and_is_named_where_it_lies_now(tree: Path) -> None:
    """Figures say which files they are of by the names that those had when they were measured."""
    path = figures.Results(tree).path("scheduling")
    result = json.loads(path.read_text())
    blobs = provenance.files("lab/simulation/tables/h200.json")
    before = {"benchmarks/costs/h200.json": next(iter(blobs.values()))}
    result["provenance"]["rooms"] = {"benchmarks/costs/h200.json": provenance.digest(before)}
    path.write_text(json.dumps(result))
    assert "Nothing that was measured has changed since." in figures.fill(PAGE, figures.Results(tree))
    result["provenance"]["rooms"] |= {
        "benchmarks/simulation": "0 costs.py",
        "benchmarks": "0 serve.py",
        "training": "0",
    }
    path.write_text(json.dumps(result))
    page = figures.fill(PAGE, figures.Results(tree))
    assert "Changed since: `lab/bench`, `lab/simulation`, `lab/training`." in page


def test_a_study_has_the_tables_of_its_file_and_a_file_its_source_once_on_a_page(tree: Path) -> None:
    known = json.loads((tree / "lab/bench/results/scheduling.json").read_text())
    (tree / "lab/bench/history").mkdir()
    (tree / "lab/bench/history/old.json").write_text(json.dumps({**known, "tables": {"a": ["| 1 |"], "b": ["| 2 |"]}}))
    page = "<!-- figures: study history/old -->\n<!-- end -->\n" * 2 + PAGE * 2
    filled = figures.fill(page, figures.Results(tree))
    assert filled.count("| 1 |\n| 2 |\n") == 2 and filled.count("| 8 | 1.234 ms |") == 2
    assert filled.count("`lab/bench/history/old.json`: measured") == 1 and filled.count("The study is over.") == 1
    assert filled.count("`lab/bench/results/scheduling.json`: measured") == 1


def test_what_was_not_measured_is_said(tree: Path) -> None:
    page = "<!-- figures: serve h200/serve -->\n<!-- end -->\n"
    assert "Not measured yet: h200/serve." in figures.fill(page, figures.Results(tree))


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("<!-- figures: attic -->\n<!-- end -->", "there is no table attic"),
        ("<!-- figures: scheduling a b -->\n<!-- end -->", "is made of 1 files"),
        ("<!-- = attic | x | .1f -->1<!-- / -->", "there is no lab/bench/results/attic.json"),
        ("<!-- = scheduling | q_s | .1f -->1<!-- / -->", "KeyError: 'q_s'"),
        ("<!-- = scheduling | p_s | 7 | .1f -->1<!-- / -->", "IndexError"),
        ("<!-- = scheduling | waiting | .1f -->1<!-- / -->", "TypeError"),
    ],
)
def test_a_mark_that_cannot_be_filled_is_named(tree: Path, mark: str, said: str) -> None:
    with pytest.raises(figures.FigureError, match=said):
        figures.fill(mark, figures.Results(tree))


def test_the_ladder_has_its_baseline_and_gates_beside_its_speeds() -> None:
    def run(capability: str, processes: int, rate: float) -> dict[str, Any]:
        best = {"batch": 4, "threads": 1, "channels_last": False, "bf16": True, "compile": False}
        compiled = {"variant": best | {"compile": True}, "left_out": "took more than 100 s"}
        trials = [compiled] if processes > 1 else []
        rungs = [
            {"name": name, "images_per_s": rate * speed, "speedup": speed, "spread": [rate * speed] * 2}
            for name, speed in (("diffusers", 1.0), ("step-batching", 1.5), ("+deepcache", 4.0), ("turbo", 20.0))
        ]
        return {
            "capability": capability, "rungs": rungs, "stock": {"best": best, "processes": processes, "trials": trials}
        }  # fmt: skip

    scored = {"ways": {"int8-auto": {"gates": [{"verdict": "holds"}, {"verdict": "open"}]},
                       "turbo": {"gates": [{"verdict": "fails"}, {"verdict": "fails"}]}}}  # fmt: skip
    native, avx2 = run("AVX512", 2, 1.5), run("AVX2", 1, 1.0)
    lines = TABLES["ladder"].lines(native, avx2, scored)
    assert lines[0] == "| configuration | images/s, AVX512 | speedup | images/s, AVX2 | speedup | gates: FID, score |"
    assert lines[2] == "| `diffusers` | 1.50 (1.50 to 1.50) | 1.00× | 1.00 (1.00 to 1.00) | 1.00× | – |"
    assert lines[4].endswith("| 4.00× | 4.00 (4.00 to 4.00) | 4.00× | holds, open |")
    assert lines[5].endswith("| fails, fails |"), "a fast student is shown with what it fails"
    assert "AVX512: 2 processes, 1 thread each, batches of 4, bf16 (not compiled: took more than 100 s)." in lines[-1]
    assert "AVX2: one process" in lines[-1]


def test_the_rivals_are_beside_what_was_fastest_of_each() -> None:
    best = {"batch": 8, "threads": 1, "channels_last": False, "bf16": True, "compile": True}
    row = {
        "images_per_s": 4.0,
        "spread": [3.0, 5.0],
        "p50_s": 2.0,
        "alone_p50_s": 0.5,
        "ratio": 1.0,
        "alone_ratio": 1.0,
    }
    stock = {**row, "name": "diffusers", "best": best, "processes": 2, "best_alone": best | {"batch": 1, "threads": 2}}
    result = {
        "rivals": [stock, {**row, "name": "+int8", "ratio": 1.5}],
        "in_flight": 16,
        "turns": 5,
        "steps": 20,
        "model": "m",
    }
    scored = {"ways": {"int8": {"gates": [{"verdict": "open"}, {"verdict": "holds"}]}}}
    lines = TABLES["rivals"].lines(result, scored)
    assert lines[2].startswith("| diffusers | 4.00 (3.00 to 5.00) | 1.00×") and lines[3].endswith("| open, holds |")
    assert (
        "2 processes, 1 thread each, batches of 8, bf16, torch.compile; alone one process, 2 threads, single"
        in lines[-1]
    )
    assert TABLES["rivals-short"].lines(result)[3].startswith("| **Diptych**, INT8 | 4.00 | 1.50× | 0.50 s")
