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
SMALL = ("rms_norm", "rotary")
BROKEN = "made(None, {}, {})"


def test_small_kernels_compile_and_an_error_is_told() -> None:
    found = errors({**{name: SCRIPTS[name] for name in SMALL}, "broken": BROKEN})
    assert found.keys() == {"broken"}, found
    assert "AttributeError" in found["broken"]


@pytest.mark.long
def test_all_compile() -> None:
    found = errors(SCRIPTS)
    assert not found, "\n".join(found.values())
