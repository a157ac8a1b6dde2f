"""What the shipped model draws on a GPU is what it draws in fp32 on a CPU, within what eight bits and bf16 may cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.h200 import fidelity

_COUNT = 8


@pytest.fixture(scope="module")
def reference() -> Any:
    return fidelity.draw("cpu", "fp32", _COUNT)[0]


# Measured over 32 pictures on an H200: 50.3 dB in bf16, 38.4 dB in INT8.
@pytest.mark.parametrize(("precision", "mean_db", "least_db"), [("bf16", 44.0, 34.0), ("int8", 33.0, 24.0)])
def test_emoji_xl_is_close_to_fp32_on_a_cpu(reference: Any, precision: str, mean_db: float, least_db: float) -> None:
    levels, drawn_by = fidelity.draw("cuda", precision, _COUNT)
    assert drawn_by["executable"] == "graphs" and drawn_by["precision"] == precision
    found = fidelity.psnr(reference, levels)
    assert found.mean() > mean_db and found.min() > least_db, found
    assert abs(float(levels.astype(np.float64).mean() - reference.mean())) < 2, "neither paler nor darker"
