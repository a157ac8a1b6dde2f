"""Provides a shell and a model folder for the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checkpoints import tiny
from tests.cli.shell import Shell


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "whole", tiny.SDXLShape())
