"""How `diptych serve` starts and ends: however it is started and however it is told to stop, nothing is left and no job
is lost; what keeps it from starting is said at once; and it, and its parts alone, work with a Redis of others.
"""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import cli
from deployment.address import url_in
from deployment.redis import RedisServer, free_port
from pipeline.checkpoints import tiny
from tests.collector import Collector
from tests.deployment.served import ROOT, Client, Served, environment, killed_at_last, wait_until

# A shell's `&` under nohup: SIGINT and SIGHUP are ignored from the start. And there are no standard streams at all.
_BEHIND_A_SHELL = ["sh", "-c", "trap '' INT HUP; exec \"$@\" <&- >&- 2>&-", "sh"]


def test_no_job_is_lost_between_two_lives(serve: Callable[..., Served]) -> None:
    """One job runs and two wait when it is told to stop, and told again because it drains for ever.

    The second life goes on when its terminal ends.
    """
    first = serve(variables={"DIPTYCH_DRAIN_S": "3600", "DIPTYCH_MAX_REQUESTS": "1"})
    first.ready()
    order = {"type": "image", "prompt": "a fox", "guidance_scale": 1.0}
    jobs = [first.json("/v1/jobs", {**order, "steps": steps})["id"] for steps in (250, 3, 3)]
    wait_until(lambda: first.json(f"/v1/jobs/{jobs[0]}")["status"] == "running", "a job in hand")
    assert url_in(first.folder / "data") == first.url
    first.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "diptych: the worker finishes what it has begun (Ctrl-C: hands it back)" in first.err, "a word")
    time.sleep(0.6)  # sooner, and it would be taken for the same signal
    assert first.stop(signal.SIGINT) == 0
    assert url_in(first.folder / "data") == ""
    assert first.err.splitlines()[-1] == "diptych: stopping Redis"

    second = serve(folder=first.folder, command=_BEHIND_A_SHELL, stdin=None)
    wait_until(lambda: second.answers("/healthz"), "the API")
    second.started()
    second.process.send_signal(signal.SIGHUP)
    pictures = [second.finished(id) for id in jobs]
    assert len(set(pictures)) == 3 and all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert second.stop(signal.SIGINT) == 130


def test_ctrl_c_under_make_reaches_both_and_leaves_nothing(tmp_path: Path) -> None:
    """The Makefile's own `serve`, in a process group of its own, as a terminal's foreground is."""
    port, words = free_port(), f"--model {tiny.TINY} --data {tmp_path / 'data'} --no-compile"
    command = ["make", "-o", ".venv/.installed", "serve", f"PORT={port}", f"ARGS={words}"]
    make = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: Client(f"http://127.0.0.1:{port}").answers("/healthz"), "the API")
        children = psutil.Process(make.pid).children(recursive=True)
        assert len(children) >= 4
        os.killpg(make.pid, signal.SIGINT)
        out, _ = make.communicate(timeout=60)
        assert make.returncode != 0 and b"Traceback" not in out
        assert psutil.wait_procs(children, 60)[1] == []
    finally:
        if make.poll() is None:
            os.killpg(make.pid, signal.SIGKILL)


def test_a_worker_for_each_gpu_and_several_apis_are_one_service(serve: Callable[..., Served]) -> None:
    """The GPUs are names only: the workers compute on the CPU. One that is killed comes back, and so does an API;
    it says that it serves when all are there. None of them survives a parent that is killed.
    """
    variables = {"DIPTYCH_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "0,1", "DIPTYCH_DRAIN_S": "1"}
    served = serve("--each-gpu", "--apis", "2", variables=variables)
    wait_until(lambda: len(served.parts("worker")) == len(served.parts("api")) == 2, "two of each")
    killed = [served.parts("worker")[1], served.parts("api")[0]]
    for part, name in zip(killed, ("worker 1", "API 1"), strict=True):
        part.kill()
        wait_until(lambda name=name: f"the {name} ended (killed by SIGKILL); starting it again" in served.err, name)
    served.ready()
    workers, apis = served.parts("worker"), served.parts("api")
    assert len(workers) == len(apis) == 2 and not {*killed} & {*workers, *apis}
    assert {worker.environ()["CUDA_VISIBLE_DEVICES"] for worker in workers} == {"0", "1"}
    live = lambda: [model["id"] for model in served.json("/v1/models")["data"] if model["diptych"]["live"]]  # noqa: E731
    wait_until(lambda: live() == [tiny.TINY], "the one model, as either API sees it")
    assert served.picture().startswith(b"\x89PNG")
    job = served.json("/v1/jobs", {"type": "image", "prompt": "a fox", "steps": 1000, "n": 4})
    wait_until(lambda: served.json(f"/v1/jobs/{job['id']}")["status"] == "running", "a job in hand")
    assert served.stop(signal.SIGKILL) == -signal.SIGKILL


# -- what keeps it from starting --------------------------------------------------------------------------------------


def test_without_a_gpu_none_is_served(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["serve", "--each-gpu"]) == 2
    assert "--each-gpu: no GPU is visible here" in capsys.readouterr().err


@pytest.mark.long
def test_an_artifacts_url_of_no_use_ends_it(serve: Callable[..., Served]) -> None:
    """On an address for everyone, with variables that are no settings: all is said once, and the error last."""
    variables = {"DIPTYCH_ARTIFACTS_URL": "gopher://pictures", "DIPTYCH_PRECISON": "fp16", "diptych_port": "80"}
    service = serve("--host", "0.0.0.0", variables=variables)
    assert service.ended(120) == 2
    assert service.err.splitlines()[-1].startswith("diptych: DIPTYCH_ARTIFACTS_URL: ")
    assert "Traceback" not in service.err and service.out == "" and "starting it again" not in service.err
    assert "other machines can reach the API; they are served once there is a key" in service.err
    warning = "DIPTYCH_PRECISON is not a known setting and is ignored; did you mean DIPTYCH_PRECISION?"
    assert service.err.count(warning) == 1


def test_a_model_that_is_not_there_ends_it_and_a_terminals_spinner_leaves_whole_lines(
    serve: Callable[..., Served],
) -> None:
    """Of a catalogue, the name that is missing is told before anything is loaded."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        service = serve(
            "--models", f"{tiny.TINY},wizard", model=None, stdout=theirs, stderr=theirs,
            variables={"TERM": "xterm", "COLUMNS": "200"},
        )  # fmt: skip
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # EIO: nobody has the other side open any more
            while read := terminal.read(4096):
                seen += read
        assert service.ended(120) == 2
    lines = seen.decode().splitlines()
    assert any("starting" in line and "\x1b[" in line for line in lines)
    said = next(line for line in lines if "no such folder" in line)
    assert said.rpartition("\x1b[2K")[2].startswith("diptych: model: wizard: no such folder")
    assert not any("loading" in line or "Traceback" in line for line in lines)


def test_a_machine_without_redis_is_told_so(serve: Callable[..., Served], tmp_path: Path) -> None:
    old = tmp_path / "bin" / "redis-server"
    old.parent.mkdir()
    old.write_text(
        "#!/bin/sh\ntest \"$1\" = --version && exec echo 'Redis server v=7.0.0'\necho out of order; exit 1\n"
    )
    old.chmod(0o755)
    service = serve(variables={"PATH": f"{old.parent}:{os.environ['PATH']}"})
    assert service.ended() == 1
    assert service.err.splitlines() == ["diptych: starting", "diptych: Redis did not start: out of order"]


@pytest.mark.parametrize("name", ["logs", "redis"])
def test_data_that_cannot_be_written_is_named(serve: Callable[..., Served], tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir(parents=True)
    (tmp_path / "data" / name).touch()
    service = serve(folder=tmp_path)
    assert service.ended() == 2
    assert f"diptych: --data: {tmp_path / 'data' / name} cannot be used (File exists)" in service.err


# -- with a Redis of somebody else's -------------------------------------------------------------------------------


def test_with_another_redis_it_starts_none_and_waits_for_it(
    serve: Callable[..., Served], redis_server: RedisServer
) -> None:
    redis_server.stop()
    service = serve(variables={"DIPTYCH_REDIS_URL": redis_server.url})
    wait_until(lambda: "DIPTYCH_REDIS_URL: Redis cannot be reached; trying until it does" in service.err, "a word")
    redis_server.start()
    wait_until(lambda: "diptych: worker: loading" in service.err, "the worker")
    assert not service.parts("redis")
    assert service.stop(signal.SIGTERM) == 0
    assert service.err.count("DIPTYCH_REDIS_URL: Redis cannot be reached") == 1
    assert redis_server.password not in service.err and "Traceback" not in service.err
    assert redis_server.answers()


@pytest.mark.parametrize("command", ["api", "worker"])
@pytest.mark.parametrize(
    ("url", "message"),
    [("", "must be given, such as redis://"), ("http://secret@nowhere", "must begin with redis:// or rediss://"),
     ("redis://secret@a b", "must hold no spaces")],
)  # fmt: skip
def test_parts_on_their_own_need_a_redis(
    command: str, url: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", url)
    assert cli.main([command]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"diptych: DIPTYCH_REDIS_URL: {message}") and "secret" not in err


@pytest.mark.long
def test_parts_on_their_own_make_a_service(redis_url: str, tmp_path: Path) -> None:
    port = free_port()
    service = Client(f"http://127.0.0.1:{port}")
    with Collector() as collector:
        env = environment(
            DIPTYCH_REDIS_URL=redis_url, DIPTYCH_ARTIFACTS_URL=tmp_path.as_uri(), DIPTYCH_DRAIN_S="1",
            DIPTYCH_TRACES=collector.url,
        )  # fmt: skip
        words = (["api", "--port", str(port)], ["worker", "--model", tiny.TINY])
        parts = [subprocess.Popen([sys.executable, "-m", "cli", *part], env=env) for part in words]
        with killed_at_last(*parts):
            wait_until(lambda: service.answers("/readyz"), "a worker that is ready")
            assert service.picture().startswith(b"\x89PNG")
            for part in parts:
                part.send_signal(signal.SIGINT)
            assert [part.wait(60) for part in parts] == [130, 130]
    assert collector.services == {"diptych-api", "diptych-worker"}, [span.name for span in collector.spans()]
    spans = {span.name: span for span in collector.spans()}
    asked, drawn, engine = (spans[name] for name in ("POST /v1/jobs", "job image", "engine"))
    assert asked.trace_id == drawn.trace_id == engine.trace_id, "one trace through the queue"
    assert (drawn.parent_span_id, engine.parent_span_id) == (asked.span_id, drawn.span_id)
    attributes = {attribute.key: attribute.value.string_value for attribute in drawn.attributes}
    assert attributes["gen_ai.request.model"] == attributes["diptych.model"] == attributes["gen_ai.response.model"]
