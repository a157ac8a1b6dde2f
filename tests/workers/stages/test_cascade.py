"""Cascades on a real engine with two models: which model draws what, what is told of it, and ends in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from contract.card import ImageCard
from contract.errors import Invalid
from contract.image import ImageParameters
from core.batching.request import Outcome
from core.jobs.record import JobState
from pipeline import plans
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.clip_scorer import ClipScorer
from tests.evaluation.conftest import CLIP
from tests.workers.crew import Crew, eventually
from tests.workers.desk import Desk, images, torch_settings
from workers.build import Runtime, build
from workers.serving_runtime import ModelRuntime, build_serving_runtime
from workers.stages.cascade import CascadeProgress, CascadeStage, draft_requests
from workers.stages.gate import Gate

NEVER, ALWAYS = 100.0, -100.0
FULL, DRAFT = "painter", "sketcher"
TUNED = 12.5


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRuntime]:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate((FULL, DRAFT)):
        tiny.save(folder / name, tiny.SHAPES[tiny.TINY], seed)
    tuned = {"gate": TUNED, "draft": load(str(folder / DRAFT)).digest, "scorer_digest": ClipScorer(CLIP).digest}
    plans.write_gate(folder / FULL / plans.FILE, "fp32", DRAFT, tuned)
    # Of another draft model, which says nothing of this one.
    plans.write_gate(folder / DRAFT / plans.FILE, "fp32", FULL, {**tuned, "draft": "another"})
    settings = torch_settings(
        model=str(folder / FULL), models=str(folder / DRAFT), plan="", text_model="off", precision="fp32",
        cascade_scorer=str(CLIP), cache_dir=folder / "cache", data_dir=folder / "data",
    )  # fmt: skip
    with build(settings, text=True) as works:
        serving = build_serving_runtime(works)
        eventually(lambda: DRAFT in serving.handlers, "the draft model")
        yield serving


@pytest.fixture
def desk(crew: Crew, serving: ModelRuntime) -> Iterator[Desk]:
    desk = Desk(crew, serving.runtime, serving.handlers, deterministic=True)
    yield desk
    desk.close()


def cascade(gate: float) -> dict[str, Any]:
    return {"draft": DRAFT, "gate": gate}


def test_a_rejected_draft_is_drawn_by_the_jobs_model_as_without_a_cascade(desk: Desk, crew: Crew) -> None:
    job = desk.draw(n=2, steps=4, cascade=cascade(NEVER))
    plain = desk.draw(n=2, steps=4)
    assert [image["key"] for image in images(job)] == [image["key"] for image in images(plain)]
    assert {image["drawn_by"] for image in images(job)} == {FULL}
    assert all(ALWAYS < image["draft_score"] < NEVER for image in images(job))
    assert not any("drawn_by" in image for image in images(plain))
    assert job.result is not None and plain.result is not None
    assert job.result["deepcache"] == plain.result["deepcache"]


def test_a_kept_draft_is_the_draft_models_by_its_own_defaults(desk: Desk, crew: Crew, serving: ModelRuntime) -> None:
    job = desk.draw(n=2, steps=4, guidance_scale=9.0, cascade=cascade(ALWAYS), preview_every=1)
    for seed, image in enumerate(images(job), 7):
        picture, parameters, fingerprint = desk.opened(image)
        assert image["drawn_by"] == fingerprint["model"] == DRAFT and image["seed"] == parameters["seed"] == seed
        draft = serving.handlers[DRAFT].card()
        assert isinstance(draft, ImageCard)
        assert parameters["steps"] == draft.defaults.steps and parameters["guidance_scale"] != 9.0
        assert image["draft_score"] == round(ClipScorer(CLIP).score(picture, "a cat"), 4)
    assert not [data for _, data in crew.events(job.id) if data.get("previews")], "they show the job's model's picture"


def test_each_picture_has_its_own_decision_which_repeats(desk: Desk) -> None:
    scores = sorted(image["draft_score"] for image in images(desk.draw(n=3, cascade=cascade(ALWAYS))))
    gate = scores[1]
    first, second = (images(desk.draw(n=3, cascade=cascade(gate))) for _ in range(2))
    assert first == second
    assert [image["drawn_by"] for image in first] == [
        DRAFT if image["draft_score"] >= gate else FULL for image in first
    ]
    assert {image["drawn_by"] for image in first} == {FULL, DRAFT}


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=4),
    st.data(),
)
def test_progress_of_any_order_of_outcomes_only_grows(
    pictures: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    drafts, steps = [draft for draft, _, _ in pictures], [step for _, step, _ in pictures]
    tally = CascadeProgress(drafts, steps)
    indices = data.draw(st.permutations([k for k, count in enumerate(drafts) for _ in range(count)]))
    reports = []
    at = [0] * len(pictures)
    for k in indices:
        at[k] += 1
        reports.append(tally.take_draft(k, Outcome(progress=(at[k], drafts[k]), finished=at[k] == drafts[k])))
    assert reports[-1] is not None and reports[-1]["images_done"] == 0
    reports += [tally.keep(k) for k, (_, _, kept) in enumerate(pictures) if kept]
    for k, (_, count, kept) in enumerate(pictures):
        for step in range(0 if kept else count):
            reports.append(tally.take(k, Outcome(progress=(step, count))))  # a retried step reports less
            reports.append(tally.take(k, Outcome(progress=(step + 1, count), finished=step + 1 == count)))
    done = [report["steps_done"] for report in reports if report is not None]
    assert done == sorted(done) and done[-1] == sum(drafts) + sum(steps)
    assert reports[-1] is not None and reports[-1]["images_done"] == len(pictures)


def test_a_job_that_is_cancelled_while_its_drafts_are_scored_draws_no_more(
    desk: Desk, crew: Crew, serving: ModelRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = Gate.scores

    def cancelling(self: Gate, drafts: Any, stopped: Any) -> list[float]:
        desk.cancel_all()
        return scores(self, drafts, stopped)

    monkeypatch.setattr(Gate, "scores", cancelling)
    requests: list[str] = []
    submit = serving.engine.submit
    monkeypatch.setattr(serving.engine, "submit", lambda request: requests.append(request.model) or submit(request))
    for gate in (NEVER, ALWAYS):
        job = desk.draw(cascade=cascade(gate))
        assert job.result is None and not job.state.final, "an abandoned attempt writes no outcome"
    assert requests == [DRAFT, DRAFT]


def test_a_draft_model_that_is_not_served_here_draws_nothing(desk: Desk) -> None:
    job = desk.draw(steps=4, cascade={"draft": "nobody", "gate": 20.0})
    assert images(job) == images(desk.draw(steps=4))


def test_jobs_take_turns_at_the_gate_and_ended_ones_leave_it() -> None:
    drafts = [(Image.new("RGB", (64, 64), (k, 0, 0)), "a cat") for k in range(4)]
    gate = Gate(ClipScorer(CLIP))
    scores = gate.scores(drafts)
    stops = iter([False, False, True])
    assert gate.scores(drafts, lambda: next(stops)) == scores[:2]
    gate.close()


def test_the_deadline_holds_for_both_parts(desk: Desk) -> None:
    assert desk.draw(cascade=cascade(NEVER), deadline_s=1e-3).state is JobState.EXPIRED


@pytest.mark.parametrize(("asked", "field"), [({"draft": DRAFT}, "cascade.gate"), ({"gate": 20.0}, "cascade")])
def test_what_cannot_be_drawn_is_refused_by_name(desk: Desk, asked: dict[str, Any], field: str) -> None:
    error = desk.draw(cascade=asked).error
    assert error is not None and (error["code"], error["field"]) == ("invalid_request", field)


def test_a_draft_model_without_the_size_is_named(serving: ModelRuntime) -> None:
    with pytest.raises(Invalid) as raised:
        draft_requests({0: ImageParameters("a cat", 1, 4096, 4096)}, serving.handlers[DRAFT])
    assert raised.value.field == "cascade.draft" and "size" in raised.value.message


def test_cards_list_the_drafts_with_their_tuned_gates(serving: ModelRuntime) -> None:
    cards = {name: handler.card() for name, handler in serving.handlers.items()}
    full, draft = cards[FULL], cards[DRAFT]
    assert isinstance(full, ImageCard) and isinstance(draft, ImageCard)
    assert full.cascades == full.offer.cascades == {DRAFT: TUNED} and draft.cascades == {FULL: None}


def test_a_worker_of_one_model_offers_none(tmp_path: Path) -> None:
    with build(torch_settings(cascade_scorer=str(CLIP), cache_dir=tmp_path, data_dir=tmp_path)) as works:
        assert isinstance(works, Runtime) and works.stage(CascadeStage).gate is None
        (handler,) = build_serving_runtime(works).handlers.values()
        card = handler.card()
    assert isinstance(card, ImageCard) and card.cascades == {}
