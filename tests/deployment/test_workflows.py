"""Tests the workflows as far as they can be read: what they run is there, and they are given as little as they need."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from tests.children import ROOT

FILES = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
WORKFLOWS: dict[str, dict[Any, Any]] = {name: yaml.safe_load(path.read_text("utf-8")) for name, path in FILES.items()}
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def jobs(name: str) -> list[dict[str, Any]]:
    return [job for job in WORKFLOWS[name]["jobs"].values() if "uses" not in job]


def commands(name: str) -> list[str]:
    """Each `run:` of a workflow, once for each value of its job's matrix."""
    found = []
    for job in jobs(name):
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in (step["run"] for step in job["steps"] if "run" in step):
            expressions = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", step)
            values = [(key, value) for key in expressions for value in matrix[key]]
            found += [step.replace(f"${{{{ matrix.{key} }}}}", str(value)) for key, value in values] or [step]
    return found


@pytest.mark.parametrize("name", FILES)
def test_what_it_runs_is_there(name: str) -> None:
    for command in commands(name):
        for words in re.findall(r"^make ([\w -]+)$", command, re.MULTILINE):
            assert set(words.split()) <= TARGETS, words
        for script in re.findall(r"\bbash (\S+)", command):
            assert (ROOT / script).is_file()
        assert "${{" not in command  # an expression would become part of the script: values go through env


def test_every_python_that_the_project_names_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert WORKFLOWS["checks"]["jobs"]["tests"]["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("name", FILES)
def test_actions_are_commits(name: str) -> None:
    uses = re.findall(r"uses: (\S+)(.*)", FILES[name].read_text("utf-8"))
    for action, comment in uses:
        if action.startswith("./"):
            assert (ROOT / action).is_file()
        else:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action) and re.match(r" # v\d+\.\d+\.\d+$", comment)


def test_an_action_has_one_commit() -> None:
    text = "".join(path.read_text("utf-8") for path in FILES.values())
    pins = set(re.findall(r"uses: ([^.\s]\S*)@(\S+) # (\S+)", text))
    assert len(pins) == len({action for action, _, _ in pins})


@pytest.mark.parametrize("name", FILES)
def test_it_runs_on_a_fork_with_few_rights(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    assert set(re.findall(r"secrets\.(\w+)", FILES[name].read_text("utf-8"))) <= {"GITHUB_TOKEN"}
    events = WORKFLOWS[name][True]  # YAML 1.1 reads the key `on` so
    assert "pull_request_target" not in events
    for job in jobs(name):
        assert job["timeout-minutes"] <= 350 and job["runs-on"] == "ubuntu-24.04"
        for step in job["steps"]:
            if re.match(r"actions/(attest|deploy)", step.get("uses", "")) or re.match(
                r"docker login|gh release", step.get("run", "")
            ):
                assert "ref_type == 'tag'" in f"{job.get('if')} {step.get('if')}" or "'refs/heads/main'" in job["if"]
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_only_commits_that_pass_are_pushed_and_published() -> None:
    """And only under a tag that is the version, which the wheel's job compares."""
    release = WORKFLOWS["release"]["jobs"]
    assert any("__version__" in step.get("run", "") for step in release["wheel"]["steps"])
    for name, job in release.items():
        if {"packages", "contents"} & {key for key, right in job.get("permissions", {}).items() if right == "write"}:
            assert {"checks", "wheel"} <= set(job["needs"]), name


def test_changes_are_tried_on_every_python_that_is_supported() -> None:
    (lowest,) = re.findall(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    pythons = WORKFLOWS["checks"]["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert pythons == [f"3.{minor}" for minor in range(int(lowest), int(lowest) + len(pythons))]
