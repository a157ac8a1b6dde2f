"""The benchmark that needs other packages says what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import agreement


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agreement", "--work", str(tmp_path)])
    assert agreement.main() == 2
    assert f"there is no {tmp_path / 'venv' / 'bin' / 'python'}" in capsys.readouterr().err
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    assert agreement.main() == 2 and f"there is no {tmp_path / 'inference'}" in capsys.readouterr().err
