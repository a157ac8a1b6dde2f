"""Limits the messages in flight per queue, and makes Celery's consumer respect the limit.

A job whose results are being stored no longer counts, so that encoding and writing take no place from the engine's next
ones; of these there may be as many again.

Every queue is consumed on its own channel, so that backpressure on one does not stop the others: a full queue's channel
asks Redis for nothing until a message is acknowledged, and then at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from celery import bootsteps
from celery.worker.consumer import Consumer
from celery.worker.request import Request
from celery.worker.state import maybe_shutdown
from kombu.entity import Queue
from kombu.transport import redis, virtual

from core.jobs import keys
from core.jobs.broker import SEPARATOR, Envelope, model_queue, own_queue, read_message

log = logging.getLogger(__name__)

_POLL_S = 0.02
_RIGHTS_S = 1.0  # between checks whether Redis grants a missing right
_DEAD_KEPT = 1000  # maximum number of dead letters


class PrefetchLimiter:
    """Counts messages from reception to acknowledgement. Thread-safe."""

    def __init__(self, queues: Sequence[str], held_up: Callable[[], bool] = lambda: False, worker: str = "") -> None:
        """While `held_up` returns True no message is taken; call `wake` when it no longer does.

        Of each queue, messages that are for this `worker` are taken before those that are for any of its model.
        """
        self.worker = worker
        self._lock = threading.Lock()
        self._limits = dict.fromkeys(queues, 0)
        self._counts = dict.fromkeys(queues, 0)
        self._storing = dict.fromkeys(queues, 0)
        self._held_up = held_up
        self._paused: frozenset[str] = frozenset()
        self.models: Mapping[str, Mapping[str, str]] = {}  # by queue, of which messages are taken, by kombu queue
        self._closed = False
        self._call_soon: Callable[[Callable[[], None]], object] | None = None
        self._lines: QueueConsumers | None = None

    @property
    def limits(self) -> dict[str, int]:
        """By queue that is served here, how many jobs may be in flight; as many more may be being stored."""
        return {queue: limit for queue, limit in self._limits.items() if limit}

    def serve(self, limits: Mapping[str, int]) -> None:
        """Set how many messages of each queue may be in flight. Call before Celery connects."""
        self._limits.update(limits)

    def route(self, models: Mapping[str, Iterable[str]]) -> None:
        """Set the models, by queue, of which messages are taken from now on. Thread-safe."""
        routes = {queue: {model_queue(queue, name): name for name in names} for queue, names in models.items()}
        if routes != self.models:
            self.models = routes
            self.wake()

    def counts(self) -> dict[str, int]:
        """Messages not yet acknowledged, by served queue."""
        with self._lock:
            return {queue: self._counts[queue] for queue in self.limits}

    def room(self, queue: str) -> bool:
        """Return whether one more may be taken now."""
        with self._lock:
            limit, storing, count = self._limits[queue], self._storing[queue], self._counts[queue]
        free = storing < limit and count - storing < limit
        return free and queue not in self._paused and not self._held_up()

    @contextlib.contextmanager
    def storing(self, queue: str) -> Iterator[None]:
        """Context: the engine is done with a job of this queue; its place goes to another while results are stored."""
        with self._lock:
            self._storing[queue] += 1
        self.wake()
        try:
            yield
        finally:
            with self._lock:
                self._storing[queue] -= 1

    def pause(self, queues: frozenset[str]) -> None:
        """Pause these queues, and resume all others. Messages in flight continue."""
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
        """Make Celery's loop check again which queues have room."""
        if self._call_soon is not None:
            self._call_soon(_nothing)

    def close(self, timeout_s: float) -> None:
        """Stop taking messages. A message that Redis was about to deliver goes back into its queue.

        Returns when no read of Redis is pending, so that later messages go to other workers; or after `timeout_s`.
        """
        self._closed = True
        if self._call_soon is None or self._lines is None:
            return
        self._call_soon(self._lines.cancel)
        until = time.monotonic() + timeout_s
        while self._lines.asking and time.monotonic() < until:
            time.sleep(_POLL_S)

    def attach(self, call_soon: Callable[[Callable[[], None]], object], lines: QueueConsumers) -> None:
        """Called when `lines` are connected; `call_soon` runs a function on their thread."""
        self._call_soon, self._lines = call_soon, lines

    def channel(self, queue: str) -> Any:
        """The queue's channel of the current connection; None while disconnected."""
        return None if self._lines is None else self._lines.channel(queue)

    @property
    def closed(self) -> bool:
        return self._closed


def _nothing() -> None:
    pass


class CountedRequest(Request):  # type: ignore[misc]
    """Celery's request, counted from reception until acknowledged or rejected, on any thread."""

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        self._counted = True
        self.app.prefetch.take(self.task.queue)

    def acknowledge(self) -> None:
        self._give()  # before the loop is woken to acknowledge: it must see the free slot
        super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        self._give()
        super().reject(requeue)

    def _give(self) -> None:
        if self._counted:
            self._counted = False
            self.app.prefetch.give(self.task.queue)


class BoundedQoS(redis.QoS):
    """A channel that asks for a message only if there is room, and acknowledges messages of earlier connections.

    kombu's own prefetch limit would forget, with each lost connection, the messages still in flight.
    """

    def __init__(self, channel: Any, prefetch: PrefetchLimiter, queue: str) -> None:
        super().__init__(channel)  # type: ignore[no-untyped-call]
        self._prefetch = prefetch
        self._queue = queue

    def can_consume(self) -> bool:
        # A reply already requested is always read: it may be a message, which no other worker would get.
        return bool(self.channel._in_poll) or self._prefetch.room(self._queue)

    def append(self, message: Any, delivery_tag: str) -> None:
        """Record a message as unacknowledged, in Redis too; if Redis is full, the message is kept nevertheless.

        An offer (`warm_claims.py`) is not kept in Redis: kombu would restore it a day later into the list of a worker
        that may have died since, and the worker that made it serves its job.
        """
        if message.delivery_info["routing_key"] == own_queue(self._queue, self._prefetch.worker):
            virtual.QoS.append(self, message, delivery_tag)  # type: ignore[no-untyped-call]
            return
        try:
            super().append(message, delivery_tag)  # type: ignore[no-untyped-call]
        except self.channel.ResponseError:
            virtual.QoS.append(self, message, delivery_tag)  # type: ignore[no-untyped-call]

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge on the current connection, which may not be the one that delivered the message.

        Without a connection the message stays unacknowledged. Redis redelivers it after a day, to no effect.
        """
        virtual.QoS.ack(self, delivery_tag)  # type: ignore[no-untyped-call]
        channel = self._prefetch.channel(self._queue)
        if channel is not None:
            unable = (*channel.connection_errors, channel.ResponseError)  # down, or it accepts no writes now
            with contextlib.suppress(*unable), channel.conn_or_acquire() as client:
                # One command at a time, unlike kombu: a full Redis refuses every transaction, and accepts these.
                client.zrem(channel.unacked_index_key, delivery_tag)
                client.hdel(channel.unacked_key, delivery_tag)


class QueueRotation:
    """The kombu queues that one BRPOP asks, in order: kombu asks all of one level before those of the next.

    The worker's own comes first, then, in turn, those of the models whose messages it takes, and the one into which
    older versions send messages of all models. kombu knows two queues, so that no binding is left of a model: the
    worker's own, and the panel's for all others, which `_screen` names so.
    """

    def __init__(self, prefetch: PrefetchLimiter, queue: str) -> None:
        self._prefetch = prefetch
        self._queue = queue
        self._own = own_queue(queue, prefetch.worker)
        self._turns: list[str] = []

    def consume(self, n: int) -> list[str]:
        """Return the queues to ask if kombu consumes any (`n`)."""
        served = [self._queue, *self._prefetch.models.get(self._queue, ())]
        self._turns = [name for name in self._turns if name in served]
        self._turns += [name for name in served if name not in self._turns]
        return [self._own, *self._turns] if n else []

    def take_turn(self, name: str) -> None:
        """Ask this queue after all others of its level, since it has just had its turn."""
        if name in self._turns:
            self._turns.remove(name)
            self._turns.append(name)

    def update(self, queues: Iterable[str]) -> None:
        """Ignore the queues that kombu consumes."""

    def rotate(self, queue: str) -> None:
        """Ignore kombu's own name of the last queue."""


def _screen(channel: Any, queue: str, prefetch: PrefetchLimiter, write: Callable[[Envelope], str]) -> None:
    """Make the channel take turns between models, and move entries that are no messages of its queue to the dead
    letters.

    Of the others Celery and kombu get the job's id and priority alone, in a message that `write` makes anew: a field
    of an unexpected type would end the worker, and one that delays the task would keep its place for years.
    """
    own, rotation = own_queue(queue, prefetch.worker), QueueRotation(prefetch, queue)
    channel._queue_cycle = rotation
    parse = channel.client.parse_response

    def screened(connection: Any, command: str, **options: Any) -> Any:
        answer = parse(connection, command, **options)
        if command != "BRPOP" or not answer:
            return answer
        key, entry = answer
        name = key.decode("utf-8", "replace")
        kombu_queue = name.partition(SEPARATOR)[0]
        rotation.take_turn(kombu_queue)
        try:
            envelope = read_message(entry, queue)
        except ValueError as error:
            # Without its content, which may be private.
            reason = error if type(error) is ValueError else type(error).__name__
            log.error("a malformed message in queue %s (%s) was moved to %s", name, reason, keys.DEAD_LETTERS)
            with contextlib.suppress(Exception), channel.conn_or_acquire() as client:
                client.lpush(keys.DEAD_LETTERS, entry)
                client.ltrim(keys.DEAD_LETTERS, 0, _DEAD_KEPT - 1)
            return None
        if kombu_queue == own:
            return key, write(replace(envelope, to=prefetch.worker)).encode()
        model = prefetch.models.get(queue, {}).get(kombu_queue, "")
        return queue.encode(), write(replace(envelope, model=model)).encode()

    channel.client.parse_response = screened


class QueueConsumers:
    """One consumer with its own channel per queue, with the interface of the single consumer that Celery expects."""

    def __init__(self, consumers: Mapping[str, Any], prefetch: PrefetchLimiter) -> None:
        self._consumers = dict(consumers)
        self._prefetch = prefetch
        self._on_message: Any = None

    def channel(self, queue: str) -> Any:
        """None once abandoned."""
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
        if not self._prefetch.closed:
            for consumer in self._consumers.values():
                consumer.consume()

    def cancel(self) -> None:
        for consumer in self._consumers.values():
            consumer.cancel()

    close = cancel  # the channels end with their connection

    @property
    def asking(self) -> bool:
        """Return whether Redis may still deliver a message to one of them."""
        return any(
            consumer.channel._in_poll or consumer.channel.active_queues for consumer in tuple(self._consumers.values())
        )

    def abandon(self) -> None:
        """Close what a lost connection leaves behind: kombu would wait for a last reply, and fail."""
        consumers, self._consumers = self._consumers, {}
        for consumer in consumers.values():
            consumer.channel._in_poll = None
            with contextlib.suppress(Exception):  # partly closed already
                consumer.channel.close()

    def qos(self, **_: Any) -> None:
        """Celery's prefetch count does not apply: see `BoundedQoS`."""


class QueueConsumersStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Replaces the consumer that Celery has just created with `QueueConsumers`. Runs for each connection."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, c: Any) -> None:
        prefetch: PrefetchLimiter = c.app.prefetch
        consumers = {}
        for queue in prefetch.limits:
            channel = c.connection.channel()
            channel.QoS = lambda channel, queue=queue: BoundedQoS(channel, prefetch, queue)
            _screen(channel, queue, prefetch, c.app.message)
            commands = channel._create_client()  # kombu would make one for each command, on the same pool
            channel.conn_or_acquire = lambda client=None, own=commands: nullcontext(client or own)
            channel.do_restore = False  # messages in flight survive the connection, and are handed back at the end
            worker_queue = Queue(own_queue(queue, prefetch.worker))  # type: ignore[no-untyped-call]  # of no exchange: it leaves nothing
            consumers[queue] = c.app.amqp.TaskConsumer(
                channel, queues=[worker_queue, c.app.amqp.queues[queue]], on_decode_error=c.on_decode_error
            )
        c.task_consumer = QueueConsumers(consumers, prefetch)
        prefetch.attach(c.hub.call_soon, c.task_consumer)


class ReconnectingConsumer(Consumer):  # type: ignore[misc]
    """Celery's consumer, but reconnecting quickly: its own delays grow to half a minute. Consumes nothing while a Redis
    right is missing.
    """

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]
        default_steps = (*Consumer.Blueprint.default_steps, QueueConsumersStep)

    def ensure_connected(self, conn: Any) -> Any:
        conn.ensure_connection(
            None, None, interval_start=0.1, interval_step=0.1, interval_max=1.0, callback=maybe_shutdown
        )
        self.first_connection_attempt = False
        while not self.app.worker.permitted():  # else kombu would ask, be refused and reconnect, for ever
            maybe_shutdown()
            time.sleep(_RIGHTS_S)
        return conn

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        if isinstance(self.task_consumer, QueueConsumers):
            self.task_consumer.abandon()
        super().on_connection_error_after_connected(exc)
        self.hub.on_tick.clear()  # else callbacks of the lost connection would keep it alive, and run, for ever
