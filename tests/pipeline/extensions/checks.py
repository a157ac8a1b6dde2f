"""What tests of extensions ask of pictures and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from contract.errors import Invalid
from contract.image import ImageParameters
from tests.pipeline.worlds import Crank, Watching, apart, solo, together


def check_bits(runner: Watching, asked: Sequence[ImageParameters]) -> list[Any]:
    """Require that no picture depends on its companions; returns them."""
    pictures = together(runner, asked)
    for one, picture in zip(asked, pictures, strict=True):
        alone = solo(runner, one)
        assert apart(picture, alone) == 0 and picture.fingerprint == alone.fingerprint, one
    return pictures


def refusal(runner: Watching, one: ImageParameters) -> Invalid:
    """The error of a request that is refused when it is checked."""
    with pytest.raises(Invalid) as caught:
        Crank(runner).submit("refused", one)
    return caught.value
