"""Prometheus metrics of a worker: batches by phase, jobs by outcome, jobs in flight, device memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from core.batching.engine import Tick
from core.jobs.unreadable import TALLY

log = logging.getLogger(__name__)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# The name under which vLLM shows it; read by its dashboards, and by the endpoint picker of the Gateway API's inference
# extension.
_VLLM_KV_CACHE = "vllm:kv_cache_usage_perc"
_LONG = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class WorkerMetrics:
    """One set per process. Thread-safe. All metrics start at 0."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("modality", "phase")
        self._seconds = Histogram(
            "diptych_batch_seconds", "One iteration of the engine.", labels, buckets=_SECONDS, registry=self.registry
        )
        self._rows = Histogram(
            "diptych_batch_rows", "Rows that shared one.", labels, buckets=_ROWS, registry=self.registry
        )
        self._failures = Counter(
            "diptych_batch_failures", "Iterations that failed; their requests are retried alone.", labels,
            registry=self.registry,
        )  # fmt: skip
        self._jobs = Counter(
            "diptych_jobs", "Jobs by how this worker ended them.", ("modality", "outcome"), registry=self.registry
        )
        self._claims = Counter(
            "diptych_claims",
            "Jobs with files, such as LoRAs or one of several models, by whether this worker had these in memory.",
            ("files",),
            registry=self.registry,
        )  # fmt: skip
        self._kv_caches: dict[str, Callable[[], float]] = {}
        self._job_seconds = Histogram(
            "diptych_job_seconds", "A job in the engine, from its claim to its result.", ("modality",), buckets=_LONG,
            registry=self.registry,
        )  # fmt: skip

    def tick(self, tick: Tick) -> None:
        """Count an iteration. On the engine's thread."""
        phase = str(getattr(tick.group, "phase", tick.modality))
        if tick.error is not None:
            self._failures.labels(tick.modality, phase).inc()
            return
        self._seconds.labels(tick.modality, phase).observe(tick.seconds)
        self._rows.labels(tick.modality, phase).observe(tick.rows)

    def claimed(self, *, warm: bool) -> None:
        """Count the claim of a job that names files."""
        self._claims.labels("warm" if warm else "cold").inc()

    def ended(self, modality: str, outcome: str, seconds: float) -> None:
        """Count a job's outcome: succeeded, failed, expired, handed_back, dropped or lost."""
        self._jobs.labels(modality, outcome).inc()
        if outcome == "succeeded":
            self._job_seconds.labels(modality).observe(seconds)

    def show_kv_cache(self, model: str, usage: Callable[[], float]) -> None:
        """Show how much of a text model's KV cache is used: `usage()`, from 0 to 1."""
        self._kv_caches[model] = usage

    def serve(self, address: str, in_hand: Callable[[], dict[str, int]]) -> None:
        """Serve on `host:port`, from its own thread, until the process ends. Raises OSError."""
        self.registry.register(_Now(in_hand, self._kv_caches))
        host, _, port = address.rpartition(":")
        start_http_server(int(port), addr=host.strip("[]"), registry=self.registry)
        log.info("metrics are at http://%s/metrics", address)


class _Now(Collector):
    """Metrics read at scrape time."""

    def __init__(self, in_hand: Callable[[], dict[str, int]], kv_caches: Mapping[str, Callable[[], float]]) -> None:
        self._in_hand = in_hand
        self._kv_caches = kv_caches

    def collect(self) -> Iterable[Any]:
        gauge = GaugeMetricFamily("diptych_jobs_in_hand", "Messages that this worker has taken.", labels=("queue",))
        for queue, count in self._in_hand().items():
            gauge.add_metric((queue,), count)
        yield gauge
        caches = GaugeMetricFamily("diptych_kv_cache_usage_ratio", "Used part of the KV cache.", labels=("model",))
        alias = GaugeMetricFamily(_VLLM_KV_CACHE, "The same under vLLM's name.", labels=("model_name",))
        for model, usage in [*self._kv_caches.items()]:
            value = usage()
            caches.add_metric((model,), value)
            alias.add_metric((model,), value)
        yield from (caches, alias)
        unreadable = CounterMetricFamily(
            "diptych_unreadable", "Records and cards in Redis that this version cannot read.", labels=("kind",)
        )
        for kind, count in TALLY.counts().items():
            unreadable.add_metric((kind,), count)
        yield unreadable
        torch = sys.modules.get("torch")  # not imported just for this
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            used = GaugeMetricFamily("diptych_device_memory_bytes", "Of the GPU.", labels=("what",))
            free, total = torch.cuda.mem_get_info()
            for label, size in (("allocated", torch.cuda.memory_allocated()), ("free", free), ("total", total)):
                used.add_metric((label,), size)
            yield used


METER = WorkerMetrics()
