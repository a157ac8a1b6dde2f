"""Tests README, CONTRIBUTING and docs/serve.md: their commands, settings and links are valid.

tests/deployment/test_service.py sends the README's request to a real service.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import cli
import diptych
from core.config import Settings

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
SERVE = (ROOT / "docs" / "serve.md").read_text("utf-8")
LINKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CODE_OF_CONDUCT.md", ROOT / "SECURITY.md"]
LINKED += sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, *(path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))]


def blocks(heading: str, page: str = README) -> list[str]:
    """The lines of code under a heading; a line that ends in a backslash goes on in the next."""
    _, _, below = page.partition(f"\n## {heading}\n")
    below = below.partition("\n## ")[0].replace("\\\n", " ")
    return [line.strip() for line in below.splitlines() if line.startswith("    ")]


def made(target: str, *variables: str) -> str:
    """What make would run."""
    command = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", target, *variables]
    alone = {"PATH": os.environ["PATH"]}  # the make that runs the tests hands its own flags and variables down
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_two_commands_set_everything_up() -> None:
    assert [line.partition("#")[0].strip() for line in blocks("Set-up")] == ["make serve", "make test"]
    assert made("serve") == ".venv/bin/diptych serve"
    assert made("serve", "PORT=8080") == ".venv/bin/diptych serve --port 8080"
    assert made("test").startswith(".venv/bin/pytest ")


def test_every_target_that_is_named_is_one() -> None:
    named = set(re.findall(r"`make (\w+)", README + CONTRIBUTING)) | set(
        re.findall(r"^    make (\w+)", CONTRIBUTING, re.M)
    )
    assert {"serve", "test", "check", "fix", "bench", "chaos"} <= named
    for target in named:
        assert made(target, "DATA=data", "PROMPTS=captions.tsv", "FILE=api/app.py", "TESTS=tests/api/test_app.py")
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert phony is not None and named <= set(phony[1].split())


@pytest.mark.parametrize("heading", ["Images without a service", "Many machines"])
def test_every_command_is_one_that_diptych_takes(heading: str) -> None:
    commands = [line for line in blocks(heading, SERVE) if not line.startswith("export ")]
    assert commands
    for line in commands:
        program, *words = shlex.split(line)
        assert program == ".venv/bin/diptych"
        cli.parser().parse_args(words)


def test_every_variable_is_a_setting() -> None:
    known = {f"DIPTYCH_{name.upper()}" for name in Settings.model_fields}
    others = {
        "DIPTYCH_TORCH_INDEX",
        "DIPTYCH_COMMIT",
        "DIPTYCH_API_KEY",
        "DIPTYCH_URL",
        "DIPTYCH_RELEASE_URL",
    }  # of set-up and of clients
    for page in PAGES:
        assert set(re.findall(r"\bDIPTYCH_[A-Z_]+", page)) - others <= known


def test_defaults_are_told_as_they_are() -> None:
    rows = re.findall(r"^\| `DIPTYCH_(\w+)` \| ([\d.]+) \|", SERVE, re.MULTILINE)
    assert len(rows) >= 7
    assert {name: float(default) for name, default in rows} == {
        name: float(Settings.model_fields[name.lower()].default) for name, _ in rows
    }


def test_the_newest_release_is_this_version() -> None:
    releases = re.findall(
        r"^## \[(\d[\w.]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert releases[0] == diptych.__version__
    tags = re.findall(r"diptych-(?:api|worker|worker-gpu):(\d[\w.]*)", "".join(PAGES))
    assert set(tags) == {diptych.__version__}, "images that pages build are those that the chart asks for"


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as mkdocs and the hosts of repositories name them."""
    heads = (re.sub(r"\[(.*?)\]\(.*?\)|[`*]", r"\1", head) for head in re.findall(r"^#+ (.*)$", page, re.MULTILINE))
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    text = path.read_text("utf-8")
    for link, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#?([^)\s]*)\)", text):
        target = path.parent / link if link else path
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target.read_text("utf-8")), f"{link}#{anchor}"
    named, defined = set(re.findall(r"\]\[(\w+)\]", text)), set(re.findall(r"^\[(\w+)\]: \S+$", text, re.MULTILINE))
    assert named == defined
