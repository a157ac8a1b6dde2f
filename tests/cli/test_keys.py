"""`diptych keys`: made, listed, revoked, in the Redis of a service; and what is said where that cannot be."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

import cli
from cli import keys
from core.jobs.batches import BatchStore
from core.jobs.files import FileStore
from core.jobs.keyring import Keyring, matching
from core.jobs.record import JobDraft
from core.jobs.store import JobStore, QueueFull
from deployment.redis import RedisServer, address_in
from tests.servers import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]


@pytest.fixture(autouse=True)
def keyring(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> Iterator[Keyring]:
    """Of the Redis that the commands are told."""
    monkeypatch.setenv("DIPTYCH_REDIS_URL", redis_url)
    with closing(Keyring(redis_url)) as keyring:
        yield keyring


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["keys", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("7B", 7), ("7KiB", 7 * 2**10), ("7MiB", 7 * 2**20), ("7GiB", 7 * 2**30), ("2TiB", 2 * 2**40)],
)
def test_a_size_has_any_unit(text: str, size: int) -> None:
    assert keys._bytes(text) == size


def test_a_list_of_no_keys_says_so(capsys: pytest.CaptureFixture[str], keyring: Keyring) -> None:
    assert run(capsys, "list") == (0, "", "there are no keys\n")


def test_a_key_is_told_once_and_works_until_it_is_revoked(capsys: pytest.CaptureFixture[str], keyring: Keyring) -> None:
    code, out, _ = run(capsys, "add", "the studio", "--scopes", "admin, images", "--rate", "5/second")
    token = out.splitlines()[0]
    assert code == 0 and re.fullmatch(r"dpt_[0-9a-f]{12}_[\w-]{43}", token)
    (key,) = keyring.all()
    assert matching(token, {key.id: key}) == key and matching(token[:-1] + "!", {key.id: key}) is None
    assert (key.name, key.scopes, key.rate, key.quota) == ("the studio", ("images", "admin"), "5/second", "")
    code, out, _ = run(capsys, "list")
    assert code == 0 and out.startswith(f"{key.id}  the studio  images,admin  2") and "rate 5/second" in out
    assert token[-43:] not in out
    code, out, _ = run(capsys, "revoke", key.id)
    assert code == 0 and out.startswith("revoked\nThat was the last key. Nobody is served now")
    assert keyring.all() == [] and keyring.guard().closed
    code, out, _ = run(capsys, "open")
    assert code == 0 and out.startswith("No key is required") and keyring.guard().open
    code, _, err = run(capsys, "revoke", key.id)
    assert code == 1 and err == "diptych: ID: there is no such key; see `diptych keys list`\n"
    assert run(capsys, "webhook", key.id)[0] == 1
    assert run(capsys, "webhook")[:2] == (0, keyring.webhook_secret("") + "\n")


def test_it_is_not_opened_while_there_is_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        assert run(capsys, "add", name)[0] == 0
    code, out, err = run(capsys, "open")
    assert code == 1 and out == "" and err.startswith("diptych: keys exist, so one is required")
    ids = [line.split()[0] for line in run(capsys, "list")[1].splitlines()]
    assert run(capsys, "revoke", ids[0])[:2] == (0, "revoked\n"), "nothing follows while there is another"


def test_limits_are_told(capsys: pytest.CaptureFixture[str], keyring: Keyring) -> None:
    limits = {
        "models": "emoji-xl, best", "rate": "60/minute,emoji-xl=5/minute", "quota": "best=9/day", "tokens": "100/hour",
        "jobs": "20,emoji-xl=3", "running": "50%,best=1", "queued": "25%", "checker": "blur",
    }  # fmt: skip
    words = [word for name, value in limits.items() for word in (f"--{name}", value)]
    assert run(capsys, "add", "me", "--file-bytes", "10GiB", "--scopes", "files,text", *words)[0] == 0
    line = run(capsys, "list")[1]
    told = [f"{name} {value}" for name, value in limits.items()] + ["file bytes 10737418240"]
    assert "text,files" in line and not [limit for limit in told if limit not in line]
    (key,) = keyring.all()
    assert {name: getattr(key, name) for name in limits} == limits
    assert key.allowed_models == {"emoji-xl", "best"} and key.file_bytes == 10 * 2**30


@pytest.mark.parametrize("cancelled", [True, False])
def test_what_a_revoked_key_asked_for_ends_or_goes_on(
    capsys: pytest.CaptureFixture[str], keyring: Keyring, redis_url: str, cancelled: bool
) -> None:
    """Queued, running and in a batch; another's stays as it is."""
    store, batches, files = JobStore(redis_url), BatchStore(redis_url), FileStore(redis_url)
    mine, _ = keyring.add("me")
    other, _ = keyring.add("another")
    for owner in (mine.id, other.id):
        for k in range(120):
            store.create(JobDraft(f"{owner}-{k}", "image", "m", {}, owner=owner))
        assert store.leases.claim(f"{owner}-7", "worker") is not None
    file = files.add(mine.id, "lines", "batch", 10, "key")
    batch = batches.add(mine.id, "/v1/images/generations", file, 3, "http://x/", None, [])
    words = ["--cancel-jobs"] if cancelled else []
    code, out, _ = run(capsys, "revoke", mine.id, *words)
    assert code == 0 and out == (
        "revoked\ncancelled: 120 jobs, 1 batches\n"
        "erased: 120 jobs, 1 batches and 1 files, with their pictures; about 1.0 MiB of Redis and 0.0 MiB of files\n"
        if cancelled
        else "revoked\n120 jobs and 1 batches of it go on; --cancel-jobs ends them\n"
    )

    def states(owner: str) -> set[str]:
        found = [store.get(f"{owner}-{k}") for k in range(120)]
        return {job.state.value for job in found if job is not None}

    assert states(other.id) == {"queued", "running"}
    assert states(mine.id) == (set() if cancelled else {"queued", "running"})
    assert (batches.batch(batch.id) is None) == (files.file(file.id) is None) == cancelled
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        left = {key for key in client.scan_iter(f"*{mine.id}*") if not key.startswith("diptych:events:")}
        assert left == {f"diptych:barred:{mine.id}"} if cancelled else len(left) > 120, left
    if cancelled:  # an API that has not heard of it yet makes none either
        with pytest.raises(QueueFull):
            store.create(JobDraft("late", "image", "m", {}, owner=mine.id))
        assert run(capsys, "revoke", mine.id, "--cancel-jobs")[:2] == (
            0, "it was revoked before\ncancelled: 0 jobs, 0 batches\nerased: 0 jobs, 0 batches and 0 files, with their "
            "pictures; about 0.0 MiB of Redis and 0.0 MiB of files\n"
        )  # fmt: skip
    for each in (store, batches, files):
        each.close()


@pytest.mark.parametrize(
    ("words", "named"),
    [("'' --rate ''", "NAME"), ("a --rate often", "--rate"), ("a --quota 1/week", "--quota"),
     ("a --scopes root", "--scopes"), ("a --scopes ,", "--scopes"), ("a --queued 101%", "--queued"),
     ("a --queued 0", "--queued"), ("a --jobs 50%", "--jobs"), ("a --rate 5/day,6/day", "--rate"),
     ("a --models ,", "--models")],
)  # fmt: skip
def test_what_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, named: str
) -> None:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", "redis://127.0.0.1:1/0")  # which nobody asks for it
    code, out, err = run(capsys, "add", *shlex.split(words))
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
        server.write_url()
        assert (tmp_path / "redis" / "address").stat().st_mode & 0o777 == 0o600
        assert run(capsys, "add", "me", "--data", str(tmp_path))[0] == 0
        assert "  me  images,text,files  " in run(capsys, "list", "--data", str(tmp_path))[1]
    finally:
        server.stop()
    assert address_in(tmp_path / "redis") == ""


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [("redis://a b", 2, "DIPTYCH_REDIS_URL: must "), ("redis://127.0.0.1:1/0", 1, "Redis cannot be reached\n")],
)
def test_what_is_no_redis(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str, code: int, said: str
) -> None:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", url)
    ended, _, err = run(capsys, "list")
    assert ended == code and err.startswith(f"diptych: {said}")
