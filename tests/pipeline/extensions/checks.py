"""What tests of extensions ask of pictures and refusals, and files whose reading waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
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


class HeldReads:
    """Makes a module's `read` wait: `begun` tells of the first, `go_on` lets all go on. `threads`: which ones read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.threads: list[str] = []
        self._real = module.read
        monkeypatch.setattr(module, "read", self._read)

    def _read(self, *given: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.go_on.wait(60)
        return self._real(*given)
