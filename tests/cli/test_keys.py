"""`diptych keys`: made, listed, revoked, in the Redis of a service; and what is said where that cannot be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cli
from core.jobs.keyring import Keyring, matching
from deployment.redis import RedisServer, address_in
from tests.servers import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", redis_url)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["keys", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_key_is_told_once_and_works_until_it_is_revoked(capsys: pytest.CaptureFixture[str], redis_url: str) -> None:
    code, out, _ = run(capsys, "add", "the studio", "--scopes", "admin, images", "--rate", "5/second")
    token = out.splitlines()[0]
    assert code == 0 and re.fullmatch(r"dpt_[0-9a-f]{12}_[\w-]{43}", token)
    keyring = Keyring(redis_url)
    (key,) = keyring.all()
    assert matching(token, {key.id: key}) == key and matching(token[:-1] + "!", {key.id: key}) is None
    assert (key.name, key.scopes, key.rate, key.quota) == ("the studio", ("images", "admin"), "5/second", "")
    code, out, _ = run(capsys, "list")
    assert code == 0 and out.startswith(f"{key.id}  the studio  images,admin  2") and "rate 5/second" in out
    assert token[-43:] not in out
    assert run(capsys, "revoke", key.id)[:2] == (0, "revoked\n")
    assert keyring.all() == []
    code, _, err = run(capsys, "revoke", key.id)
    assert code == 1 and err == "diptych: ID: there is no such key; see `diptych keys list`\n"
    assert run(capsys, "webhook", key.id)[0] == 1
    assert run(capsys, "webhook")[:2] == (0, keyring.webhook_secret("") + "\n")
    keyring.close()


@pytest.mark.parametrize(
    ("words", "named"),
    [(["", "--rate", ""], "NAME"), (["a", "--rate", "often"], "--rate"), (["a", "--quota", "1/week"], "--quota"),
     (["a", "--scopes", "root"], "--scopes"), (["a", "--scopes", ","], "--scopes")],
)  # fmt: skip
def test_what_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], named: str
) -> None:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", "redis://127.0.0.1:1/0")  # which nobody asks for it
    code, out, err = run(capsys, "add", *words)
    assert code == 2 and out == "" and err.startswith(f"diptych: {named}: ")


def test_the_redis_of_a_service_here_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DIPTYCH_REDIS_URL")
    code, _, err = run(capsys, "list", "--data", str(tmp_path))
    assert code == 1 and str(tmp_path) in err
    server = RedisServer(tmp_path / "redis")
    server.start()
    try:
        server.tell()
        assert (tmp_path / "redis" / "address").stat().st_mode & 0o777 == 0o600
        assert run(capsys, "add", "me", "--data", str(tmp_path))[0] == 0
        assert "  me  images,text  " in run(capsys, "list", "--data", str(tmp_path))[1]
    finally:
        server.stop()
    assert address_in(tmp_path / "redis") == ""


@pytest.mark.parametrize("url", ["redis://a b", "redis://:6379/0", "http://a", "redis://"])
def test_what_is_no_redis(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", url)
    code, _, err = run(capsys, "list")
    assert code == 2 and err.startswith("diptych: DIPTYCH_REDIS_URL: must ")


def test_a_redis_that_does_not_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", "redis://127.0.0.1:1/0")
    code, _, err = run(capsys, "list")
    assert code == 1 and err == "diptych: Redis cannot be reached\n"
