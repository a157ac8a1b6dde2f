"""Checks the architecture by reading the source: imports between layers, packages without torch, names, sizes.

Reads syntax trees instead of importing, so an import inside a function, or under TYPE_CHECKING, counts like one at the
top: both are dependencies. (One test does import, to confirm this in practice.) A module that is named for
`python -m` counts as imported. The second half shows on small artificial trees that
every rule can fail. Complexity and statements of functions are ruff's (`pyproject.toml`).
"""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up. A module belongs to the longest name that it starts with. Imports go down; a room knows itself.
LAYERS = (
    ("contract", "core"),  # of core the package's own __init__ only
    ("core.config", "core.digests", "core.extras", "core.failures", "core.hub_cache", "core.json_files", "core.logs",
     "core.peft_config", "core.pictures", "core.threads"),
    ("core.traces",),
    ("core.artifacts", "core.batching", "core.cuda_graphs", "core.graphs", "core.jobs", "core.kernels", "core.quant",
     "core.transfers"),
    ("core.ops",),
    ("unet_opt",),
    ("llm", "pipeline"),
    ("api", "deployment", "workers"),
    ("evaluation",),
    ("cli",),
    ("diptych",),  # the name that all of it is installed under
    ("lab", "lab.bench.harness", "lab.scenes"),  # which nothing of the product imports
    ("lab.captions", "lab.simulation"),
    ("lab.bench", "lab.training"),
    ("integrations",),  # what other programs load, beside a Diptych of another version or without one
)  # fmt: skip
FLOORS = {room: floor for floor, rooms in enumerate(LAYERS) for room in rooms}
# Downwards, and forbidden all the same: the text panel knows no UNet, the API knows only what is torch-free.
CLOSED = {
    "llm": {"unet_opt"},
    "api": {"pipeline", "llm", "unet_opt"},
    "deployment": {"pipeline", "llm", "unet_opt"},
    "lab.training": {"lab.simulation"},
    "integrations": {room for rooms in LAYERS for room in rooms},
}
TORCH_FREE = ("contract", "core.batching", "core.jobs", "core.artifacts", "core.pictures", "api", "deployment")
TORCH = {
    "torch", "torchvision", "torchao", "triton", "diffusers", "transformers", "accelerate", "safetensors.torch",
}  # fmt: skip
# Third-party packages and the only files (or folders, ending in /) that may import them.
KEPT_TO = {
    "celery": ("workers/", "api/jobs/queue.py"),
    "kombu": ("workers/", "api/jobs/queue.py"),
    "fastapi": ("api/",),
    "starlette": ("api/",),
    "redis": ("core/jobs/",),
}
MAX_LINES = 600
MAX_METHODS = 12
# Classes with more public methods, inherited ones among them, and how many. It only shrinks.
LARGE_CLASSES = {
    "lab.simulation.runner.SimulatedRunner": 15,
    "contract.image.ImageParameters": 14,
    "core.batching.runner.PreemptibleRunner": 20,
    "core.batching.runner.Runner": 16,
    "core.batching.scheduler.Scheduler": 13,
    "core.jobs.batches.BatchStore": 14,
    "core.kernels.cpu.token_program.TokenProgram": 18,
    "core.ops.cpu.CpuOps": 20,
    "core.ops.cpu_tokens.CpuTokenOps": 26,
    "core.ops.cuda.CudaOps": 20,
    "core.ops.ops.Ops": 19,
    "core.ops.ops.TokenOps": 23,
    "core.ops.reference.TorchOps": 19,
    "core.ops.trace.TraceOps": 23,
    "llm.backends.torch_ops.TorchTokenOps": 23,
    "llm.runner.TextRunner": 20,
    "pipeline.families.diffusers.runner.DiffusersRunner": 19,
    "pipeline.families.family.ImageModel": 14,
    "pipeline.model_pool.ModelPool": 21,
    "pipeline.model_pool.PooledRunner": 17,
    "pipeline.recording.GraphSet": 15,
    "pipeline.runner.ImageRunner": 20,
    "workers.claims.prefetch.PrefetchLimiter": 14,
    "workers.text.pool.TextPool": 25,
}
FORBIDDEN_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "managers", "base", "misc"}
NOT_OURS = {"models", "build", "dist", "out", "data"}
# Packages and modules whose docstrings have not been gone over; it only shrinks.
MODULE = re.compile(r"[a-z_0-9]+(\.[a-z_0-9]+)+")


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

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return _nodes(self.source)

    def imports(self, modules: "dict[str, Module]") -> list[Import]:
        # `from core import quant` imports core.quant if that is a module, and else a name of core's.
        found = (
            Import(line, name if start is None or name in modules or name in FLOORS or name in TORCH else start)
            for line, name, start in _imports(self.source, self.package)
            if start != "" or (ours(name) and (name in modules or name in FLOORS))
        )
        return list(dict.fromkeys(found))


@functools.cache
def _nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


@functools.cache
def _imports(source: str, package: str) -> tuple[tuple[int, str, str | None], ...]:
    """Line, name, and of what `from` imports the package that the name may be an attribute of; "" of a string."""
    return tuple(found for node in _nodes(source) for found in _read(node, package))


def _read(node: ast.AST, package: str) -> Iterator[tuple[int, str, str | None]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield node.lineno, alias.name, None
    elif isinstance(node, ast.ImportFrom):
        start = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:
            yield node.lineno, f"{start}.{alias.name}", start
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if MODULE.fullmatch(node.value):
            yield node.lineno, node.value, ""
        elif command := re.match(r"(?:\S*/)?python\S* -m ([a-z_0-9.]+)", node.value):
            yield node.lineno, command[1], ""
    if isinstance(node, ast.Call):
        callee = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if callee in {"import_module", "__import__"}:
            argument = node.args[0] if node.args else None
            name = str(argument.value if isinstance(argument, ast.Constant) else "")
            yield node.lineno, importlib.util.resolve_name(name, package) if name.startswith(".") else name, None
        yield from _run(node.args)
    elif isinstance(node, ast.List | ast.Tuple):
        yield from _run(node.elts)


def _run(words: list[ast.expr]) -> Iterator[tuple[int, str, str | None]]:
    """The modules that a command's words run: `"-m", "lab.training.loop"`; of `f"lab.training.{name}"` the package.

    `-m cli` is the command `diptych`, which every room may run as a user does.
    """
    for option, name in pairwise(words):
        if isinstance(option, ast.Constant) and option.value == "-m":
            start = name.values[0] if isinstance(name, ast.JoinedStr) and name.values else name
            if isinstance(start, ast.Constant) and start.value != "cli":
                text = str(start.value)
                yield option.lineno, text if start is name else text.rpartition(".")[0], ""


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


def product(modules: dict[str, Module]) -> Iterator[Module]:
    return (module for module in modules.values() if not within(module.name, "tests"))


def check_floors(modules: dict[str, Module]) -> Iterator[str]:
    for module in product(modules):
        here = room(module.name)
        if module.name == "install":
            continue
        if here is None:
            yield f"{module.path}: in no room of the plan; give it a floor in LAYERS, or a room that exists"
            continue
        for found in module.imports(modules):
            where, there = f"{module.path}:{found.line}", room(found.name)
            if within(found.name, "tests") or within(found.name, "install"):
                yield f"{where}: {here} imports {found.name}, which is no room"
            elif ours(found.name) and there is None:
                yield f"{where}: imports {found.name}, which is in no room of the plan"
            elif there is None or there in (here, "core"):
                continue
            elif FLOORS[there] >= FLOORS[here]:
                yield f"{where}: {here} imports {there}, {'upwards' if FLOORS[there] > FLOORS[here] else 'sideways'}"
            elif there in CLOSED.get(here, ()):
                yield f"{where}: {here} imports {there}, which is closed to it"


def check_lab(modules: dict[str, Module]) -> Iterator[str]:
    """The product, and its tests, pass where `lab/` and `tests/lab/` are deleted."""
    for module in modules.values():
        if within(module.name, "lab") or within(module.name, "tests.lab") or module.name == "tests.test_floors":
            continue
        for found in module.imports(modules):
            if within(found.name, "lab") or within(found.name, "tests.lab"):
                yield f"{module.path}:{found.line}: imports {found.name}, which it must work without"


def check_torch_free(modules: dict[str, Module]) -> Iterator[str]:
    """Follows every import from the torch-free packages, including packages' __init__ files."""
    todo = [(m.name, m.name) for m in modules.values() if any(within(m.name, r) for r in TORCH_FREE)]
    seen = set()
    while todo:
        name, path = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        module = modules[name]
        for found in module.imports(modules):
            where = f"{module.path}:{found.line}"
            if not found.name:
                yield f"{where}: imports a name computed at run time, in reach of {path}; write it out"
            if any(within(found.name, t) for t in TORCH):
                yield f"{where}: imports {found.name}, in reach of {path}"
            parts = found.name.split(".")
            prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            todo += [(prefix, f"{path} → {prefix}") for prefix in prefixes if prefix in modules]


def check_kept_to(modules: dict[str, Module]) -> Iterator[str]:
    for module in product(modules):
        for found in module.imports(modules):
            allowed = KEPT_TO.get(found.name.partition(".")[0])
            # A whole path starts with a file's only where the two are one.
            if allowed is not None and not module.path.startswith(allowed):
                yield f"{module.path}:{found.line}: imports {found.name}, which is kept to {', '.join(allowed)}"


def check_circles(modules: dict[str, Module]) -> Iterator[str]:
    """No file reaches itself by imports, those inside functions and under TYPE_CHECKING among them."""
    reached = {
        module.name: {part for found in module.imports(modules) if (part := _file(found.name, modules))} - {module.name}
        for module in product(modules)
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
    for module in product(modules):
        lines = len(module.source.splitlines())
        if lines > MAX_LINES:
            yield f"{module.path}: {lines} lines, more than {MAX_LINES}; a file has one job"


def methods(modules: dict[str, Module]) -> dict[str, set[str]]:
    """The public methods of each class at the top of a module, by full name, with those inherited from ours."""
    bodies: dict[str, ast.ClassDef] = {}
    names: dict[str, dict[str, str]] = {}
    for module in product(modules):
        tree = module.nodes[0]
        assert isinstance(tree, ast.Module)
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        bodies |= {f"{module.name}.{name}": node for name, node in classes.items()}
        # A name in the module, and the full name that it stands for.
        names[module.name] = {
            alias.asname or alias.name: ".".join(filter(None, (getattr(node, "module", ""), alias.name)))
            for node in module.nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
        } | {name: f"{module.name}.{name}" for name in classes}  # fmt: skip

    @functools.cache
    def of(name: str) -> frozenset[str]:
        if name not in bodies:
            return frozenset()
        known, own = names[name.rpartition(".")[0]], set()
        for node in bodies[name].body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                own.add(node.name)
        bases = (ast.unparse(base).partition("[")[0] for base in bodies[name].bases)
        heads = (base.partition(".") for base in bases)
        return frozenset(own).union(*(of(f"{known.get(head, head)}{dot}{tail}") for head, dot, tail in heads))

    return {name: set(of(name)) for name in bodies}


def check_methods(modules: dict[str, Module]) -> Iterator[str]:
    large = {name: len(found) for name, found in methods(modules).items() if len(found) > MAX_METHODS}
    for name, count in large.items():
        if count > LARGE_CLASSES.get(name, 0):
            yield f"{name} has {count} public methods, more than {LARGE_CLASSES.get(name, MAX_METHODS)}"
    if "core.batching.scheduler" in modules and "core.ops.ops" in modules:  # not on an artificial tree
        for name, count in LARGE_CLASSES.items():
            if within(name, "lab") and "lab" not in modules:
                continue
            if large.get(name, 0) < count:
                yield f"{name} has {large.get(name, 'few')} public methods: LARGE_CLASSES says {count}"


def check_names(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        words = set(re.split(r"[./_]", module.path.removesuffix(".py")))
        for word in sorted(words & FORBIDDEN_NAMES):
            yield f"{module.path}: '{word}' names no job"


def check_docstrings(modules: dict[str, Module]) -> Iterator[str]:
    """A docstring begins with a verb, or a noun with its article."""
    for module in product(modules):
        for node in module.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").partition(" ")[0]
                if first in ("Of", "As", "Those"):
                    yield f"{module.path}:{getattr(node, 'lineno', 1)}: a docstring begins with {first}"


RULES = [
    check_floors, check_lab, check_torch_free, check_kept_to, check_circles, check_lengths, check_methods, check_names,
    check_docstrings,
]  # fmt: skip


@pytest.fixture(scope="module")
def house() -> dict[str, Module]:
    modules = read(ROOT)
    assert {"core", "core.batching", "pipeline", "unet_opt", "evaluation"} <= modules.keys()
    return modules


@pytest.mark.parametrize("rule", RULES)
def test_house(rule, house):
    broken = list(rule(house))
    assert not broken, "\n" + "\n".join(broken)


def test_torch_free_rooms_load_no_torch(house):
    """Covers what the AST does not show: third-party packages that import torch. One process, room after room."""
    rooms = {free: [name for name in house if within(name, free)] for free in TORCH_FREE}
    code = (
        "import importlib, sys\n"
        f"for room, names in {rooms!r}.items():\n"
        "    for name in names: importlib.import_module(name)\n"
        f"    if torch := set({sorted(TORCH)!r}) & sys.modules.keys(): sys.exit(f'{{room}}: {{torch}}')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert all(rooms.values()) and done.returncode == 0, done.stderr


# --- the rules can fail ---------------------------------------------------------------------------------

SOUND = {
    "cli/__init__.py": "from cli import evaluate\nfrom pipeline import runner",
    "cli/evaluate.py": "import evaluation.fid, deployment.serve",
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
    "core/ops/__init__.py": "from core.quant import int8",
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
    "api/jobs/queue.py": "import celery",
    "deployment/__init__.py": "",
    "deployment/serve.py": "from core.config import Settings",
    "lab/__init__.py": "",
    "lab/bench/__init__.py": "",
    "lab/bench/command.py": "from cli import evaluate",
    "lab/bench/ladder.py": "from pipeline import runner",
    "evaluation/__init__.py": "",
    "evaluation/fid.py": "import scipy",
    "lab/training/__init__.py": "",
    "lab/training/loop.py": "run('-m', 'evaluation.fid')",
    "tests/test_app.py": "import redis, celery, fastapi, torch, api.app, pipeline.runner",
    "models/emoji-xl/base.py": "import anything",
    ".venv/lib/utils.py": "import core.batching",
}
METHODS = "\n".join(f"    def m{k}(self): ..." for k in range(8))


def build(root: Path, extra: dict[str, str]) -> dict[str, Module]:
    for path, source in (SOUND | extra).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(source, "utf-8")
    return read(root)


@pytest.mark.parametrize("rule", RULES)
def test_sound_tree_passes(rule, tmp_path):
    assert list(rule(build(tmp_path, {}))) == []


FAILS = [
    *((check_floors, {path: source}, said) for path, source, said in [
        ("core/quant/int8.py", "import pipeline.runner", "core.quant imports pipeline, upwards"),
        ("core/config.py", "from core.batching import engine", "core.config imports core.batching, upwards"),
        ("core/config.py", "from . import jobs", "core.config imports core.jobs, upwards"),
        ("core/__init__.py", "from .jobs import JobStore", "core imports core.jobs, upwards"),
        ("pipeline/runner.py", "def f():\n    import lab.bench.ladder", "pipeline imports lab.bench, upwards"),
        ("core/jobs/__init__.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from api import app",
         "core.jobs imports api, upwards"),
        ("core/graphs.py", "import importlib\nimportlib.import_module('pipeline.runner')",
         "core.graphs imports pipeline, upwards"),
        ("core/quant/int8.py", "import core.ops", "core.quant imports core.ops, upwards"),
        ("pipeline/runner.py", "from llm import runner", "pipeline imports llm, sideways"),
        ("core/graphs.py", "from core.quant import int8", "core.graphs imports core.quant, sideways"),
        ("core/batching/engine.py", "from .. import jobs", "core.batching imports core.jobs, sideways"),
        # by another process
        ("lab/bench/ladder.py", "run('-m', 'lab.training.loop')", "lab.bench imports lab.training, sideways"),
        ("lab/bench/ladder.py", "run('-m', f'lab.training.{name}')", "lab.bench imports lab.training, sideways"),
        ("lab/bench/ladder.py", "run('python -m lab.training.loop -x')", "lab.bench imports lab.training, sideways"),
        # closed, unknown, and not a room
        ("llm/runner.py", "import unet_opt", "llm imports unet_opt, which is closed to it"),
        ("core/cupboard.py", "", "core/cupboard.py: in no room of the plan"),
        ("attic/__init__.py", "", "attic/__init__.py: in no room of the plan"),
        ("pipeline/runner.py", "import core.cupboard", "imports core.cupboard, which is in no room"),
        ("pipeline/runner.py", "from tests.test_app import x", "imports tests.test_app, which is no room"),
    ]),
    (check_lab, {"api/app.py": "def f():\n    from lab.bench import ladder"}, "api/app.py:2: imports lab.bench.ladder"),
    (check_lab, {"cli/evaluate.py": "run('-m', 'lab.bench.ladder')"}, "imports lab.bench.ladder, which"),
    (check_lab, {"tests/test_app.py": "from lab.training import loop"}, "tests/test_app.py:1: imports lab."),
    *((check_torch_free, {path: source}, said) for path, source, said in [
        ("core/batching/scheduler.py", "import torch", "imports torch, in reach of core.batching"),
        ("core/batching/scheduler.py", "class A:\n    def f(self):\n        import diffusers", "imports diffusers"),
        ("core/batching/scheduler.py", "from safetensors import torch", "imports safetensors.torch"),
        ("core/batching/scheduler.py", "import importlib\nimportlib.import_module(x)", "run time"),
        ("core/config.py", "import torch", "core/config.py:1: imports torch"),
        ("core/batching/engine.py", "def f():\n    from core import quant", "core/quant/__init__.py:1: imports torch"),
        ("api/jobs/queue.py", "def f():\n    import core.graphs", "core/graphs.py:1: imports torch"),
    ]),
    *((check_kept_to, {path: source}, f"{path}:") for path, source in [
        ("pipeline/runner.py", "import celery"),
        ("core/jobs/__init__.py", "def f():\n    from celery.app import x"),
        ("workers/app.py", "import fastapi"),
        ("api/app.py", "import redis.asyncio"),
    ]),
    *((check_circles, planted, f"{circle}: import one another in a circle") for planted, circle in [
        ({"pipeline/runner.py": "from pipeline.checkpoints import load",
          "pipeline/checkpoints/load.py": "from pipeline.runner import x"},
         "pipeline.checkpoints.load, pipeline.runner"),
        ({"llm/a.py": "from . import b", "llm/b.py": "def f():\n    import llm.c", "llm/c.py": "from .a import X"},
         "llm.a, llm.b, llm.c"),
        ({"core/batching/scheduler.py": "if TYPE_CHECKING:\n    from core.batching.engine import Engine",
          "core/batching/engine.py": "import importlib\nimportlib.import_module('.scheduler')"},
         "core.batching.engine, core.batching.scheduler"),
        ({"core/batching/__init__.py": "from .engine import Engine",
          "core/batching/engine.py": "from core.batching import Y"},
         "core.batching, core.batching.engine"),
    ]),
    (check_lengths, {"pipeline/runner.py": "x = 1\n" * 601}, "601 lines"),
    (check_methods, {"llm/a.py": f"class A:\n{METHODS}\n{METHODS.replace('m', 'n')}"}, "llm.a.A has 16 public methods"),
    (check_methods, {"llm/a.py": f"class A:\n{METHODS}",
                     "llm/b.py": f"from llm import a\nclass B(a.A):\n{METHODS.replace('m', 'n')}"}, "llm.b.B has 16"),
    (check_methods, {"llm/a.py": f"class A(Generic[T]):\n{METHODS}",
                     "llm/b.py": f"from llm.a import A as X\nclass B(X[int]):\n{METHODS.replace('m', 'n')}"}, "B has"),
    *((check_names, {path: ""}, f"{path}: ") for path in (
        "core/utils.py", "pipeline/helpers/__init__.py", "api/base.py", "llm/kv_manager.py", "tests/common.py",
    )),
    (check_docstrings, {"llm/a.py": '"""Of a file."""'}, "llm/a.py:1: a docstring begins with Of"),
    (check_docstrings, {"llm/a.py": 'class A:\n    def f(self):\n        """As g."""'}, "llm/a.py:2: "),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "planted", "said"), FAILS)
def test_rules_can_fail(rule, planted, said, tmp_path):
    broken = list(rule(build(tmp_path, planted)))
    assert len(broken) == 1 or rule is check_torch_free
    assert any(said in line for line in broken), broken


def test_an_import_beyond_the_top_is_refused(tmp_path):
    with pytest.raises(ImportError, match="beyond top-level"):
        list(check_floors(build(tmp_path, {"core/batching/engine.py": "from ...pipeline import runner"})))


@pytest.mark.parametrize("path", ["pipeline/runner.py", "tests/test_app.py"])
def test_a_file_of_the_limit_and_a_long_test_pass(path, tmp_path):
    lines = MAX_LINES if path.startswith("pipeline") else 2 * MAX_LINES
    assert list(check_lengths(build(tmp_path, {path: "x = 1\n" * lines}))) == []
