"""Tests that docs/internals/rooms.md lists the code's packages and imports."""

from tests import rooms


def test_the_page_is_current() -> None:
    written, lab = rooms.PAGE.read_text("utf-8"), (rooms.ROOT / "lab").is_dir()
    assert written == rooms.page() or (not lab and written.startswith(rooms.page())), (
        "run `make rooms`; the code's imports have changed"
    )
