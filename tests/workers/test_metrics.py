"""A worker's figures: what ticks and jobs add up to, shown on a real port."""

from __future__ import annotations

import socket
import urllib.request
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.batching.engine import Tick
from deployment.redis import free_port
from workers.metrics import WorkerMetrics


class Group(NamedTuple):
    phase: str


def test_what_is_shown_is_what_was_told() -> None:
    meter, port = WorkerMetrics(), free_port()
    for rows, seconds in ((2, 0.004), (8, 0.02), (8, 0.03)):
        meter.tick(Tick("image", Group("deep"), rows, rows // 2, seconds, None))
    meter.tick(Tick("image", Group("deep"), 8, 4, 9.0, RuntimeError()))
    meter.tick(Tick("text", "no phase", 1, 1, 0.5, None))
    for outcome in ("succeeded", "succeeded", "failed", "handed_back"):
        meter.ended("image", outcome, 1.5)
    meter.show_kv_cache("emoji-lm", lambda: 0.25)
    meter.serve(f"127.0.0.1:{port}", lambda: {"image": 3, "text": 0})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }
    expected = {
        ("diptych_batch_rows_sum", "deep", "image"): 18, ("diptych_batch_failures_total", "deep", "image"): 1,
        ("diptych_batch_seconds_count", "deep", "image"): 3, ("diptych_batch_seconds_count", "text", "text"): 1,
        ("diptych_jobs_total", "image", "succeeded"): 2, ("diptych_jobs_total", "failed", "image"): 1,
        ("diptych_job_seconds_count", "image"): 2, ("diptych_jobs_in_hand", "image"): 3,
        ("diptych_kv_cache_usage_ratio", "emoji-lm"): 0.25, ("vllm:kv_cache_usage_perc", "emoji-lm"): 0.25,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected, "what failed is no measure of time"
    assert found["diptych_batch_seconds_sum", "deep", "image"] == pytest.approx(0.054)


def test_an_address_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        WorkerMetrics().serve(f"127.0.0.1:{taken.getsockname()[1]}", dict)
