"""Who runs beside others after a crash: twice at most, and never with the last attempt."""

from __future__ import annotations

import pytest

from core.jobs.crashes import alone_from


@pytest.mark.parametrize(("max_attempts", "alone"), [(1, 1), (2, 1), (3, 2), (4, 2), (9, 2)])
def test_the_last_life_is_spent_alone(max_attempts: int, alone: int) -> None:
    assert alone_from(max_attempts) == alone
