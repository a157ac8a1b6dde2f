"""How many messages of each queue are in hand, and the part of Celery that takes no more than that.

Every queue is consumed on a channel of its own, so that a full one stops alone: its channel asks Redis for nothing
until a message ends, and then at once. Knows Celery and kombu; knows nothing of jobs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import bootsteps
from celery.worker.consumer import Consumer
from celery.worker.request import Request
from celery.worker.state import maybe_shutdown
from kombu.transport import redis, virtual

from core.jobs import keys

log = logging.getLogger(__name__)

_POLL_S = 0.02
_RIGHTS_S = 1.0  # between looks whether Redis lets its user do what it did not
_DEAD_KEPT = 1000  # entries that are no messages


class Intake:
    """Counts messages from their reception to their acknowledgement. Thread-safe."""

    def __init__(self, queues: Sequence[str], held_up: Callable[[], bool] = lambda: False) -> None:
        """While `held_up` returns True nothing is taken in; call `wake` when it no longer does."""
        self._lock = threading.Lock()
        self._limits = dict.fromkeys(queues, 0)
        self._counts = dict.fromkeys(queues, 0)
        self._held_up = held_up
        self._paused: frozenset[str] = frozenset()
        self._closed = False
        self._call_soon: Callable[[Callable[[], None]], object] | None = None
        self._lines: Lines | None = None

    @property
    def queues(self) -> list[str]:
        """Those that are served here."""
        return [queue for queue, limit in self._limits.items() if limit]

    @property
    def limits(self) -> dict[str, int]:
        return {queue: limit for queue, limit in self._limits.items() if limit}

    def serve(self, limits: Mapping[str, int]) -> None:
        """Set how many messages of each queue may be in hand at once. To be called before Celery connects."""
        self._limits.update(limits)

    def counts(self) -> dict[str, int]:
        """How many messages of each served queue are in hand."""
        with self._lock:
            return {queue: self._counts[queue] for queue in self.queues}

    def room(self, queue: str) -> bool:
        """Whether one more may be taken in now."""
        return self._counts[queue] < self._limits[queue] and queue not in self._paused and not self._held_up()

    def pause(self, queues: frozenset[str]) -> None:
        """Take nothing more from these queues, and from all others again. What is in hand goes on."""
        if queues != self._paused:
            self._paused = queues
            self.wake()

    def take(self, queue: str) -> None:
        with self._lock:
            self._counts[queue] += 1

    def give(self, queue: str) -> None:
        with self._lock:
            self._counts[queue] -= 1

    def wake(self) -> None:
        """Have Celery's loop look again for which queues there is room."""
        if self._call_soon is not None:
            self._call_soon(_nothing)

    def close(self, timeout_s: float) -> None:
        """Take nothing in any more. What Redis was about to hand out goes back into its queue.

        Returns when nothing is asked of Redis any more, so that what is sent from now on goes to other workers; or
        after `timeout_s`.
        """
        self._closed = True
        if self._call_soon is None or self._lines is None:
            return
        self._call_soon(self._lines.cancel)
        until = time.monotonic() + timeout_s
        while self._lines.asking and time.monotonic() < until:
            time.sleep(_POLL_S)

    def attach(self, call_soon: Callable[[Callable[[], None]], object], lines: Lines) -> None:
        """`lines` are connected, and `call_soon` runs something on their thread."""
        self._call_soon, self._lines = call_soon, lines

    def channel(self, queue: str) -> Any:
        """The queue's channel of the present connection; None while there is none."""
        return None if self._lines is None else self._lines.channel(queue)

    @property
    def closed(self) -> bool:
        return self._closed


def _nothing() -> None:
    pass


class Received(Request):  # type: ignore[misc]
    """Celery's request, counted from its reception until it is acknowledged or rejected, on whatever thread."""

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        self._counted = True
        self.app.intake.take(self.task.queue)

    def acknowledge(self) -> None:
        self._give()  # before the loop is woken to acknowledge: there is room again when it looks
        super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        self._give()
        super().reject(requeue)

    def _give(self) -> None:
        if self._counted:
            self._counted = False
            self.app.intake.give(self.task.queue)


class Bounded(redis.QoS):
    """Lets a channel ask for a message only where there is room for it, and acknowledges what others took in.

    kombu's own prefetch limit would forget, with each lost connection, what is still in hand.
    """

    def __init__(self, channel: Any, intake: Intake, queue: str) -> None:
        super().__init__(channel)  # type: ignore[no-untyped-call]
        self._intake = intake
        self._queue = queue

    def can_consume(self) -> bool:
        # What Redis was asked for already is always read: it may be a message, which nobody else would get.
        return bool(self.channel._in_poll) or self._intake.room(self._queue)

    def append(self, message: Any, delivery_tag: str) -> None:
        """Note a message as taken, in Redis too: unless that is full, which is no reason to drop the message."""
        try:
            super().append(message, delivery_tag)  # type: ignore[no-untyped-call]
        except self.channel.ResponseError:
            virtual.QoS.append(self, message, delivery_tag)  # type: ignore[no-untyped-call]

    def ack(self, delivery_tag: str) -> None:
        """By the connection that stands now, not by the one that the message came by.

        While none does the message stays noted as taken. Redis then has it delivered again after a day, to no effect.
        """
        virtual.QoS.ack(self, delivery_tag)  # type: ignore[no-untyped-call]
        channel = self._intake.channel(self._queue)
        if channel is not None:
            unable = (*channel.connection_errors, channel.ResponseError)  # away, or it takes no writes now
            with contextlib.suppress(*unable), channel.conn_or_acquire() as client:
                # One by one, and not as kombu does it: a full Redis refuses every transaction, and takes these.
                client.zrem(channel.unacked_index_key, delivery_tag)
                client.hdel(channel.unacked_key, delivery_tag)


def _screen(channel: Any) -> None:
    """Have the channel put aside what is no message, as a dead letter: kombu would end the worker over it."""
    parse = channel.client.parse_response

    def screened(connection: Any, command: str, **options: Any) -> Any:
        answer = parse(connection, command, **options)
        if command != "BRPOP" or not answer:
            return answer
        try:
            channel.Message(json.loads(answer[1]), channel=channel)
        except Exception as error:
            queue, entry = answer
            log.error(  # its content is nobody's business here
                "an entry of the queue %s is no message (%s); it lies in the list %s",
                queue.decode("utf-8", "replace"), type(error).__name__, keys.DEAD_LETTERS,
            )  # fmt: skip
            with contextlib.suppress(Exception), channel.conn_or_acquire() as client:
                client.lpush(keys.DEAD_LETTERS, entry)
                client.ltrim(keys.DEAD_LETTERS, 0, _DEAD_KEPT - 1)
            return None
        return answer

    channel.client.parse_response = screened


class Lines:
    """One consumer for each queue, each with its channel, in the shape of the one consumer that Celery expects."""

    def __init__(self, consumers: Mapping[str, Any], intake: Intake) -> None:
        self._consumers = dict(consumers)
        self._intake = intake
        self._on_message: Any = None

    def channel(self, queue: str) -> Any:
        """None once they are abandoned."""
        consumer = self._consumers.get(queue)
        return None if consumer is None else consumer.channel

    @property
    def on_message(self) -> Any:
        return self._on_message

    @on_message.setter
    def on_message(self, callback: Any) -> None:
        self._on_message = callback
        for consumer in self._consumers.values():
            consumer.on_message = callback

    def consume(self) -> None:
        if not self._intake.closed:
            for consumer in self._consumers.values():
                consumer.consume()

    def cancel(self) -> None:
        for consumer in self._consumers.values():
            consumer.cancel()

    close = cancel  # the channels end with their connection

    @property
    def asking(self) -> bool:
        """Whether Redis may still hand out a message to one of them."""
        return any(
            consumer.channel._in_poll or consumer.channel.active_queues for consumer in tuple(self._consumers.values())
        )

    def abandon(self) -> None:
        """Close what a lost connection leaves behind: kombu waits for a last answer first, and gives up over that."""
        consumers, self._consumers = self._consumers, {}
        for consumer in consumers.values():
            consumer.channel._in_poll = None
            with contextlib.suppress(Exception):  # half of it is gone already
                consumer.channel.close()

    def qos(self, **_: Any) -> None:
        """Celery's prefetch count does not apply: see `Bounded`."""


class Channels(bootsteps.StartStopStep):  # type: ignore[misc]
    """Puts `Lines` in the place of the consumer that Celery has just made. Runs anew for each connection."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, c: Any) -> None:
        intake: Intake = c.app.intake
        consumers = {}
        for queue in intake.queues:
            channel = c.connection.channel()
            channel.QoS = lambda channel, queue=queue: Bounded(channel, intake, queue)
            _screen(channel)
            channel.do_restore = False  # what is in hand is not lost with its connection, nor left when all ends
            consumers[queue] = c.app.amqp.TaskConsumer(
                channel, queues=[c.app.amqp.queues[queue]], on_decode_error=c.on_decode_error
            )
        c.task_consumer = Lines(consumers, intake)
        intake.attach(c.hub.call_soon, c.task_consumer)


class Steady(Consumer):  # type: ignore[misc]
    """Celery's consumer, quick to return to a Redis that is back: its own waits grow to half a minute. Where a right
    lacks it asks for nothing.
    """

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]
        default_steps = (*Consumer.Blueprint.default_steps, Channels)

    def ensure_connected(self, conn: Any) -> Any:
        conn.ensure_connection(
            None, None, interval_start=0.1, interval_step=0.1, interval_max=1.0, callback=maybe_shutdown
        )
        self.first_connection_attempt = False
        while not self.app.station.permitted():  # else kombu would ask, be refused and connect anew, for ever
            maybe_shutdown()
            time.sleep(_RIGHTS_S)
        return conn

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        if isinstance(self.task_consumer, Lines):
            self.task_consumer.abandon()
        super().on_connection_error_after_connected(exc)
        self.hub.on_tick.clear()  # else the lost connection's callbacks would hold on to it, and run, for ever
