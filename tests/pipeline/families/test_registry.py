"""Families are found by the class of their pipeline: built-in ones, and those of installed packages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from pipeline.checkpoints.tiny import SDXLShape
from pipeline.families import registry
from pipeline.families.family import Family
from tests.pipeline.damage import edit
from tests.pipeline.worlds import model

PLUGIN = """
from dataclasses import replace

from pipeline.families.sdxl import FAMILY as SDXL

FAMILY = replace(SDXL, label="Added", pipelines=("AddedPipeline",))
"""


def install(packages: Path, target: str) -> None:
    """A package with a family, installed as pip would: its code, and its metadata."""
    (packages / "added.py").write_text(PLUGIN)
    metadata = packages / "added-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[diptych.families]\nAddedPipeline = {target}\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    where = tmp_path / "packages"
    where.mkdir()
    monkeypatch.syspath_prepend(str(where))
    monkeypatch.delitem(sys.modules, "added", raising=False)
    return where


def saved(folder: Path, pipeline: object) -> Path:
    tiny.save(folder, SDXLShape())
    edit("model_index.json", _class_name=pipeline)(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "pipeline"), [(family, name) for family in registry.BUILT_IN for name in family.pipelines]
)
def test_built_in_families_are_found_by_every_name(family: Family, pipeline: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    assert registry.read(tmp_path) is family


@pytest.mark.parametrize("pipeline", ["FluxPipeline", None, ["a", "list"]])
def test_unknown_pipelines_are_told_what_is_known(pipeline: object, tmp_path: Path, packages: Path) -> None:
    known = ", ".join(family.pipelines[0] for family in registry.BUILT_IN if family.pipelines)
    folder = saved(tmp_path / "model", pipeline)
    for more in ("", ", AddedPipeline"):
        with pytest.raises(ModelError) as caught:
            load(str(folder))
        assert str(caught.value) == f"{folder}/model_index.json: is a {pipeline}; this engine runs {known}{more}"
        if not more:
            install(packages, "added:FAMILY")


def test_another_package_adds_a_family(tmp_path: Path, packages: Path) -> None:
    install(packages, "added:FAMILY")
    made = load(str(saved(tmp_path / "model", "AddedPipeline")))
    assert made.family.label == "Added" and made.native == 32


def test_a_family_that_does_not_load_is_named(tmp_path: Path, packages: Path) -> None:
    install(packages, "added:MISSING")
    with pytest.raises(ModelError, match=r"the family AddedPipeline \(added:MISSING\) does not load \(AttributeError"):
        load(str(saved(tmp_path / "model", "AddedPipeline")))


def test_parts_are_replaced_in_a_copy() -> None:
    one = model("plain")
    other = one.with_parts(unet="another")
    assert other.denoiser == "another" and other.vae is one.vae and one.denoiser != "another"
