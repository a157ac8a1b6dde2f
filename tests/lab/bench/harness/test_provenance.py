"""What a record says of the tree that it was measured on, in repositories made for the purpose."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path

import pytest

from lab.bench.harness import provenance, record
from tests.children import forget, in_fork


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two rooms, as the tree of this project."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    for name in ("core/a.py", "core/b.h", "llm/c.py", "docs/d.md", "lab/bench/results/e.json", "tests/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    _git(tmp_path, "init", "--quiet")
    _commit(tmp_path)
    monkeypatch.setattr(provenance, "_BEGUN_S", time.time() + 1)
    return tmp_path


def _git(folder: Path, *arguments: str) -> None:
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ("-c", "user.name=any", "-c", "user.email=any@localhost")
    subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, env=os.environ | own
    )


def _commit(folder: Path) -> None:
    _git(folder, "add", "--all")
    _git(folder, "commit", "--quiet", "--message", "any")


def changed(rooms: dict[str, str]) -> list[str]:
    return [room for room, was in rooms.items() if provenance.digest(provenance.files(room)) != was]


def test_a_commit_is_clean_until_source_changes(tree: Path) -> None:
    commit = provenance.commit()
    assert commit is not None and len(commit) >= 10 and provenance.has_commit(commit) and provenance.has_full_history()
    for name in ("docs/d.md", "lab/bench/results/e.json", "lab/bench/results/new.json", "tests/test_a.py", "out.log"):
        (tree / name).write_text("changed")
    assert provenance.commit() == commit
    (tree / "core" / "a.py").write_text("changed")
    assert provenance.commit() == f"{commit}-dirty"


def test_a_new_source_file_is_a_change_too(tree: Path) -> None:
    (tree / "llm" / "new.py").write_text("new")
    assert str(provenance.commit()).endswith(provenance.DIRTY)


def test_without_git_the_commit_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    assert provenance.commit() is None
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, "0123456789")
    assert provenance.commit() == "0123456789" and not provenance.has_full_history()


def test_a_tree_within_another_repository_is_not_that_one(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tree / "core")
    assert provenance.commit() is None


def test_rooms_are_compared_with_the_commit_and_with_the_tree(tree: Path) -> None:
    commit = str(provenance.commit())
    rooms = {room: provenance.digest(provenance.files(room)) for room in ("core", "llm", "core/a.py")}
    assert provenance.differing(commit, rooms) == [] and changed(rooms) == []
    (tree / "core" / "b.h").write_text("changed")
    (tree / "core" / "notes.md").write_text("no source")
    assert changed(rooms) == ["core"] and provenance.differing(commit, rooms) == []
    now = {room: provenance.digest(provenance.files(room)) for room in rooms}
    assert provenance.differing(commit, now) == ["core"]
    (tree / "core" / "b.h").rename(tree / "core" / "c.h")
    _commit(tree)
    assert changed(now) == ["core"], "a name counts as well as contents"


def test_what_changes_while_it_is_measured_is_dirty(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where it was committed meanwhile: the process may not have run it."""
    assert not str(provenance.provenance(("core",))["commit"]).endswith(provenance.DIRTY)
    monkeypatch.setattr(provenance, "_BEGUN_S", time.time() - 5)
    (tree / "core" / "a.py").write_text("changed")
    _commit(tree)
    assert not str(provenance.commit()).endswith(provenance.DIRTY)
    assert str(provenance.provenance(("core",))["commit"]).endswith(provenance.DIRTY)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["/venv/bin/diptych", "bench", "ladder", "--results", "/tmp/x"], "diptych bench ladder"),
        (["ROOT/cli/__main__.py", "bench", "serve"], "diptych bench serve"),
        (
            ["ROOT/lab/bench/engine.py", "--results=/tmp/x", "--window", "3"],
            "python -m lab.bench.engine --window 3",
        ),
        (["ROOT/lab/bench/results.py", "--data", "/home/me/data"], "python -m lab.bench.results --data data"),
    ],
)
def test_a_command_is_told_without_the_machines_folders(arguments: list[str], told: str) -> None:
    arguments[0] = arguments[0].replace("ROOT", str(provenance.ROOT))
    assert provenance._command(arguments) == told


def test_a_record_says_all_and_a_dirty_one_warns(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = record.publish("any", {"rate": 1.5}, tree / "lab" / "bench" / "results", artifacts=("core", "llm"))
    assert json.loads((tree / "lab" / "bench" / "results" / "any.json").read_text()) == whole
    said = capsys.readouterr()
    assert json.loads(said.out) == whole and not said.err
    about = whole["provenance"]
    assert whole["rate"] == 1.5 and set(about["rooms"]) == {"core", "llm"} and about["machine"]["torch"]
    assert provenance.differing(about["commit"], about["rooms"]) == []
    (tree / "llm" / "c.py").write_text("changed")
    os.utime(tree / "llm" / "c.py", (0, 0))
    dirty = record.publish("any", {}, tree / "lab" / "bench" / "results", artifacts=("core",))
    assert dirty["provenance"]["commit"] == f"{about['commit']}-dirty"
    assert "docs cannot cite" in capsys.readouterr().err


# What the service's processes import; tests/lab/bench/test_ladder.py holds what one does that draws.
_SERVICE = ("api.app", "cli.serve", "deployment.devices", "deployment.serve", "workers.boot", "workers.serving_runtime")


def covered(name: str, rooms: Mapping[str, str]) -> bool:
    """Whether a file counts: by its whole room, or by name in its folder's."""
    folder, _, file = name.rpartition("/")
    named = rooms.get(folder, "").split(" ")[1:]
    return file in named or any(
        name == room or name.startswith(f"{room}/") for room, was in rooms.items() if " " not in was
    )


def test_every_imported_module_belongs_to_a_recorded_room(tmp_path: Path) -> None:
    """To the result's own, which are taken from the process, and to the list for children that do not report."""
    file = tmp_path / "imported.json"

    def look() -> None:
        forget()
        for name in _SERVICE:
            importlib.import_module(name)
        own = importlib.import_module("lab.bench.harness.provenance")
        file.write_text(json.dumps([sorted(own.loaded()), own.provenance(("models/emoji-clip",))["rooms"]]))

    assert in_fork(look) == 0
    imported, rooms = json.loads(file.read_text())
    assert {"workers/boot.py", "api/app.py", "core/jobs/store.py"} <= {*imported}
    assert [name for name in imported if not covered(name, rooms)] == []
    assert rooms.keys() >= {"models/emoji-clip"}, "data that a benchmark names"
    own = [name for name in imported if not name.startswith("lab/")]
    assert [name for name in own if not covered(name, dict.fromkeys(provenance.SERVICE, ""))] == []


def test_what_was_not_imported_does_not_count(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module counts, and what lies beside it that is no module; another module of its folder does not."""
    (tree / "core" / "other.py").write_text("other")
    (tree / "core" / "scripts").mkdir()
    (tree / "core" / "scripts" / "add.lua").write_text("add")
    _commit(tree)
    module = types.ModuleType("measured")
    module.__file__ = str(tree / "core" / "a.py")
    monkeypatch.setitem(sys.modules, "measured", module)
    rooms = provenance.provenance(("llm",))["rooms"]
    assert {room: was.split(" ")[1:] for room, was in rooms.items()} == {
        "core": ["a.py", "b.h"], "core/scripts": ["add.lua"], "llm": [],
    }  # fmt: skip
    commit = str(provenance.commit())
    assert provenance.differing(commit, rooms) == []
    (tree / "core" / "other.py").write_text("changed")
    assert all(provenance.is_unchanged(room, was) for room, was in rooms.items())
    (tree / "core" / "b.h").write_text("changed")
    assert not provenance.is_unchanged("core", rooms["core"])
    assert provenance.is_unchanged("core", rooms["core"], commit)
