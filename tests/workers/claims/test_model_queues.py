"""Workers of several models on one Redis: which messages they take, in which order, and where a model is loaded."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from core.jobs.broker import Envelope, model_queue
from core.jobs.placement import Placement
from core.jobs.record import Job, JobState
from pipeline.checkpoints import tiny
from tests.core.jobs.books import Books
from tests.core.jobs.older import sent_by_older
from tests.workers.crew import Crew, Hired, eventually
from tests.workers.stage import picture
from workers.claims.model_router import takes
from workers.claims.prefetch import PrefetchLimiter, QueueRotation


def received(worker: Hired) -> list[str]:
    return [event["request"] for event in worker.noted("receive")]


def succeeded(crew: Crew, id: str) -> Job:
    job = crew.ended(id)
    assert job.state is JobState.SUCCEEDED and job.result is not None, job.error
    assert crew.artifacts.get(job.result["images"][0]["key"]) == picture(f"{job.model}: a pizza", 7, 32, 32)
    return job


def test_no_worker_receives_a_message_of_a_model_that_it_does_not_serve(crew: Crew) -> None:
    catalogues = [("one", "two", "ode"), ("two", "three", "hymn")]
    workers = [crew.hire("--name", f"{one},{two}", "--text", text) for one, two, text in catalogues]
    ids = [crew.ask(model=("one", "two", "three")[k % 3]) for k in range(30)]
    texts = [crew.ask("text", model=("ode", "hymn")[k % 2]) for k in range(10)]
    waiting, unheard = [crew.ask(model="four") for _ in range(5)], crew.ask("text", model="elegy")
    models = {id: succeeded(crew, id).model for id in ids} | {id: crew.ended(id).model for id in texts}
    for worker, names in zip(workers, catalogues, strict=True):
        assert {models[id] for id in received(worker)} <= {*names}
    assert sorted(id for worker in workers for id in received(worker)) == sorted(models), "each once"
    assert crew.redis.llen(f"{model_queue('image', 'four')}:3") == 5
    assert {crew.job(id).attempt for id in (*waiting, unheard)} == {0}
    # The second comes again with another catalogue.
    workers[1].signal(signal.SIGTERM)
    assert workers[1].wait() == 0
    last = crew.ask(model="three")
    succeeded(crew, crew.ask(model="two"))
    assert crew.job(last).state is JobState.QUEUED
    changed = crew.hire("--name", "four,three")
    for id in [*waiting, last]:
        succeeded(crew, id)
    assert sorted(received(changed)) == sorted([*waiting, last])
    eventually(lambda: not crew.redis.keys("image.*") and not crew.redis.exists("diptych:active:image"), "no queue")
    assert {*crew.redis.keys("_kombu.binding.*")} <= {"_kombu.binding.image", "_kombu.binding.text"}


def test_priorities_hold_over_models_and_no_flood_starves_another_model(crew: Crew) -> None:
    late = [crew.ask(model="two", priority=9) for _ in range(2)]
    flood = [crew.ask(model="one") for _ in range(30)]
    few = [crew.ask(model="two") for _ in range(4)]
    urgent = [crew.ask(model=name, priority=0) for name in ("one", "two", "one")]
    worker = crew.hire("--name", "one,two", image_jobs=1)
    for id in [*late, *flood, *few, *urgent]:
        succeeded(crew, id)
    order = received(worker)
    assert {*order[:3]} == {*urgent} and order[-2:] == late
    assert [id for id in order if id in flood] == flood and [id for id in order if id in few] == few
    turns = order[3:-2]
    assert turns.index(few[-1]) <= 2 * len(few), "in turn, as long as both wait"


def test_messages_that_an_older_version_has_sent_reach_their_models(crew: Crew) -> None:
    ids = [crew.make(model=("one", "two", "three")[k % 3]) for k in range(30)]
    for id in ids:
        sent_by_older(crew.redis, id)
        crew.sender.post(Envelope(id, "image", 5))
    assert crew.redis.llen("image:3") == 30
    workers = [crew.hire("--name", name) for name in ("one", "two")]
    for id in ids:
        if crew.job(id).model != "three":
            succeeded(crew, id)
    eventually(
        lambda: not crew.redis.exists("image:3") and crew.redis.llen("image.three:3") == 10, "the old queue's end"
    )
    counts = [sum(received(worker).count(id) for worker in workers) for id in ids]
    assert max(counts) <= 2, "once from the old queue, once from its model's"
    Books.of(crew.redis).check()
    third = crew.hire("--name", "three")
    for id in ids:
        succeeded(crew, id)
    assert sorted(received(third)) == sorted(ids[2::3])


def test_a_model_is_loaded_where_no_other_worker_has_it(crew: Crew) -> None:
    """Loading takes longer than anybody waits here, as the cards say."""
    holder = crew.hire("--name", "two")
    eventually(lambda: crew.redis.zscore("diptych:delays:image.two", crew.registry.workers()[0].id) is not None)
    cold = crew.hire("--name", "one,two,three", "--cold", "1e6")
    ids = [crew.ask(model="two") for _ in range(20)]
    for id in [*ids, crew.ask(model="one"), crew.ask(model="three")]:  # nobody else serves the last two
        succeeded(crew, id)
    assert sorted(received(holder)) == sorted(ids)
    assert holder.stop() == 0
    id = crew.ask(model="two")
    succeeded(crew, id)
    assert id in received(cold)
    card = eventually(lambda: crew.card(cold), "its card")
    assert {model.name for model in card.models} == {"one", "two", "three"}


def test_a_job_waits_for_a_worker_that_has_its_model_no_longer_than_a_load_takes(crew: Crew) -> None:
    holder = crew.hire("--name", "two", lease_s=600, stuck_s=3600)
    eventually(lambda: crew.redis.zscore("diptych:delays:image.two", crew.registry.workers()[0].id) is not None)
    cold = crew.hire("--name", "one,two", "--cold", "0.5", lease_s=600)
    holder.signal(signal.SIGSTOP)  # it has a card and no delay, and takes nothing more
    crew.redis.delete("unacked")  # what it may have been owed
    ids = [crew.ask(model="two") for _ in range(2)]  # Redis may owe the stopped one a message
    eventually(lambda: any(crew.job(id).state.final for id in ids), "a job's end")
    assert {*received(cold)} & {*ids}
    holder.signal(signal.SIGCONT)
    for id in ids:
        succeeded(crew, id)


@given(st.booleans(), st.none() | st.floats(0, 100), st.floats(0, 100))
def test_the_rule(nearest: bool, waited_s: float | None, load_s: float) -> None:
    state = Placement(nearest, waited_s)
    assert takes(state, load_s) is (load_s == 0 or nearest or (waited_s or 0) > load_s)


@given(st.lists(st.sampled_from(["image", "image.a", "image.b", "image@me", "route a", "route ab"]), max_size=40))
def test_turns_go_round_whatever_is_served(steps: list[str]) -> None:
    """Each queue that has had its turn is asked after the others, and one that is served again is not forgotten."""
    prefetch = PrefetchLimiter(["image"], worker="me")
    prefetch.route({"image": ["a", "b"]})
    rotation = QueueRotation(prefetch, "image")
    for step in steps:
        if step.startswith("route "):
            prefetch.route({"image": step.removeprefix("route ")})
        asked = rotation.consume(2)
        assert asked[0] == "image@me" and {*asked[1:]} == {"image", *prefetch.models["image"]}
        assert len(asked) == len({*asked})
        if step in asked[1:]:
            rotation.take_turn(step)
            assert rotation.consume(2) == [*(name for name in asked if name != step), step]
    assert rotation.consume(0) == []


def test_every_configured_model_is_announced_from_the_first_card_on(crew: Crew, tmp_path: Path) -> None:
    """As one that is being loaded, until it is served, or does not load."""
    names = ["one", "two", "broken"]
    shape = tiny.SHAPES[tiny.TINY]
    folders = [str(tiny.save(tmp_path / name, shape)) for name in names]
    weights = next((tmp_path / "broken" / "unet").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    worker = crew.hire(
        command=(sys.executable, "-m", "cli", "worker", "--models", ",".join(folders)), ready=False, kernels=False,
        text_model="off", model="", cache_dir=tmp_path / "cache",
    )  # fmt: skip
    seen = []

    def settled() -> bool:
        assert worker.process.poll() is None, worker.log
        if (card := crew.card(worker)) is not None:
            served = [model.name for model in card.models]
            assert card.loading == {name: "image" for name in names if name in card.loading}
            assert {*served, *card.loading} >= {"one", "two"} and not {*served} & {*card.loading}
            seen.append((card.state, served, [*card.loading]))
        return bool(seen) and seen[-1] == ("ready", ["one", "two"], [])

    eventually(settled, "two of three models")
    assert seen[0] == ("starting", [], names)
    assert worker.stop() == 0
