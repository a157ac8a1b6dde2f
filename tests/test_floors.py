"""Checks the architecture by reading the source: imports between layers, packages without torch, names, file lengths.

Reads syntax trees instead of importing, so an import inside a function, or under TYPE_CHECKING, counts like one at the
top: both are dependencies. (One test does import, to confirm this in practice.) The second half shows on small
artificial trees that every rule can fail.
"""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module belongs to the longest name that it starts with. Imports go down; a room knows itself.
FLOORS = {
    "diptych": 6,  # the name that all of it is installed under
    "cli": 5,
    "evaluation": 5,
    "benchmarks": 5,
    "training": 5,
    "workers": 4,
    "api": 4,
    "deployment": 4,
    "pipeline": 3,
    "llm": 3,
    "unet_opt": 2,
    "core.ops": 1,
    "core.quant": 1,
    "core.kernels": 1,
    "core.batching": 1,
    "core.graphs": 1,
    "core.cuda_graphs": 1,
    "core.digests": 0,
    "core.transfers": 1,
    "core.failures": 2,  # torch's, in the engine's words
    "core.jobs": 1,
    "core.artifacts": 1,
    "core.config": 0,
    "core.logs": 0,
    "core.extras": 0,
    "core.threads": 0,
    "core.traces": 0,
    "contract": 0,
    "core": 0,  # the package's own __init__ only
}
# Downwards, and forbidden all the same: the text panel knows no UNet, the API knows only what is torch-free.
CLOSED = {"llm": {"unet_opt"}, "api": {"pipeline", "llm", "unet_opt"}, "deployment": {"pipeline", "llm", "unet_opt"}}
# The front door opens every room of its own floor but the training, which no wheel has.
# What is run by `python -m` counts as imported.
# Settings are read in the contract's words, and log lines made printable by its rule.
# Operations pack quantized layers, call kernels, and copy to devices.
SIDEWAYS = {
    "cli": {"evaluation", "benchmarks"},
    "training": {"evaluation"},
    "core.config": {"contract"},
    "core.logs": {"contract"},
    "core.ops": {"core.kernels", "core.quant", "core.transfers"},
    "core.traces": {"core.extras"},
}

TORCH_FREE = ("contract", "core.batching", "core.jobs", "core.artifacts", "api", "deployment")
TORCH = {
    "torch",
    "torchvision",
    "torchao",
    "triton",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors.torch",
}

# Third-party packages and the only files (or folders, ending in /) that may import them.
KEPT_TO = {
    "celery": ("workers/", "api/queue.py"),
    "kombu": ("workers/", "api/queue.py"),
    "fastapi": ("api/",),
    "starlette": ("api/",),
    "redis": ("core/jobs/",),
}

MAX_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_COMPLEXITY = 15  # one, and one for each branch, loop, handler, comprehension and operand of `and` and `or`
FORBIDDEN_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "managers", "base", "misc"}
NOT_OURS = {"models", "build", "dist", "out", "data"}


@dataclass(frozen=True)
class Import:
    line: int
    name: str  # dotted and absolute; empty where it is computed at run time


@dataclass(frozen=True)
class Module:
    path: str  # relative to the root, with /
    name: str
    package: str  # what its relative imports start from
    source: str

    def imports(self, modules: "dict[str, Module]") -> list[Import]:
        # `from core import quant` imports core.quant if that is a module, and else a name of core's.
        found = (
            Import(line, name if start is None or name in modules or name in FLOORS or name in TORCH else start)
            for line, name, start in _imports(self.source, self.package)
            if start != "" or (name in modules and ours(name))
        )
        return list(dict.fromkeys(found))


@functools.cache
def _imports(source: str, package: str) -> tuple[tuple[int, str, str | None], ...]:
    """Line, name, and of what `from` imports the package that the name may be an attribute of; "" of a string."""
    return tuple(found for node in ast.walk(ast.parse(source)) for found in _read(node, package))


def _read(node: ast.AST, package: str) -> Iterator[tuple[int, str, str | None]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield node.lineno, alias.name, None
    elif isinstance(node, ast.ImportFrom):
        start = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:
            yield node.lineno, f"{start}.{alias.name}", start
    elif isinstance(node, ast.Call):
        callee = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if callee in {"import_module", "__import__"}:
            argument = node.args[0] if node.args else None
            name = str(argument.value if isinstance(argument, ast.Constant) else "")
            yield node.lineno, importlib.util.resolve_name(name, package) if name.startswith(".") else name, None
    elif isinstance(node, ast.Constant) and re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)+", str(node.value)):
        yield node.lineno, str(node.value), ""  # such as for `python -m`, where it names a module


def read(root: Path) -> dict[str, Module]:
    """Every Python module under the root, by dotted name, without hidden folders and what is not ours."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if parts[0] in NOT_OURS or any(part.startswith(".") or part.endswith(".egg-info") for part in parts):
            continue
        dotted = ".".join(parts)[: -len(".py")]
        name = dotted.removesuffix(".__init__")
        package = name if name != dotted else dotted.rpartition(".")[0]
        modules[name] = Module("/".join(parts), name, package, path.read_text("utf-8"))
    return modules


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def room(name: str) -> str | None:
    """The package that a module belongs to; None for modules outside of `FLOORS`."""
    rooms = [r for r in FLOORS if within(name, r) and (r != "core" or name == "core")]
    return max(rooms, key=len, default=None)


def ours(name: str) -> bool:
    return name.partition(".")[0] in FLOORS


def check_floors(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        if module.name == "install" or within(module.name, "tests"):
            continue
        here = room(module.name)
        if here is None:
            yield f"{module.path}: in no room of the plan; give it a floor in FLOORS, or a room that exists"
            continue
        for found in module.imports(modules):
            where = f"{module.path}:{found.line}"
            if within(found.name, "tests") or within(found.name, "install"):
                yield f"{where}: {here} imports {found.name}, which is no room"
            if not ours(found.name):
                continue
            there = room(found.name)
            if there is None:
                yield f"{where}: imports {found.name}, which is in no room of the plan"
            elif there in (here, "core"):
                continue
            elif FLOORS[there] > FLOORS[here]:
                yield f"{where}: {here} imports {there}, upwards"
            elif FLOORS[there] == FLOORS[here] and there not in SIDEWAYS.get(here, ()):
                yield f"{where}: {here} imports {there}, sideways"
            elif there in CLOSED.get(here, ()):
                yield f"{where}: {here} imports {there}, which is closed to it"


def check_torch_free(modules: dict[str, Module]) -> Iterator[str]:
    """Follows every import from the torch-free packages, including packages' __init__ files."""
    todo = [(m.name, m.name) for m in modules.values() if any(within(m.name, r) for r in TORCH_FREE)]
    seen = set()
    while todo:
        name, way = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        module = modules[name]
        for found in module.imports(modules):
            where = f"{module.path}:{found.line}"
            if not found.name:
                yield f"{where}: imports a name computed at run time, in reach of {way}; write it out"
            if any(within(found.name, t) for t in TORCH):
                yield f"{where}: imports {found.name}, in reach of {way}"
            parts = found.name.split(".")
            for length in range(1, len(parts) + 1):
                prefix = ".".join(parts[:length])
                if prefix in modules:
                    todo.append((prefix, f"{way} → {prefix}"))


def check_kept_to(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        if within(module.name, "tests"):
            continue
        for found in module.imports(modules):
            allowed = KEPT_TO.get(found.name.partition(".")[0])
            # A whole path starts with a file's only where the two are one.
            if allowed is None or module.path.startswith(allowed):
                continue
            yield f"{module.path}:{found.line}: imports {found.name}, which is kept to {', '.join(allowed)}"


def check_circles(modules: dict[str, Module]) -> Iterator[str]:
    """No file reaches itself by imports, those inside functions and under TYPE_CHECKING among them."""
    reached = {
        module.name: {part for found in module.imports(modules) if (part := _file(found.name, modules))} - {module.name}
        for module in modules.values()
        if not within(module.name, "tests")
    }
    before = {}
    while before != (sizes := {name: len(there) for name, there in reached.items()}):
        before = sizes
        for there in reached.values():
            there.update(*(reached.get(name, ()) for name in list(there)))
    circles = {
        frozenset(n for n in there if name in reached.get(n, ())) for name, there in reached.items() if name in there
    }
    for circle in sorted(map(sorted, circles)):
        yield f"{', '.join(circle)}: import one another in a circle"


def _file(name: str, modules: dict[str, Module]) -> str:
    """The module in which an imported name is looked up; empty where it is none of ours."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def check_lengths(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        lines = len(module.source.splitlines())
        if lines > MAX_LINES and not any(within(module.name, r) for r in ("tests", "training")):
            yield f"{module.path}: {lines} lines, more than {MAX_LINES}; a file has one job"


def check_functions(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        if within(module.name, "tests"):
            continue
        for node in ast.walk(ast.parse(module.source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines, found = (node.end_lineno or 0) - node.lineno + 1, complexity(node)
                if lines > MAX_FUNCTION_LINES:
                    yield f"{module.path}:{node.lineno}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"
                if found > MAX_COMPLEXITY:
                    yield f"{module.path}:{node.lineno}: {node.name} has a complexity of {found}, over {MAX_COMPLEXITY}"


def complexity(function: ast.AST) -> int:
    branches = ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.comprehension
    nodes = list(ast.walk(function))
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return 1 + operands + sum(isinstance(node, branches | ast.match_case) for node in nodes)


def check_names(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        words = set(re.split(r"[./_]", module.path.removesuffix(".py")))
        for word in sorted(words & FORBIDDEN_NAMES):
            yield f"{module.path}: '{word}' names no job"


RULES = [check_floors, check_torch_free, check_kept_to, check_circles, check_lengths, check_functions, check_names]


@pytest.fixture(scope="module")
def house() -> dict[str, Module]:
    modules = read(ROOT)
    assert {"core", "core.batching", "pipeline", "unet_opt", "benchmarks"} <= modules.keys()
    return modules


@pytest.mark.parametrize("rule", RULES)
def test_house(rule, house):
    broken = list(rule(house))
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize("free", TORCH_FREE)
def test_torch_free_rooms_load_no_torch(free, house):
    """Covers what the AST does not show: third-party packages that import torch."""
    names = [name for name in house if within(name, free)]
    if not names:
        pytest.skip(f"{free} has no code")
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"sys.exit(' '.join(set({sorted(TORCH)!r}) & sys.modules.keys()) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- the rules can fail ---------------------------------------------------------------------------------

SOUND = {
    "cli/__init__.py": "from cli import bench\nfrom pipeline import runner",
    "cli/bench.py": "import benchmarks.ladder, evaluation.fid, deployment.serve",
    "core/__init__.py": "",
    "core/config.py": "import os, contract.characters",
    "core/jobs/__init__.py": "import redis\nfrom core.config import Settings",
    "contract/__init__.py": "",
    "contract/characters.py": "",
    "core/graphs.py": "import torch\nfrom . import config",
    "core/batching/__init__.py": "",
    "core/batching/engine.py": "from .scheduler import Scheduler\nfrom core.config import Settings",
    "core/batching/scheduler.py": "",
    "core/quant/__init__.py": "import torch",
    "core/quant/int8.py": "import torch",
    "unet_opt/__init__.py": "",
    "unet_opt/deepcache.py": "import torch\nfrom core.quant import int8",
    "pipeline/__init__.py": "",
    "pipeline/runner.py": "from core.batching.engine import Engine\nfrom unet_opt.deepcache import deep",
    "llm/__init__.py": "",
    "llm/runner.py": "from core import quant\nfrom core.batching import engine",
    "workers/__init__.py": "",
    "workers/app.py": "import celery\nfrom core import jobs",
    "workers/build.py": "import pipeline.runner, llm.runner",
    "api/__init__.py": "",
    "api/app.py": (
        "import fastapi\nfrom contract import characters\nfrom core.jobs import JobStore\nfrom . import queue"
    ),
    "api/queue.py": "import celery",
    "deployment/__init__.py": "",
    "deployment/serve.py": "from core.config import Settings",
    "benchmarks/__init__.py": "",
    "benchmarks/ladder.py": "from pipeline import runner",
    "evaluation/__init__.py": "",
    "evaluation/fid.py": "import scipy",
    "training/__init__.py": "",
    "training/loop.py": "run('-m', 'evaluation.fid')",
    "tests/test_app.py": "import redis, celery, fastapi, torch, api.app, pipeline.runner",
    "models/emoji-xl/base.py": "import anything",
    ".venv/lib/utils.py": "import core.batching",
}


def build(root: Path, **extra: str) -> dict[str, Module]:
    for path, source in (SOUND | extra).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(source, "utf-8")
    return read(root)


@pytest.mark.parametrize("rule", RULES)
def test_sound_tree_passes(rule, tmp_path):
    assert list(rule(build(tmp_path))) == []


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        # upwards
        ("core/quant/int8.py", "import pipeline.runner", "core.quant imports pipeline, upwards"),
        ("core/config.py", "from core.batching import engine", "core.config imports core.batching, upwards"),
        ("core/config.py", "from . import jobs", "core.config imports core.jobs, upwards"),
        ("core/__init__.py", "from .jobs import JobStore", "core imports core.jobs, upwards"),
        ("unet_opt/deepcache.py", "from pipeline.runner import x", "unet_opt imports pipeline, upwards"),
        ("pipeline/runner.py", "import workers.app", "pipeline imports workers, upwards"),
        ("workers/app.py", "import cli", "workers imports cli, upwards"),
        (
            "pipeline/runner.py",
            "def f():\n    import benchmarks.ladder",
            "pipeline imports benchmarks, upwards",
        ),
        (
            "core/jobs/__init__.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from api import app",
            "core.jobs imports api, upwards",
        ),
        (
            "core/graphs.py",
            "import importlib\nimportlib.import_module('pipeline.runner')",
            "core.graphs imports pipeline, upwards",
        ),
        ("core/graphs.py", "__import__('llm')", "core.graphs imports llm, upwards"),
        ("core/batching/engine.py", "from ...pipeline import runner", "beyond top-level"),
        # sideways
        ("pipeline/runner.py", "from llm import runner", "pipeline imports llm, sideways"),
        ("llm/runner.py", "import pipeline", "llm imports pipeline, sideways"),
        ("workers/build.py", "from api.queue import send", "workers imports api, sideways"),
        ("deployment/serve.py", "import workers.boot", "deployment imports workers, sideways"),
        ("api/app.py", "from workers import app", "api imports workers, sideways"),
        ("core/graphs.py", "from core.quant import int8", "core.graphs imports core.quant, sideways"),
        ("core/batching/engine.py", "from .. import jobs", "core.batching imports core.jobs, sideways"),
        ("benchmarks/ladder.py", "import training.loop", "benchmarks imports training, sideways"),
        ("benchmarks/ladder.py", "run('-m', 'training.loop')", "benchmarks imports training, sideways"),
        ("evaluation/fid.py", "import cli", "evaluation imports cli, sideways"),
        ("cli/captions.py", "import training.loop", "cli imports training, sideways"),
        # closed, unknown, and not a room
        ("llm/runner.py", "import unet_opt", "llm imports unet_opt, which is closed to it"),
        (
            "deployment/serve.py",
            "import pipeline.checkpoints.folder",
            "deployment imports pipeline, which is closed to it",
        ),
        ("api/app.py", "from unet_opt import deepcache", "api imports unet_opt, which is closed to it"),
        ("core/cupboard.py", "", "core/cupboard.py: in no room of the plan"),
        ("attic/__init__.py", "", "attic/__init__.py: in no room of the plan"),
        ("pipeline/runner.py", "import core.cupboard", "imports core.cupboard, which is in no room"),
        ("pipeline/runner.py", "from tests.test_app import x", "imports tests.test_app, which is no room"),
    ],
)
def test_floors_can_fail(path, source, said, tmp_path):
    modules = build(tmp_path, **{path: source})
    if said == "beyond top-level":  # Python refuses this one before we do
        with pytest.raises(ImportError, match=said):
            list(check_floors(modules))
        return
    broken = list(check_floors(modules))
    assert len(broken) == 1
    assert said in broken[0]


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("core/batching/scheduler.py", "import torch", "imports torch, in reach of core.batching"),
        ("core/batching/scheduler.py", "import torch.nn.functional as F", "imports torch.nn.functional"),
        ("core/batching/scheduler.py", "def f():\n    from torch import nn", "imports torch, in reach of"),
        (
            "core/batching/scheduler.py",
            "class A:\n    def f(self):\n        import diffusers",
            "imports diffusers",
        ),
        ("core/batching/scheduler.py", "from safetensors import torch", "imports safetensors.torch"),
        ("core/batching/scheduler.py", "__import__('transformers')", "imports transformers"),
        (
            "core/batching/scheduler.py",
            "import importlib\nimportlib.import_module(x)",
            "run time",
        ),
        ("core/batching/__init__.py", "import torch", "core/batching/__init__.py:1: imports torch"),
        ("core/__init__.py", "import torch", "core/__init__.py:1: imports torch"),
        ("core/config.py", "import torch", "core/config.py:1: imports torch"),
        ("core/jobs/__init__.py", "import transformers", "in reach of core.jobs"),
        ("contract/characters.py", "import transformers", "contract/characters.py:1: imports transformers"),
        (
            "core/batching/engine.py",
            "def f():\n    from core import quant",
            "core/quant/__init__.py:1: imports torch",
        ),
        ("api/queue.py", "def f():\n    import core.graphs", "core/graphs.py:1: imports torch"),
    ],
)
def test_torch_free_can_fail(path, source, said, tmp_path):
    broken = list(check_torch_free(build(tmp_path, **{path: source})))
    assert len(broken) >= 1
    assert any(said in line for line in broken), broken


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pipeline/runner.py", "import celery"),
        ("core/jobs/__init__.py", "def f():\n    from celery.app import x"),
        ("api/app.py", "from celery import Celery"),
        ("api/app.py", "import kombu"),
        ("workers/app.py", "import fastapi"),
        ("cli/serve.py", "def serve():\n    from fastapi import FastAPI"),
        ("core/batching/engine.py", "import starlette.applications"),
        ("api/app.py", "import redis.asyncio"),
        ("workers/build.py", "import redis"),
        ("benchmarks/ladder.py", "from redis.asyncio import Redis"),
    ],
)
def test_kept_to_can_fail(path, source, tmp_path):
    broken = list(check_kept_to(build(tmp_path, **{path: source})))
    assert len(broken) == 1
    assert broken[0].startswith(path)
    assert "kept to" in broken[0]


@pytest.mark.parametrize(
    ("planted", "circle"),
    [
        (
            {
                "pipeline/runner.py": "from pipeline.checkpoints import load",
                "pipeline/checkpoints/load.py": "from pipeline.runner import x",
            },
            "pipeline.checkpoints.load, pipeline.runner",
        ),
        (
            {"llm/a.py": "from . import b", "llm/b.py": "def f():\n    import llm.c", "llm/c.py": "from .a import X"},
            "llm.a, llm.b, llm.c",
        ),
        (
            {
                "core/batching/scheduler.py": "if TYPE_CHECKING:\n    from core.batching.engine import Engine",
                "core/batching/engine.py": "import importlib\nimportlib.import_module('.scheduler')",
            },
            "core.batching.engine, core.batching.scheduler",
        ),
        (
            {
                "core/batching/__init__.py": "from .engine import Engine",
                "core/batching/engine.py": "from core.batching import Y",
            },
            "core.batching, core.batching.engine",
        ),
    ],
)
def test_circles_can_fail(planted, circle, tmp_path):
    assert list(check_circles(build(tmp_path, **planted))) == [f"{circle}: import one another in a circle"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    x = 1\n" * 59, ""),
        ("    x = 1\n" * 60, "61 lines"),
        ("    return " + " or ".join("abcdefghijklmno"), ""),
        ("    return " + " or ".join("abcdefghijklmnop"), "complexity of 16"),
        ("    if a:\n        return [b for b in c if d]\n" * 8, "complexity of 17"),
    ],
)
def test_functions_can_be_too_long_and_too_intricate(body, said, tmp_path):
    broken = list(check_functions(build(tmp_path, **{"api/app.py": f"def f():\n{body}"})))
    assert len(broken) == bool(said)
    assert said in "".join(broken)


@pytest.mark.parametrize(
    ("path", "lines", "fails"),
    [
        ("pipeline/runner.py", 400, False),
        ("pipeline/runner.py", 401, True),
        ("cli/generate.py", 401, True),
        ("install.py", 401, True),
        ("tests/test_app.py", 401, False),
        ("training/draw.py", 401, False),
    ],
)
def test_lengths_can_fail(path, lines, fails, tmp_path):
    broken = list(check_lengths(build(tmp_path, **{path: "x = 1\n" * lines})))
    assert len(broken) == fails
    assert all("401 lines" in line for line in broken)


@pytest.mark.parametrize(
    "path",
    [
        "core/utils.py",
        "pipeline/helpers/__init__.py",
        "api/base.py",
        "llm/kv_manager.py",
        "tests/common.py",
        "misc.py",
    ],
)
def test_names_can_fail(path, tmp_path):
    broken = list(check_names(build(tmp_path, **{path: ""})))
    assert len(broken) == 1
    assert broken[0].startswith(f"{path}: ")
