"""The settings name a backend: ours, or one that an installed package brings; what cannot run is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from core.config import Settings, SettingsError
from core.config import read as read_settings
from pipeline.backends.programs import ProgramBackend
from pipeline.backends.torch_backend import TorchBackend
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from pipeline.quantization import quantized
from tests.children import ROOT
from tests.cli.conftest import shell
from tests.cli.shell import Said, Shell
from tests.core.quant import stage
from workers import backends
from workers.build import build
from workers.build_images import precision

__all__ = ["shell"]

SHAPE = tiny.SDXLShape(channels=(16, 32), heads=(1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "tiny", SHAPE)


def settings(model: Path | str, **given: object) -> Settings:
    return Settings(model=str(model), cache_dir=stage.CACHE.parent, device="cpu", compile=False, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "kind"), [("torch", TorchBackend), ("programs", ProgramBackend), ("auto", None)])
def test_the_settings_select_one_of_ours(name: str, kind: type | None, folder: Path) -> None:
    stage.kernels()  # skips this where there are none
    with build(settings(folder, backend=name)) as works:
        assert type(works.images.backend) is (kind or ProgramBackend)
        (decision,) = works.decisions
        expected = "torch" if name == "torch" else works.images.backend.kernels.name
        assert decision.implementation == works.images.backend.kernels.name == expected
        assert name != "torch" or decision.reason == "the settings select torch"


def test_what_cannot_run_here_is_refused_with_the_reason(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="backend graphs: these kernels are for GPUs"):
        build(settings(folder, backend="graphs"))
    with pytest.raises(ModelError, match=r"backend programs: the CPU kernels support .*, not bf16"):
        build(settings(folder, backend="programs", precision="bf16"))
    narrow = tiny.save(tmp_path / "narrow", tiny.SDXLShape(channels=(16, 32), heads=(2, 4)))
    with pytest.raises(ModelError, match=r"backend programs: unet .* no multiple of 16"):
        build(settings(narrow, backend="programs"))


def test_torch_never_runs_8_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:

    made = tiny.save(tmp_path / "tiny", SHAPE)
    quantized.make(load(str(made)), ["a hat", "a cat"], made)
    with pytest.raises(ModelError, match="int8 does not run on the backend torch"):
        build(settings(made, backend="torch", precision="int8"))
    with caplog.at_level("INFO"):
        assert precision(settings(made, backend="torch"), "cpu") == "fp32"
    assert "fp32 instead of int8: the settings select the backend torch" in caplog.text


def test_an_unknown_name_is_refused_with_all_that_there_are(monkeypatch: pytest.MonkeyPatch, installed: Path) -> None:
    known = "there are auto, torch, programs, graphs"
    with pytest.raises(SettingsError, match=f"^backend: there is no tpu; {known}$"):
        backends.find("tpu")
    monkeypatch.syspath_prepend(installed)
    with pytest.raises(SettingsError, match=f"^backend: there is no tpu; {known}, broken, constant, counted$"):
        backends.find("tpu")
    with pytest.raises(SettingsError, match=r"^backend: broken \(diptych_counted_missing:make\) cannot be imported"):
        backends.find("broken")
    with pytest.raises(SettingsError, match=r"^backend: constant .* is no factory"):
        backends.find("constant")
    with pytest.raises(SettingsError, match="--backend"):
        read_settings(backend="no such name")


# -- a package that brings one ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the package of tests/plugins/counted."""
    made = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "tests" / "plugins" / "counted", made / "source")  # a build writes into it
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index",
         "--disable-pip-version-check", "--target", str(made / "site"), str(source)], check=True,
    )  # fmt: skip
    return made / "site"


def generate(shell: Shell, model: Path, backend: str) -> Said:
    return shell(
        "generate", "a red hat", "a blue hat", "--model", str(model), "--steps", "4", "--seed", "3", "--deterministic",
        "--deepcache", "2", "--backend", backend, "-o", backend,
    )  # fmt: skip


def test_an_installed_package_s_backend_draws_pictures(
    shell: Shell, folder: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_COMPILE", "0")  # whether compiled code was there in time would decide bits
    said = generate(shell, folder, "counted")
    assert said.code == 2 and "backend: there is no counted; there are auto, torch, programs, graphs" in said.err
    assert not (shell.folder / "counted").exists()
    monkeypatch.syspath_prepend(installed)
    said = generate(shell, folder, "counted")
    assert said.code == 0, said.err
    # Of four steps each second one is deep, and the two pictures may share them; each is decoded alone.
    (forwards,) = import_module("diptych_counted").FORWARDS
    assert forwards["vae"] == 2 and 2 <= forwards["deep"] <= 4 and 2 <= forwards["shallow"] <= 4
    said = generate(shell, folder, "torch")
    assert said.code == 0, said.err
    paths = {name: sorted((shell.folder / name).glob("*.png")) for name in ("torch", "counted")}
    assert len(paths["counted"]) == 2
    for pair in zip(*paths.values(), strict=True):
        ours, theirs = map(Image.open, pair)
        assert np.array_equal(np.asarray(ours), np.asarray(theirs)) and np.asarray(ours).std() > 5
        prints = [json.loads(image.text["fingerprint"]) for image in (ours, theirs)]  # type: ignore[attr-defined]
        assert [one["kernels"] for one in prints] == ["torch", "counted 1.0"] and prints[1]["executable"] == "counted"
