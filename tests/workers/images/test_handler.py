"""The image panel: from a job's JSON to requests and back, and what is said of a real runner's costs."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.jobs.admission import work_s
from contract import plan
from contract.bounds import MAX_SEED
from contract.card import MAX_IMAGES, ImageCard, ImageCosts, read_card, to_data
from contract.errors import Invalid
from contract.image import ImageJob, ImageParameters
from contract.plan import AUTO, DEPTHS, DeepCache
from core.artifacts import Artifacts
from core.batching.request import Outcome
from core.batching.runner import Lane
from core.jobs.record import to_json
from pipeline.backends.backend import BatchGroup
from pipeline.backends.phases import SHALLOW
from pipeline.checkpoints.load import load
from pipeline.checkpoints.tiny import TINY
from tests.core.tape import Tape
from tests.pipeline.worlds import Crank, Watching
from tests.workers.desk import JOB, drawn, torch_settings
from tests.workers.stage import handler_of
from workers.artifact_writer import ArtifactWriter
from workers.build import Runtime, build
from workers.handlers import Output
from workers.images.cards import image_card
from workers.images.handler import ImageJobHandler, ImageJobProgress, pictures

ASKED = {**JOB, "deterministic": True}


@given(st.integers(1, MAX_IMAGES), st.integers(0, MAX_SEED))
def test_seeds_count_up_and_around(n: int, seed: int) -> None:
    made = pictures(ImageJob.read({**ASKED, "n": n, "seed": seed}))
    assert made == [
        ImageParameters("a pizza", (seed + k) % 2**63, 32, 32, steps=4, deterministic=True) for k in range(n)
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 0), ("n", MAX_IMAGES + 1), ("n", "2"), ("n", True), ("seed", -1), ("seed", 2**63), ("seed", None)],
)
def test_what_cannot_be_counted_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(Invalid, match=f"^{field}: "):
        pictures(ImageJob.read({name: one for name, one in {**ASKED, field: value}.items() if one is not None}))


@given(st.data())
def test_progress_only_grows(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    tally, left = ImageJobProgress(steps), [list(range(n + 1)) for n in steps]
    before = {"steps_done": 0, "images_done": 0}
    while any(left):
        index = data.draw(st.sampled_from([k for k, rest in enumerate(left) if rest]))
        step = left[index].pop(0)
        said = tally.take(index, Outcome(progress=(step, steps[index]), finished=not left[index]))
        assert said is not None
        assert said["image"] == index
        assert said["steps"] == sum(steps)
        assert all(said[name] >= before[name] for name in ("steps_done", "images_done"))
        before = said
    assert before["steps_done"] == sum(steps)
    assert before["images_done"] == len(steps)
    assert tally.take(0, Outcome()) is None


@pytest.fixture(scope="module")
def works() -> Iterator[Runtime]:
    with build(torch_settings(max_requests=4, max_rows=8), lane=Lane("device"), measure_s=1.0) as works:
        yield works


def test_pictures_are_kept_and_told(works: Runtime) -> None:
    handler, artifacts = handler_of(works), Artifacts("memory://")
    job = handler.read(ASKED)
    made = [dataclasses.replace(picture, warnings=("for people",)) for picture in drawn(works, handler.requests(job))]
    images = handler.build_result(job, [Output(picture) for picture in made], ArtifactWriter(artifacts))["images"]
    json.loads(to_json(images))
    for seed, image, picture in zip((5, 6), images, made, strict=True):
        assert artifacts.get(image["key"]) == picture.png()
        expected = {
            "seed": seed, "width": 32, "height": 32, "media_type": "image/png", "warnings": ["for people"],
            "size_bytes": len(picture.png()),
        }  # fmt: skip
        assert image.items() >= expected.items()


def test_the_card_tells_what_the_runner_offers(works: Runtime) -> None:
    card, runner = handler_of(works).card(), works.images
    assert isinstance(card, ImageCard) and card.name == handler_of(works).name == TINY
    assert (card.modality, card.precision, card.device, card.native) == ("image", "fp32", "cpu", 32)
    assert (32, 32) in card.sizes and {*card.sizes} == {*runner.sizes} and card.upscalers == ()
    assert card.size_range == runner.model.size_range and card.defaults == runner.model.family.defaults
    assert card.default_scheduler in card.schedulers
    assert (card.limits.max_images, card.limits.max_seed) == (MAX_IMAGES, MAX_SEED)
    assert read_card(json.loads(to_json(to_data(card)))) == card, "it goes to Redis"


def test_a_model_that_may_leave_memory_keeps_its_card(works: Runtime) -> None:
    runner = works.images
    resident = [runner, None]
    handler = ImageJobHandler(runner, resident=lambda: resident[-1], load_s=lambda: 2.5)
    assert handler.files(ImageJob.read({**ASKED, "lora": "ink"})) == {"lora ink"}
    gone = handler.card()
    assert (handler.load_s, gone.load_s) == (2.5, 2.5) and not gone.loaded and handler.held_files() == ()
    resident.pop()
    there = handler.card()
    assert (handler.load_s, there.load_s) == (0, 2.5)
    costs = {name: getattr(gone, name) for name in ("costs", "least_costs", "capacity_per_s")}
    assert there.loaded and dataclasses.replace(there, **costs) == dataclasses.replace(gone, loaded=True)

    alone = ImageJobHandler(runner)
    assert alone.load_s == 0 and alone.card().loaded


def test_costs_follow_the_curves(works: Runtime) -> None:
    card = image_card(works.images)
    costs = card.costs
    assert "32x32" in costs.solo_step_s
    assert 0 < costs.row_step_s["32x32"] <= costs.solo_step_s["32x32"]
    picture_s = costs.encode_s + 40 * costs.row_step_s["32x32"] + costs.vae_s
    assert card.capacity_per_s == pytest.approx(1 / picture_s)
    other = next(size for size in works.images.sizes if size != (32, 32))
    name = f"{other[0]}x{other[1]}"
    assert name not in costs.solo_step_s  # nothing is known of it yet
    drawn(works, [ImageParameters("x", 1, *other, steps=2)])
    assert image_card(works.images).costs.solo_step_s[name] > 0


def test_the_card_counts_the_graphs_that_are_recorded(works: Runtime) -> None:
    assert image_card(works.images).graphs == {}, "a CPU records none"
    runner = Watching(load(TINY), fused=True, recorder=Tape(), buckets=(2,), max_rows=2, deterministic_rows=2)
    try:
        runner.recording.close()  # what is left to be recorded is recorded here
        runner.prepare(measure_s=0.0)
        assert image_card(runner).graphs == {"recorded": 0, "wanted": 12}
        assert runner.backend.graphs.record_next()
        assert image_card(runner).graphs == {"recorded": 1, "wanted": 12}
    finally:
        runner.close()


@pytest.mark.parametrize("depth", DEPTHS)
def test_shallow_steps_are_told_of_once_they_were_measured(works: Runtime, depth: str) -> None:
    other = works.images.sizes[0] if works.images.sizes[0] != (32, 32) else works.images.sizes[1]
    name = f"{other[0]}x{other[1]}"
    before = image_card(works.images).costs.shallow_solo_step_s
    assert name not in before.get(depth, {})
    drawn(works, [ImageParameters("x", 1, *other, steps=3, deepcache=DeepCache(3, depth))])
    costs = image_card(works.images).costs
    group = BatchGroup(SHALLOW[depth], other)
    assert costs.shallow_solo_step_s[depth][name] == pytest.approx(works.images.cost(group, 2), rel=0.5)
    assert 0 < costs.shallow_row_step_s[depth][name] <= costs.shallow_solo_step_s[depth][name]


def test_the_card_says_what_jobs_get_that_do_not_say(works: Runtime) -> None:
    for usual in (None, AUTO, DeepCache(3, "resnet")):
        told = json.loads(to_json(dataclasses.asdict(ImageJobHandler(works.images, usual).card())))["deepcache"]
        assert plan.read_schedule(told) == usual
        for job in (ASKED, {**ASKED, "deepcache": told}):
            assert pictures(ImageJob.read(job), usual)[0].deepcache == usual


@pytest.mark.parametrize("more", [{}, {"deepcache": {"interval": 3}}, {"deepcache": "auto", "steps": 7}])
def test_the_api_counts_the_steps_that_are_run(more: dict[str, Any]) -> None:
    """One second a deep step, a thousandth a shallow one: what is estimated says how many of each there are."""
    runner = Watching(load(TINY), lane=Lane("watched"))
    parameters = {**ASKED, "n": 1, **more}
    made = ImageJobHandler(runner, AUTO)
    crank = Crank(runner)
    crank.submit("one", made.requests(ImageJob.read(parameters))[0])
    crank.pictures()
    counts = Counter(phase for phase, _ in runner.rides)
    shallow = sum(counts[phase] for phase in SHALLOW.values())
    assert shallow, "or there is nothing to see"
    each = {depth: {"32x32": 0.001} for depth in DEPTHS}
    costs = ImageCosts(row_step_s={"32x32": 1.0}, shallow_row_step_s=each)
    card = dataclasses.replace(made.card(), costs=costs)
    assert work_s(card, ImageJob.read(parameters)) == pytest.approx(2 * (counts["deep"] + shallow / 1000))
