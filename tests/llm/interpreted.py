"""Triton for tests: on a GPU as it is, else its interpreter. Imported before any of our kernels."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
pytest.importorskip("triton")


def _mend() -> None:
    """The interpreter of Triton 3.6 makes bounds of loops from arrays of one number, which NumPy 2.4 refuses."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


if not CUDA:
    _mend()
