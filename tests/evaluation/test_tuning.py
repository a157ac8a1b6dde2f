"""The search for plans: what is tried, what stays in a round, and who is given a name."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from contract import plan, tuned
from contract.card import ImageDefaults
from contract.image import ImageParameters
from contract.plan import AUTO, DeepCache
from evaluation import tuning
from evaluation.captions import Caption
from evaluation.run import EvaluationRun, RunWriter
from evaluation.tuning import FULL, Candidate, Gate, Judged, Rated
from pipeline.families import sdxl, zimage
from tests.api.world import CARD

DRAFT = ImageParameters("x", 0, 128, 128)


@pytest.mark.parametrize("family", [sdxl.FAMILY, zimage.FAMILY])
def test_every_candidate_is_a_valid_plan_of_its_own(family: Any) -> None:
    every = tuning.candidates(family.defaults, family.samplers)
    assert every[0] == Candidate(FULL, family.defaults.steps) and len({one.name for one in every}) == len(every)
    drafts = replace(DRAFT, steps=family.defaults.steps)
    for one in every:
        assert tuned.read({"x": one.fields()})["x"] == one.fields()
        asked = one.request(drafts)
        assert asked.steps == one.fields()["steps"]
        asked.guidance.check(asked.steps)
        assert asked.deepcache == plan.read_schedule(one.fields()["deepcache"])
        assert one.name == FULL or asked != drafts
    assert any(one.interval for one in every) == (family is sdxl.FAMILY)


def test_no_two_candidates_mean_the_same() -> None:
    for steps in (1, 2, 3, 4, 8, 20):
        every = tuning.candidates(ImageDefaults(steps=steps), ("euler", "dpm++2m"))
        meant = set()
        for one in every:
            deep = plan.rows_and_depths(one.cached, plan.GuidanceSchedule(one.interval), one.steps, 2)
            shallow = one.cached is not None and not all(is_deep for _, is_deep in deep)
            meant.add((one.scheduler, one.cached.depth if one.cached and shallow else None, deep))
        assert len(meant) == len(every), steps


def test_a_student_is_tried_with_fewer_steps_by_its_own_sampler() -> None:
    student = ImageDefaults(steps=4, guidance_scale=1.0, timesteps=(999, 749, 499, 249), student="dmd2", most_steps=4)
    every = tuning.candidates(student, ("euler", "dpm++2m"))
    assert {one.steps for one in every} == {4, 3, 2, 1} and not any(one.scheduler or one.interval for one in every)
    draft = replace(DRAFT, steps=4, timesteps=student.timesteps)
    for one in every:
        assert one.request(draft).timesteps == (None if one.steps < 4 else student.timesteps)


RATED = st.builds(
    lambda name, seconds, psnr: Rated(Candidate(name, 1), seconds, psnr),
    st.text("ab", min_size=1), st.sampled_from([1.0, 2.0, 3.0, 4.0]), st.sampled_from([10.0, 20.0, 30.0]),
)  # fmt: skip


@given(st.lists(RATED, unique_by=lambda one: one.candidate.name))
def test_the_front_is_what_no_other_beats(rated: list[Rated]) -> None:
    found = tuning.pareto_front(rated)
    assert bool(found) == bool(rated) and found == tuning.pareto_front(reversed(rated))
    assert [one.seconds for one in found] == sorted({one.seconds for one in found})
    for one in rated:
        better = [
            o for o in rated if o.seconds <= one.seconds and o.psnr >= one.psnr and (o.seconds, o.psnr) != one[1:]
        ]
        assert (one[1:] in [o[1:] for o in found]) == (not better)


@given(st.lists(RATED, unique_by=lambda one: one.candidate.name), st.integers(1, 12))
def test_as_many_stay_as_there_is_room_for_and_the_front_first(rated: list[Rated], count: int) -> None:
    kept, first = tuning.keep(rated, count), tuning.pareto_front(rated)
    assert len({one.candidate.name for one in kept}) == len(kept) == min(count, len(rated))
    if len(first) <= count:
        assert set(first) <= set(kept)
    elif count > 1:  # its ends stay
        assert first[0] in kept and first[-1] in kept


def judged(name: str, speed: float, score: float, psnr: float, **others: float) -> Judged:
    bounds = {name: (value, value - 0.01, value + 0.01) for name, value in others.items()}
    return Judged(Candidate(name, 1), speed, (score, score - 0.01, score + 0.01), psnr, bounds)


def test_names_go_to_the_fastest_that_pass_and_else_to_the_full_plan() -> None:
    full = judged(FULL, 10, 1.0, tuning.MOST_DB)
    others = [judged("a", 30, 0.97, 20), judged("b", 25, 0.996, 25), judged("c", 20, 1.001, 31), judged("d", 9, 1, 50)]
    found = tuning.name_plans(
        others, full, {"best": Gate(0.2, 30), "balanced": Gate(0.5, 24), "fast": Gate(5, 10), "own": Gate(0.01, 45)}
    )
    assert {name: one.candidate.name for name, one in found.items()} == {
        "best": "c", "balanced": "b", "fast": "a", "own": FULL,
    }  # fmt: skip
    assert [one.candidate.name for one in tuning.best_pareto_front(others, full)] == ["a", "b", "c", FULL]
    assert tuning.name_plans([], full, tuning.GATES) == dict.fromkeys(tuning.GATES, full)
    # A score that rises is no better than one that falls: the pictures are others.
    assert tuning.name_plans([judged("a", 30, 1.01, 40)], full, {"best": Gate(0.2, 30)}) == {"best": full}


@pytest.mark.parametrize(
    ("limits", "passing"),
    [
        ({}, "abc"),
        ({"ssim": 0.9}, "ab"),
        ({"lpips": 0.1}, "ac"),
        ({"distance": 0.01, "ssim": 0.9}, "a"),
        ({"fid": 5}, "bc"),
        ({"cmmd": 0}, "bc"),
    ],
)
def test_every_limit_of_a_gate_counts(limits: dict[str, float], passing: str) -> None:
    found = [
        judged("a", 3, 1, 40, ssim=0.95, distance=0.001, lpips=0.05, fid=1.2, cmmd=1.1),
        judged("b", 3, 1, 40, ssim=0.9, distance=0.02, lpips=0.2, fid=1.05, cmmd=0.9),
        judged("c", 3, 1, 40, ssim=0.8, distance=0.01, lpips=0.1, fid=0.9, cmmd=1.0),
        judged("d", 3, 1, 20, ssim=1, distance=0, lpips=0, fid=1, cmmd=1),
    ]
    assert [one.candidate.name for one in found if one.passes(Gate(0.2, 30, limits))] == list(passing)
    unknown = judged("e", 3, 1, 40)
    assert unknown.passes(Gate(0.2, 30, limits)) == (not limits)


def search(folder: Path, error: dict[str, int], count: int) -> tuple[Any, list[Any]]:
    """A search whose pictures are the full plan's with an error of so many levels; notes what is drawn."""
    captions, notes = [Caption(index, str(index), f"number {index}") for index in range(count)], []
    pictures = [np.random.default_rng(index).integers(60, 190, (16, 16, 3), dtype=np.uint8) for index in range(count)]

    def draw(plans: Any, captions_drawn: int, what: str) -> list[Candidate]:
        notes.append(([one.name for one in plans], captions_drawn))
        for one in plans:
            if one.name == "broken":
                continue
            with RunWriter(folder / one.name, {}, captions) as writer:
                for caption in writer.run.missing[: max(0, captions_drawn - len(writer.run.records))]:
                    stream = io.BytesIO()
                    Image.fromarray(pictures[caption.index] + np.uint8(error.get(one.name, 0))).save(stream, "PNG")
                    name = f"{caption.index}.png"
                    writer.add(caption, caption.index, name, stream.getvalue(), session=0, seconds=0.0)
        return [one for one in plans if one.name != "broken"]

    return tuning.Search(folder, CARD, DRAFT, count, draw), notes


def test_rounds_halve_by_speed_and_psnr_and_finalists_draw_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_ROUNDS", ((2, 0.5), (4, 0.5)))
    every = [Candidate(FULL, 20), *(Candidate(f"s{steps}", steps) for steps in range(3, 19)), Candidate("broken", 2)]
    every.append(Candidate("slow", 25))  # is not faster than the full plan
    error = {f"s{steps}": 40 - steps for steps in range(3, 19)} | {"s9": 2, "s15": 1}  # these two beat all slower ones
    found, notes = search(tmp_path, error, 6)
    finalists = [one.name for one in found.finalists(every, count=4)]
    assert finalists == ["s3", "s5", "s7", "s15"]  # of s3 to s9 and s15, which no other beats, spread evenly
    assert notes[1][0][1:] == [*(f"s{steps}" for steps in range(3, 10)), "s15"]
    assert "slow" not in notes[0][0] and "broken" in notes[0][0] and "broken" not in notes[1][0]
    assert [(len(names), count) for names, count in notes] == [(1 + 17, 2), (1 + 8, 4), (1 + 4, 6)]
    monkeypatch.delattr(EvaluationRun, "load")  # a run that is known is not read again
    found.rated(every[1], 2)


class Machine:
    """An image source on a clock of its own: an image takes time by its steps and the hour, and more at first."""

    width = 8

    def __init__(self, slowdown: Callable[[float], float]) -> None:
        self.now, self.drawn = 0.0, list[ImageParameters]()
        self._slowdown, self._seen = slowdown, set[tuple[int, str]]()

    def clock(self) -> float:
        return self.now

    def submit(self, wanted: ImageParameters, tick: Any) -> Future[Any]:
        self.drawn.append(wanted)
        new = (wanted.steps, wanted.prompt) not in self._seen
        self._seen.add((wanted.steps, wanted.prompt))
        self.now += (0.02 + 0.01 * wanted.steps) * self._slowdown(self.now) + 3.0 * new
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    def take(self, result: Any) -> None:
        pass


ASKED = {name: (replace(DRAFT, steps=steps), 0.01 * steps) for name, steps in ((FULL, 20), ("15", 15), ("10", 10))}
TRUE = {FULL: 1.0, "15": 0.22 / 0.17, "10": 0.22 / 0.12}


def measured(machine: Machine, known: dict[str, list[list[float]]]) -> dict[str, float]:
    source: Any = machine
    return tuning.measure(ASKED, source, ["x", "y"], known, lambda: None, lambda _: None, machine.clock)


@given(end=st.floats(0.3, 4.0), burst=st.tuples(st.floats(0, 120), st.floats(0, 12), st.floats(1.0, 10.0)))
def test_a_machine_that_changes_its_speed_does_not_change_who_is_how_fast(
    end: float, burst: tuple[float, float, float]
) -> None:
    """Half the steps are at most twice as fast, however the machine drifts, and whatever slows one turn down."""
    start, length, factor = burst

    def slowdown(now: float) -> float:
        drift = 1 + (end - 1) * min(1.0, now / 300)
        return drift * (factor if start <= now < start + length else 1.0)

    speeds = measured(Machine(slowdown), {})
    for name, true in TRUE.items():
        assert speeds[name] / speeds[FULL] == pytest.approx(true, rel=0.15), name


def test_turns_of_a_stopped_search_are_compared_within_themselves() -> None:
    """They were measured at another speed of the machine; none is measured again."""
    known = {"15": [[1.0, TRUE["15"]]] * 3, "10": [[1.0, TRUE["10"]]]}
    machine = Machine(lambda now: 0.1)
    speeds = measured(machine, known)
    assert {one.steps for one in machine.drawn} == {20, 10} and [len(pairs) for pairs in known.values()] == [3, 3]
    for name, true in TRUE.items():
        assert speeds[name] / speeds[FULL] == pytest.approx(true, rel=0.02), name
    assert measured(Machine(lambda now: 5.0), known) == speeds


def test_estimates_count_shallow_and_unguided_steps() -> None:
    card = replace(CARD, costs=replace(CARD.costs, shallow_row_step_s={"resnet": {"128x128": 0.01}}))
    for options, steps_s in (
        ({}, 20 * 2 * 0.03),
        ({"interval": (0.0, 0.5)}, 30 * 0.03),
        ({"cached": AUTO}, 2 * (11 * 0.03 + 9 * 0.01)),
        ({"cached": DeepCache(2)}, 20 * 2 * 0.03),  # a depth without costs
    ):
        found = tuning.estimate_s(card, Candidate("x", 20, **options).request(DRAFT))
        assert found == pytest.approx(card.costs.encode_s + card.costs.vae_s + steps_s)


def test_captions_are_in_an_order_of_their_own_and_of_every_search() -> None:
    captions = [Caption(index, str(index), f"number {index // 3}") for index in range(30)]
    found = tuning.shuffled(captions, 10)
    assert [caption.index for caption in found] == list(range(10))
    assert tuning.shuffled(captions, 20)[:10] == found
    assert len(tuning.shuffled(captions, 99)) == 30
