"""The build backend of pyproject.toml: setuptools, with every package moved under `diptych` in wheels.

In a checkout the packages are top-level (`core`, `api` …). Installed under these names they would collide with others,
so a wheel is built from a copy of the tree in which they are in `diptych/`, and in which their imports and names read
`diptych.core`. Editable installs and source distributions are setuptools' own.

Of the embedded models a wheel has those that a service loads by default, and the others' digests: deployment/assets.py.
Its metadata has README.md as the description, and the address of the project's page that DIPTYCH_PROJECT_URL names.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)

from deployment import assets

__all__ = [
    "build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable", "get_requires_for_build_sdist",
    "get_requires_for_build_wheel", "prepare_metadata_for_build_editable",
]  # fmt: skip

TOP = "diptych"
_BESIDE = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
_DATA = {".cpp", ".css", ".cu", ".h", ".html", ".jinja", ".js", ".json", ".lua", ".svg", ".txt"}
# For the checkout only: measurements behind the docs, the training, and the chart.
_LEFT_OUT = ("lab/bench/results/", "lab/bench/history/", "lab/training/", "deployment/helm/")


class BuildError(ValueError):
    """A source file names a package in a way that cannot be rewritten. The message gives the file, the line and a
    remedy.
    """


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel, as PEP 517 defines, from a copy of the tree with all packages under `diptych`."""
    target = str(Path(wheel_directory).resolve())
    with tempfile.TemporaryDirectory(prefix="diptych-wheel-") as folder:
        stage(Path.cwd(), Path(folder))
        with contextlib.chdir(folder):
            # Metadata prepared before would describe the unmoved tree.
            return str(build_meta.build_wheel(target, config_settings))


def packages_of(root: Path) -> frozenset[str]:
    """The top-level packages of a checkout that are installed: all but the tests and `diptych` itself."""
    return frozenset(path.parent.name for path in root.glob("*/__init__.py")) - {"tests", TOP}


def stage(root: Path, folder: Path) -> None:
    """Copy a wheel's content into `folder`: `diptych/`, with packages and models in it, and the files that the metadata
    needs.
    """
    packages = packages_of(root)
    for name in _BESIDE:
        shutil.copy2(root / name, folder / name)
    project = folder / "pyproject.toml"
    project.write_text(_rename_entry_points(project.read_text("utf-8"), packages), "utf-8")
    if address := os.environ.get("DIPTYCH_PROJECT_URL", "").rstrip("/"):
        with project.open("a", encoding="utf-8") as file:
            file.write(f"\n[project.urls]\nRepository = {json.dumps(address)}\n")
    shutil.copytree(root / "LICENSES", folder / "LICENSES")
    modules = {_dotted(path, root) for room in packages for path in (root / room).rglob("*.py")}
    for model in assets.INCLUDED:
        for name, path in assets.files(root / "models" / model):
            target = folder / TOP / "models" / model / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(path, target)
    (folder / TOP / "models" / "assets.json").write_text(json.dumps(assets.index(root), indent=1), "utf-8")
    for top in (*sorted(packages), TOP):
        for path in sorted((root / top).rglob("*")):
            name = path.relative_to(root).as_posix()
            if not path.is_file() or "__pycache__" in path.parts or name.startswith(_LEFT_OUT):
                continue
            target = folder / name if top == TOP else folder / TOP / name
            if path.suffix == ".py":
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(rename_imports(path.read_bytes(), modules, name))
            elif path.suffix in _DATA:
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(path, target)


def _rename_entry_points(project: str, packages: frozenset[str]) -> str:
    """The text of pyproject.toml with `diptych.` before the modules of ours that entry points name."""
    for points in tomllib.loads(project)["project"].get("entry-points", {}).values():
        for value in points.values():
            if _top(value) in packages:
                project = project.replace(f'"{value}"', f'"{TOP}.{value}"')
    return project


def rename_imports(source: bytes, modules: set[str], name: str) -> bytes:
    """A module's source with `diptych.` before every one of our names that it imports or names. Raises `BuildError`.

    `modules` are all our dotted module names. Names are: imports; strings that are the dotted name of a module
    (`"workers.claims.prefetch:ReconnectingConsumer"`); a package after `"-m"`; and the argument of `import_module`. All
    else stays the same, to the byte.
    """
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    places: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for at, opening in _places(node, modules, name):
            start = starts[at.lineno - 1] + at.col_offset
            match = re.compile(opening).match(source, start)
            if match is None:
                raise BuildError(f"{name}:{at.lineno}: the build cannot rewrite this module name")
            places.add(match.end())
    result = source
    for place in sorted(places, reverse=True):
        result = result[:place] + f"{TOP}.".encode() + result[place:]
    return result


_IMPORT, _NAME, _STRING = rb"from\s+", rb"", rb"[fF]?[\"']"


def _places(node: ast.AST, modules: set[str], name: str) -> Iterator[tuple[Any, bytes]]:
    """Nodes that name a package, and the source text between a node's start and the name itself."""
    match node:
        case ast.ImportFrom(module=str(module), level=0) if _top(module) in modules:
            yield node, _IMPORT
        case ast.Import(names=names):
            for alias in (alias for alias in names if _top(alias.name) in modules):
                if alias.asname is None:
                    raise BuildError(f"{name}:{node.lineno}: write `from … import …` or `import … as …`")
                yield alias, _NAME
        case ast.Constant(value=str(text)) if "." in text and text.partition(":")[0] in modules:
            yield node, _STRING
        case ast.List(elts=words) | ast.Tuple(elts=words) | ast.Call(args=words):
            yield from ((word, _STRING) for word in _named_words(node, words, modules))


def _named_words(node: ast.AST, words: list[ast.expr], modules: set[str]) -> Iterator[ast.expr]:
    """The words of a list or a call that name a module: each after `"-m"`, and `import_module`'s argument."""
    yield from (word for before, word in pairwise(words) if _text(before) == "-m" and _text(word) in modules)
    if isinstance(node, ast.Call) and _callee(node) == "import_module":
        yield from (word for word in words[:1] if _top(_text(_first(word))) in modules)


def _first(word: ast.expr) -> ast.AST:
    """The first part of an f-string, or the node itself."""
    return word.values[0] if isinstance(word, ast.JoinedStr) and word.values else word


def _top(name: str) -> str:
    return name.partition(".")[0]


def _text(node: ast.AST) -> str:
    """The value of a string literal; empty for any other node."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _callee(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _dotted(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _link(path: Path, target: Path) -> None:
    """Hard-link the file; copy it if the two are on different disks."""
    try:
        os.link(path.resolve(), target)
    except OSError:
        shutil.copy2(path, target)
