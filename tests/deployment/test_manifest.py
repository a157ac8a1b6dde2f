"""Tests what a source distribution contains, as setuptools reads MANIFEST.in."""

from __future__ import annotations

from pathlib import Path

import pytest
from setuptools.command.egg_info import FileList

from deployment import assets
from tests.children import ROOT


def test_it_has_every_file_of_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of folders that another model links to, which `graft models` would take once only."""
    monkeypatch.chdir(ROOT)
    listed = FileList()
    for line in Path("MANIFEST.in").read_text("utf-8").splitlines():
        if "models" in line and not line.startswith("#"):
            listed.process_template_line(line)
    assert set(listed.files) == {f"models/{name}" for name, _ in assets.files(ROOT / "models")}
