"""The worker's process from outside: jobs go in through the store and Celery, results and events come out."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cli
from core.jobs.record import JobState
from pipeline.checkpoints.tiny import TINY
from tests.core.quant.stage import warm
from tests.workers.crew import Crew, Hired, eventually
from tests.workers.stage import picture

LONG = 1000  # steps: the job does not end before the test does


def test_a_job_becomes_pictures(crew: Crew) -> None:
    worker = crew.hire()
    text = crew.ask("text")
    job = crew.ended(crew.ask(n=3, steps=4, seed=2**63 - 2))
    assert job.state is JobState.SUCCEEDED
    assert job.attempt == 1
    assert job.result is not None
    images = job.result["images"]
    assert [image["seed"] for image in images] == [2**63 - 2, 2**63 - 1, 0]
    for image in images:
        data = crew.artifacts.get(image["key"])
        assert data == picture("a pizza", image["seed"], 32, 32)
        assert image["size_bytes"] == len(data)
    assert job.result["engine_s"] > 0
    types = [type for type, _ in crew.events(job.id)]
    assert types[:2] == ["queued", "running"]
    assert types[-1] == "succeeded"
    progress = [data for type, data in crew.events(job.id) if type == "progress"]
    assert len(progress) == len(types) - 3
    assert progress[-1] == {"steps_done": 12, "steps": 12, "image": progress[-1]["image"], "images_done": 3}
    for field in ("steps_done", "images_done"):
        assert [p[field] for p in progress] == sorted(p[field] for p in progress)
    assert job.progress == progress[-1]
    card = crew.card(worker)
    assert card is not None
    assert [model.name for model in card.models] == ["stage"]
    assert card.limits == {"image": 32}
    eventually(lambda: crew.redis.hlen("unacked") == 0, "the acknowledgement")
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
    drawn = sorted(out.iterdir())
    assert [crew.artifacts.get(image["key"]) for image in job.result["images"]] == [p.read_bytes() for p in drawn]
    assert len(drawn) == 2
    card = crew.card(worker)
    assert card is not None
    assert card.models[0].capacity_per_s > 0
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert crew.card(worker) is None
    assert "Traceback" not in worker.log


def test_whatever_fails_fails_alone(crew: Crew) -> None:
    worker = crew.hire("--text", max_requests=8)
    ids: dict[str, str] = {
        "width": crew.ask(width=33),
        "steps": crew.ask(steps=0),
        "n": crew.ask(n=11),
        "scheduler": crew.ask(scheduler="sundial"),
        "engine": crew.ask(prompt="FAIL please", n=3),
        "memory": crew.ask(prompt="MEMORY please"),
        "fine": crew.ask(n=2),
        "text": crew.ask("text", prompt="hello"),
    }
    jobs = {name: crew.ended(id) for name, id in ids.items()}
    assert jobs["fine"].state is JobState.SUCCEEDED
    assert jobs["text"].result is not None
    assert jobs["text"].result["text"] == "hello"
    for name, code, message in [
        ("width", "invalid_request", "size: 33x32 is not offered"),
        ("steps", "invalid_request", "steps: must be between 1 and 1000"),
        ("n", "invalid_request", "n: must be between 1 and 10, not "),
        ("scheduler", "invalid_request", "scheduler: must be one of euler"),
        ("engine", "engine_error", "the engine failed at this job (RuntimeError)"),
        ("memory", "out_of_memory", "the device has too little memory"),
    ]:
        error = jobs[name].error
        assert error is not None
        assert jobs[name].state is JobState.FAILED
        assert error["code"] == code
        assert error["message"].startswith(message)
        assert "please" not in error["message"]
        assert jobs[name].attempt == 1
    eventually(lambda: crew.redis.hlen("unacked") == 0, "all acknowledgements")
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
    assert crew.ended(crew.ask()).state is JobState.SUCCEEDED


def test_a_cancelled_job_leaves_the_engine(crew: Crew) -> None:
    """There is one place in the engine: the next job gets it only if the cancelled one lets go."""
    worker = crew.hire(max_requests=1)
    id = crew.ask(n=2, steps=LONG)
    crew.running(id)
    card = crew.card(worker)
    assert card is not None
    crew.redis.xadd(f"diptych:control:{card.id}", {"sing": "a song", "cancel ": "no"})  # what it does not understand
    crew.store.cancel(id)
    assert crew.ended(crew.ask()).state is JobState.SUCCEEDED
    job = crew.job(id)
    assert job.state is JobState.CANCELLED
    assert job.result is None
    assert crew.events(id)[-1][0] == "cancelled"
    eventually(lambda: len(worker.noted("admit", id)) == len(worker.noted("release", id)))


def test_a_deadline_ends_a_job_wherever_it_stands(crew: Crew) -> None:
    worker = crew.hire(max_requests=1)
    holding = crew.ask(steps=LONG, n=8)
    crew.running(holding)
    waiting = crew.ask(deadline_s=0.2)  # for the place of the one before
    assert crew.ended(waiting).state is JobState.EXPIRED
    assert not crew.job(holding).state.final
    assert not worker.noted("admit", waiting)
    crew.store.cancel(holding)
    drawing = crew.ask(steps=LONG, n=8, deadline_s=1)
    assert crew.ended(drawing).state is JobState.EXPIRED
    error = crew.job(drawing).error
    assert error is not None
    assert error["code"] == "expired"
    assert crew.ended(crew.ask(deadline_s=60)).state is JobState.SUCCEEDED
    eventually(lambda: len(worker.noted("admit", drawing)) == len(worker.noted("release", drawing)))


def test_messages_of_no_use_are_acknowledged_and_ignored(crew: Crew) -> None:
    worker = crew.hire()
    id = crew.ask()
    for _ in range(3):
        crew.send(id)
    crew.send("job_that_never_was")
    crew.send("no id at all; DROP")
    crew.ended(id)
    crew.send(id)
    sender: Any = crew._sender
    for arguments in ([], [{"a": 1}], [None, 2]):
        sender.send_task("diptych.image", args=arguments, queue="image")
    sender.send_task("diptych.unheard", args=[], queue="image")
    crew.redis.lpush("image", _message_without_a_task())
    assert crew.ended(crew.ask(seed=8)).state is JobState.SUCCEEDED
    eventually(lambda: crew.redis.hlen("unacked") == 0, "all acknowledgements")
    assert len(worker.noted("done", id)) == 1
    card = crew.card(worker)
    assert card is not None
    assert card.state == "ready"


def _message_without_a_task() -> str:
    properties = {
        "delivery_tag": "t", "body_encoding": "base64", "delivery_info": {"exchange": "image", "routing_key": "image"},
    }  # fmt: skip
    message = {"body": "e30=", "content-encoding": "utf-8", "content-type": "application/json", "headers": {}}
    return json.dumps({**message, "properties": properties})


# -- two queues ------------------------------------------------------------------------------------------------


def test_text_goes_on_while_images_are_full(crew: Crew, record_property: Any) -> None:
    worker = crew.hire("--text", image_jobs=2, text_jobs=2, max_requests=2)
    images = [crew.ask(steps=LONG) for _ in range(4)]
    for id in images[:2]:
        crew.running(id)
    took_ms = []
    for _ in range(5):
        asked = time.monotonic()
        id = crew.ask("text", steps=1)
        took_ms.append(1000 * (eventually(lambda: worker.noted("admit", id))[0]["at"] - asked))  # noqa: B023
        assert crew.ended(id).state is JobState.SUCCEEDED
    states = [crew.job(id).state for id in images]
    assert states == [JobState.RUNNING] * 2 + [JobState.QUEUED] * 2  # no image has ended meanwhile, none has come in
    record_property("text_start_ms", sorted(took_ms))
    print(f"text tasks began after {', '.join(f'{ms:.0f}' for ms in sorted(took_ms))} ms")
    assert min(took_ms) < 1000  # of the five; a machine that stalls may be slow, a queue that is blocked is always

    crew.store.cancel(images[0])
    freed = eventually(lambda: worker.noted("release", images[0]))[0]["at"]
    began = eventually(lambda: worker.noted("admit", images[2]))[0]["at"]
    print(f"the next image began {1000 * (began - freed):.0f} ms after a place was free")
    assert crew.job(images[3]).state is JobState.QUEUED


def test_no_more_than_the_limit_is_in_hand(crew: Crew) -> None:
    """Each queue by itself; the engine would take all of them."""
    worker = crew.hire("--text", "--step", "0.003", image_jobs=3, text_jobs=2, max_requests=64)
    limits = {"image": 3, "text": 2}
    holds = [crew.ask(modality, prompt="STEP=0.05", steps=LONG) for _ in range(4) for modality in limits]
    ids = [crew.ask(modality, steps=20) for _ in range(15) for modality in limits]
    eventually(lambda: most_at_once(worker) == limits, "as many in hand as may be")
    for id in holds:
        crew.store.cancel(id)
    for id in ids:
        assert crew.ended(id).state is JobState.SUCCEEDED
    assert most_at_once(worker) == limits


def most_at_once(worker: Hired) -> dict[str, int]:
    now: dict[str, int] = {"image": 0, "text": 0}
    most = dict(now)
    for event in worker.events:
        if event["event"] in ("admit", "release"):
            now[event["modality"]] += 1 if event["event"] == "admit" else -1
            most = {modality: max(most[modality], now[modality]) for modality in now}
    return most


def test_urgent_jobs_go_first(crew: Crew) -> None:
    worker = crew.hire(image_jobs=1)
    holds = crew.ask(steps=LONG)
    crew.running(holds)
    usual, urgent = crew.ask(priority=9), crew.ask(priority=0)
    crew.store.cancel(holds)
    for id in (usual, urgent):
        crew.ended(id)
    done = [event["request"].split("/")[0] for event in worker.noted("done")]
    assert done == [urgent, usual]


# -- a Redis that is full --------------------------------------------------------------------------------------


def test_a_full_redis_stops_nothing_that_has_begun(crew: Crew) -> None:
    worker = crew.hire()
    running, waiting = crew.ask(prompt="STEP=0.1", steps=8), crew.make()
    crew.running(running)
    used = int(crew.redis.info("memory")["used_memory"])
    crew.redis.config_set("maxmemory", used - 100_000)
    try:
        assert crew.ended(running).state is JobState.SUCCEEDED
        assert worker.process.poll() is None
    finally:
        crew.redis.config_set("maxmemory", 0)
    crew.send(waiting)
    assert crew.ended(waiting).state is JobState.SUCCEEDED
    assert "Traceback" not in worker.log
