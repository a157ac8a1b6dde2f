"""Provides Triton for tests: on a GPU as it is, otherwise its interpreter, which tests/conftest.py enables."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux on x86 alone")
CUDA = torch.cuda.is_available()
