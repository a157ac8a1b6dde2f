"""`make rooms` lists packages and their imports from the code: docs/internals/rooms.md.

It reads imports with the functions of tests/test_floors.py, so that page and rule cannot differ.
"""

from __future__ import annotations

from tests.test_floors import FLOORS, ROOT, read, room, within

PAGE = ROOT / "docs" / "internals" / "rooms.md"
HEAD = """\
# Packages and imports

`make rooms` generates this page from the code. Imports go down; `tests/test_floors.py` has the layers.

| layer | package | imports |
|---|---|---|
"""
LABORATORY = """
The laboratory, which nothing above imports; without `lab/` the page ends here.

| layer | package | imports |
|---|---|---|
"""


def imports() -> dict[str, set[str]]:
    """Map each package to those that it imports directly."""
    modules = read(ROOT)
    found: dict[str, set[str]] = {name: set() for name in FLOORS}
    for module in modules.values():
        here = room(module.name)
        if here is not None and not within(module.name, "tests"):
            found[here] |= {there for one in module.imports(modules) if (there := room(one.name)) not in (None, here)}
    found.pop("core")  # the package's own, empty __init__
    return {name: there - {"core"} for name, there in found.items()}


def page() -> str:
    """Return the text of docs/internals/rooms.md."""
    lists = {name: ", ".join(f"`{one}`" for one in sorted(there)) or "–" for name, there in imports().items()}
    rows = {name: f"| {FLOORS[name]} | `{name}` | {named} |\n" for name, named in lists.items()}
    lab = [row for name, row in rows.items() if within(name, "lab")]
    product = [row for name, row in rows.items() if not within(name, "lab")]
    return "".join([HEAD, *product, *([LABORATORY, *lab] if (ROOT / "lab").is_dir() else [])])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
