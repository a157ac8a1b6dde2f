"""Tests that the docs match the tree (files, modules, settings, endpoints, commands, figures)."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

import cli
from api.app import create_app
from cli import plugins
from core.config import Settings
from tests.test_floors import FLOORS

ROOT = Path(__file__).resolve().parents[1]
LAB = (ROOT / "lab").is_dir()
PAGES = {
    path.relative_to(ROOT).as_posix().removeprefix("docs/"): path.read_text("utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.parent.name != "reference"
}
MARKED = re.compile(
    r"<!-- figures: .*?<!-- end -->|<!-- = .*?<!-- / -->|<!-- elsewhere: (?!-->)\S.*?<!-- end -->", re.DOTALL
)
CODE = re.compile(r"^```.*?^```|(?:\A|(?<=\n\n))(?: {4}[^\n]*(?:\n+|\Z))+|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LIMITS = re.compile(r"<!-- limits: (.*?) -->", re.DOTALL)
UNITS = (
    r"ns|µs|ms|s|seconds?|minutes?|hours?|W|MHz|GHz|dB|FPS|%|kB|MB|GB|TB|KiB|MiB|GiB|TiB|[a-z]*/s|[kMGT]B/s|TFLOP/s|times|"
    r"(?:pictures|images|tokens|captions|samples|requests|jobs) (?:a|per) second"
)
AMOUNT = re.compile(rf"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?:[ \u00a0-]?(?:{UNITS})(?![\w/])|×(?! ?\d))")
CELL = re.compile(r"(?<=\|) *\**(\d{1,3}(?:,\d{3})+|\d[\d,]*\.\d+)\** *(?=\|)")
ROOMS = "api|cli|contract|core|deployment|docs|evaluation|lab|llm|models|pipeline|tests|unet_opt|workers"


def source_files() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for kind in ("py", "sh", "h", "cpp", "yml", "toml")
        for top in (*ROOMS.split("|"), "diptych", ".github", ".")
        for path in (ROOT / top).glob(f"*.{kind}" if top == "." else f"**/*.{kind}")
    }


@pytest.fixture(scope="module")
def files() -> set[str]:
    return source_files()


def of_lab(name: str) -> bool:
    """Return whether a file, folder or module is the laboratory's, where that is deleted: nobody can look there."""
    return not LAB and re.match(r"(tests[./])?lab[./]", name) is not None


def missing_files(page: str, files: set[str]) -> list[str]:
    """Source files that a page names, by path or by file name, and that do not exist."""
    named = set(re.findall(r"(?<![\w./-])[\w./-]*\w\.(?:py|sh|h|cpp|yml|toml)\b(?!/)", page))
    missing = (name for name in named if not any(file == name or file.endswith(f"/{name}") for file in files))
    return sorted(name for name in missing if not of_lab(name))


def missing_paths(page: str) -> list[str]:
    """Files and folders of the tree that a page names and that do not exist; `*` matches any part of a name."""
    named = set(re.findall(rf"`((?:{ROOMS})/[\w./*-]*)`", page))
    return sorted(name for name in named if not list(ROOT.glob(name.rstrip("/"))) and not of_lab(name))


def missing_modules(page: str) -> list[str]:
    named = {name.rstrip(".") for name in re.findall(rf"python -m ((?:{ROOMS})\.[\w.]+)", page)}
    return sorted(name for name in named if not (ROOT / f"{name.replace('.', '/')}.py").is_file() and not of_lab(name))


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_is_there(name: str, files: set[str]) -> None:
    page = PAGES[name]
    assert missing_files(page, files) == []
    assert missing_paths(page) == []
    assert missing_modules(page) == []


def test_what_is_not_there_is_found(files: set[str]) -> None:
    page = (
        "`core/logs.py`, `logs.py` and `core/cupboard.py`; `attic.sh`. `api/web/`, `llm/attic*`; python -m cli.attic."
    )
    assert missing_files(page, files) == ["attic.sh", "core/cupboard.py"]
    assert missing_paths(page) == ["core/cupboard.py", "llm/attic*"]
    assert missing_modules(page) == ["cli.attic"]


def test_every_room_has_its_floor_in_the_picture() -> None:
    _, picture, _ = PAGES["internals/architecture.md"].split("```", 2)
    floor, told = 0, {}
    for line in picture.splitlines():
        left = re.match(r" ?(\d+) +", line)
        floor = int(left[1]) if left else floor
        # Names stand before the gap that sets apart what is said of them.
        names = re.match(r" *\d* +((?:[a-z_.]+ {2,})+)", line)
        told |= dict.fromkeys(names[1].split() if names else (), floor)
    assert told == {room: floor for room, floor in FLOORS.items() if room != "core"}


def test_every_setting_is_told_with_its_default() -> None:
    def written(value: object) -> str:
        if value is None or value == "":
            return "–"
        return (
            str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else f"{value}"
        )

    rows = re.findall(r"^\| `DIPTYCH_(\w+)` \| (.*?) \|", PAGES["operations.md"], re.MULTILINE)
    told = {name.lower(): default.strip("`") for name, default in rows}
    assert len(told) == len(rows)
    home = str(Path.home())
    found = {name: written(field.default).replace(home, "~") for name, field in Settings.model_fields.items()}
    assert told == found


def test_every_address_is_told() -> None:
    """In full, or abbreviated to its last part after one that differs only in that."""
    page = PAGES["api.md"]
    paths = list(create_app(Settings(redis_url="redis://127.0.0.1:1/0")).openapi()["paths"])
    assert len(paths) > 20
    assert [path for path in paths if path not in page and f"…{path[path.rindex('/') :]}" not in page] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_command_is_one_that_diptych_takes(name: str) -> None:
    """Checks commands on separate lines, which may begin with variable assignments; the laboratory's where it is."""
    lines = PAGES[name].replace("\\\n", " ").splitlines()
    _, added = commands_told()
    others = () if LAB else (*added, "evaluate scenes")
    for line in lines:
        command = re.match(r"(?: {4,})?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?diptych ([a-z].*)$", line)
        if command is not None and not command[1].startswith(others):
            cli.parser().parse_args(shlex.split(command[1].rstrip(" &"), comments=True))


def test_every_command_is_told() -> None:
    (commands,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    ours, added = commands_told()
    assert sorted(ours) == sorted(set(commands.choices) - set(plugins.names()))
    assert sorted(added) == sorted(plugins.names()) or not LAB


def commands_told() -> tuple[list[str], list[str]]:
    """The commands that the page names: of the product, and of the laboratory."""
    rows = [line.split("|")[1] for line in PAGES["serve.md"].splitlines() if line.startswith("| `diptych ")]
    ours, added = (re.findall(r"`(?:diptych )?([a-z][\w-]*)`", row) for row in rows)
    return ours, added


# -- figures -----------------------------------------------------------------------------------------------------------


def amounts(page: str) -> list[str]:
    """Numbers with a unit, and bare numbers in cells of tables, that stand in a page's own words.

    Figures that `make figures` writes, passages marked as from elsewhere and code do not count, nor do settings' rows.
    """
    words = CODE.sub("`code`", LIMITS.sub("", MARKED.sub("", page)))
    words = re.sub(r"^\| `code` \| `code` \|", "|", words, flags=re.MULTILINE)  # a setting and its default
    return [" ".join(found.group().split()) for found in AMOUNT.finditer(words)] + CELL.findall(words)


def limits(page: str) -> set[str]:
    """Amounts that a page says are no measurements but defaults, limits and gates: `<!-- limits: 15 s; 2% -->`."""
    return {" ".join(one.split()) for found in LIMITS.findall(page) for one in found.split(";")}


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_is_written_from_a_file_or_marked(name: str) -> None:
    unmarked = sorted(set(amounts(PAGES[name])) - limits(PAGES[name]))
    assert unmarked == [], (
        f"{name}: {', '.join(unmarked)}: let `make figures` write what was measured (lab/bench/figures.py); mark what "
        "others published as <!-- elsewhere: whose --> … <!-- end -->; name defaults and limits in the page's "
        "<!-- limits: … --> comment"
    )


@pytest.mark.parametrize("name", PAGES)
def test_limits_that_a_page_lists_stand_in_it(name: str) -> None:
    assert limits(PAGES[name]) - set(amounts(PAGES[name])) == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It draws 2.92 pictures/s at 38 dB, in 24 ms.", ["2.92 pictures/s", "38 dB", "24 ms"]),
        ("**1,234 tokens/s**, 3.5× as fast, 1.24 times, 67%", ["1,234 tokens/s", "3.5×", "1.24 times", "67%"]),
        ("| engine | 3.97 | **8,900** | 12 |\n", ["3.97", "8,900"]),
        ("takes 24 minutes\nand 50 seconds, 2.3 GB, 4.0 TB/s and 45 captions a second",
         ["24 minutes", "50 seconds", "2.3 GB", "4.0 TB/s", "45 captions a second"]),
        ("128×128 and 3×3, SDXL 1.0, `sleep 5 s`, v0.42.1, 16 tokens, 2,048 keys", []),
        ("```\n24 ms\n```\n\n    curl 24 ms\n\n    25 ms\nand 26 ms", ["26 ms"]),
        ("- a list\n    goes on: 24 ms", ["24 ms"]),
        ("<!-- figures: ladder -->\n24 ms\n<!-- end --> and <!-- = a | b | c -->24<!-- / --> ms, then 2 ms", ["2 ms"]),
        ("<!-- elsewhere: MLPerf -->2.40 dB<!-- end --> <!-- elsewhere: -->2.3 dB<!-- end -->", ["2.3 dB"]),
        ("| `DIPTYCH_X` | `0.5` | or 0.7 |", []),
    ],
)  # fmt: skip
def test_an_unmarked_figure_is_found(text: str, found: list[str]) -> None:
    assert amounts(text) == found


def test_limits_are_listed_one_by_one() -> None:
    assert limits("a <!-- limits: 15 s; 2%;\n 1 MiB --> b") == {"15 s", "2%", "1 MiB"}


def test_every_cell_of_the_comparison_has_a_source() -> None:
    lines = [line for line in PAGES["comparison.md"].splitlines() if line.startswith("|") and "|---" not in line]
    cells = [cell.strip() for line in lines for cell in line.strip("|").split("|")[1:]]
    heads = {"what it is", "requests in one batch", "caches between steps", "LoRAs", "eight bits", "image models"}
    assert len(cells) > 30
    unsourced = [cell for cell in cells if cell and "](" not in cell and "][" not in cell]
    assert set(unsourced) - heads - {"a request's progress"} == {
        line.strip("| ").split(" | ")[1]
        for line in lines
        if line.startswith("| [")  # of a project that is linked
    }


# -- the site ----------------------------------------------------------------------------------------------------------


def test_every_page_has_its_place_in_the_site() -> None:
    """As `make docs` would refuse, without the tools that it needs."""
    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = re.findall(r": ([\w/-]+\.md)$", site.partition("\nnav:\n")[2], re.MULTILINE)
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(name for name in there if not re.match(r"decisions/\d", name))


def test_the_reference_names_packages_that_are_there() -> None:
    for path in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", path.read_text("utf-8"), re.MULTILINE):
            assert (ROOT / name.replace(".", "/") / "__init__.py").is_file(), f"{path.name}: {name}"


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "index.md").read_text("utf-8")
    numbered = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert re.findall(r"\((\d{4}-[\w-]+\.md)\)", index) == numbered
