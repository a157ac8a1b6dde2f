"""Registry of live workers: their cards, heartbeats, and a control stream of messages to each."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from contract.card import ModelCard
from core.jobs import keys
from core.jobs.broker import model_queue
from core.jobs.cards import WorkerCard, card_json, model_card, worker_card
from core.jobs.connection import TIMEOUT_S, RedisClient, RedisStore
from core.jobs.record import to_json
from core.jobs.unreadable import TALLY, UnreadableRecord

log = logging.getLogger(__name__)

T = TypeVar("T")

READY = "ready"
_KEPT_S = 86_400  # a worker silent for this long is removed from the list of heartbeats
_BLOCK_S = TIMEOUT_S / 2  # the longest blocking read: well below the connection's timeout


def condition_faults(condition: Mapping[str, str]) -> list[str]:
    """Return what Redis's own status has that loses jobs, in words."""
    faults = []
    if condition["policy"] != "noeviction":
        faults.append(f"maxmemory-policy is {condition['policy']}: jobs would be evicted; noeviction is needed")
    if condition["appends"] != "1":
        faults.append("appendonly is off: what was accepted is lost with the process")
    return faults


def log_condition_faults(registry: Registry) -> None:
    """Log them. Raises `StoreError`."""
    for fault in condition_faults(registry.condition()):
        log.warning("Redis may lose jobs: %s", fault)


class Registry(RedisStore):
    """The cards of workers and models, and the control streams to workers.

    A worker's id names one process and is never reused.
    """

    def __init__(self, redis: RedisClient | str) -> None:
        super().__init__(redis)
        self._announce = self._client.script("workers/announce")
        self._deregister = self._client.script("workers/deregister")

    def announce(self, card: WorkerCard, ttl_s: float) -> frozenset[str]:
        """Record a worker's heartbeat, valid for `ttl_s` seconds; returns the paused queues.

        Works on a full Redis too.
        """
        models = [value for model in card.models for value in (model.name, to_json(card_json(model)))]
        limits = card.limits if card.state == READY else {}  # a worker that drains takes no more jobs
        places = [
            value for model in card.models if (limit := limits.get(model.modality))
            for value in (model_queue(model.modality, model.name), limit)
        ]  # fmt: skip
        times = round(ttl_s * 1000), _KEPT_S * 1000
        return frozenset(self._announce(card.id, to_json(card_json(card)), *times, len(places) // 2, *places, *models))

    def paused_queues(self) -> set[str]:
        """The queues from which no worker takes jobs."""
        reply: Any = self._client.smembers(keys.PAUSED)
        return set(reply)

    def pause(self, queue: str, on: bool) -> None:
        """Pause or resume a queue; workers apply it at their next heartbeat."""
        if on:
            self._client.sadd(keys.PAUSED, queue)
        else:
            self._client.srem(keys.PAUSED, queue)

    def deregister(self, worker_id: str) -> None:
        """Unregister a worker that ends, and delete its control stream."""
        self._deregister(worker_id)

    def forget_model(self, name: str) -> None:
        """Remove a model from the list until a worker announces it again."""
        self._client.hdel(keys.MODELS, name)

    def condition(self) -> dict[str, str]:
        """Redis's own status: the server's name and version, the version of Redis that it is compatible with, used and
        maximum memory, eviction policy, and whether AOF is on.
        """
        reply: Any = self._client.info()
        name = str(reply.get("server_name", "redis"))  # of Valkey
        return {
            "server": f"{name.capitalize()} {reply.get(f'{name}_version', reply['redis_version'])}",
            "version": str(reply["redis_version"]),
            "used": str(reply["used_memory_human"]),
            "most": str(reply["maxmemory_human"]) if reply["maxmemory"] else "all there is",
            "policy": str(reply["maxmemory_policy"]),
            "appends": str(reply["aof_enabled"]),
        }

    def workers(self) -> list[WorkerCard]:
        """The live workers, by id; those with unreadable cards are left out."""
        ids: Any = sorted(self._client.zrange(keys.WORKERS, 0, -1))
        cards: Any = self._client.mget([keys.worker(id) for id in ids]) if ids else []
        cards_by_id = {id: card for id, card in zip(ids, cards, strict=True) if card is not None}
        return list(_read("worker card", cards_by_id, worker_card))

    def models(self) -> list[ModelCard]:
        """Every model ever announced, with its last card, by name; `live` says which are served now, and `loaded` which
        are in the memory of a worker that serves them.

        Models with unreadable cards are left out; `has_model` includes them.
        """
        cards: Any = self._client.hgetall(keys.MODELS)
        served = [model for worker in self.workers() if worker.state == READY for model in worker.models]
        live, loaded = {model.name for model in served}, {model.name for model in served if model.loaded}
        return [
            replace(card, live=card.name in live, loaded=card.name in loaded)
            for card in _read("model card", cards, model_card)
        ]

    def has_model(self, name: str) -> bool:
        """Return whether a card exists under this name, readable or not."""
        return bool(self._client.hexists(keys.MODELS, name))

    def control(self, worker_id: str, after: str, block_s: float) -> list[tuple[str, dict[str, str]]]:
        """Messages to a worker after the given id ("0": all), waiting up to `block_s` for the first; may be empty.

        Returns (id, message) pairs. {"cancel": job id}: the job was cancelled or has expired, and its result is no
        longer needed.
        """
        until = time.monotonic() + block_s
        while True:
            left_s = until - time.monotonic()
            # BLOCK 0 would wait forever
            block_ms = max(1, round(1000 * min(left_s, _BLOCK_S)))
            answer: Any = self._client.xread({keys.control(worker_id): after}, block=block_ms)
            if answer:
                return [(id, dict(message)) for id, message in answer[0][1]]
            if left_s <= _BLOCK_S:
                return []


def _read(kind: str, cards: Mapping[str, str], read: Callable[[str, Any], T]) -> Iterator[T]:
    """Parse the readable cards, by name."""
    for name in sorted(cards):
        try:
            try:
                raw = json.loads(cards[name])
            except (ValueError, RecursionError):
                raise UnreadableRecord(kind, name, "it is no JSON") from None
            yield read(name, raw)
        except UnreadableRecord as error:
            TALLY.note(error)
