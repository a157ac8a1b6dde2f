"""Tests that docs/internals/rooms.md lists the code's packages and imports."""

from tests import rooms


def test_the_page_is_current() -> None:
    assert rooms.PAGE.read_text("utf-8") == rooms.page(), "run `make rooms`; the code's imports have changed"
