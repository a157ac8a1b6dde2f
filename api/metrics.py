"""GET /metrics for Prometheus: requests by route, queues, waits and workers. For keys with the scope admin.

Uses the newest snapshot and measured response times; queries nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.access import By
from api.middleware import on_start
from api.service import Given, Service
from core.jobs.unreadable import TALLY

router = APIRouter(tags=["health"])

_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_METHODS = {"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"}


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
async def metrics(service: Given, caller: By) -> Response:
    caller.check("admin")
    return Response(generate_latest(service.figures), media_type="text/plain; version=0.0.4; charset=utf-8")


class MetricsMiddleware:
    """Times every request by its route, so that no address chosen by a client becomes a label."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self.app = app
        self._seconds = Histogram(
            "diptych_http_seconds", "From a request to the first byte of its answer.", ("method", "route", "status"),
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()

        def observe(message: Message) -> None:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            labels = self._seconds.labels(method, route, str(message["status"]))
            labels.observe(time.perf_counter() - begun)

        await self.app(scope, receive, on_start(send, observe))


class QueueCollector(Collector):
    """Queues and workers as the API sees them, collected at scrape time."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Any]:
        cards = self._service.cards
        now = cards.now
        up = GaugeMetricFamily("diptych_redis_up", "Whether Redis answered lately.")
        up.add_metric((), float(cards.redis_answers))
        jobs = GaugeMetricFamily("diptych_queue_jobs", "Jobs of a queue.", labels=("queue", "state"))
        work = GaugeMetricFamily(
            "diptych_queue_work_seconds", "Estimated work of one worker in them.", labels=("queue", "state")
        )
        model_jobs = GaugeMetricFamily("diptych_model_jobs", "Jobs of a model.", labels=("queue", "model", "state"))
        model_work = GaugeMetricFamily(
            "diptych_model_work_seconds", "Estimated work of one worker in them.", labels=("queue", "model", "state")
        )
        wait = GaugeMetricFamily("diptych_queue_wait_seconds", "Until what waits is done.", labels=("queue",))
        paused = GaugeMetricFamily("diptych_queue_paused", "Whether workers take nothing.", labels=("queue",))
        for queue, backlog in now.backlogs.items():
            jobs.add_metric((queue, "queued"), backlog.queued)
            jobs.add_metric((queue, "running"), backlog.running)
            work.add_metric((queue, "queued"), backlog.queued_ms / 1000)
            work.add_metric((queue, "running"), backlog.running_ms / 1000)
            wait.add_metric((queue,), now.wait_s(queue))
            paused.add_metric((queue,), float(queue in now.paused))
        for queue, model, backlog in now.backlogs_by_model():
            model_jobs.add_metric((queue, model, "queued"), backlog.queued)
            model_jobs.add_metric((queue, model, "running"), backlog.running)
            model_work.add_metric((queue, model, "queued"), backlog.queued_ms / 1000)
            model_work.add_metric((queue, model, "running"), backlog.running_ms / 1000)
        workers = GaugeMetricFamily("diptych_workers", "Workers by state.", labels=("state",))
        states = Counter(worker.state for worker in now.workers)
        for state in ("ready", "starting", "draining"):
            workers.add_metric((state,), states[state])
        unreadable = CounterMetricFamily(
            "diptych_unreadable", "Records and cards in Redis that this version cannot read.", labels=("kind",)
        )
        for kind, count in TALLY.counts().items():
            unreadable.add_metric((kind,), count)
        yield from (up, jobs, work, model_jobs, model_work, wait, paused, workers, unreadable)
