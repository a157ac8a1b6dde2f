"""Tests that the drawings in docs/ match the code's packages and imports."""

from __future__ import annotations

from tests import drawings


def test_drawings_are_current() -> None:
    stale = [path.name for path, text in drawings.drawn().items() if path.read_text("utf-8") != text]
    assert not stale, f"{', '.join(stale)}: run `make rooms`; the code's imports have changed"
