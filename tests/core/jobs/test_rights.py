"""The least rights in Redis, as docs/operations.md grants them: the whole service works with just these."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

from core.jobs.broker import Envelope
from core.jobs.keyring import Keyring
from core.jobs.rights import RedisPermissions, _commands, describe_missing
from deployment.redis import RedisServer
from tests.api.world import Api, Worker, check_error, eventually, settings_of
from tests.deployment.served import ROOT


def granted() -> list[str]:
    """The words after ACL SETUSER diptych, but for the password."""
    text = (ROOT / "docs" / "operations.md").read_text("utf-8").replace("\\\n", " ")
    (words,) = re.findall(r"ACL SETUSER diptych (.+)", text)
    return [word for word in str(words).split() if not word.startswith(">")]


@pytest.fixture
def limited(redis_server: RedisServer, client: redis.Redis, redis_url: str) -> str:
    client.execute_command("ACL", "SETUSER", "diptych", "reset", ">secret", *granted())
    client.execute_command("ACL", "LOG", "RESET")
    return f"redis://diptych:secret@127.0.0.1:{redis_server.port}/0"


def missing(url: str) -> list[str]:
    rights = RedisPermissions(url)
    try:
        return rights.missing()
    finally:
        rights.close()


def test_it_serves_with_them(limited: str, tmp_path: Path, client: redis.Redis) -> None:
    """Jobs, events, messages as Celery sends and takes them, the sweep, keys and lists."""
    settings = settings_of(limited, tmp_path)
    with Worker(settings) as worker, Api(settings) as api:
        worker.announce()
        id = api.order()
        assert [one for one, _ in worker.messages()] == [id]
        worker.work(id)
        assert [event.type for event in api.all_events(id)] == ["queued", "running", "succeeded"]
        worker.store.upkeep.sweep()
        queue = api.server._service.queue
        queue.send(Envelope("job_1", "image", 0))
        with queue._celery.connection_for_read() as connection, connection.SimpleQueue("image") as messages:
            messages.get(timeout=60).ack()  # as a worker takes them
        assert api.client.get("/readyz").status_code == 200 and api.client.get("/v1/jobs").status_code == 200
        assert api.client.delete(f"/v1/jobs/{id}").status_code == 200
        keyring = Keyring(limited)
        key, _ = keyring.add("me")
        assert keyring.revoke(key.id) and keyring.unlock()
        keyring.close()
    assert missing(limited) == []
    refused = [entry["object"] for entry in client.acl_log()]
    # Redis 6.2 knows no right to a subcommand that it lacks: that connections may not say their library harms nothing.
    assert [object for object in refused if object != "client"] == [], "nothing that is needed was refused"


@pytest.mark.parametrize("other", [["SET", "elsewhere", "1"], ["FLUSHALL"], ["CONFIG", "GET", "*"], ["ACL", "LIST"]])
def test_and_they_are_no_more_than_needed(limited: str, other: list[str]) -> None:
    with redis.Redis.from_url(limited) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*other)


# -- rights that lack -------------------------------------------------------------------------------------------------


def test_every_command_that_lacks_is_named_and_none_is_run(limited: str, client: redis.Redis) -> None:
    for command in {words[0] for _, words in _commands()} - {"PING"}:  # what is no right: connections begin with it
        client.execute_command("ACL", "SETUSER", "diptych", f"-{command.lower()}")
        assert set(missing(limited)) == {name for name, words in _commands() if words[0] == command}
        client.execute_command("ACL", "SETUSER", "diptych", f"+{command.lower()}")
    for key in ("~diptych:*", "~image*", "~text*", "~_kombu.*", "~unacked*"):
        words = granted()
        words.remove(key)
        client.execute_command("ACL", "SETUSER", "diptych", "reset", ">secret", *words)
        lacking = missing(limited)
        assert lacking and all(f" on {key[1:-1]}" in name for name in lacking)
    client.execute_command("ACL", "SETUSER", "diptych", "reset", "on", ">secret", "-multi")
    assert missing(limited) == ["MULTI"]
    assert client.dbsize() == 0


def test_every_command_of_the_scripts_is_looked_for() -> None:
    looked = {words[0] for _, words in _commands()}
    scripts = sorted((ROOT / "core" / "jobs" / "lua").rglob("*.lua"))
    assert len(scripts) > 20
    for path in scripts:
        called = set(re.findall(r"redis\.p?call\('(\w+)'", path.read_text("utf-8")))
        assert called <= looked, path.name


@pytest.mark.parametrize(
    ("lacks", "told_of"), [(["-zadd"], "ZADD on diptych:rights"), (["-evalsha", "-eval"], "EVAL, EVALSHA")]
)
def test_what_lacks_is_told_and_passes(
    limited: str, tmp_path: Path, client: redis.Redis, lacks: list[str], told_of: str
) -> None:
    """503 and not 500, with what is to be granted; then all goes on."""
    settings = settings_of(limited, tmp_path)
    with Worker(settings) as worker, Api(settings) as api:
        worker.announce()
        eventually(lambda: api.client.get("/readyz").status_code == 200)
        client.execute_command("ACL", "SETUSER", "diptych", *lacks)
        error = check_error(api.post("/v1/jobs", type="image", prompt="a cat"), 503, code="store_rights")
        assert told_of in error["message"] and "docs/operations.md" in error["message"]
        client.execute_command("ACL", "SETUSER", "diptych", *(f"+{word[1:]}" for word in lacks))
        worker.announce()
        worker.work(api.order())


def test_a_sentence_is_no_longer_than_is_read() -> None:
    assert describe_missing(["A"]).startswith("Redis refuses A to this service's user; ")
    assert describe_missing([*"ABCDEFG"]).startswith("Redis refuses A, B, C, D, E and 2 more to")
