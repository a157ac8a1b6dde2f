"""The least rights in Redis, as docs/operations.md grants them: the whole service works with just these."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

from core.jobs.broker import Envelope
from core.jobs.keyring import Keyring
from deployment.redis import RedisServer
from tests.api.world import Api, Worker, settings_of
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


def test_it_serves_with_them(limited: str, tmp_path: Path, client: redis.Redis) -> None:
    """Jobs, events, messages as Celery sends and takes them, the sweep, keys and lists."""
    settings = settings_of(limited, tmp_path)
    with Worker(settings) as worker, Api(settings) as api:
        worker.announce()
        id = api.order()
        assert [one for one, _ in worker.messages()] == [id]
        worker.work(id)
        assert [event.type for event in api.all_events(id)] == ["queued", "running", "succeeded"]
        worker.store.sweep()
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
    assert list(client.execute_command("ACL", "LOG")) == [], "nothing was refused"


@pytest.mark.parametrize("other", [["SET", "elsewhere", "1"], ["FLUSHALL"], ["CONFIG", "GET", "*"], ["ACL", "LIST"]])
def test_and_they_are_no_more_than_needed(limited: str, other: list[str]) -> None:
    with redis.Redis.from_url(limited) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*other)
