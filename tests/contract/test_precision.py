"""The list of precisions is one, and torch and the settings know what it names."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from contract.precision import (
    CHOICES,
    GPTQ_SCHEMES,
    IMAGE_SCHEMES,
    PRECISIONS,
    SCHEMES,
    Choice,
    dtype,
    is_quantized,
    runs,
    unquantized,
)
from core.config import Settings


def test_types_and_table_name_the_same() -> None:
    assert get_args(Choice) == ("auto", *PRECISIONS)
    plain = [name for name, precision in PRECISIONS.items() if precision.scheme is None]
    assert ("auto", *plain, *IMAGE_SCHEMES) == CHOICES and {*IMAGE_SCHEMES, *GPTQ_SCHEMES} <= {*SCHEMES}
    assert tuple(p.scheme for p in PRECISIONS.values() if p.scheme) == SCHEMES
    assert get_args(Settings.model_fields["text_precision"].annotation) == get_args(Choice)
    assert get_args(Settings.model_fields["precision"].annotation) == (*CHOICES, "nf4")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision_has_a_dtype_on_every_device(name: str, device: str) -> None:
    assert isinstance(getattr(torch, dtype(name, device)), torch.dtype)
    assert is_quantized(name) == (PRECISIONS[name].dtype is None)
    if is_quantized(name):
        assert dtype(name, device) == dtype(unquantized(device), device)


def test_fp8_is_for_gpus() -> None:
    assert [
        (name, device) for name in PRECISIONS for device in ("cpu", "cuda", "cuda:1") if not runs(name, device)
    ] == [("fp8", "cpu")]
