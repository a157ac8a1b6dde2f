"""Tests that a request that crashes every worker finally fails alone."""

from __future__ import annotations

from tests.faults.play import play
from tests.faults.rounds import Gallery
from tests.faults.stack import Stack


def test_a_poisoned_request_fails_alone(stand_ins: Stack, gallery: Gallery) -> None:
    outcome = play("poison", stand_ins, gallery, jobs=8, seconds=0.4)
    assert outcome.problems == []
    assert (outcome.lost, outcome.twice) == (0, 0)
    assert outcome.figures["crashes"] == stand_ins.max_attempts
