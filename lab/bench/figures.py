"""Writes the measured figures of README.md and docs/ from the JSON files under lab/bench/ (`make figures`).

Pages contain marks, in HTML comments, for:

    <!-- figures: ladder --> … <!-- end -->                      a table of `lab.bench.tables`
    <!-- figures: serve h200/serve --> … <!-- end -->            the same table of another file
    <!-- figures: source h200/engine --> … <!-- end -->          only the provenance of a file
    <!-- figures: study history/loras --> … <!-- end -->         the tables that the file of a past study stores
    <!-- = serve | p99_s | .2f -->15.22<!-- / -->                one figure: file, keys, format; `1000*.0f` scales it
    <!-- elsewhere: MLPerf v5.1; https://… -->2.40<!-- end -->   figures of others, or of runs without a file

Where figures from elsewhere are from is written behind them, for readers, with its address if there is one. Below a
page's first table of a file follow the file's provenance and the measured parts of the tree that have changed since.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.bench.harness import provenance
from lab.bench.tables import TABLES
from lab.simulation import simulate

PAGES = (
    "README.md",
    *sorted(str(path.relative_to(provenance.ROOT)) for path in (provenance.ROOT / "docs").rglob("*.md")),
)
BLOCK = re.compile(r"(<!-- figures: ([^>]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
INLINE = re.compile(r"(<!-- = ([^>]+?) -->)(.*?)(<!-- / -->)", re.DOTALL)
ELSEWHERE = re.compile(r"(<!-- elsewhere: ([^>]+?) -->)(.*?)(\s*)(<!-- end -->)", re.DOTALL)
WRITTEN = re.compile(r"\s*<sub>Source: [^\n]*</sub>$")
SOURCE, STUDY, HISTORY = "source", "study", "history"
_PAST = "The study is over."
_VERSIONED = ("models/", "tests/")  # files beside what they describe, without a provenance: tests hold them


class FigureError(ValueError):
    """A mark is invalid. The message names the mark and the error."""


class PlotFile(NamedTuple):
    """A plot in docs/ and the result that it shows."""

    file: str
    draw: Callable[[dict[str, Any]], str]


PLOTS = {
    "docs/planning-h200.svg": PlotFile("simulate-h200", simulate.plot),
}


class Results:
    """The JSON files under lab/bench/, by names such as `ladder`, `h200/engine`, and `history/vae` of a past study."""

    def __init__(self, root: Path = provenance.ROOT) -> None:
        self._root = root

    def path(self, name: str) -> Path:
        if name.startswith(_VERSIONED):
            return self._root / f"{name}.json"
        folder = "" if name.startswith(f"{HISTORY}/") else "results"
        return self._root / "lab" / "bench" / folder / f"{name}.json"

    def shown(self, name: str) -> str:
        return self.path(name).relative_to(self._root).as_posix()

    @functools.cache  # noqa: B019 - lives as long as the command
    def __call__(self, name: str) -> dict[str, Any] | None:
        """None if there is no measurement yet."""
        path = self.path(name)
        if not path.is_file():
            return None
        result: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return result


def fill(page: str, results: Results) -> str:
    """The page with every mark filled from the results. Raises `FigureError`."""
    shown: set[str] = set()
    page = BLOCK.sub(lambda mark: f"{mark[1]}{_block(mark[2], results, shown)}\n{mark[4]}", page)
    page = INLINE.sub(lambda mark: f"{mark[1]}{_figure(mark[2], results)}{mark[4]}", page)
    return ELSEWHERE.sub(_with_source, page)


def _with_source(mark: re.Match[str]) -> str:
    """Figures from elsewhere with their source written behind them, below a table."""
    text = WRITTEN.sub("", mark[3])
    source, _, address = mark[2].partition("; ")
    between = "\n\n" if text.endswith("|") else " "
    named = f"[{source}]({address})" if address else source
    return f"{mark[1]}{text}{between}<sub>Source: {named}.</sub>{mark[4]}{mark[5]}"


def cited(page: str) -> set[str]:
    """Names of the files that a page's tables and sources use."""
    named = {name for mark in BLOCK.finditer(page) for name in _files(mark[2])[1]}
    return {name for name in named if not name.startswith(_VERSIONED)}


def cited_inline(page: str) -> set[str]:
    """Names of the files that inline figures of a page use."""
    named = {mark[2].split("|")[0].strip() for mark in INLINE.finditer(page)}
    return {name for name in named if not name.startswith(_VERSIONED)}


def _files(mark: str) -> tuple[str, tuple[str, ...]]:
    """The kind of a block, and the names of its files."""
    kind, *named = mark.split()
    if kind in (SOURCE, STUDY) and named:
        return kind, tuple(named)
    if kind not in TABLES:
        raise FigureError(f"figures: {mark}: there is no table {kind}; there are {', '.join(sorted(TABLES))}")
    if named and len(named) != len(TABLES[kind].files):
        raise FigureError(f"figures: {mark}: {kind} is made of {len(TABLES[kind].files)} files")
    return kind, tuple(named) or TABLES[kind].files


def _block(mark: str, results: Results, shown: set[str]) -> str:
    """A block's content. `shown` are the files whose provenance the page has above, to which this adds."""
    kind, names = _files(mark)
    loaded = [results(name) for name in names]
    missing = [name for name, result in zip(names, loaded, strict=True) if result is None]
    if missing:
        return f"Not measured yet: {', '.join(missing)}."
    if kind == STUDY:
        lines = [line for result in filter(None, loaded) for table in result["tables"].values() for line in table]
    else:
        lines = [] if kind == SOURCE else TABLES[kind].lines(*filter(None, loaded))
    new = [name for name in dict.fromkeys(names) if name not in shown and not name.startswith(_VERSIONED)]
    shown.update(new)
    return "\n".join([*lines, "", *sources(new, results)]).strip()


def _figure(mark: str, results: Results) -> str:
    name, *keys, form = (part.strip() for part in mark.split("|"))
    value: Any = results(name)
    if value is None:
        raise FigureError(f"= {mark}: there is no {results.shown(name)}")
    try:
        for key in keys:
            value = value[int(key) if isinstance(value, list) else key]
        factor, _, form = form.rpartition("*")
        return format(value * float(factor or 1), form)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise FigureError(f"= {mark}: {type(error).__name__}: {error}") from error


# -- where figures come from -------------------------------------------------------------------------------------------


def sources(names: Sequence[str], results: Results) -> list[str]:
    """One line per file: commit, date, machine, command, and changes since."""
    lines = []
    for name in names:
        result, is_over = results(name), name.startswith(f"{HISTORY}/")
        stamp = result["provenance"] if result else {}
        verb = "simulated" if "simulate" in name else "measured"
        machine = _machine(stamp["machine"])
        command = _command(stamp["command"], is_over)
        commit = f"at commit `{stamp['commit']}`" if stamp["commit"] else "at a commit that was not recorded"
        lines.append(
            f"<sub>`{results.shown(name)}`: {verb} {commit} on {stamp['date']}{command}{machine}. "
            f"{_PAST if is_over else _since(stamp['rooms'])}</sub>"
        )
    return [line + ("\\" if number < len(lines) else "") for number, line in enumerate(lines, 1)]


def _command(command: str | None, is_over: bool) -> str:
    """The command, without `python -m` where the study is over, or its module no longer in the tree."""
    text = (command or "").removeprefix("python -m ")
    module = text.split(" ")[0]
    if is_over or ("." in module and not (provenance.ROOT / f"{module.replace('.', '/')}.py").is_file()):
        return f" by `{text}` of that commit"
    return f" by `{command}`" if command else ""


def _machine(machine: dict[str, Any] | None) -> str:
    if not machine:
        return ", on a machine that was not recorded"
    gpus = machine.get("gpus", 1)
    chip = f"{machine['processor']}, {machine['cores']} cores, {machine['capability']}"
    if machine.get("gpu"):
        chip = f"{gpus} × {machine['gpu']}" if gpus > 1 else machine["gpu"]
    versions = [f"{name} {machine[name]}" for name in ("torch", "triton", "driver") if machine.get(name)]
    return f" ({', '.join([chip, *versions])})"


def _since(rooms: dict[str, str]) -> str:
    if not rooms:
        return "What has changed since is not known."
    changed = sorted({_nearest_existing(room) for room, was in rooms.items() if not _is_unchanged(room, was)})
    changed = [room for room in changed if not any(room.startswith(f"{other}/") for other in changed)]
    if not changed:
        return "Nothing that was measured has changed since."
    return f"Changed since: {', '.join(f'`{room}`' for room in changed)}."


_is_unchanged = functools.cache(provenance.is_unchanged)


def _nearest_existing(room: str) -> str:
    """The file or folder, or the nearest one above it that the tree still has."""
    path = Path(provenance.moved(room))
    parts = (path, *path.parents[:-1])
    return next((part.as_posix() for part in parts if (provenance.ROOT / part).exists()), room)


def written(root: Path = provenance.ROOT) -> Iterator[tuple[Path, str]]:
    """Yield every file that contains figures, with its up-to-date content. Raises `FigureError`."""
    results = Results(root)
    for name in PAGES:
        try:
            yield root / name, fill((root / name).read_text("utf-8"), results)
        except FigureError as error:
            raise FigureError(f"{name}: {error}") from error
    for name, plot in PLOTS.items():
        result = results(plot.file)
        if result is None:
            raise FigureError(f"{name}: there is no {results.shown(plot.file)}")
        yield root / name, plot.draw(result)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make figures", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing: exit code 1 if a page would change")
    check = parser.parse_args(arguments).check
    try:
        changed = [(path, text) for path, text in written() if not path.is_file() or path.read_text("utf-8") != text]
    except FigureError as error:
        print(error, file=sys.stderr)
        return 2
    if check and changed:
        print(
            f"{', '.join(path.name for path, _ in changed)}: run `make figures`. Either a file under lab/bench/ was "
            "measured again, or code has changed that a table names as unchanged since it was measured.",
            file=sys.stderr,
        )
        return 1
    for path, text in changed:
        path.write_text(text, "utf-8")
        print(f"written: {path.relative_to(provenance.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
