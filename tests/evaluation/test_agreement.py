"""The recorded agreement with other implementations: every figure agrees, or a reason says why not."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness.record import RESULTS


def test_every_figure_agrees_or_says_why_not() -> None:
    found = json.loads((RESULTS / "agreement.json").read_text("utf-8"))
    for row in found["rows"]:
        assert row["relative"] == pytest.approx(abs(row["ours"] - row["theirs"]) / abs(row["theirs"]))
        assert row["relative"] <= 1e-4 or row["reason"], row
    references = {(row["figure"], row["reference"].partition(",")[0]) for row in found["rows"]}
    assert references >= {
        *(("FID", name) for name in ("torchmetrics", "torch-fidelity", "clean-fid", "MLPerf")),
        *(("KID", name) for name in ("torchmetrics", "torch-fidelity", "clean-fid")), ("CLIP score", "MLPerf"),
    }  # fmt: skip
    assert found["pictures"] > 2048, "a covariance of Inception's features needs more for its full rank"
