"""Which widths of steps are recorded, over cost curves of any shape: what is chosen pays, and nothing else would."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.graph_widths import StepCosts, TrafficCounter, cheapest, expected_s, worth_recording

MOST = 16
ROWS = st.integers(1, MOST)
# Of any shape: wider may be cheaper, and a graph dearer than launching.
CURVES = st.lists(st.floats(0.001, 10), min_size=MOST, max_size=MOST).map(lambda curve: lambda rows: curve[rows - 1])
COSTS = st.builds(StepCosts, graph=CURVES, direct=CURVES, record_s=st.floats(0, 50))
# As devices have them: wider costs more, and a graph saves the launching.
STEPS = st.builds(
    lambda row_s, launch_s, record_s: StepCosts(
        lambda rows: rows * row_s, lambda rows: max(launch_s, rows * row_s) + launch_s / 10, record_s
    ),
    st.floats(0.001, 0.1), st.floats(0, 0.1), st.floats(0.01, 10),
)  # fmt: skip
TRAFFIC = st.dictionaries(ROWS, st.integers(1, 500), min_size=1, max_size=8)
WIDTHS = st.sets(ROWS, max_size=6)


@given(ROWS, WIDTHS, COSTS)
def test_no_width_is_taken_that_costs_more_than_launching(rows: int, widths: set[int], costs: StepCosts) -> None:
    width = cheapest(rows, widths, costs)
    ways = [costs.direct(rows), *(costs.graph(one) for one in widths if one >= rows)]
    if width is None:
        assert costs.direct(rows) == min(ways)
    else:
        assert rows <= width and width in widths
        assert costs.graph(width) == min(ways) < costs.direct(rows)


@given(TRAFFIC, WIDTHS, COSTS | STEPS, st.integers(0, 8))
def test_every_width_pays_for_its_recording_and_is_of_the_traffic(
    traffic: dict[int, int], known: set[int], costs: StepCosts, room: int
) -> None:
    found = worth_recording(traffic, known, costs, room)
    assert len(found) <= room and set(found) <= traffic.keys() - known and len({*found}) == len(found)
    for index, width in enumerate(found):
        before = [*known, *found[:index]]
        assert expected_s(traffic, before, costs) - expected_s(traffic, [*before, width], costs) > costs.record_s


@given(TRAFFIC, WIDTHS, COSTS | STEPS)
def test_no_further_set_of_widths_pays(traffic: dict[int, int], known: set[int], costs: StepCosts) -> None:
    have = [*known, *worth_recording(traffic, known, costs, MOST)]
    now_s, others = expected_s(traffic, have, costs), [rows for rows in traffic if rows not in have]
    for more in chain.from_iterable(combinations(others, count) for count in range(1, len(others) + 1)):
        saved_s = now_s - expected_s(traffic, [*have, *more], costs)
        assert saved_s <= len(more) * costs.record_s + 1e-9 * now_s


@given(st.lists(st.tuples(st.sampled_from("ab"), ROWS), max_size=3000))
def test_traffic_is_what_came_lately(forwards: list[tuple[str, int]]) -> None:
    counter, last = TrafficCounter(), {"a": 0, "b": 0}
    for kind, rows in forwards:
        last[kind] += 1
        told = counter.note(kind, rows)
        assert told is None or (told[rows] > 0 and sum(told.values()) <= min(last[kind], 1024))
    for kind in range(1000):
        counter.note(kind, 1)
    assert len(counter._kinds) <= 64
