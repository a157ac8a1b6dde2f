"""`diptych doctor`: what is well is said to be, what is broken is named, and nothing is left behind."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

import cli
from cli.doctor import gpu, threads
from core.jobs.cards import WorkerCard
from core.jobs.keyring import Keyring
from core.jobs.registry import Registry
from core.kernels.device import DeviceInfo
from core.threads import cores
from deployment.redis import free_port
from tests.core.kernels.test_device import A100, H200, L4, NO_NVRTC, V100
from tests.http_server import Handler, LocalServer
from tests.servers import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, redis_url: str, tmp_path: Path) -> Path:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", redis_url)
    monkeypatch.setenv("DIPTYCH_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("DIPTYCH_PORT", str(free_port()))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the marks by what they are of; a second line of the same counts if it is worse."""
    code = cli.main(["doctor", *options])
    found: dict[str, str] = {}
    for line in capsys.readouterr().out.splitlines():
        what = line[2:].partition(":")[0]
        found[what] = max(line[0], found.get(what, ""), key="✓·✗".index) if what in found else line[0]
    return code, found


def test_all_is_well(healthy: Path, capsys: pytest.CaptureFixture[str], redis_url: str) -> None:
    keyring = Keyring(redis_url)
    keyring.add("me")
    keyring.close()
    code, found = run(capsys)
    assert code == 0 and "✗" not in found.values()
    looked_at = {"python", "cpu", "cpu int8", "cpu fp32", "model", "data", "redis", "artifacts", "port", "access"}
    assert looked_at <= found.keys()
    assert found["worker"] == "·", "there is none"
    assert not [path for path in healthy.rglob("*") if path.is_file()], "what was written is gone"


@pytest.mark.parametrize(
    ("what", "name", "value"),
    [
        ("redis", "REDIS_URL", "redis://127.0.0.1:1/0"), ("model", "MODEL", "/nowhere"),
        ("artifacts", "ARTIFACTS_URL", "nothing://x"), ("device", "DEVICE", "cuda:9"),
        ("checker", "CHECKER", "/nowhere"), ("redis", "", "allkeys-lru"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named(
    healthy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, redis_url: str, what: str,
    name: str, value: str,
) -> None:  # fmt: skip
    if name:
        monkeypatch.setenv(f"DIPTYCH_{name}", value)
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", "noeviction" if name else value)
        try:
            code, found = run(capsys)
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert code == 1 and found[what] == "✗"


@pytest.mark.parametrize(
    ("class_name", "code", "said"),
    [
        ("PNDMScheduler", 0, "· sampler: PNDMScheduler is drawn by dpm++2m, the nearest sampler"),
        ("DDIMScheduler", 0, "· sampler: DDIMScheduler is drawn by euler, which takes the same steps"),
        ("VQDiffusionScheduler", 1, "_class_name='VQDiffusionScheduler' is not a supported scheduler"),
        ("EulerDiscreteScheduler", 0, ""),
    ],
)
def test_a_sampler_that_replaces_the_models_own_is_said(
    healthy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, class_name: str, code: int,
    said: str,
) -> None:  # fmt: skip
    model = healthy / "model"
    (model / "scheduler").mkdir(parents=True)
    (model / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    (model / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": class_name}))
    monkeypatch.setenv("DIPTYCH_MODEL", str(model))
    assert cli.main(["doctor"]) == code
    out = capsys.readouterr().out
    assert said in out and (" sampler: " in out) == bool(said)


OLDER = "not a Hopper device (compute capability {})"
OURS = "torch (linear, conv): ours multiply 8 bits; torch (layer norm): ours writes 8 bits; "
TRITONS = "linear, geglu, conv, upsample conv, layer norm"


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (
            A100,
            [
                "✓ cuda:0: NVIDIA A100, compute capability 8.0, 80 GiB",
                f"✓ cuda:0 int8: Triton kernels ({TRITONS}): {OLDER.format('8.0')}; "
                f"torch (attention): {OLDER.format('8.0')}; Triton kernels (group norm, quantize)",
                "· cuda:0 fp8: does not run: fp8 needs compute capability 8.9, NVIDIA A100 has 8.0; take int8 or bf16",
                f"✓ cuda:0 bf16: {OURS}torch (attention): {OLDER.format('8.0')}; Triton kernels (group norm)",
            ],
        ),
        (
            V100,
            [
                "✓ cuda:0: Tesla V100, compute capability 7.0, 80 GiB",
                "· cuda:0 int8: does not run: int8 needs compute capability 8.0, Tesla V100 has 7.0; take fp16",
                "· cuda:0 fp8: does not run: fp8 needs compute capability 8.9, Tesla V100 has 7.0; take fp16",
                "· cuda:0 bf16: torch: bf16 needs compute capability 8.0, Tesla V100 has 7.0",
            ],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, DeviceInfo) else "",
)
def test_what_draws_on_a_gpu_is_said_for_each_precision(device: DeviceInfo, said: list[str]) -> None:
    marks = {"well": "✓", "note": "·", "ill": "✗"}
    assert [f"{marks[one.state]} {one.subject}: {one.says}" for one in gpu("cuda:0", device, 80 * 2**30)] == said


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (L4, f"Triton kernels ({TRITONS}): not a Hopper device"),
        (NO_NVRTC, f"Triton kernels ({TRITONS}): {NO_NVRTC.nvrtc_lacks}"),
        (H200, f"Hopper kernels ({TRITONS}, attention); Triton kernels (group norm, quantize)"),
    ],
)
def test_fp8_runs_from_ada_on(device: DeviceInfo, said: str) -> None:
    (fp8,) = [one for one in gpu("cuda:0", device, 2**30) if one.subject == "cuda:0 fp8"]
    assert fp8.state == "well" and fp8.says.startswith(said)


@given(each=st.integers(1, 64), workers=st.integers(1, 16), processors=st.integers(1, 256))
def test_threads_of_all_workers_are_held_against_the_cores(each: int, workers: int, processors: int) -> None:
    found = list(threads(each * workers, workers, processors))
    assert [finding.state for finding in found] == ["note"] * (each * workers > processors)
    if found and processors >= workers:  # following the advice ends the note
        advised = int(found[0].says.partition("DIPTYCH_THREADS to ")[2].split()[0])
        assert not list(threads(advised * workers, workers, processors))


def test_the_port_that_is_looked_at_is_an_option(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Page(Handler):
        def respond(self) -> None:
            self.answer(200, b"no Diptych")

    with LocalServer(Page) as stranger:
        port = stranger.url.rpartition(":")[2]
        assert run(capsys)[1]["port"] == "✓"
        code, found = run(capsys, "--port", port)
    assert code == 1 and found["port"] == "✗"
    assert cli.main(["doctor", "--port", "70000"]) == 2
    assert capsys.readouterr().err.startswith("diptych: --port: ")


def test_workers_of_this_machine_are_counted(healthy: Path, capsys: pytest.CaptureFixture[str], redis_url: str) -> None:
    registry = Registry(redis_url)
    for number, host in enumerate((socket.gethostname(), socket.gethostname(), "elsewhere")):
        card = WorkerCard(f"worker-{number}", host, 1, "ready", "", 1.5, threads=cores())
        registry.announce(card, 600)
    cli.main(["doctor"])
    said = capsys.readouterr().out
    assert f"threads: 2 workers compute on {2 * cores()} CPU threads" in said
    for number in range(3):
        registry.deregister(f"worker-{number}")
    registry.close()
    assert "threads" not in run(capsys)[1]


def test_the_server_that_serve_would_start_is_named(
    healthy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DIPTYCH_REDIS_URL")
    monkeypatch.setenv("PATH", str(tmp_path))
    cli.main(["doctor"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line[2:].startswith("redis:"))
    assert line.startswith("✓ redis: Valkey 9.") and line.endswith(
        "bundled: for this machine alone, updated with Diptych"
    )
    monkeypatch.setattr("deployment.redis_programs.bundled", lambda: None)
    cli.main(["doctor"])
    assert "✗ redis: there is no redis-server or valkey-server on the PATH" in capsys.readouterr().out
