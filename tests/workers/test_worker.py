"""The worker's process from outside: jobs go in through the store and Celery, results and events come out; and when it
ends, what has begun is finished or handed back, at no cost to any job.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import cli
from core.jobs.broker import PRIORITY_STEPS, list_key, model_queue
from core.jobs.record import JobState
from deployment.redis import RedisServer
from pipeline.checkpoints.tiny import TINY
from tests.core.quant.stage import warm
from tests.workers.crew import Crew, Hired, eventually
from tests.workers.stage import MODEL, picture

LONG = 1000  # steps: the job does not end before the test does


def test_a_job_becomes_pictures(crew: Crew) -> None:
    worker = crew.hire()
    text = crew.ask("text")
    job = crew.ended(crew.ask(n=3, steps=4, seed=2**63 - 2))
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1) and job.result is not None
    for seed, image in zip((2**63 - 2, 2**63 - 1, 0), job.result["images"], strict=True):
        data = crew.artifacts.get(image["key"])
        assert data == picture("a pizza", seed, 32, 32)
        assert (image["seed"], image["size_bytes"]) == (seed, len(data))
    assert job.result["engine_s"] > 0
    (first, _), (second, _), *between, (last, _) = crew.events(job.id)
    assert (first, second, last) == ("queued", "running", "succeeded") and {type for type, _ in between} == {"progress"}
    progress = [data for _, data in between]
    assert job.progress == progress[-1]
    assert progress[-1] == {"steps_done": 12, "steps": 12, "image": progress[-1]["image"], "images_done": 3}
    for field in ("steps_done", "images_done"):
        assert [p[field] for p in progress] == sorted(p[field] for p in progress)
    card = crew.card(worker)
    assert card is not None and card.limits == {"image": 32} and [model.name for model in card.models] == ["stage"]
    crew.acknowledged()
    assert crew.job(text).state is JobState.QUEUED  # nothing here would know what to do with it
    assert re.fullmatch(r"INFO ready\n(INFO job job_[0-9a-f]{24} of stage: succeeded after [0-9.]+ s\n)+", worker.log)


def test_the_real_worker_draws_what_the_command_line_draws(crew: Crew, tmp_path: Path) -> None:
    """By way of `celery -A workers.app worker`: the same process that `diptych worker` is."""
    worker = crew.hire(
        command=(sys.executable, "-m", "celery", "-A", "workers.app", "worker"), model=TINY,
        cache_dir=warm(tmp_path / "cache"),
    )  # fmt: skip
    id = crew.ask(model=TINY, n=2, deterministic=True, steps=2)
    out = tmp_path / "out"
    asked = f"generate|a pizza|-n|2|--seed|7|--steps|2|--deterministic|--model|{TINY}|--threads|1|-o|{out}"
    assert cli.main(asked.split("|")) == 0
    job = crew.ended(id)
    assert job.result is not None, job.error
    first, second = sorted(out.iterdir())
    assert [crew.artifacts.get(image["key"]) for image in job.result["images"]] == [
        first.read_bytes(), second.read_bytes()
    ]  # fmt: skip
    card = crew.card(worker)
    assert card is not None and card.models[0].capacity_per_s > 0
    assert worker.stop() == 0 and crew.card(worker) is None and "Traceback" not in worker.log


def test_whatever_fails_fails_alone(crew: Crew) -> None:
    worker = crew.hire("--text", "--files", "1", max_requests=8)
    failing: list[tuple[dict[str, Any], str, str]] = [
        ({"width": 33}, "invalid_request", "size: 33x32 is not offered"),
        ({"steps": 0}, "invalid_request", "steps: must be between 1 and 1000"),
        ({"n": 11}, "invalid_request", "n: must be between 1 and 10, not "),
        ({"scheduler": "sundial"}, "invalid_request", "scheduler: must be one of euler"),
        ({"lora": 5}, "engine_error", ""),
        ({"prompt": "FAIL please", "n": 3}, "engine_error", "the engine failed at this job (RuntimeError)"),
        ({"prompt": "OVERFLOW please"}, "not_finite", "the fp16 VAE of x returned NaN or infinity"),
        ({"prompt": "MEMORY please"}, "out_of_memory", "the device has too little memory"),
    ]
    ids = [crew.ask(**asked) for asked, _, _ in failing]
    fine, text = crew.ask(n=2), crew.ask("text", prompt="hello")
    for id, (_, code, message) in zip(ids, failing, strict=True):
        job = crew.ended(id)
        assert (job.state, job.attempt) == (JobState.FAILED, 1) and job.error is not None
        assert job.error["code"] == code and job.error["message"].startswith(message)
        assert "please" not in job.error["message"]
    assert crew.ended(fine).state is JobState.SUCCEEDED and crew.ended(text).result is not None
    crew.acknowledged()
    assert "Traceback" not in worker.log


def test_pictures_that_cannot_be_kept_fail_their_job(crew: Crew, tmp_path: Path) -> None:
    crew.hire()
    (tmp_path / "artifacts").rename(tmp_path / "moved")
    (tmp_path / "artifacts").write_text("in the way")
    job = crew.ended(crew.ask())
    assert job.error == {
        "code": "artifact_error",
        "message": "an artifact could not be kept or read: cannot write an artifact: not a directory",
    }
    (tmp_path / "artifacts").unlink()
    (tmp_path / "moved").rename(tmp_path / "artifacts")
    crew.succeeded(crew.ask())


def test_a_cancelled_job_leaves_the_engine(crew: Crew) -> None:
    """There is one place in the engine: the next job gets it only if the cancelled one lets go."""
    worker = crew.hire(max_requests=1)
    id = crew.ask(n=2, steps=LONG)
    crew.running(id)
    card = crew.card(worker)
    assert card is not None
    crew.redis.xadd(f"diptych:control:{card.id}", {"sing": "a song", "cancel ": "no"})  # what it does not understand
    crew.store.cancel(id)
    crew.succeeded(crew.ask())
    assert crew.job(id).state is JobState.CANCELLED and crew.job(id).result is None
    assert crew.events(id)[-1][0] == "cancelled"
    eventually(lambda: len(worker.noted("admit", id)) == len(worker.noted("release", id)))


def test_a_deadline_ends_a_job_wherever_it_stands(crew: Crew) -> None:
    worker = crew.hire(max_requests=1)
    holding = crew.ask(steps=LONG, n=8)
    crew.running(holding)
    waiting = crew.ask(deadline_s=0.2)  # for the place of the one before
    assert crew.ended(waiting).state is JobState.EXPIRED
    assert not crew.job(holding).state.final and not worker.noted("admit", waiting)
    crew.store.cancel(holding)
    drawing = crew.ended(crew.ask(steps=LONG, n=8, deadline_s=1))
    assert (drawing.state, (drawing.error or {})["code"]) == (JobState.EXPIRED, "expired")
    crew.succeeded(crew.ask(deadline_s=60))


def test_no_more_than_the_limit_is_in_hand(crew: Crew) -> None:
    """Each queue by itself, though the other is full; the engine would take all of them."""
    worker = crew.hire("--text", "--step", "0.003", image_jobs=3, text_jobs=2, max_requests=64)
    limits = {"image": 3, "text": 2}
    holds = [crew.ask("image", prompt="STEP=0.05", steps=LONG) for _ in range(4)]
    eventually(lambda: most_at_once(worker)["image"] == 3, "all places of images")
    holds += [crew.ask("text", prompt="STEP=0.05", steps=LONG) for _ in range(4)]
    ids = [crew.ask(modality, steps=20) for _ in range(15) for modality in limits]
    eventually(lambda: most_at_once(worker) == limits, "as many in hand as may be")
    for id in holds:
        crew.store.cancel(id)
    assert {crew.ended(id).state for id in ids} == {JobState.SUCCEEDED}
    assert most_at_once(worker) == limits


def most_at_once(worker: Hired) -> dict[str, int]:
    now: dict[str, int] = {"image": 0, "text": 0}
    most = dict(now)
    for event in worker.events:
        if event["event"] in ("admit", "release"):
            now[event["modality"]] += 1 if event["event"] == "admit" else -1
            most = {modality: max(most[modality], now[modality]) for modality in now}
    return most


def test_a_full_redis_stops_nothing_that_has_begun(crew: Crew) -> None:
    worker = crew.hire()
    running = crew.ask(prompt="STEP=0.1", steps=8)
    crew.running(running)
    crew.redis.config_set("maxmemory", int(crew.redis.info("memory")["used_memory"]) - 100_000)
    try:
        crew.succeeded(running)
    finally:
        crew.redis.config_set("maxmemory", 0)
    crew.succeeded(crew.ask())
    assert worker.well


# -- how it ends -----------------------------------------------------------------------------------------------------

QUEUE = model_queue("image", MODEL)


def test_what_has_begun_is_finished_and_the_rest_is_handed_back(crew: Crew) -> None:
    """One job in the engine, two that wait in it, one that waits in the queue."""
    worker = crew.hire("--step", "0.1", image_jobs=3, max_requests=1)
    begun = crew.ask(steps=8, n=1)
    crew.running(begun)
    waiting = [crew.ask(seed=k) for k in range(3)]
    eventually(lambda: [crew.job(id).state for id in waiting].count(JobState.RUNNING) == 2)
    assert worker.stop() == 0
    assert crew.job(begun).state is JobState.SUCCEEDED
    assert {crew.job(id).state for id in waiting} == {JobState.QUEUED}
    assert crew.card(worker) is None and crew.redis.hlen("unacked") == 0 and "Traceback" not in worker.log
    crew.hire()
    jobs = [crew.ended(id) for id in waiting]
    assert {(job.state, job.lost, job.suspect) for job in jobs} == {(JobState.SUCCEEDED, 0, False)}
    assert sorted(job.attempt for job in jobs) == [1, 2, 2]
    assert "queued" in [type for type, _ in crew.events(waiting[0])][1:]


@pytest.mark.parametrize(
    ("switches", "asked"),
    [(["--compiling"], {"steps": LONG}), ([], {"prompt": "HANG"})],
    ids=["while something compiles, which cannot be interrupted", "a device that hangs"],
)
def test_what_takes_too_long_is_handed_back(crew: Crew, switches: list[str], asked: dict[str, Any]) -> None:
    worker = crew.hire(*switches, drain_s=0.3)
    id = crew.ask(**asked, n=2)
    crew.running(id)
    worker.signal(signal.SIGINT)
    assert worker.wait() == 130
    job = crew.job(id)
    assert (job.state, job.attempt, job.lost, job.suspect) == (JobState.QUEUED, 1, 0, False)
    assert crew.redis.llen(QUEUE) == 1  # its new message
    assert "is handed back" in worker.log and crew.card(worker) is None


def test_a_worker_that_is_still_loading_ends_at_once(crew: Crew) -> None:
    worker = crew.hire("--load", "3600", ready=False)
    card = eventually(lambda: (card := crew.card(worker)) and card.message == "loading the stage" and card)
    assert card and card.state == "starting"
    assert worker.stop() == 0 and crew.card(worker) is None


def test_a_worker_ends_though_redis_is_away(crew: Crew, redis_server: RedisServer) -> None:
    worker = crew.hire(drain_s=0.5)
    id = crew.ask(steps=LONG)
    crew.running(id)
    redis_server.kill()
    try:
        eventually(lambda: "cannot be reached" in worker.log)
        assert worker.stop() == 0
    finally:
        redis_server.start()
    assert "Traceback" not in worker.log


def test_a_job_that_waits_for_a_suspect_is_given_back(crew: Crew) -> None:
    """The suspect runs alone; whoever waits at the gate has claimed nothing, and only its message goes back."""
    worker = crew.hire(drain_s=0.3)
    suspect = crew.make(steps=LONG)
    crew.redis.hset(f"diptych:job:{suspect}", "suspect", "1")
    crew.send(suspect)
    crew.running(suspect)
    others = [crew.ask(seed=k) for k in range(5)]
    # Redis may owe the worker one message; for more it does not ask while it could not begin with them.
    assert crew.redis.llen(list_key(QUEUE, 3)) >= 4
    assert worker.stop() == 0
    assert [crew.job(id).attempt for id in others] == [0] * 5
    crew.redis.hset(f"diptych:job:{suspect}", "parameters", '{"prompt": 1}')
    crew.hire()
    assert [crew.ended(id).state for id in others] == [JobState.SUCCEEDED] * 5
    assert crew.ended(suspect).state is JobState.FAILED


def test_what_redis_hands_out_to_a_worker_that_ends_goes_back(crew: Crew) -> None:
    """Redis still owes it an answer for up to a second, and that answer may be a message."""
    worker = crew.hire()
    worker.signal(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    ids = [crew.ask(seed=k) for k in range(3)]
    assert worker.wait() == 0
    assert {crew.job(id).attempt for id in ids} == {0} and crew.redis.hlen("unacked") == 0
    assert sum(crew.redis.llen(list_key(QUEUE, level)) for level in PRIORITY_STEPS) == 3


BROKEN = """
import sys
from tests.workers import stage
from workers.claims import prefetch

def append(self, message, delivery_tag, usual=prefetch.BoundedQoS.append):
    usual(self, message, delivery_tag)
    if self._prefetch.counts()["image"]:
        raise ZeroDivisionError("a bug of Celery's")

prefetch.BoundedQoS.append = append
sys.exit(stage.main())
"""


def test_where_celery_breaks_the_worker_ends_in_good_order(crew: Crew) -> None:
    worker = crew.hire(command=(sys.executable, "-c", BROKEN), drain_s=0.3)
    begun = crew.ask(steps=LONG)
    crew.running(begun)
    last = crew.ask()
    assert worker.wait() == 1
    assert "Unrecoverable error: ZeroDivisionError" in worker.log
    assert "Traceback" not in worker.log
    assert (crew.job(begun).state, crew.job(begun).lost) == (JobState.QUEUED, 0)
    assert crew.job(last).attempt == 0
    assert crew.card(worker) is None
