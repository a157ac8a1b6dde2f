"""Compares how soon workers could run jobs of a model, and tells how long these have waited."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from core.jobs.broker import model_queue
from core.jobs.connection import RedisClient, RedisStore
from core.jobs.record import milliseconds

Model = tuple[str, str]  # its queue and its name


@dataclass(frozen=True, slots=True)
class Placement:
    """A model as a worker that serves it stands to it.

    `nearest`: no other worker could run a job of it sooner. `waited_s`: how long the job whose message was sent first
    has waited; None: no job waits.
    """

    nearest: bool
    waited_s: float | None


class ModelPlacement(RedisStore):
    """The delays after which workers could run the next job of each model, as last announced."""

    def __init__(self, redis: RedisClient | str) -> None:
        super().__init__(redis)
        self._place = self._client.script("workers/place")

    def announce(self, worker_id: str, delays_s: Mapping[Model, float], ttl_s: float) -> dict[Model, Placement]:
        """Announce a worker's delays; they are known as long as it has a card, and any worker announces within `ttl_s`
        seconds.
        """
        entries = [word for model in delays_s for word in (model_queue(*model), milliseconds(delays_s[model]))]
        answer = self._place(worker_id, milliseconds(ttl_s), *entries)
        return {
            model: Placement(nearest == 1, None if waited_ms < 0 else waited_ms / 1000)
            for model, nearest, waited_ms in zip(delays_s, answer[::2], answer[1::2], strict=True)
        }

    def withdraw(self, worker_id: str, models: Collection[Model]) -> None:
        """Announce that the worker takes no more jobs of these models."""
        self._place(worker_id, 0, *(word for model in models for word in (model_queue(*model), "")))
