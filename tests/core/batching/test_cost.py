"""Cost curves: they pass through what was measured, stay finite and positive, and recover from outliers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.batching.cost import CostCurve, CostTable

FIXED = settings(deadline=None, derandomize=True, database=None, max_examples=200)
SECONDS = st.floats(1e-6, 1e3)


def curve(points: dict[int, float]) -> CostCurve:
    made = CostCurve()
    for rows, seconds in points.items():
        made.observe(rows, seconds)
    return made


def test_before_anything_is_measured_wider_is_dearer_but_cheaper_a_row() -> None:
    guess = CostCurve(0.02)
    assert guess(1) == pytest.approx(0.02)
    for rows in range(1, 32):
        assert guess(rows) < guess(rows + 1)
        assert guess(rows) / rows > guess(rows + 1) / (rows + 1)


@FIXED
@given(st.dictionaries(st.integers(1, 64), SECONDS, min_size=1, max_size=8))
def test_first_measurements_are_met_unless_they_are_outliers(points: dict[int, float]) -> None:
    made = curve(points)
    assert set(made.measured) == set(points)
    for rows, seconds in points.items():
        assert made(rows) == made.measured[rows]
        assert made(rows) <= seconds


@FIXED
@given(
    st.dictionaries(st.integers(1, 64), SECONDS, max_size=8),
    st.lists(st.tuples(st.integers(-2, 99), st.floats(allow_nan=True, allow_infinity=True)), max_size=8),
    st.integers(1, 256),
)
def test_always_finite_and_positive(points: dict[int, float], noise: list[tuple[int, float]], rows: int) -> None:
    made = curve(points)
    for place, seconds in noise:
        made.observe(place, seconds)
    assert 0 < made(rows) < math.inf


@FIXED
@given(st.integers(1, 40), st.integers(41, 80), st.floats(0.001, 1), st.floats(0, 1), st.integers(1, 99))
def test_two_points_give_the_line_through_them(low: int, high: int, at_low: float, more: float, rows: int) -> None:
    made = curve({low: at_low, high: at_low * (1 + 3 * more)})
    if low <= rows:
        share = (rows - low) / (high - low)
        assert made(rows) == pytest.approx(at_low + share * 3 * more * at_low)
    else:
        assert at_low * 0.1 <= made(rows) <= at_low


def test_noise_that_falls_with_rows_never_makes_more_rows_cheaper_between() -> None:
    made = curve({1: 1.0, 8: 0.9})
    assert [made(rows) for rows in range(2, 8)] == [1.0] * 6


@pytest.mark.parametrize("nonsense", [0.0, -1.0, math.inf, math.nan])
def test_what_cannot_be_a_duration_is_ignored(nonsense: float) -> None:
    made = CostCurve()
    made.observe(4, nonsense)
    assert not made.measured
    made.observe(4, 0.5)
    made.observe(4, nonsense)
    assert made(4) == 0.5
    made.observe(0, 1.0)
    made.observe(-3, 1.0)
    assert set(made.measured) == {4}


@FIXED
@given(st.floats(1e-4, 10), st.floats(1e-4, 10))
def test_a_measurement_that_was_wrong_is_forgotten(first: float, true: float) -> None:
    made = curve({4: first})
    for _ in range(100):
        made.observe(4, true)
    assert made(4) == pytest.approx(true, rel=0.01)


@pytest.mark.parametrize(("before", "most"), [({4: 1.0}, 1.75), ({1: 1.0, 2: 1.0}, 4.0)])
def test_one_outlier_moves_a_measurement_by_little(before: dict[int, float], most: float) -> None:
    """Also a first one: the forward that also paid for warming up."""
    made = curve(before)
    made.observe(4, 1e6)
    assert made(4) <= most


def test_a_width_that_looked_dear_once_is_tried_again_some_day() -> None:
    made = curve({2: 1.0, 16: 9.0})  # 16 rows cost 3.0 in truth, and the scheduler avoids them
    for _ in range(500):
        made.observe(2, 1.0)
    assert made(16) == 9.0
    for _ in range(500):
        made.observe(2, 1.0)
    assert made(16) == 4.5
    made.observe(16, 3.0)
    assert made(16) == 6.0


WIDTHS = (1, 2, 4, 8, 16, 32)
DISTORTED = st.lists(st.floats(1, 300), min_size=len(WIDTHS), max_size=len(WIDTHS))


def true_s(rows: int) -> float:
    return 0.004 + 0.001 * rows


def started(distortions: list[float], clock: Callable[[], float] = lambda: 0.0) -> CostCurve:
    """A curve measured at a start at which something else slowed each measurement by its factor."""
    curve = CostCurve(clock=clock)
    for rows, factor in zip(WIDTHS, distortions, strict=True):
        for noise in (1.1, 1.0):
            curve.measure(rows, noise * factor * true_s(rows))
    return curve


@FIXED
@given(st.floats(1, 1000), st.sampled_from(WIDTHS), st.floats(0, 0.2))
def test_one_iteration_corrects_all_that_an_evenly_loaded_start_measured(factor: float, ran: int, noise: float) -> None:
    curve = started([factor] * len(WIDTHS))
    curve.observe(ran, (1 + noise) * true_s(ran))
    for rows in range(1, 65):
        assert true_s(rows) / 1.5 <= curve(rows) <= 1.5 * true_s(rows)


@FIXED
@given(DISTORTED, st.sampled_from(WIDTHS))
def test_of_an_unevenly_loaded_start_nothing_stays_that_iterations_disprove(factors: list[float], ran: int) -> None:
    curve = started(factors)
    curve.observe(ran, true_s(ran))
    for rows in WIDTHS:
        if rows < ran:
            assert curve(rows) <= true_s(ran)
        elif rows > ran:
            assert true_s(ran) <= curve(rows) <= -(-rows // ran) * true_s(ran)
    for rows in WIDTHS:
        curve.observe(rows, true_s(rows))
    for rows in range(1, 33):
        assert true_s(rows) / 1.5 <= curve(rows) <= 1.5 * true_s(rows)


@FIXED
@given(st.floats(1.5, 1000), st.lists(st.floats(1, 1.2), min_size=3, max_size=3))
def test_a_load_that_lasts_into_the_first_requests_is_forgotten_after_three_more(
    factor: float, noise: list[float]
) -> None:
    curve = started([factor] * len(WIDTHS))
    for _ in range(50):
        curve.observe(2, factor * true_s(2))
    for each in noise:
        curve.observe(2, each * true_s(2))
    for rows in WIDTHS:
        assert true_s(rows) / 1.5 <= curve(rows) <= 1.5 * true_s(rows)


@pytest.mark.parametrize("factor", [0.001, 1000])
def test_one_odd_iteration_moves_what_is_confirmed_by_little(factor: float) -> None:
    curve = started([1.0] * len(WIDTHS))
    for rows in (2, 4, 2):
        curve.observe(rows, true_s(rows))
    before = [curve(rows) for rows in WIDTHS]
    curve.observe(2, factor * true_s(2))
    assert all(b / 2.1 < curve(rows) < 2.1 * b for rows, b in zip(WIDTHS, before, strict=True))


def test_a_start_counts_as_it_is_until_an_iteration_ran_and_never_corrects_what_did() -> None:
    curve = started([1.0] * len(WIDTHS))
    assert [curve(rows) for rows in WIDTHS] == pytest.approx([true_s(rows) for rows in WIDTHS])
    assert curve.unconfirmed == [*WIDTHS]
    curve.observe(4, 0.9 * true_s(4))
    assert curve.unconfirmed == [1, 2, 8, 16, 32]
    curve.measure(4, 99.0)
    curve.measure(4, 1e-6)
    assert curve(4) == 0.9 * true_s(4)


@FIXED
@given(DISTORTED, st.lists(st.sampled_from(WIDTHS), max_size=4), st.integers(1, 64))
def test_the_least_is_what_iterations_showed(factors: list[float], ran: list[int], rows: int) -> None:
    curve = started(factors)
    assert curve.least(rows) == 0.0
    for width in ran:
        curve.observe(width, true_s(width))
    assert curve.least(rows) <= true_s(rows) * (1 + 1e-9)
    if rows in ran:
        assert curve.least(rows) == pytest.approx(true_s(rows))


@FIXED
@given(DISTORTED, st.sampled_from(WIDTHS), st.integers(1, 64))
def test_the_least_of_widths_that_ran_under_a_load_is_within_what_another_shows(
    factors: list[float], ran: int, rows: int
) -> None:
    """Forwards of more rows take no less, and so many rows no more than several forwards of fewer."""
    curve = started([1.0] * len(WIDTHS))
    for width, factor in zip(WIDTHS, factors, strict=True):
        if width != ran:
            curve.observe(width, factor * true_s(width))
    for _ in range(200):
        curve.observe(ran, true_s(ran))
    assert curve.least(rows) <= -(-rows // ran) * true_s(ran) * 1.01
    assert curve.least(ran) >= min(true_s(width) * -(-ran // width) for width in WIDTHS) * 0.99


def test_a_wide_batch_under_a_load_does_not_raise_the_least_of_narrow_ones_for_good() -> None:
    curve = CostCurve(clock=lambda: 0.0)
    curve.observe(32, 5.0)
    for _ in range(2000):
        curve.observe(2, 0.05)
    assert [curve.least(rows) for rows in (1, 2, 32)] == pytest.approx([0.05, 0.05, 16 * 0.05])


def test_an_iteration_shows_the_least_for_a_minute() -> None:
    """A load that has gone may have slowed it, and refuses the work that would show it."""
    now = [0.0]
    curve = started([1.0] * len(WIDTHS), clock=lambda: now[0])
    curve.observe(2, 300 * true_s(2))
    now[0] = 60.0
    assert curve.least(1) > 0 and curve.least(2) > true_s(2)
    now[0] = 60.1
    assert [curve.least(rows) for rows in WIDTHS] == [0.0] * len(WIDTHS)
    assert curve(2) > true_s(2), "what is expected stays"
    curve.observe(4, true_s(4))
    assert curve.least(4) == pytest.approx(true_s(4))
    assert 0 < curve.least(2) <= true_s(4)


def test_forget_starts_anew() -> None:
    made = curve({1: 5.0, 2: 6.0})
    made.forget()
    assert not made.measured
    assert made(1) == CostCurve()(1)


def test_a_table_keeps_one_curve_a_group_and_shows_what_was_measured() -> None:
    table = CostTable(0.5)
    assert table["a"](1) == 0.5
    table["b"].observe(2, 3.0)
    assert table["b"] is table["b"]
    assert table.measured() == {"b": {2: 3.0}}
