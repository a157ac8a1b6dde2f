"""The benchmarks through HTTP, on a real service with the tiny model: every figure is there, and is possible."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from core.config import Settings
from core.jobs.keyring import Keyring
from deployment.children import ChildProcess
from lab.bench import flood, serve
from lab.bench.harness import record, service

Running = tuple[str, str, ChildProcess, float]
SETTINGS = Settings(model="random:tiny", text_model="off", compile=False, kernels=False, threads=1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = SETTINGS.model_copy(update={"max_queued": 1_000_000})
    with service.running(settings, tmp_path_factory.mktemp("service")) as started:
        yield started


@pytest.fixture
def shared(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Benchmarks that start a service get the one of all tests. Keys that they leave in it are removed: with keys, or
    after the last one, nobody else may draw.
    """
    monkeypatch.setattr(service, "running", lambda *_: contextlib.nullcontext(running))
    monkeypatch.setattr(record, "alone", contextlib.nullcontext)  # no figure of this is kept
    monkeypatch.setattr(serve, "_IDLE", float("inf"))
    monkeypatch.setattr(serve, "_LOOK_S", 0.1)
    yield
    url, redis, *_ = running
    with contextlib.closing(Keyring(redis)) as keyring:
        for key in keyring.all():
            keyring.revoke(key.id)
        keyring.unlock()
    assert service.until(lambda: httpx2.get(f"{url}/v1/models", trust_env=False).is_success, 30)


@pytest.mark.long
@pytest.mark.usefixtures("shared")
def test_every_figure_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "_CLIENTS", 3)
    for name in ("_HEALTH_EVERY_S", "_REFUSED_EVERY_S"):
        monkeypatch.setattr(serve, name, 0.05)
    monkeypatch.setattr(flood, "RATE_PER_S", 20.0)
    monkeypatch.setattr(flood, "SECONDS", 2.0)
    result = serve.run(SETTINGS, steps=1, pictures=6, results=tmp_path)
    assert result["ready_s"] > 0
    assert result["arrivals"] == 6 and result["steps"] == 1 and result["model"] == "random:tiny"
    assert result["precision"] == "fp32" and result["deepcache"] == "off"
    assert "api" in result["provenance"]["rooms"]
    assert 0 < result["p50_s"] <= result["p99_s"] and 0 < result["overhead_s"] < result["p99_s"]
    assert result["rate_per_s"] == pytest.approx(0.7 * result["capacity_per_s"], rel=1e-2)
    assert all(result[name] > 0 for name in ("images_per_s", "healthz_p99_s", "rejected_p99_s"))
    # Redis stamps whole milliseconds, so that a part may come out a little below nothing.
    assert all(seconds > -0.01 for seconds in result["overhead_parts_s"].values())
    assert result["submitted"] == 40 and result["left"] == 0
    assert 0 < result["submit_p50_s"] <= result["submit_p99_s"] and result["cancelled"] <= result["queued"] <= 40
    assert all(result[f"flood_{name}_p99_s"] > 0 for name in ("healthz", "metrics"))
    assert 10 < result["api_mib"]["before"] <= result["api_mib"]["most"]
    assert json.loads((tmp_path / "serve.json").read_text()) == result
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


def test_no_arrivals_are_refused() -> None:
    with pytest.raises(record.BenchError, match="--pictures"):
        serve.run(Settings(), steps=1, pictures=0, results=None)
