"""The refusal of a request: by which field, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from contract.errors import Invalid


@contextmanager
def refused(field: str | None, said: str = "") -> Iterator[None]:
    """Fails unless the field is refused; `said` is a part of the reason."""
    with pytest.raises(Invalid) as caught:
        yield
    wrong = caught.value
    assert wrong.field == field and said in wrong.message
