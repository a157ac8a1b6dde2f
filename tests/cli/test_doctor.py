"""`diptych doctor`: what is well is said to be, what is broken is named, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

import cli
from core.jobs.keyring import Keyring
from deployment.redis import free_port
from tests.servers import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, redis_url: str, tmp_path: Path) -> Path:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", redis_url)
    monkeypatch.setenv("DIPTYCH_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("DIPTYCH_PORT", str(free_port()))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    """The exit code, and the marks by what they are of; a second line of the same counts if it is worse."""
    code = cli.main(["doctor"])
    found: dict[str, str] = {}
    for line in capsys.readouterr().out.splitlines():
        what = line[2:].partition(":")[0]
        found[what] = max(line[0], found.get(what, ""), key="✓·✗".index) if what in found else line[0]
    return code, found


def test_all_is_well(healthy: Path, capsys: pytest.CaptureFixture[str], redis_url: str) -> None:
    keyring = Keyring(redis_url)
    keyring.add("me")
    keyring.close()
    code, found = run(capsys)
    assert code == 0 and "✗" not in found.values()
    assert {"python", "cpu", "model", "data", "redis", "artifacts", "port", "access"} <= found.keys()
    assert found["worker"] == "·", "there is none"
    assert not [path for path in healthy.rglob("*") if path.is_file()], "what was written is gone"


@pytest.mark.parametrize(
    ("broken", "what"),
    [("redis", "redis"), ("policy", "redis"), ("model", "model"), ("artifacts", "artifacts"), ("device", "device")],
)
def test_what_is_broken_is_named(
    healthy: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    redis_url: str,
    broken: str,
    what: str,
) -> None:
    if broken == "policy":
        with redis.Redis.from_url(redis_url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
    values = {
        "redis": ("REDIS_URL", "redis://127.0.0.1:1/0"), "model": ("MODEL", str(healthy / "nowhere")),
        "artifacts": ("ARTIFACTS_URL", "nothing://x"), "device": ("DEVICE", "cuda:9"),
    }  # fmt: skip
    if broken in values:
        monkeypatch.setenv("DIPTYCH_" + values[broken][0], values[broken][1])
    try:
        code, found = run(capsys)
    finally:
        with redis.Redis.from_url(redis_url) as client:
            client.config_set("maxmemory-policy", "noeviction")
    assert code == 1 and found[what] == "✗"
