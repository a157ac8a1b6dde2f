"""How `diptych serve` starts and ends: however it is started and however it is told to stop, nothing is left and no job
is lost.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from deployment.redis import free_port
from pipeline.checkpoints import tiny
from tests.deployment.served import ROOT, Client, Served, environment, wait_until

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
    first.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "diptych: the worker finishes what it has begun (Ctrl-C: hands it back)" in first.err, "a word")
    time.sleep(0.6)  # sooner, and it would be taken for the same signal
    assert first.stop(signal.SIGINT) == 0
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
