"""A shell for tests: runs commands in this process, in a folder of their own, and reads what they leave."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

import cli
from pipeline.checkpoints import tiny
from tests.core.quant.stage import warm

QUICK = ["--model", tiny.TINY, "--steps", "2"]


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Shell:
    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "200")
        for name in [name for name in os.environ if name.startswith("DIPTYCH_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("DIPTYCH_CACHE_DIR", str(warm(folder.with_name(f"{folder.name}-cache"))))  # not a user's
        self._capsys = capsys
        self.folder = folder

    def __call__(self, *arguments: str) -> Said:
        self._capsys.readouterr()
        try:
            code = cli.main(arguments)
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err, err
        return Said(code, out, err)

    def done(self, *arguments: str) -> Said:
        said = self(*arguments)
        assert said.code == 0, said
        return said

    def refusal(self, *arguments: str) -> str:
        """What is said of a command that must be refused."""
        said = self(*arguments)
        assert said.code == 2 and said.out == "", said
        return said.err

    def generate(self, *arguments: str) -> Said:
        return self("generate", *QUICK, "-o", "out", *arguments)

    def drawn(self, *arguments: str) -> Path:
        """The one picture that lies in `out` after such a command."""
        said = self.generate(*arguments)
        assert said.code == 0, said
        (path,) = self.pictures()
        return path

    def refused(self, *arguments: str) -> str:
        """What is said of a command that must be refused, and must leave the folder as it was."""
        before = sorted(self.folder.rglob("*"))
        said = self.generate(*arguments)
        assert said.code == 2, said
        assert said.out == ""
        assert sorted(self.folder.rglob("*")) == before
        line = said.err.strip().splitlines()[-1]
        assert line.startswith("diptych") and len(line) < 1000
        return line

    def pictures(self) -> list[Path]:
        """All that lies in `out`, each of it a whole picture."""
        found = sorted((self.folder / "out").iterdir())
        for path in found:
            with Image.open(path) as image:
                image.load()
        return found

    def save(self, name: str, data: str | bytes) -> str:
        (self.folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
        return name


def made_with(path: Path) -> dict[str, Any]:
    with Image.open(path) as image:
        found = json.loads(image.text["diptych"])  # type: ignore[attr-defined]
    assert isinstance(found, dict)
    return found
