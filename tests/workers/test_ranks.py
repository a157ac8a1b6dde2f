"""A worker whose text model is spread over processes, over gloo, Redis and Celery: one is killed in mid-answer."""

from __future__ import annotations

import signal

import psutil

from contract.text import TextJob
from core.jobs.record import JobDraft, JobState, new_id
from llm import tiny
from llm.followers import RANK_LOST
from tests.forks import REAL
from tests.workers.crew import Crew, Hired

SETTINGS = {"text_model": tiny.TINY, "text_memory_mib": 4, "text_requests": 4, "device": "cpu", "lease_s": 1.0}


def followers(worker: Hired) -> list[psutil.Process]:
    children = psutil.Process(worker.process.pid).children(recursive=True)
    return [child for child in children if "llm.follower" in " ".join(child.cmdline())]


def test_a_rank_is_killed_and_another_worker_finishes_its_job(crew: Crew, reaper: None) -> None:
    worker = crew.hire("--llm", imported=REAL, text_parallel="pp2", **SETTINGS)
    (rank,) = followers(worker)
    parameters = TextJob(prompts=[[1, 40, 41]], max_tokens=400, temperature=0.0, logit_bias={"2": -100}).to_dict()
    id = crew.store.create(JobDraft(new_id(), "text", tiny.TINY, parameters)).id
    crew.send(id, "text")
    crew.running(id)
    rank.send_signal(signal.SIGKILL)
    assert worker.wait() == RANK_LOST
    assert f"exiting: rank 1 of pp2 (process {rank.pid}): ended with exit code -9" in worker.log
    other = crew.hire("--llm", imported=REAL, kernels=False, **SETTINGS)
    job = crew.ended(id)
    assert (job.state, job.attempt, job.lost) == (JobState.SUCCEEDED, 2, 1)
    assert job.result is not None and len(job.result["choices"][0]["text"]) > 0
    assert other.stop() == 0
