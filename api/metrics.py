"""GET /metrics for Prometheus: requests by route, queues, models, waits and workers. For keys with the scope admin.

Uses the newest snapshot and measured response times; queries nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fastapi import Response
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.access import By
from api.cards import RegistrySnapshot
from api.http.middleware import on_start
from api.routers import new_router
from api.service import Given, Service
from core.jobs.record import QueueBacklog
from core.jobs.unreadable import TALLY

router = new_router("health")

_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STATES = ("ready", "starting", "draining")
# The names under which vLLM shows the jobs of a model by state; read by its dashboards, and by the endpoint picker of
# the Gateway API's inference extension.
_VLLM = {"queued": "vllm:num_requests_waiting", "running": "vllm:num_requests_running"}
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
        wait = GaugeMetricFamily("diptych_queue_wait_seconds", "Until what waits is done.", labels=("queue",))
        paused = GaugeMetricFamily("diptych_queue_paused", "Whether workers take nothing.", labels=("queue",))
        for queue, backlog in now.backlogs.items():
            jobs.add_metric((queue, "queued"), backlog.queued)
            jobs.add_metric((queue, "running"), backlog.running)
            work.add_metric((queue, "queued"), backlog.queued_ms / 1000)
            work.add_metric((queue, "running"), backlog.running_ms / 1000)
            wait.add_metric((queue,), now.wait_s(queue))
            paused.add_metric((queue,), float(queue in now.paused))
        workers = GaugeMetricFamily("diptych_workers", "Workers by state.", labels=("state",))
        states = Counter(worker.state for worker in now.workers)
        for state in _STATES:
            workers.add_metric((state,), states[state])
        unreadable = CounterMetricFamily(
            "diptych_unreadable", "Records and cards in Redis that this version cannot read.", labels=("kind",)
        )
        for kind, count in TALLY.counts().items():
            unreadable.add_metric((kind,), count)
        yield from (up, jobs, work, wait, paused, workers, unreadable)
        yield from _by_model(now)


def _by_model(now: RegistrySnapshot) -> Iterable[Metric]:
    """The load and the workers of every model that has a card or live jobs; 0 for one without."""
    jobs = GaugeMetricFamily("diptych_model_jobs", "Jobs of a model.", labels=("model", "state"))
    work = GaugeMetricFamily(
        "diptych_model_work_seconds", "Estimated work of one worker in them.", labels=("model", "state")
    )
    workers = GaugeMetricFamily("diptych_model_workers", "Workers of a model.", labels=("model", "state"))
    aliases = {
        state: GaugeMetricFamily(name, "diptych_model_jobs under vLLM's name.", labels=("model_name",))
        for state, name in _VLLM.items()
    }
    nothing = QueueBacklog(0, 0, 0, 0)
    states = Counter((model.name, worker.state) for worker in now.workers for model in worker.models)
    for model in sorted({card.name for card in now.models} | {*now.model_backlogs} | {name for name, _ in states}):
        load = now.model_backlogs.get(model, nothing)
        for state, count, ms in (
            ("queued", load.queued, load.queued_ms), ("running", load.running, load.running_ms),
        ):  # fmt: skip
            jobs.add_metric((model, state), count)
            work.add_metric((model, state), max(ms, count) / 1000)  # above 0 where there are jobs: it wakes workers
            aliases[state].add_metric((model,), count)
        for state in _STATES:
            workers.add_metric((model, state), states[model, state])
    return (jobs, work, workers, *aliases.values())
