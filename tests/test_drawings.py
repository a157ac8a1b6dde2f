"""Tests that the drawings in docs/ match the code's packages and imports."""

from __future__ import annotations

from xml.etree import ElementTree

from tests import drawings
from tests.test_floors import FLOORS


def test_drawings_are_current() -> None:
    stale = [path.name for path, text in drawings.drawn().items() if path.read_text("utf-8") != text]
    assert not stale, f"{', '.join(stale)}: run `make rooms`; the code's imports have changed"


def test_every_room_is_drawn_once() -> None:
    texts = [found.text for found in ElementTree.fromstring(drawings.rooms(drawings.imports())).iter() if found.text]
    assert sorted(text for text in texts if text in FLOORS) == sorted(set(FLOORS) - {"core"})


def test_what_follows_from_others_is_left_out_and_nothing_else() -> None:
    edges = {"a": frozenset("bcd"), "b": frozenset("c"), "c": frozenset(), "d": frozenset()}
    assert drawings.reduced(edges) == {**edges, "a": frozenset("bd")}
