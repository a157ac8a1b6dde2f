"""Tests every fault once on a service that generates images: no job is lost or finished twice, no image differs."""

from __future__ import annotations

import pytest

from tests.faults.play import play
from tests.faults.rounds import Gallery
from tests.faults.scenarios import PICTURES
from tests.faults.stack import Stack


def check(name: str, pictures: Stack, gallery: Gallery, jobs: int, seconds: float) -> None:
    outcome = play(name, pictures, gallery, jobs, seconds)
    assert outcome.problems == []
    assert (outcome.lost, outcome.twice) == (0, 0)


# What differs from another fault in how the part ends, not in what is lost with it.
_LONG = ("redis_restarted", "worker_terminated", "worker_disowned", "disk_full")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in _LONG else name for name in PICTURES]
)
def test_no_accepted_job_is_lost(pictures: Stack, gallery: Gallery, name: str) -> None:
    check(name, pictures, gallery, jobs=8, seconds=0.2)


@pytest.mark.long
@pytest.mark.parametrize("name", PICTURES)
def test_no_accepted_job_is_lost_under_a_longer_load(pictures: Stack, name: str) -> None:
    check(name, pictures, Gallery(), jobs=24, seconds=2.0)
