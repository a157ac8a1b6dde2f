"""The search for plans: what is tried, what stays in a round, and who is given a name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import plan, tuned
from contract.card import ImageDefaults
from contract.image import ImageParameters
from contract.plan import AUTO, DeepCache
from evaluation import tuning
from evaluation.captions import Caption
from evaluation.tuning import FULL, Candidate, Gate, Judged, Rated
from pipeline.families import sdxl, zimage
from tests.api.world import CARD

DRAFT = ImageParameters("x", 0, 128, 128)


@pytest.mark.parametrize("family", [sdxl.FAMILY, zimage.FAMILY])
def test_every_candidate_is_a_valid_plan_of_its_own(family: Any) -> None:
    every = tuning.candidates(family.defaults, family.samplers)
    assert every[0] == Candidate(FULL, family.defaults.steps) and len({one.name for one in every}) == len(every)
    assert len({replace(one, name="") for one in every}) == len(every)
    drafts = replace(DRAFT, steps=family.defaults.steps)
    for one in every:
        assert tuned.read({"x": one.fields()})["x"] == one.fields()
        asked = one.request(drafts)
        assert asked.steps == one.fields()["steps"]
        plan.check_interval(asked.guidance_interval or (0, 1), asked.steps)
        assert asked.deepcache == plan.read(one.fields()["deepcache"])
        assert one.name == FULL or asked != drafts
    guided = [one for one in every if one.interval is not None]
    assert bool(guided) == (family is sdxl.FAMILY)


def test_a_student_is_tried_with_fewer_steps_by_its_own_sampler() -> None:
    student = ImageDefaults(steps=4, guidance_scale=1.0, timesteps=(999, 749, 499, 249), student="dmd2", most_steps=4)
    every = tuning.candidates(student, ("euler", "dpm++2m"))
    assert {one.steps for one in every} == {4, 3, 2, 1} and not any(one.scheduler or one.interval for one in every)
    draft = replace(DRAFT, steps=4, timesteps=student.timesteps)
    assert {one.request(draft).timesteps for one in every} == {student.timesteps, None}
    assert all((one.request(draft).timesteps is None) == (one.steps < 4) for one in every)


RATED = st.builds(
    lambda name, seconds, psnr: Rated(Candidate(name, 1), seconds, psnr),
    st.text("ab", min_size=1), st.sampled_from([1.0, 2.0, 3.0, 4.0]), st.sampled_from([10.0, 20.0, 30.0]),
)  # fmt: skip


@given(st.lists(RATED, unique_by=lambda one: one.candidate.name))
def test_the_front_is_what_no_other_beats(rated: list[Rated]) -> None:
    found = tuning.front(rated)
    assert bool(found) == bool(rated) and found == tuning.front(reversed(rated))
    assert [one.seconds for one in found] == sorted({one.seconds for one in found})
    for one in rated:
        better = [
            o for o in rated if o.seconds <= one.seconds and o.psnr >= one.psnr and (o.seconds, o.psnr) != one[1:]
        ]
        assert (one[1:] in [o[1:] for o in found]) == (not better)


@given(st.lists(RATED, unique_by=lambda one: one.candidate.name), st.integers(1, 12))
def test_as_many_stay_as_there_is_room_for_and_the_front_first(rated: list[Rated], count: int) -> None:
    kept, first = tuning.keep(rated, count), tuning.front(rated)
    assert len({one.candidate.name for one in kept}) == len(kept) == min(count, len(rated))
    if len(first) <= count:
        assert set(first) <= set(kept)
    elif count > 1:  # its ends stay
        assert first[0] in kept and first[-1] in kept


def judged(name: str, speed: float, score: float, psnr: float) -> Judged:
    return Judged(Candidate(name, 1), speed, (score, score - 0.01, score + 0.01), psnr)


def test_names_go_to_the_fastest_that_pass_and_else_to_the_full_plan() -> None:
    full = judged(FULL, 10, 1.0, tuning.MOST_DB)
    others = [judged("a", 30, 0.97, 20), judged("b", 25, 0.996, 25), judged("c", 20, 1.001, 31), judged("d", 9, 1, 50)]
    found = tuning.named(
        others, full, {"best": Gate(0.2, 30), "balanced": Gate(0.5, 24), "fast": Gate(5, 10), "own": Gate(0.01, 45)}
    )
    assert {name: one.candidate.name for name, one in found.items()} == {
        "best": "c", "balanced": "b", "fast": "a", "own": FULL,
    }  # fmt: skip
    assert [one.candidate.name for one in tuning.best_front(others, full)] == ["a", "b", "c", FULL]
    assert tuning.named([], full, tuning.GATES) == dict.fromkeys(tuning.GATES, full)
    # A score that rises is no better than one that falls: the pictures are others.
    assert tuning.named([judged("a", 30, 1.01, 40)], full, {"best": Gate(0.2, 30)}) == {"best": full}


def test_estimates_count_shallow_and_unguided_steps() -> None:
    card = replace(CARD, costs=replace(CARD.costs, shallow_row_step_s={"resnet": {"128x128": 0.01}}))
    encode_s, vae_s = card.costs.encode_s, card.costs.vae_s

    def steps_s(one: Candidate) -> float:
        return tuning.estimate_s(card, one.request(DRAFT)) - encode_s - vae_s

    assert steps_s(Candidate(FULL, 20)) == pytest.approx(20 * 2 * 0.03)
    assert steps_s(Candidate("x", 20, interval=(0.0, 0.5))) == pytest.approx(30 * 0.03)
    assert steps_s(Candidate("x", 20, cached=AUTO)) == pytest.approx(2 * (11 * 0.03 + 9 * 0.01))
    assert steps_s(Candidate("x", 20, cached=DeepCache(2))) == pytest.approx(20 * 2 * 0.03)  # a depth without costs


def test_captions_are_in_an_order_of_their_own_and_of_every_search() -> None:
    captions = [Caption(index, str(index), f"number {index // 3}") for index in range(30)]
    found = tuning.shuffled(captions, 10)
    assert [caption.index for caption in found] == list(range(10)) and found == tuning.shuffled(captions, 10)
    assert tuning.shuffled(captions, 20)[:10] == found
    assert len(tuning.shuffled(captions, 99)) == 30
