"""The refusal of a request: by which field, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refused(field: str | None, said: str = "") -> Iterator[None]:
    """Fails unless the field is refused; `said` is a part of the reason."""
    with refused(field, said):
        yield
