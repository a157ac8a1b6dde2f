"""Provides Triton for tests: on a GPU as it is, otherwise its interpreter, which tests/conftest.py enables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux on x86 alone")
CUDA = torch.cuda.is_available()


def _patch_once() -> None:
    """Patch `triton.language` once a launch, where the interpreter does so again at each call of a device function:
    nearly half of its time.
    """
    from triton import language
    from triton.runtime import interpreter

    patch, patched, of_globals = interpreter._patch_lang, set[int](), dict[int, set[int]]()

    class Scope:
        def __init__(self, scope: Any) -> None:
            self._scope = scope

        def restore(self) -> None:
            patched.clear()
            self._scope.restore()

    def patch_once(function: Any) -> Any:
        values = function.__globals__
        if (modules := of_globals.get(id(values))) is None:
            modules = {id(value) for value in values.values() if value is language or value is language.core}
            of_globals[id(values)] = modules
        if modules <= patched:
            return None  # of a device function: only a launch restores
        patched.update(modules)
        return Scope(patch(function))

    interpreter._patch_lang = patch_once


if not CUDA:
    _patch_once()
