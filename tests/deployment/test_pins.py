"""`make pins`: hashes from the real uv and a folder of wheels. Skipped without `make build/tools/.installed`."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from deployment.pins import HEAD, pin_packages
from tests.deployment.served import ROOT
from tests.test_install import wheel

UV = ROOT / "build" / "tools" / "bin" / "uv"

PROJECT = """\
[project]
name = "house"
version = "1"
dependencies = ["panel>=1"]

[dependency-groups]
tools = ["hinge>=1"]
"""


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, and a folder instead of an index with two versions of what it needs."""
    for version in ("1.0", "1.1"):
        wheel(tmp_path, "hinge", version)
    wheel(tmp_path, "panel", "2.0", needs="hinge")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.skipif(not UV.exists(), reason="no uv here: make build/tools/.installed")
def test_versions_stay_and_get_hashes(house: Path) -> None:
    constraints = house / "constraints.txt"
    constraints.write_text("hinge==1.0\n")
    assert pin_packages(house, str(UV)) == 0
    text = constraints.read_text()
    files = [house / f"{name}-py3-none-any.whl" for name in ("hinge-1.0", "panel-2.0")]
    told = [sha256(file.read_bytes()).hexdigest() for file in files]
    assert text == (
        f"{HEAD}hinge==1.0 \\\n    --hash=sha256:{told[0]}\n"
        f"    # via\n    #   house (pyproject.toml:tools)\n    #   panel\n"
        f"panel==2.0 \\\n    --hash=sha256:{told[1]}\n    # via house (pyproject.toml)\n"
    )
    before = constraints.stat().st_mtime_ns
    assert pin_packages(house, str(UV)) == 0
    assert constraints.stat().st_mtime_ns == before, "what is current is left alone"
    assert pin_packages(house, str(UV), upgrade=True) == 0 and "hinge==1.1" in constraints.read_text()
    (house / "pyproject.toml").write_text(PROJECT.replace("panel", "nowhere"))
    before_text = constraints.read_text()
    assert pin_packages(house, str(UV)) != 0 and constraints.read_text() == before_text
    assert not [path for path in house.iterdir() if path.name.startswith(".pins-")]
