"""Plots: well-formed, within their frame, and marked at round values."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation.plot import Line, draw

SVG = "{http://www.w3.org/2000/svg}"
VALUES = st.floats(1e-3, 1e5)


@given(
    st.lists(st.lists(st.tuples(VALUES, VALUES), max_size=8), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_every_dot_lies_in_the_frame(found: list[list[tuple[float, float]]], log_x: bool, log_y: bool) -> None:
    lines = [Line(f"line <{number}>", dots, number) for number, dots in enumerate(found)]
    drawn = ElementTree.fromstring(draw(lines, "a & b", "across", "up", log_x=log_x, log_y=log_y))
    circles = list(drawn.iter(f"{SVG}circle"))
    assert len(circles) == sum(len(dots) for dots in found)
    for circle in circles:
        assert 63 <= float(circle.get("cx")) <= 697 and 71 <= float(circle.get("cy")) <= 349
    said = ["".join(text.itertext()) for text in drawn.iter(f"{SVG}text")]
    assert {"a & b", "across", "up", *(f"line <{number}>" for number in range(len(found)))} <= set(said)
    assert len(list(drawn.iter(f"{SVG}polyline"))) == len(found)


@pytest.mark.parametrize(
    ("log", "values", "marks"),
    [
        (False, [0.3, 0.95], ["0.2", "0.4", "0.6", "0.8", "1"]),
        (True, [1, 1000], ["1", "10", "100", "1000"]),
        (True, [0.4, 7], ["0.2", "0.5", "1", "2", "5", "10"]),
        (False, [5, 5], ["5"]),
    ],
)
def test_axes_are_marked_at_round_values(log: bool, values: list[float], marks: list[str]) -> None:
    svg = draw([Line("one", [(value, 1.0) for value in values], 0)], "t", "x", "y", log_x=log)
    found = [e for e in ElementTree.fromstring(svg).iter(f"{SVG}text") if e.get("text-anchor") == "middle"]
    assert [e.text for e in found if e.text not in ("x", "y")] == marks
