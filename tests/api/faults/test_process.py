"""The API as a process of its own: killed at the worst moment, and stopped as a supervisor stops it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from api.app import create_app
from core.config import Settings, SettingsError
from core.jobs.record import JobState
from tests.api.world import PATIENCE_S, SERVE, Worker, check_error, eventually, process

# Dies when the job is made, and nobody has been told.
DIES = "import os; from api.jobs import routes; routes.job_object = lambda *_: os.kill(os.getpid(), 9); " + SERVE


def test_killed_between_the_record_and_the_answer(settings: Settings) -> None:
    with Worker(settings) as worker:
        worker.announce()
        with process(DIES, settings) as (child, client):
            with pytest.raises(httpx2.TransportError):
                client.post("/v1/jobs", json={"type": "image", "prompt": "a cat"})
            assert child.wait(PATIENCE_S) == -signal.SIGKILL
        (id,) = worker.ids()
        assert worker.is_(id, JobState.QUEUED)
        assert worker.messages() == [(id, 3)], "its message came with it: nobody need look for it"
        worker.work(id)


def test_stops_when_it_is_told_to(settings: Settings) -> None:
    with Worker(settings) as worker, ThreadPoolExecutor(1) as pool:
        worker.announce()
        with process(SERVE, settings) as (child, client):
            answer = pool.submit(client.post, "/v1/images/generations", json={"prompt": "a cat"})
            (id,) = eventually(worker.ids)
            eventually(worker.messages)
            child.terminate()
            check_error(answer.result(PATIENCE_S), 503, code="stopping")
            assert child.wait(PATIENCE_S) == -signal.SIGTERM
            assert child.stderr is not None and child.stderr.read() == ""
        assert worker.is_(id, JobState.CANCELLED)


# Redis never answers, which is told.
HANGS = (
    "import sys, time; from api import app; from core.jobs.job_lists import JobLists; "
    "from core.jobs.store import JobStore; app._GRACE_S = 0.1; "
    "JobStore.get = JobLists.summary = lambda *_: (print('asked', file=sys.stderr, flush=True), time.sleep(1)); "
    + SERVE
)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/jobs/x"), ("POST", "/v1/jobs/x/cancel")])
def test_a_request_that_does_not_end_in_time_is_answered_503(settings: Settings, method: str, path: str) -> None:
    """It was a 500 in plain text, with a traceback in the log."""
    with process(HANGS, settings) as (child, client), ThreadPoolExecutor(1) as pool:
        assert child.stderr is not None
        answer = pool.submit(client.request, method, path)
        assert child.stderr.readline() == "asked\n"
        child.terminate()
        check_error(answer.result(PATIENCE_S), 503, code="stopping")
        assert ("retry-after" in answer.result().headers) == (method == "GET")
        assert child.wait(PATIENCE_S) == -signal.SIGTERM
        assert "Traceback" not in child.stderr.read()


# Tells on SIGUSR1 how many full collections of garbage there were.
TELLS = (
    "import gc, signal, sys\n"
    "said = lambda *_: print(gc.get_stats()[2]['collections'], file=sys.stderr, flush=True)\n"
    "signal.signal(signal.SIGUSR1, said)\n" + SERVE
)


def test_opening_streams_does_not_stop_for_all_garbage(settings: Settings) -> None:
    """Counted, not timed: a full collection walks through every open stream while nobody is answered."""
    with Worker(settings) as worker, contextlib.ExitStack() as streams:
        worker.announce()
        with process(TELLS, settings) as (child, client):
            assert child.stderr is not None
            id = client.post("/v1/jobs", json={"type": "image", "prompt": "a cat"}).json()["id"]

            def collections() -> int:
                child.send_signal(signal.SIGUSR1)
                return int(child.stderr.readline())

            before = collections()
            limits = httpx2.Limits(max_connections=450)
            many = streams.enter_context(httpx2.Client(base_url=client.base_url, timeout=PATIENCE_S, limits=limits))
            opened: list[Iterator[str]] = []
            for _ in range(450):
                lines = streams.enter_context(many.stream("GET", f"/v1/jobs/{id}/events")).iter_lines()
                assert next(lines).startswith("event: queued")
                opened.append(lines)  # which would close the stream if nobody held it
            assert collections() == before


def test_answers_are_not_held_back(settings: Settings) -> None:
    """The socket that is handed over is one of TCP's, and known as one: else 40 ms would go by before each answer."""
    show = (
        "import socket; from uvicorn.protocols.http.h11_impl import H11Protocol as H; made = H.connection_made\n"
        "def look(self, transport):\n"
        "    s = transport.get_extra_info('socket'); made(self, transport)\n"
        "    on = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)\n"
        "    import sys; print('nodelay', on, file=sys.stderr, flush=True)\n"
        "H.connection_made = look\n"
    )
    with process(show + SERVE, settings) as (child, _):
        assert child.stderr is not None and child.stderr.readline() == "nodelay 1\n"


@pytest.mark.parametrize(("name", "value"), [("redis_url", ""), ("artifacts_url", "nothing://x")])
def test_settings_that_cannot_be_used(tmp_path: Path, name: str, value: str) -> None:
    given = {"redis_url": "redis://127.0.0.1:1/0", "data_dir": tmp_path, name: value}
    with pytest.raises(SettingsError, match=f"DIPTYCH_{name.upper()}: "):
        create_app(Settings(**given))
