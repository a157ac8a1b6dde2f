"""Tests the wheel: one name in site-packages, the embedded models, and every command that needs no extra.

The environment is real, with the wheel installed by pip. Its dependencies are links to the files of the base
dependencies, and theirs; nothing else of the test environment is visible. One test adds those of the extra `serve`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deployment import assets
from deployment.wheel import BuildError, packages_of, rename_imports
from tests.core.quant.stage import CACHE
from tests.deployment.served import Served

ROOT = Path(__file__).resolve().parents[1]
LAB = (ROOT / "lab").is_dir()  # what measures, whose commands the wheel has where the tree has them
PAGE = "https://forge.example/someone/diptych"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def closure(requirements: list[str]) -> dict[str, Distribution]:
    """What these requirements install, and what that requires in turn, by name."""
    found: dict[str, Distribution] = {}
    todo = [(Requirement(text), {""}) for text in requirements]
    seen = set()
    while todo:
        requirement, extras = todo.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        key = (requirement.name.lower().replace("_", "-"), *sorted(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = distribution(requirement.name)
        todo += [(Requirement(text), {"", *requirement.extras}) for text in found[key[0]].requires or []]
    return found


def link(one: Distribution, site: Path) -> None:
    """Put a distribution's packages, modules and metadata into a folder, as links."""
    tops = {file.parts[0] for file in one.files or [] if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        target = Path(str(one.locate_file(top)))
        if not (site / top).exists():
            (site / top).symlink_to(target, target_is_directory=target.is_dir())


def packages(environment: Path) -> Path:
    (site,) = environment.glob("lib/python*/site-packages")
    return site


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment in which `pip install diptych` was run."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
        if name and (ROOT / name).exists() and not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip"]
    quick = "--config-settings=--build-option=--compression=stored"
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", quick, "-w", folder, source]
    subprocess.run(build, check=True, env={**os.environ, "DIPTYCH_PROJECT_URL": f"{PAGE}/"})
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    site = packages(folder / "venv")
    for one in closure(PROJECT["dependencies"]).values():
        link(one, site)
    (wheel,) = folder.glob("diptych-*.whl")
    python = folder / "venv" / "bin" / "python"
    options = ("-q", "--no-deps", "--no-index", "--no-compile")
    subprocess.run([*pip, "--python", python, "install", *options, wheel], check=True)
    return python.parent


def asset(name: str, folder: Path) -> Path:
    """The archive of a model, as a release has it."""
    archive = folder / f"{name}.zip"
    if not archive.exists():
        with archive.open("wb") as stream:
            assets.write(ROOT, name, stream)
    return archive


def cache(bare: Path) -> str:
    """A cache of its own, but for compiled kernels: they are found by a digest of the wheel's sources."""
    folder = bare.parent / "cache"
    if not folder.exists():
        folder.mkdir()
        CACHE.mkdir(parents=True, exist_ok=True)
        (folder / "kernels").symlink_to(CACHE, target_is_directory=True)
    return str(folder)


def environment(bare: Path) -> dict[str, str]:
    """No setting of this machine, and no path on which modules would be found."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("DIPTYCH_", "PYTHON"))}
    ours = {"DIPTYCH_CACHE_DIR": cache(bare), "DIPTYCH_COMPILE": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return variables | ours


def run(bare: Path, *words: str | Path, where: Path) -> subprocess.CompletedProcess[str]:
    """A command, in a folder of its own."""
    return subprocess.run(
        [bare / "diptych", *words], cwd=where, env=environment(bare), capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def without_models(bare: Path) -> Iterator[None]:
    """The same environment, with the embedded models taken out of it."""
    models = packages(bare.parent) / "diptych" / "models"
    aside = models.rename(bare.parent / "models")
    yield
    aside.rename(models)


@pytest.fixture
def serving(bare: Path) -> Iterator[None]:
    """The same environment, with what the extra `serve` requires."""
    extra = bare.parent / "extra"
    extra.mkdir()
    for one in closure(PROJECT["optional-dependencies"]["serve"]).values():
        link(one, extra)
    entry = packages(bare.parent) / "extra.pth"
    entry.write_text(f"{extra}\n")
    yield
    entry.unlink()


def test_it_takes_one_name_in_site_packages(bare: Path) -> None:
    (told,) = packages(bare.parent).glob("diptych-*.dist-info")
    files = [line.partition(",")[0] for line in (told / "RECORD").read_text("utf-8").splitlines()]
    assert {Path(name).parts[0] for name in files if not name.startswith("../")} == {"diptych", told.name}
    assert {".py", ".cpp", ".h", ".html", ".js", ".json", ".safetensors"} <= {Path(name).suffix for name in files}
    assert not [
        name for name in files if "/results/" in name or name.startswith(("diptych/tests/", "diptych/lab/training/"))
    ]


def test_it_says_what_it_is_and_where_it_comes_from(bare: Path) -> None:
    (told,) = packages(bare.parent).glob("diptych-*.dist-info")
    metadata = Parser().parsestr((told / "METADATA").read_text("utf-8"))
    assert metadata.get_all("Project-URL") == [f"Repository, {PAGE}"]
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text("utf-8").strip()


def test_it_fits_an_index_and_pins_the_models_that_it_leaves_out(bare: Path) -> None:
    (wheel,) = bare.parents[1].glob("diptych-*.whl")
    assert wheel.stat().st_size < 95e6  # without compression, even
    index = json.loads((packages(bare.parent) / "diptych" / "models" / "assets.json").read_text("utf-8"))
    tracked = subprocess.run(["git", "ls-files", "models"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    models = {file.split("/")[1] for file in tracked.splitlines() if file.count("/") > 1}
    assert index["models"].keys() == set(assets.LEFT_OUT) == models - set(assets.INCLUDED)
    for name, entry in index["models"].items():
        assert not (packages(bare.parent) / "diptych" / "models" / name).exists()
        archive = asset(name, bare.parent)
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == entry["sha256"], name
        with zipfile.ZipFile(archive) as opened:
            assert {Path(file).parts[0] for file in opened.namelist()} == {name}


def test_it_carries_every_lua_script(bare: Path) -> None:
    installed, ours = packages(bare.parent) / "diptych" / "core" / "jobs" / "lua", ROOT / "core" / "jobs" / "lua"
    scripts = {path.relative_to(ours) for path in ours.rglob("*.lua")}
    assert scripts and {path.relative_to(installed) for path in installed.rglob("*.lua")} == scripts


def test_nothing_in_it_imports_a_room_by_its_own_name(bare: Path) -> None:
    left, ours = [], packages_of(ROOT)
    assert "integrations" not in ours  # other programs load it from a folder of theirs
    for path in (packages(bare.parent) / "diptych").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            left += [f"{path.name}: {name}" for name in names if name.partition(".")[0] in ours]
    assert left == []


def test_its_entry_points_name_what_it_holds(bare: Path) -> None:
    """The commands that measure are there under the wheel's one name; what trains is not."""
    (metadata,) = packages(bare.parent).glob("diptych-*.dist-info")
    groups = ConfigParser()
    groups.read_string((metadata / "entry_points.txt").read_text("utf-8"))
    declared = PROJECT.get("entry-points", {})
    assert set(groups.sections()) == {"console_scripts", *declared}
    for group, points in declared.items():
        assert set(groups[group]) == points.keys()
        for name, value in groups[group].items():
            module, _, function = value.partition(":")
            assert value == f"diptych.{points[name]}"
            source = packages(bare.parent).joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8")
            assert f"\ndef {function}(" in source
    if LAB:
        done = run(bare, "bench", "--help", where=bare)
        assert done.returncode == 0 and "simulate" in done.stdout and not done.stderr
    done = run(bare, "--help", where=bare)
    assert done.returncode == 0 and ("captions" in done.stdout) == LAB and not done.stderr


def test_the_environment_holds_the_base_and_no_extra(bare: Path) -> None:
    wanted = [
        f"{name}" for extra in ("serve", "eval", "text", "otel") for name in PROJECT["optional-dependencies"][extra]
    ]
    base = closure(PROJECT["dependencies"])
    absent = sorted({Requirement(text).name for text in wanted} - base.keys())
    assert {"redis", "obstore", "celery", "fastapi"} <= set(absent)
    code = (
        "import importlib.metadata as m, pathlib, diptych.core.config as c\n"
        "print(*sorted(d.name for d in m.distributions()), sep='\\n')\n"
        "print(pathlib.Path(c.__file__).is_relative_to(__import__('sys').prefix))"
    )
    command = [bare / "python", "-c", code]
    done = subprocess.run(command, cwd=bare, env=environment(bare), capture_output=True, text=True, check=True)
    *names, from_wheel = done.stdout.split()
    assert from_wheel == "True"
    assert not {name.lower() for name in names} & set(absent)


@pytest.mark.long
@pytest.mark.usefixtures("without_models")
def test_without_a_model_it_says_that_it_draws_noise(bare: Path, tmp_path: Path) -> None:
    """The stand-in must not be mistaken for the embedded model."""
    done = run(bare, "generate", "a hat", "--steps", "1", where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "random weights: images are noise" in done.stderr
    assert "--model" in done.stderr


@pytest.mark.long
def test_it_talks(bare: Path, tmp_path: Path) -> None:
    done = run(bare, "chat", "hello", "--max-tokens", "8", where=tmp_path)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.long
def test_it_writes_captions_draws_and_scores_them(bare: Path, tmp_path: Path) -> None:
    """With a model that is not in the wheel; all commands in one process, which imports torch once."""
    model = "emoji-xl-turbo"
    words = (
        ("models", "add", str(asset(model, bare.parent))),
        ("models", "list"),
        *([("captions", "--count", "2", "-o", "captions.tsv")] if LAB else []),
        ("evaluate", "--prompts", "captions.tsv", "--out", "run", "--steps", "1", "--resamples", "2",
         "--model", model, "--lens", "emoji-clip"),
    )  # fmt: skip
    code = f"import sys, diptych.cli as cli; sys.exit(any([cli.main(one) for one in {words}]))"
    variables = {**environment(bare), "DIPTYCH_MODELS_DIR": str(tmp_path / "models")}
    if not LAB:
        (tmp_path / "captions.tsv").write_text("id\tcaption\n1\ta hat\n2\ta cat\n")
    done = subprocess.run(
        [bare / "python", "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (
        "emoji-xl-turbo  (added; SDXL, 20 MB, int8; --model" in done.stdout
        and "emoji-z  (not installed; `diptych models add emoji-z.zip`" in done.stdout
    )
    assert "noise" not in done.stderr
    assert (tmp_path / "run" / "scores.json").is_file()


@pytest.mark.long
@pytest.mark.usefixtures("without_models")
def test_the_lens_that_is_not_there_is_named(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "captions.tsv").write_text("id\tcaption\n1\ta hat\n")
    words = ("evaluate", "--prompts", "captions.tsv", "--out", "run", "--model", "random:tiny", "--lens", "emoji-clip")
    done = run(bare, *words, where=tmp_path)
    assert done.returncode == 2
    assert "emoji-clip is not installed" in done.stderr and "--lens" in done.stderr


@pytest.mark.long
def test_it_quantizes(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a hat\n")
    words = ("quantize", "--model", "random:tiny", "--prompts", "prompts.txt", "--limit", "1", "--out", "made")
    done = run(bare, *words, where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made").is_dir()


def test_a_model_that_was_left_out_is_named_with_its_command(bare: Path, tmp_path: Path) -> None:
    done = run(bare, "generate", "a hat", "--model", "emoji-z", where=tmp_path)
    assert done.returncode == 2
    assert "emoji-z: is not installed; `diptych models add emoji-z.zip` unpacks it" in done.stderr


def test_what_needs_an_extra_names_it(bare: Path, tmp_path: Path) -> None:
    done = run(bare, "serve", where=tmp_path)
    assert done.returncode == 2
    assert "redis" in done.stderr and "pip install 'diptych[serve]'" in done.stderr


@pytest.mark.usefixtures("serving")
def test_it_serves_a_picture(bare: Path, tmp_path: Path) -> None:
    """API and worker are children of `diptych serve`, found by the names that they have in the wheel."""
    service = Served(
        tmp_path, model=None, program=[str(bare / "diptych")],
        unset=["PYTHONPATH", "DIPTYCH_KERNELS", "DIPTYCH_TEXT_MODEL"], variables={"DIPTYCH_CACHE_DIR": cache(bare)},
    )  # fmt: skip
    try:
        service.ready()
        assert service.picture("a hat", steps=1).startswith(b"\x89PNG")
        assert "emoji-xl" in service.out
        _, models = service.call("/v1/models")
        assert b'"emoji-lm"' in models
        status, page = service.call("/")
        assert status == 200 and b"<html" in page
    finally:
        service.close()


# -- what the build rewrites -------------------------------------------------------------------------------------------

MODULES = {"core", "core.config", "workers.claims.prefetch", "lab", "cli"}


@pytest.mark.parametrize(
    ("source", "made"),
    [
        ("from core.config import Settings", "from diptych.core.config import Settings"),
        ("if x:\n  from core import (\n    a,\n  )", "if x:\n  from diptych.core import (\n    a,\n  )"),
        ("import core.config as c, os", "import diptych.core.config as c, os"),
        ("from .core import x\nimport corelib\nfrom core_x import y", "same"),
        (
            "x = 'workers.claims.prefetch:ReconnectingConsumer'",
            "x = 'diptych.workers.claims.prefetch:ReconnectingConsumer'",
        ),
        ("x = 'workers.gone:Steady', 'core/config.py', 'core'", "same"),
        ("run([python, '-P', '-m', 'cli', 'api'])", "run([python, '-P', '-m', 'diptych.cli', 'api'])"),
        ("import_module(f'lab.bench.{what}')", "import_module(f'diptych.lab.bench.{what}')"),
        ("'10 × 2'; from core import config", "'10 × 2'; from diptych.core import config"),
    ],
)  # fmt: skip
def test_names_of_rooms_are_moved(source: str, made: str) -> None:
    assert rename_imports(source.encode(), MODULES, "x.py").decode() == (source if made == "same" else made)


def test_what_cannot_be_moved_is_named() -> None:
    with pytest.raises(BuildError, match=r"x\.py:2: write `from"):
        rename_imports(b"import os\nimport core.config", MODULES, "x.py")
