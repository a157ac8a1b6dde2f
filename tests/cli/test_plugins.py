"""Commands that other packages add, as packages with nothing but a module and metadata."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cli import plugins
from tests.cli.shell import Shell

MODULE = """
def add(commands):
    parser = commands.add_parser("fire", help="light a fire")
    parser.add_argument("--logs", type=int, default=3, help="how many")
    parser.set_defaults(run=lambda options: print(options.logs, "logs") or 4)


def add_part(commands):
    commands.add_parser("smoke", help="look for smoke").set_defaults(run=lambda options: 5)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, with one that adds a command, a part of `evaluate`, and what does not load."""
    folder = tmp_path / "packages"
    metadata = folder / "campfire-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "campfire.py").write_text(MODULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: campfire\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{plugins.GROUP}]\nfire = campfire:add\nevaluate.smoke = campfire:add_part\nrain = no_such_package:add\n"
        "wood = campfire:absent\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "campfire", raising=False)
    return folder


@pytest.mark.usefixtures("install")
def test_a_command_of_another_package_is_one_of_ours(shell: Shell) -> None:
    ran = shell("fire", "--logs", "7")
    assert (ran.code, ran.out, ran.err) == (4, "7 logs\n", "")
    assert "  fire         light a fire\n" in shell("--help").out
    assert "--logs LOGS" in shell("fire", "--help").out
    assert "did you mean --logs?" in shell("fire", "--log2").err


@pytest.mark.usefixtures("install")
def test_a_part_of_evaluate_is_added_to_it_alone(shell: Shell) -> None:
    assert shell("evaluate", "smoke").code == 5
    assert "look for smoke" in shell("evaluate", "--help").out
    assert "smoke" not in shell("--help").out and shell("smoke").code == 2


@pytest.mark.parametrize(("name", "reason"), [("rain", "No module named 'no_such_package'"), ("wood", "absent")])
@pytest.mark.usefixtures("install")
def test_a_command_that_does_not_load_is_named_and_leaves_the_others(shell: Shell, name: str, reason: str) -> None:
    refused = shell(name)
    assert refused.code == 2 and f"the command {name} (" in refused.err and reason in refused.err
    listed = shell("--help")
    assert listed.code == 0 and "light a fire" in listed.out and f"the command {name} (" in listed.err


def test_without_such_packages_its_name_is_no_command(shell: Shell) -> None:
    assert shell("fire").code == 2
