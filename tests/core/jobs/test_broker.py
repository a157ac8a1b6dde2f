"""What we say of Celery's and kombu's ways, held against the real ones."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from celery.app.defaults import NAMESPACES, flatten
from kombu.transport.redis import Channel

from core.jobs.broker import PRIORITY_STEPS, QUEUES, celery_settings, level, list_key, task_name
from tests.core.jobs import books


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    app = Celery("test", set_as_current=False)
    app.conf.update(celery_settings(redis_url))
    yield app
    app.close()


def send(app: Celery, id: str, queue: str, priority: int) -> None:
    app.send_task(task_name(queue), (id,), queue=queue, priority=priority, ignore_result=True)


def body(message: Any) -> list[Any]:
    return list(json.loads(base64.b64decode(json.loads(message)["body"])))


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("priority", range(10))
def test_celery_puts_messages_where_we_look(app: Celery, client: redis.Redis, queue: str, priority: int) -> None:
    send(app, "job_1", queue, priority)
    send(app, "job_2", queue, priority)
    key = list_key(queue, level(priority))
    # Pushed on the left: the last one comes first here, and is received last.
    assert [body(message)[0] for message in client.lrange(key, 0, -1)] == [["job_2"], ["job_1"]]
    lists = {list_key(q, step) for q in QUEUES for step in PRIORITY_STEPS}
    assert [name for name in lists if client.exists(name)] == [key]


def test_received_by_priority_then_in_order(app: Celery, client: redis.Redis) -> None:
    order = [("a", 9), ("b", 5), ("c", 0), ("d", 5), ("e", 3), ("f", 2), ("g", 6)]
    for id, priority in order:
        send(app, id, "image", priority)
    got = []
    with app.connection_for_read() as connection, connection.SimpleQueue("image") as messages:
        for _ in order:
            message = messages.get(timeout=60)
            got.append(message.payload[0][0])
            message.ack()
    assert got == ["c", "f", "b", "d", "e", "g", "a"]
    # And our stand-in for kombu, which other tests use, does the same.
    for id, priority in order:
        books.push(client, "image", level(priority), id)
    assert [books.pop(client, "image") for _ in order] == got


def test_settings_are_celerys_own(app: Celery) -> None:
    """A misspelt setting would be ignored in silence."""
    known = {name.lower() for name, _ in flatten(NAMESPACES)}
    assert set(celery_settings("redis://")) <= known
    options = celery_settings("redis://")["broker_transport_options"]
    assert set(options) <= set(Channel.from_transport_options)


def test_settings_as_celery_reads_them(app: Celery) -> None:
    assert set(app.amqp.queues) == set(QUEUES)
    assert app.conf.task_acks_late
    assert app.conf.worker_prefetch_multiplier == 1
    assert app.conf.result_backend is None
    assert list(app.conf.accept_content) == ["json"]
    assert not app.conf.worker_enable_remote_control
    with app.connection_for_write() as connection, connection.channel() as channel:
        assert channel.visibility_timeout == 86_400
        assert channel.sep == ":"
        assert channel.queue_order_strategy == "priority"
    with pytest.raises(Exception, match="elsewhere"):
        send(app, "job_1", "elsewhere", 5)
