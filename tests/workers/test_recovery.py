"""What is left of jobs when workers die, hang, sleep or are refused by Redis: every job ends, once, none is lost."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import psutil
import pytest
import redis
from celery.backends.base import DisabledBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.entity import Queue

from contract.text import TextJob
from core.config import Settings
from core.jobs.broker import QUEUES, Envelope, read_message
from core.jobs.record import JobDraft, JobState, new_id
from deployment.redis import RedisServer
from llm.families import tiny
from llm.parallel.followers import RANK_LOST
from tests.core import refusals
from tests.faults.histories.proxy import Proxy
from tests.forks import REAL
from tests.workers.crew import Crew, eventually
from tests.workers.test_worker import most_at_once
from workers.app import create
from workers.claims.heartbeat import STUCK

LONG = 1000


@pytest.mark.parametrize("way", [*refusals.WAYS, "away"])
def test_finished_work_outlasts_every_refusal(crew: Crew, redis_server: RedisServer, way: str) -> None:
    """It is written when Redis takes it, counts no attempt, and the worker serves on. A late message has no effect."""
    hinder, reason = refusals.WAYS.get(way, (lambda _: away(redis_server), "cannot be reached"))
    worker = crew.hire("--step", "0.05")
    id = crew.ask(steps=20)
    crew.running(id)
    with hinder(crew.redis):
        eventually(lambda: worker.noted("done", id))
        eventually(lambda: reason in worker.log and "are written when Redis is available" in worker.log)
    job = crew.ended(id)
    assert (job.state, job.attempt, job.lost) == (JobState.SUCCEEDED, 1, 0)
    crew.send(id)
    crew.succeeded(crew.ask(seed=9))
    assert len(worker.noted("done", id)) == 1 and crew.job(id) == job
    assert worker.well


@contextlib.contextmanager
def away(server: RedisServer) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.start()


def test_a_right_that_lacks_is_said_and_waited_for(crew: Crew) -> None:
    """Celery would ask, be refused and connect anew, for ever."""
    granted = "resetkeys ~diptych:* ~image* ~text* ~_kombu.* ~unacked* resetchannels &/* +@all -@admin -brpop"
    crew.redis.execute_command("ACL", "SETUSER", "few", "reset", "on", ">secret", *granted.split())
    try:
        worker = crew.hire(ready=False, redis_url=f"redis://few:secret@127.0.0.1:{urlsplit(crew.url).port}/0")
        eventually(lambda: "Redis refuses BRPOP on image" in worker.log)
        assert "docs/operations.md" in worker.log
        id = crew.ask()

        def refused() -> list[dict[str, Any]]:
            entries: Any = crew.redis.acl_log()
            return [entry for entry in entries if entry["object"] == "brpop"]

        looked = lambda: sum(entry["count"] for entry in refused())  # noqa: E731
        before = looked()
        eventually(lambda: looked() > before, "it does not look again")
        assert {entry["context"] for entry in refused()} == {"multi"}, "it asks for a message all the same"
        crew.redis.execute_command("ACL", "SETUSER", "few", "+brpop")
        crew.succeeded(id)
        assert worker.log.count("Redis refuses") <= 2 and "Traceback" not in worker.log
    finally:
        crew.redis.execute_command("ACL", "DELUSER", "few")


def test_all_that_a_killed_worker_had_runs_again_at_once(crew: Crew, reaper: None) -> None:
    """Beside each other, and beside what the other worker has begun: nobody waits until somebody's end."""
    first = crew.hire(lease_s=1.0, image_jobs=8)
    ids = [crew.ask(steps=LONG, seed=seed, prompt="STEP=0.05") for seed in range(8)]
    for id in ids:
        crew.running(id)
    second = crew.hire(lease_s=1.0, image_jobs=16)
    other = crew.ask(steps=LONG, prompt="STEP=0.05")
    crew.running(other)
    first.signal(signal.SIGKILL)
    eventually(lambda: all(crew.job(id).attempt == 2 and crew.job(id).progress is not None for id in ids))
    jobs = [crew.job(id) for id in (*ids, other)]
    assert {job.state for job in jobs} == {JobState.RUNNING}
    assert {job.worker.split("-")[-2] for job in jobs} == {str(second.process.pid)}
    assert {(job.lost, job.suspect) for job in jobs} == {(1, False), (0, False)}
    assert not crew.redis.keys("_kombu.binding.*celeryev*"), "Redis would gather one for each process"


def test_poison_costs_as_many_workers_as_it_has_lives_and_nobody_else_a_last_one(crew: Crew, reaper: None) -> None:
    """At its second crash all that are there become suspect; it then goes down alone."""
    poison = crew.make(prompt="KILL STEP=0.3")
    innocents = [crew.make(seed=seed, prompt="STEP=0.3") for seed in range(5)]
    for id in (poison, *innocents):
        crew.send(id)
    crashes = 0
    while not crew.job(poison).state.final:
        worker = crew.hire(lease_s=1.0, ready=False)
        eventually(lambda: worker.process.poll() is not None or crew.job(poison).state.final)  # noqa: B023
        crashes += worker.process.poll() == -signal.SIGKILL
        assert crashes <= 3
    crew.hire(lease_s=1.0, ready=False)
    jobs = [crew.ended(id) for id in innocents]
    assert {job.state for job in jobs} == {JobState.SUCCEEDED}
    assert max(job.lost for job in jobs) <= 2
    job = crew.job(poison)
    assert (job.state, job.lost, crashes) == (JobState.FAILED, 3, 3) and (job.error or {})["code"] == "crashed"


ODD = ["no JSON at all", "[]", '"x"', "[" * 10_000, '{"properties": {"body_encoding": "base64"}, "body": "%"}', "\xff"]


PLACES = [  # in a message, whose body is decoded
    *((name,) for name in ("body", "headers", "properties", "content-type", "content-encoding")),
    *(("headers", name) for name in ("task", "id", "eta", "expires", "retries", "timelimit", "root_id", "group",
        "argsrepr", "compression", "ignore_result", "stamps", "replaced_task_nesting")),
    *(("properties", name) for name in ("delivery_info", "delivery_tag", "priority", "body_encoding",
        "correlation_id", "reply_to", "delivery_mode")),
    ("properties", "delivery_info", "exchange"), ("properties", "delivery_info", "routing_key"),
    ("body", 0), ("body", 0, 0), ("body", 1), ("body", 2), ("body", 2, "chain"), ("body", 2, "callbacks"),
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["x" * 100_000, "a" * 64, "image", "application/x-python-serialize", "2999-01-01T00:00:00Z"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=9), values, max_size=3)
    | st.fixed_dictionaries({"__type__": st.sampled_from(["uuid", "datetime", "x"]), "__value__": values}),
    max_leaves=5,
)  # fmt: skip
GONE = object()


def changed(message: str, changes: list[tuple[tuple[str | int, ...], object]]) -> str:
    """The message with other values in these places, as far as they exist."""
    whole = json.loads(message)
    whole["body"] = json.loads(base64.b64decode(whole["body"]))
    for path, value in changes:
        with contextlib.suppress(LookupError, TypeError):
            place = whole
            for name in path[:-1]:
                place = place[name]
            if value is GONE:
                del place[path[-1]]
            else:
                place[path[-1]] = value
    if "body" in whole:
        whole["body"] = base64.b64encode(json.dumps(whole["body"]).encode()).decode()
    return json.dumps(whole)


def test_no_message_ends_a_worker_or_keeps_its_place(crew: Crew) -> None:
    """Whatever its fields hold: it is served as the job's that it names, or put aside for people to look at."""
    worker = crew.hire(image_jobs=2)
    put_aside = {*ODD}
    crew.redis.rpush("image", *ODD)

    @settings(max_examples=150)
    @given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES | st.just(GONE)), min_size=1, max_size=2))
    def push(changes: list[tuple[tuple[str | int, ...], object]]) -> None:
        entry = changed(crew.sender.message(Envelope("no-such-job", "image", 5)), changes)
        crew.redis.rpush("image", entry)
        try:
            read_message(entry, "image")
        except ValueError:
            put_aside.add(entry)

    push()
    crew.succeeded(crew.ask())
    eventually(lambda: crew.redis.llen("image") == 0 and crew.redis.hlen("unacked") == 0, "all acknowledgements")
    assert set(crew.redis.lrange("diptych:dead_letters", 0, -1)) == put_aside
    assert worker.process.poll() is None and "a malformed message in queue" in worker.log
    assert not [text for text in ("Traceback", "x" * 1000, ODD[0]) if text in worker.log]
    jobs = [crew.ask(steps=LONG, seed=k) for k in range(2)]
    for id in jobs:  # both places are free
        crew.running(id)
        assert crew.store.cancel(id)


@pytest.mark.parametrize("max_attempts", [2])
def test_a_crash_costs_an_attempt_and_suspects_run_alone(crew: Crew, reaper: None, max_attempts: int) -> None:
    """A worker dies with two jobs in hand. Both are done by the next one, each while nothing else is."""
    first = crew.hire("--text", lease_s=1.0, max_attempts=max_attempts)
    companion = crew.ask("text", steps=LONG, prompt="STEP=0.02")
    crew.running(companion)
    killer = crew.ask(prompt="KILL=1")
    assert first.wait() == -signal.SIGKILL
    crew.redis.hset(f"diptych:job:{companion}", "parameters", '{"prompt": "short now", "steps": 5}')
    second = crew.hire("--text", "--step", "0.02", lease_s=1.0, max_attempts=max_attempts)
    others = [crew.ask(seed=k) for k in range(6)] + [crew.ask("text") for _ in range(6)]
    for id in (companion, killer, *others):
        crew.succeeded(id)
    for id in (companion, killer):
        job = crew.job(id)
        assert (job.attempt, job.lost, job.suspect) == (2, 1, True)
    inside: set[str] = set()
    for event in second.events:
        if event["event"] == "admit":
            inside.add(event["request"])
        elif event["event"] == "release":
            inside.remove(event["request"])
        suspects = [request for request in inside if request.startswith((companion, killer))]
        assert not suspects or len(inside) == 1


def test_a_hung_device_ends_the_process_and_the_job_goes_on_elsewhere(crew: Crew, reaper: None) -> None:
    worker = crew.hire(lease_s=1.0, stuck_s=1.0)
    id = crew.ask(prompt="HANG=1")
    assert worker.wait() == STUCK
    assert "the device hangs" in worker.log and "Traceback" not in worker.log
    crew.hire(lease_s=1.0, stuck_s=60)
    job = crew.ended(id)
    assert (job.state, job.attempt, job.lost) == (JobState.SUCCEEDED, 2, 1)


def test_a_worker_that_slept_too_long_finds_its_jobs_gone_and_serves_on(crew: Crew, reaper: None) -> None:
    sleeper = crew.hire("--step", "0.02", stuck_s=1.5, lease_s=1.0)
    id = crew.ask(steps=100)
    crew.running(id)
    sleeper.signal(signal.SIGSTOP)
    other = crew.hire(lease_s=1.0)
    job = crew.ended(id)
    assert (job.state, job.attempt, job.lost) == (JobState.SUCCEEDED, 2, 1)
    assert job.worker.split("-")[-2] == str(other.process.pid)
    events = crew.events(id)
    assert other.stop() == 0
    sleeper.signal(signal.SIGCONT)
    eventually(lambda: sleeper.noted("release", f"{id}/1/"))  # its request is taken out of the engine …
    assert not sleeper.noted("done", f"{id}/1/")
    assert crew.ended(crew.ask()).state is JobState.SUCCEEDED  # … and it serves on
    assert crew.events(id) == events and crew.job(id) == job
    assert "of stage: dropped after " in sleeper.log and sleeper.process.poll() is None


def test_redis_restarts_under_a_busy_worker(crew: Crew, redis_server: RedisServer) -> None:
    """Twice. What was under way ends as if nothing had been; limits hold; what comes later is served."""
    worker = crew.hire("--text", "--step", "0.05", image_jobs=2, text_jobs=2)
    for _ in range(2):
        images = [crew.ask(steps=20, seed=k) for k in range(4)]
        for id in images[:2]:
            crew.running(id)
        redis_server.kill()
        redis_server.start()
        crew.succeeded(crew.ask("text"))
        jobs = [crew.ended(id) for id in images]
        assert [(job.state, job.attempt, job.lost) for job in jobs] == [(JobState.SUCCEEDED, 1, 0)] * 4
    assert most_at_once(worker)["image"] == 2
    assert worker.well


@contextlib.contextmanager
def replicated(folder: Path) -> Iterator[tuple[Crew, Callable[[], None]]]:
    """A crew on a Redis with a replica, behind a proxy; and what makes the replica the primary of all."""
    options = ("appendfsync no", "masterauth secret")
    first, second = (RedisServer(folder / str(k), options, password="secret") for k in range(2))
    with contextlib.ExitStack() as stack:
        for server in (first, second):
            server.start()
            stack.callback(server.kill)
        proxy = Proxy(first.port)
        stack.callback(proxy.close)
        direct = [stack.enter_context(redis.Redis.from_url(server.url)) for server in (first, second)]
        direct[1].execute_command("REPLICAOF", "127.0.0.1", str(first.port))
        eventually(lambda: cast("dict[str, Any]", direct[0].info("replication")).get("connected_slaves") == 1)
        eventually(lambda: cast("dict[str, Any]", direct[1].info("replication"))["master_link_status"] == "up")
        crew = Crew(first.url.replace(f":{first.port}", f":{proxy.port}"), folder)
        stack.callback(crew.close)

        def fail_over() -> None:
            direct[0].execute_command("FAILOVER", "TO", "127.0.0.1", str(second.port), "TIMEOUT", "30000")
            eventually(lambda: direct[1].execute_command("ROLE")[0] == b"master", "the replica's promotion")
            proxy.lead(second.port)

        yield crew, fail_over


@pytest.mark.parametrize("fault", ["restarts", "stalls", "fails over"])
def test_a_worker_keeps_its_queues_its_limits_and_its_places(
    crew: Crew, redis_server: RedisServer, tmp_path: Path, fault: str
) -> None:
    """Whatever Redis does under load, twice: what Celery's fixes 10335, 10345 and 10346 are about."""
    with contextlib.ExitStack() as stack:
        fail_over: Callable[[], None] = list
        if fault == "fails over":
            crew, fail_over = stack.enter_context(replicated(tmp_path / "pair"))
        worker = crew.hire("--step", "0.02", image_jobs=2, lease_s=60.0)
        texts = [crew.ask("text") for _ in range(3)]
        for _ in range(1 if fault == "fails over" else 2):
            images = [crew.ask(steps=10, seed=k) for k in range(8)]
            for id in images[:2]:
                crew.running(id)
            if fault == "restarts":
                redis_server.kill()
                redis_server.start()
            elif fault == "stalls":
                assert redis_server.process is not None
                silent = worker.log.count("are written when Redis is available")
                redis_server.process.send_signal(signal.SIGSTOP)
                eventually(lambda: worker.log.count("are written when Redis is available") > silent, "a silent Redis")  # noqa: B023
                redis_server.process.send_signal(signal.SIGCONT)
            else:
                fail_over()
            for id in images:
                job = crew.ended(id)
                assert (job.state, job.attempt, job.lost) == (JobState.SUCCEEDED, 1, 0)
            crew.acknowledged()
            # Two long ones run beside each other: no place is held by what ended before.
            for id in [crew.ask(steps=LONG) for _ in range(2)]:
                crew.running(id)
                crew.store.cancel(id)
        assert most_at_once(worker)["image"] == 2
        assert {crew.job(id).state for id in texts} == {JobState.QUEUED}, "of a queue that it does not serve"
        assert sum(crew.redis.llen(key) for key in crew.redis.scan_iter("text*", _type="list")) == len(texts)

        def kept() -> str:
            count = len(worker.noted("celery"))
            worker.signal(signal.SIGUSR1)
            return str(eventually(lambda: worker.noted("celery")[count:])[0]["request"])

        eventually(lambda: kept() == "0 0 0", "requests that nobody runs")  # the last ones may still be cancelled
        assert worker.well


def test_celery_has_no_results_and_adds_no_queues() -> None:
    """So its leak in the consumer of results (10366) is in code that never runs, and a rejected task (10369) needs no
    result: jobs have records of their own.
    """
    with contextlib.closing(create(Settings(redis_url="redis://127.0.0.1:1/0", artifacts_url="memory://"))) as app:
        assert isinstance(app.backend, DisabledBackend)
        assert not app.conf.task_create_missing_queues
        app.amqp.router.route({"queue": Queue("image.model")}, "diptych.image")
        assert {*app.amqp.queues} == {*QUEUES}


def test_a_rank_is_killed_and_another_worker_finishes_its_job(crew: Crew, reaper: None) -> None:
    """The text model is spread over processes, over gloo."""
    settings: dict[str, Any] = {"text_model": tiny.TINY, "text_memory_mib": 4, "text_requests": 4, "lease_s": 1.0}
    worker = crew.hire("--llm", imported=REAL, text_parallel="pp2", device="cpu", **settings)
    (rank,) = (
        child
        for child in psutil.Process(worker.process.pid).children(recursive=True)
        if "llm.parallel.follower" in " ".join(child.cmdline())
    )
    parameters = TextJob(prompts=[[1, 40, 41]], max_tokens=400, temperature=0.0, logit_bias={"2": -100}).to_dict()
    id = crew.store.create(JobDraft(new_id(), "text", tiny.TINY, parameters)).id
    crew.send(id, "text")
    crew.running(id)
    rank.send_signal(signal.SIGKILL)
    assert worker.wait() == RANK_LOST
    assert f"exiting: rank 1 of pp2 (process {rank.pid}): ended with exit code -9" in worker.log
    other = crew.hire("--llm", imported=REAL, kernels=False, device="cpu", **settings)
    job = crew.ended(id)
    assert (job.state, job.attempt, job.lost) == (JobState.SUCCEEDED, 2, 1)
    assert job.result is not None and len(job.result["choices"][0]["text"]) > 0
    assert other.stop() == 0
