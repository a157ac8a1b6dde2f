"""A message that we make ourselves is what Celery and kombu would have put there; and they read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery

from api.jobs.queue import MessageProducer
from core.jobs.broker import QUEUES, Envelope, celery_settings, level, list_key, task_name


@pytest.fixture
def queue(redis_url: str) -> Iterator[MessageProducer]:
    queue = MessageProducer(redis_url)
    yield queue
    queue.close()


def without_names(message: dict[str, Any]) -> dict[str, Any]:
    """The message without what is drawn by lot, after a look that it is well drawn."""
    headers, properties = message["headers"], message["properties"]
    name = headers.pop("id")
    assert name == headers.pop("root_id") == properties.pop("correlation_id")
    tag = properties.pop("delivery_tag")
    assert len(name) == len(tag) == 36 and name != tag
    return message


@pytest.mark.quick
@pytest.mark.parametrize("name", QUEUES)
@pytest.mark.parametrize("priority", range(10))
@pytest.mark.parametrize("model", ["", "emoji-xl", 'owner/"a: 50%"'])
def test_as_celery_puts_it(queue: MessageProducer, redis_url: str, name: str, priority: int, model: str) -> None:
    envelope = Envelope("job_0123-_aZ", name, priority, model=model)
    queue.send(envelope)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        sent = json.loads(str(client.rpop(list_key(envelope.kombu_queue, level(priority)))))
        assert not client.keys("_kombu.binding.*"), "nothing of a model's queue"
    assert without_names(json.loads(queue.message(envelope))) == without_names(sent)


def test_as_celery_reads_it(queue: MessageProducer, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for id in ("job_1", "job_2"):
            client.lpush(list_key("image", 3), queue.message(Envelope(id, "image", 5)))
    app = Celery("test", set_as_current=False, config_source=celery_settings(redis_url))
    with app.connection_for_read() as connection, connection.SimpleQueue("image") as messages:
        for id in ("job_1", "job_2"):
            message = messages.get(timeout=60)
            assert message.payload[0] == [id] and message.headers["task"] == task_name("image")
            assert message.properties["priority"] == 5
            message.ack()
    app.close()


def test_no_two_are_alike(queue: MessageProducer) -> None:
    made = [json.loads(queue.message(Envelope("job_1", "image", 5))) for _ in range(50)]
    assert len({message["properties"]["delivery_tag"] for message in made}) == 50
    assert len({message["headers"]["id"] for message in made}) == 50
