"""`make rooms` draws packages and the life of an image from the code: docs/internals/rooms.svg, rooms.md and life.svg.

It reads imports with the functions of tests/test_floors.py, so that drawing and rule cannot differ. The drawing omits
arrows that a longer chain of imports implies; the table in docs/internals/rooms.md lists all imports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from tests.test_floors import FLOORS, ROOT, read, room, within

Edges = Mapping[str, frozenset[str]]
INK, PAPER, LINE, ACCENT, DIM = "#1f2933", "#ffffff", "#9aa5b1", "#0f766e", "#52606d"
# The layers' colours in turn, light enough for dark text.
FILLS = ("#e5e7eb", "#ede9fe", "#fef3c7", "#dcfce7", "#dbeafe", "#fde2d4", "#f5e6c8")


def imports() -> dict[str, frozenset[str]]:
    """Maps each package to those that it imports directly."""
    modules = read(ROOT)
    found: dict[str, set[str]] = {name: set() for name in FLOORS}
    for module in modules.values():
        here = room(module.name)
        if here is None or within(module.name, "tests"):
            continue
        found[here] |= {there for one in module.imports(modules) if (there := room(one.name)) not in (None, here)}
    found.pop("core")  # the package's own, empty __init__
    return {name: frozenset(there - {"core"}) for name, there in found.items()}


def reduced(edges: Edges) -> dict[str, frozenset[str]]:
    """Removes each import that a longer chain of imports implies."""

    def reach(name: str) -> set[str]:
        return set(edges[name]).union(*(reach(there) for there in edges[name]))

    return {name: there - set().union(*(reach(one) for one in there)) for name, there in edges.items()}


# -- drawing -----------------------------------------------------------------------------------------------------------


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img" aria-label="{escape(title)}">'
    )
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{DIM}"/></marker></defs>'
    )
    return "\n".join([head, arrow, f'<rect width="{width}" height="{height}" fill="{PAPER}"/>', *parts, "</svg>", ""])


def box(x: float, y: float, width: float, height: float, words: Sequence[str], fill: str) -> str:
    """Draws a rounded box: the first line is its name, the others describe it."""
    lines = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{LINE}"/>']
    top = y + height / 2 - 8 * (len(words) - 1) + 4.5
    for k, text in enumerate(words):
        style = f'font-weight="600" fill="{INK}"' if k == 0 else f'font-size="11.5" fill="{DIM}"'
        at = f'x="{x + width / 2}" y="{top + 16 * k:g}"'
        lines.append(f'<text {at} text-anchor="middle" {style}>{escape(text)}</text>')
    return "".join(lines)


def path(points: str, *, dashed: bool = False) -> str:
    more = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="{points}" fill="none" stroke="{DIM}" stroke-width="1.2" marker-end="url(#arrow)"{more}/>'


def rooms(edges: Edges) -> str:
    """Draws layers from the top down, with arrows from importing to imported packages."""
    width, row, tall, names = 1060, 92, 34, {name: 9 * len(name) + 22 for name in edges}
    floors = sorted({FLOORS[name] for name in edges}, reverse=True)
    places: dict[str, tuple[float, float]] = {}
    parts: list[str] = []
    for k, floor in enumerate(floors):
        here = [name for name in edges if FLOORS[name] == floor]
        gap = (width - 60 - sum(names[name] for name in here)) / (len(here) + 1)
        x, y = 50 + gap, 24 + k * row
        parts.append(f'<text x="16" y="{y + 22}" fill="{DIM}">{floor}</text>')
        for name in here:
            places[name] = (x, y)
            x += names[name] + gap
    for name, there in reduced(edges).items():
        for other in sorted(there):
            (x0, y0), (x1, y1) = places[name], places[other]
            x0, x1 = x0 + names[name] / 2, x1 + names[other] / 2
            if y0 == y1:  # an import within a layer
                parts.append(path(f"M{x0:g} {y0:g} C{x0:g} {y0 - 26:g} {x1:g} {y1 - 26:g} {x1:g} {y1:g}"))
            else:
                parts.append(path(f"M{x0:g} {y0 + tall:g} C{x0:g} {y0 + tall + 40:g} {x1:g} {y1 - 40:g} {x1:g} {y1:g}"))
    parts += [box(*places[name], names[name], tall, [name], FILLS[FLOORS[name] % len(FILLS)]) for name in places]
    return svg(width, 24 + row * len(floors), "Packages and their imports", parts)


def life() -> str:
    """Draws the life of an image, from its request to its file."""
    queue, serve, core, panel = (FILLS[floor] for floor in (1, 4, 2, 3))
    steps = [
        (30, 30, 200, 62, ["api: check", "the request, by the model card"], serve),
        (300, 30, 210, 62, ["core.jobs: record", "queued, by one script in Redis"], queue),
        (580, 30, 210, 62, ["Celery queue", "a message with the job's id"], queue),
        (860, 30, 200, 62, ["workers: claim", "attempt, lease, incarnation"], serve),
        (860, 150, 200, 62, ["Engine.submit", "check, inbox, future"], core),
        (580, 150, 210, 62, ["Scheduler", "next group and batch width"], core),
        (300, 150, 210, 62, ["ImageRunner.launch", "one iteration, one Ticket"], panel),
        (320, 296, 150, 56, ["encode", "the prompt, once"], panel),
        (510, 296, 150, 56, ["deep", "the whole UNet"], panel),
        (700, 296, 150, 56, ["shallow", "its last block"], panel),
        (890, 296, 150, 56, ["vae", "pixels"], panel),
        (860, 416, 200, 62, ["core.artifacts", "a PNG named by its content"], queue),
        (580, 416, 210, 62, ["core.jobs: succeeded", "record and terminal event"], queue),
        (300, 416, 210, 62, ["api: answer", "to waiting clients, followers"], serve),
    ]
    arrows = [
        "M230 61 H296", "M510 61 H576", "M790 61 H856", "M960 92 V146", "M860 181 H794", "M580 181 H514",
        "M395 212 V266", "M470 324 H506", "M660 315 H696", "M700 333 H664", "M850 324 H886", "M965 352 V412",
        "M860 447 H794",
        "M580 447 H514", "M300 447 H234",
    ]  # fmt: skip
    notes = [
        (440, 288, "start", "phases of an image: each step is one iteration, shared with rows of other requests"),
        (698, 236, "start", "outcome: requests ready for their next phase"), (130, 443, "middle", "JSON or a stream,"),
        (130, 459, "middle", "a PNG over HTTP"),
    ]  # fmt: skip
    frame = f'<rect x="300" y="270" width="760" height="98" rx="8" fill="none" stroke="{LINE}" stroke-dasharray="3 3"/>'
    parts = [frame, path("M685 270 V216", dashed=True), *map(path, arrows), *(box(*step) for step in steps)]
    parts += [
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11.5" fill="{ACCENT}">{escape(text)}</text>'
        for x, y, anchor, text in notes
    ]
    return svg(1090, 510, "Life of an image: check, record, queue, claim, engine, iterations, artifact, answer", parts)


def page(edges: Edges) -> str:
    """Renders docs/internals/rooms.md."""
    lists = {name: ", ".join(f"`{one}`" for one in sorted(there)) or "–" for name, there in edges.items()}
    rows = [f"| {FLOORS[name]} | `{name}` | {named} |" for name, named in lists.items()]
    return "\n".join([
        "# Packages and imports", "",
        "`make rooms` generates this page from the code. Imports go down; `tests/test_floors.py` has the layers.",
        "The drawing omits imports that a longer chain implies; the table lists all of them.", "",
        "![Packages by layer, with arrows from importing to imported packages](rooms.svg)", "",
        "| layer | package | imports |", "|---|---|---|", *rows, "",
    ])  # fmt: skip


def drawn() -> dict[Path, str]:
    """Maps each generated file to its content."""
    edges = imports()
    docs = ROOT / "docs" / "internals"
    return {docs / "rooms.svg": rooms(edges), docs / "rooms.md": page(edges), docs / "life.svg": life()}


if __name__ == "__main__":
    for file, text in drawn().items():
        file.write_text(text, "utf-8")
