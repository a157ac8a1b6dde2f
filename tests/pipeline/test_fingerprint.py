"""The fingerprint: it is another one whenever bits may be, and the same one in equal installations of equal code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from contract.image import ImageParameters
from core.kernels.cpu import library as module
from core.kernels.cpu.library import KernelsUnavailable, identity
from core.kernels.describe import digest
from pipeline import fingerprint as prints
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.fingerprint import CODE, ROOT, KernelIdentity, fingerprint
from pipeline.pixels.picture import Picture
from tests.children import python_path
from tests.core.quant import stage
from tests.pipeline import worlds
from tests.pipeline.worlds import Watching, apart, model, solo
from tests.test_floors import read

FIELDS = {
    "model", "weights", "precision", "device", "version", "code", "kernels", "torch", "diffusers", "transformers",
    "tokenizers", "numpy", "pillow", "libc", "executable", "bucket",
}  # fmt: skip
WISH = ImageParameters("a red hat", 3, 32, 32, steps=3, deterministic=True)


worlds.MORE["fingerprint"] = tiny.SDXLShape(channels=(16, 32), heads=(1, 2))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that would be named."""
    for name in prints._VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("plain")
def test_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = load(tiny.TINY)
    found = fingerprint(drawn, executable="eager", bucket=8)
    assert json.loads(json.dumps(found)) == found
    assert set(found) == FIELDS and None not in (found[name] for name in FIELDS - {"version"})
    assert found["weights"] == drawn.digest and found["bucket"] == 8 and found["kernels"] == "torch"
    assert module.processor() in found["device"] and f"{torch.get_num_threads()} threads" in found["device"]
    assert "zlib" in found["pillow"] and "jpeg" in found["pillow"]
    assert str(ROOT) not in json.dumps(found) and str(Path.home()) not in json.dumps(found)
    assert fingerprint(drawn, executable="eager", bucket=None) != found
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert fingerprint(drawn, executable="eager", bucket=8)["environment"] == {"ATEN_CPU_CAPABILITY": "default"}


@pytest.mark.usefixtures("plain")
def test_the_compiler_is_named_where_it_made_code(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = load(tiny.TINY)
    monkeypatch.setattr(module, "compiler_version", lambda: "g++ 99")
    assert "compiler" not in fingerprint(drawn, executable="eager", bucket=8)
    for executable in ("compiled", "eager or compiled"):
        assert fingerprint(drawn, executable=executable, bucket=8)["compiler"] == "g++ 99"
    own = KernelIdentity("avx2", "0123", "clang 7")
    named = fingerprint(drawn, executable="kernels", bucket=None, kernels=own)
    assert (named["kernels"], named["compiler"]) == ("avx2 0123", "clang 7")


_PRINT = """
import json, sys
from pathlib import Path
from core.kernels.cpu.library import library
from pipeline.fingerprint import KernelIdentity, fingerprint
from pipeline.checkpoints.load import load
model = load("random:tiny")
found = library(Path(sys.argv[1])) if sys.argv[1] else None
kernels = KernelIdentity.on_cpu(found) if found else KernelIdentity()
print(json.dumps(fingerprint(model, executable="kernels", bucket=None, kernels=kernels)))
"""


@pytest.mark.long
def test_equal_installations_print_the_same(tmp_path: Path) -> None:
    """This process and a fresh one in another folder, with other hashes, on a copy of the sources of another age."""
    own = KernelIdentity.on_cpu(stage.kernels())
    here = fingerprint(load(tiny.TINY), executable="kernels", bucket=None, kernels=own)
    copy = copied(tmp_path)
    for path in copy.rglob("*"):
        os.utime(path, (0, 0))
    environment = {**os.environ, "PYTHONPATH": python_path(copy), "PYTHONHASHSEED": "2"}
    done = subprocess.run(
        [sys.executable, "-c", _PRINT, str(stage.CACHE)],
        cwd=copy, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == here
    assert here["kernels"].startswith("avx") and here["compiler"]


# -- what changes bits changes it --------------------------------------------------------------------------------------


def copied(folder: Path) -> Path:
    """A copy of our sources in a folder of its own."""
    kept = shutil.ignore_patterns("__pycache__")
    for name in ("contract", "core", "pipeline", "unet_opt", "workers", "llm"):
        shutil.copytree(ROOT / name, folder / name, ignore=kept)
    return folder


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{path}: {old} is there {text.count(old)} times"
    path.write_text(text.replace(old, new), "utf-8")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The sources' copy; fingerprints and the compiler read that one."""
    root = copied(tmp_path / "tree")
    monkeypatch.setattr(prints, "ROOT", root)
    monkeypatch.setattr(module, "_HERE", root / "core/kernels/cpu")
    digest.cache_clear()
    yield root
    digest.cache_clear()


def drawn(cache: Path) -> Picture:
    try:
        kernels = module.library.__wrapped__(cache)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    picture: Picture = solo(Watching(model("fingerprint"), kernels=kernels), WISH)
    return picture


@pytest.mark.long
def test_one_constant_of_the_cpu_kernels_changes_bytes_and_fingerprint(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled three times, without optimizing: that takes an eighth of the time."""
    monkeypatch.setattr(module, "_FLAGS", ("-O0", *module._FLAGS[1:]))
    before = drawn(tmp_path / "cache")
    header = elsewhere / "core/kernels/cpu/vector.h"
    changed(header, "Vec p = all(1.061405429f);", "Vec p = all(1.031405429f);")  # of gelu
    digest.cache_clear()  # as in a new process
    after = drawn(tmp_path / "cache")
    assert apart(before, after), "the constant is in no picture: choose another"
    one, other = before.fingerprint, after.fingerprint
    assert {name for name in one if one[name] != other[name]} == {"kernels", "code"}
    # And back: the same sources are the same kernels, whenever they were compiled.
    changed(header, "Vec p = all(1.031405429f);", "Vec p = all(1.061405429f);")
    digest.cache_clear()
    again = drawn(tmp_path / "other cache")
    assert again.fingerprint == one and again.png() == before.png()


def test_another_compiler_or_flag_changes_the_kernels_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ is installed")
    digests = {module._digest([compiler])[0] for _ in range(2)} | {module._digest([compiler, "-ffast-math"])[0]}
    monkeypatch.setattr(module, "_FLAGS", ("-O1", *module._FLAGS[1:]))
    assert len(digests) == 2 and module._digest([compiler])[0] not in digests


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("core/kernels/cuda/attention_source.py", "0.05500892f", "0.05500893f"),
        ("core/kernels/cuda/epilogue_source.py", "0.03470122f", "0.03470123f"),
        ("core/kernels/cuda/quantize.py", "12582912.0) - 12582912.0", "12582912.0) - 12582911.0"),
        ("core/ops/fused.py", "self.base, self.eps, self.silu = base, norm.eps, silu", "pass"),
    ],
)
def test_one_constant_of_the_gpu_kernels_changes_their_digest(path: str, old: str, new: str, elsewhere: Path) -> None:
    before = digest(elsewhere, prints._CUDA)
    assert before == digest(ROOT, prints._CUDA)
    changed(elsewhere / path, old, new)
    digest.cache_clear()
    assert digest(elsewhere, prints._CUDA) != before


def test_one_constant_of_a_sampler_changes_the_fingerprint(elsewhere: Path) -> None:
    drawn = load(tiny.TINY)
    before = fingerprint(drawn, executable="eager", bucket=8)
    path = elsewhere / "pipeline/sampling/sigmas.py"
    path.write_text(path.read_text("utf-8") + "\n", "utf-8")
    digest.cache_clear()
    after = fingerprint(drawn, executable="eager", bucket=8)
    assert {name for name in before if before[name] != after[name]} == {"code"}
    digest.cache_clear()
    watching = Watching(model("fingerprint"))
    path.write_text("changed while the process ran")
    assert solo(watching, WISH).fingerprint["code"] == after["code"], "sources are digested as drawing began"


# What drawing imports of ours and what no bit depends on: who rides with whom, words for errors, log lines.
HARMLESS = re.compile(
    r"core|contract|core\.(batching|config|extras|failures|logs|threads)(\..*)?|contract\.(errors|urls)"
)


def test_all_that_drawing_imports_is_digested() -> None:
    modules = read(ROOT)
    left = {name for name in modules if name.startswith(("pipeline", "unet_opt", "core.quant"))}
    seen: set[str] = set()
    while left:
        name = left.pop()
        seen.add(name)
        for found in modules[name].imports(modules):
            parts = found.name.split(".")
            near = {".".join(parts[:n]) for n in range(1, len(parts) + 1)} & modules.keys()
            left |= {one for one in near if not HARMLESS.fullmatch(one)} - seen
    roots = tuple(name.removesuffix(".py").replace("/", ".") for name in CODE)
    missed = [name for name in sorted(seen) if not any(name == root or name.startswith(f"{root}.") for root in roots)]
    assert not missed, "their sources are in no fingerprint: add them to CODE"
    assert identity(stage.kernels()).digest == module._digest(module._compiler())[0]
