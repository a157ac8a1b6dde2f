"""Tests some hundred hostile requests: none causes a server error, every one gets an answer."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.faults.bodies import requests
from tests.faults.hostile import attack, summary


def test_hostile_requests_are_refused(tmp_path: Path) -> None:
    found = attack(300, seed=1, folder=tmp_path)
    assert found.faults == [], found.faults
    result = summary(found)
    assert result["requests"] == 300 and len(result["statuses"]) == 16
    refused = sum(n for one in found.statuses.values() for status, n in one.items() if 400 <= status < 500)
    assert refused > 250, found.statuses


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 7))
def test_ten_thousand_hostile_requests_are_refused(tmp_path: Path, seed: int) -> None:
    found = attack(2000, seed, folder=tmp_path)
    assert found.faults == [], found.faults
    refused = sum(n for one in found.statuses.values() for status, n in one.items() if 400 <= status < 500)
    assert refused > 1600, found.statuses


def test_a_seed_is_a_sequence() -> None:
    first, again, other = (list(islice(requests(seed), 50)) for seed in (3, 3, 4))
    assert first == again != other
