"""Defines what Celery producers, workers and scripts must agree on: queues, task names, priorities, settings.

Plain data. Does not import Celery, so that the store can compute the Redis key of a kombu list.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
from bisect import bisect
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

QUEUES = ("image", "text")
PRIORITY_STEPS = (0, 3, 6, 9)  # the lists that kombu keeps for each queue; FIFO within each
SEPARATOR = ":"
JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message to send: the job's id, its queue, its Celery priority (0 to 9, 0 first), and its model.

    `to` is the worker that it is for; empty: any that serves the model.
    """

    id: str
    queue: str
    priority: int
    to: str = ""
    model: str = ""

    @property
    def kombu_queue(self) -> str:
        """The kombu queue that the message goes into."""
        return own_queue(self.queue, self.to) if self.to else model_queue(self.queue, self.model)


def task_name(queue: str) -> str:
    """Name of the Celery task that serves a queue. Its only argument is the job's id."""
    return f"diptych.{queue}"


def level(priority: int) -> int:
    """The kombu priority step that a message of this priority (0 to 9) belongs to; kombu rounds down."""
    return PRIORITY_STEPS[bisect(PRIORITY_STEPS, priority) - 1]


def list_key(queue: str, level: int) -> str:
    """Redis key of the list in which kombu keeps this queue's messages of one level (`Channel._q_for_pri`).

    Messages are pushed on the left and popped from the right.
    """
    return f"{queue}{SEPARATOR}{level}" if level else queue


def model_queue(queue: str, model: str) -> str:
    """The kombu queue of messages for the workers that serve a model; without a model, that of versions before it.

    The name contains no separator, whatever the model's contains: kombu cuts the level off at the last one. Equal to
    `model_queue` in `lua/shared/fairness.lua`.
    """
    return f"{queue}.{model.replace('%', '%25').replace(SEPARATOR, '%3A')}" if model else queue


def own_queue(queue: str, worker: str) -> str:
    """The queue of messages that are for this worker, of jobs of a queue."""
    return f"{queue}@{worker}"


def pushed(task: Any, queue: str, priority: int, body: str, tag: str) -> str:
    """The message of a Celery task (`celery.app.amqp.task_message`) as kombu pushes it into a queue's list.

    `body` is the task's, in base64; `tag` is unique.
    """
    properties = {
        **task.properties,
        "delivery_mode": 2,  # persistent
        "delivery_info": {"exchange": "", "routing_key": queue},
        "priority": priority,
        "body_encoding": "base64",
        "delivery_tag": tag,
    }
    return json.dumps(
        {
            "body": body,
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": task.headers,
            "properties": properties,
        }
    )


def read_message(entry: str | bytes, queue: str) -> Envelope:
    """Parse an entry of a queue's list, as `pushed` writes it; what nobody reads is ignored.

    Raises ValueError for anything else.
    """
    try:
        message = json.loads(entry)
        headers, properties = message["headers"], message["properties"]
        read = (message["content-type"], message["content-encoding"], properties["body_encoding"], headers["task"])
        if read != ("application/json", "utf-8", "base64", task_name(queue)):
            raise ValueError(f"is not a task {task_name(queue)} in JSON")
        if headers.get("eta") is not None or headers.get("expires") is not None:
            raise ValueError("is for another time")
        id = json.loads(base64.b64decode(message["body"], validate=True))[0][0]
        priority = properties["priority"]
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("has another structure") from error
    if not isinstance(id, str) or not JOB_ID.fullmatch(id):
        raise ValueError("names no job")
    if type(priority) is not int or not PRIORITY_STEPS[0] <= priority <= PRIORITY_STEPS[-1]:
        raise ValueError("has no priority")
    return Envelope(id, queue, priority)


def celery_settings(url: str) -> dict[str, Any]:
    """Celery's configuration, for producers and workers. `url` is Redis's, including its password if there is one.

    For `rediss://` the certificate and host name are verified, as by the other Redis connections; kombu does neither by
    default.
    """
    parts = urlsplit(url)
    tls = {**dict(parse_qsl(parts.query)), "ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}
    return {
        "broker_url": urlunsplit(parts._replace(query="")),
        "broker_use_ssl": tls if parts.scheme == "rediss" else None,
        "broker_connection_timeout": 5,
        "broker_connection_retry": True,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # unlimited: a worker outlives an outage of Redis
        "broker_transport_options": {
            "priority_steps": list(PRIORITY_STEPS),
            "sep": SEPARATOR,
            "queue_order_strategy": "priority",  # a worker's own: `workers.claims.prefetch.QueueRotation`
            # Kombu's own redelivery (visibility timeout) waits a day: a shorter one would run long jobs twice. The
            # store's sweep finds lost messages.
            "visibility_timeout": 86_400,
            "socket_timeout": 10,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 10,
        },
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_backend": None,
        "task_ignore_result": True,
        "task_acks_late": True,
        "task_default_priority": 5,
        "task_default_queue": QUEUES[0],
        "task_create_missing_queues": False,
        "task_queues": {
            queue: {"exchange": queue, "exchange_type": "direct", "routing_key": queue} for queue in QUEUES
        },
        "task_publish_retry": True,
        # Short: the reaper resends a message that could not be sent.
        "task_publish_retry_policy": {"max_retries": 2, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.2},
        "task_send_sent_event": False,
        "worker_send_task_events": False,
        "worker_enable_remote_control": False,
        "worker_prefetch_multiplier": 1,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_detect_quorum_queues": False,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
    }
