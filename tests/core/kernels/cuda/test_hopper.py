"""All Triton kernels compile for Hopper without one, use its tensor cores, and keep to registers."""

from __future__ import annotations

import pytest

from tests.core.kernels.cuda import (
    test_attention,
    test_decode_kernel,
    test_int4_kernel,
    test_low_rank,
    test_rms_norm,
    test_rotary,
)
from tests.core.kernels.cuda.hopper import errors

MODULES = (test_attention, test_decode_kernel, test_int4_kernel, test_low_rank, test_rms_norm, test_rotary)
SCRIPTS = {module.__name__.rpartition(".test_")[2]: module.COMPILE for module in MODULES}
BROKEN = "made(None, {}, {})"


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """The errors of all scripts, compiled in one process."""
    return errors({**SCRIPTS, "broken": BROKEN})


@pytest.mark.parametrize("name", SCRIPTS)
def test_they_compile(name: str, found: dict[str, str]) -> None:
    assert name not in found, found[name]


def test_an_error_is_told(found: dict[str, str]) -> None:
    assert "AttributeError" in found["broken"]
