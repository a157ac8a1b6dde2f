"""Tables: what is measured comes back, what was shipped was measured, and what cannot be used is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.bench.harness.record import BenchError
from lab.simulation.costs import DEEP, SHIPPED, VAE, Costs, find, read, shipped
from tests.lab.simulation.tables import SIZE, affine

RESULTS = Path(__file__).resolve().parents[3] / "lab" / "bench" / "history"


@given(
    st.dictionaries(st.integers(1, 64), st.floats(1e-4, 10, allow_nan=False), min_size=1, max_size=8),
    st.floats(1e-4, 10),
)
def test_what_was_measured_is_what_it_costs(rows: dict[int, float], vae_s: float) -> None:
    costs = Costs("any", {(DEEP, SIZE): rows, (VAE, SIZE): {1: vae_s}})
    for count, seconds in rows.items():
        assert costs(DEEP, SIZE, count) == pytest.approx(seconds, rel=1e-6)
    assert costs.widest(DEEP, SIZE) == max(rows)
    least = costs.least_s(DEEP, SIZE, 2, max(rows))
    assert least <= min(2 * seconds / count for count, seconds in rows.items()) * (1 + 1e-6)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(affine().as_json()))
    found = read(path)
    assert found.measured == affine().measured and found.held_bytes == affine().held_bytes
    assert found.device == "a formula" and found.name == "table.json"


@pytest.mark.parametrize("name", shipped())
def test_shipped_tables_are_read(name: str) -> None:
    costs = read(find(name))
    assert costs.sizes and costs.source and find(name).parent == SHIPPED


def test_the_h200s_figures_are_those_that_were_measured() -> None:
    costs = read(find("h200"))
    results = {name: json.loads((RESULTS / f"{name}.json").read_text())[name] for name in ("fused", "vae", "encoders")}
    size, fused = (1024, 1024), results["fused"]["rows"]
    for rows, seconds in costs.measured[DEEP, size].items():
        assert seconds == pytest.approx(fused[f"int8 {rows}"]["deep_ms"] / 1e3, rel=1e-5)
    for rows, seconds in costs.measured["shallow", size].items():
        assert seconds == pytest.approx(fused[f"int8 {rows}"]["shallow_ms"]["block"] / 1e3, rel=1e-5)
    for rows, seconds in costs.measured[VAE, size].items():
        assert seconds == pytest.approx(results["vae"][f"fused int8 {rows}"] / 1e3, rel=1e-5)
    for rows, seconds in costs.measured["encode", (0, 0)].items():
        measured_ms = results["encoders"][str(rows)]["graph_ms"] + fused[f"int8 {rows}"]["keys_ms"]
        assert seconds == pytest.approx(measured_ms / 1e3, rel=1e-4)


GOOD: dict[str, Any] = {
    "device": "any",
    "source": "any",
    "deep": {"64x64": {"2": 0.1}},
    "vae": {"64x64": {"1": 0.1}},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"deep": {"64x64": {"2": 0}}}, "deep.64x64.2: Input should be greater than 0"),
        ({"deep": {"64x64": {"2": "0.1"}}}, "deep.64x64.2: Input should be a valid number"),
        ({"deep": {"64x64": {"2": True}}}, "deep.64x64.2: Input should be a valid number"),
        ({"deep": {"64x64": {"2": math.nan}}}, "deep.64x64.2: Input should be "),
        ({"deep": {"64x64": {"2": math.inf}}}, "deep.64x64.2: Input should be a finite number"),
        ({"deep": {"64x64": {"0": 0.1}}}, "deep.64x64.0: String should match pattern"),
        ({"deep": {"64x64": {"two": 0.1}}}, "deep.64x64.two: String should match pattern"),
        ({"deep": {"64x64": {}}}, "deep.64x64: Dictionary should have at least 1 item"),
        ({"deep": {"64x64": 0.1}}, "deep.64x64: Input should be a valid dictionary"),
        ({"deep": {"64": {"2": 0.1}}}, "deep.64: String should match pattern"),
        ({"deep": {"any": {"2": 0.1}}}, "deep.any: String should match pattern"),
        ({"encode": {"64x64": {"2": 0.1}}}, "encode.64x64: Input should be 'any'"),
        ({"deep": {}}, "deep: Dictionary should have at least 1 item"),
        ({"deep": [1]}, "deep: Input should be a valid dictionary"),
        ({"deep": None}, "deep: Input should be a valid dictionary"),
        ({"vae": ...}, "vae: Field required"),
        ({"deeper": {"64x64": {"2": 0.1}}}, "deeper: Extra inputs are not permitted"),
        ({"source": " "}, "source: String should match pattern"),
        ({"device": ...}, "device: Field required"),
        ({"held_bytes": {"64x64": {"row": 1.5}}}, "held_bytes.64x64.row: Input should be a valid integer"),
        ({"held_bytes": {"64x64": {"rows": 1}}}, "held_bytes.64x64.rows: Input should be 'request', 'row'"),
    ],
)
def test_bad_tables_are_refused_by_file_and_field(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({k: v for k, v in (GOOD | change).items() if v is not ...}))
    with pytest.raises(BenchError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "should be a valid dict"),
        ("{", "is not JSON"),
        ('{"deep": {"64x64": {"2": 1, "2": 2}}}', "2: stands twice"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=said):
        read(path)
    with pytest.raises(BenchError, match=r"--costs: .*nowhere.*shipped are .*h200"):
        read(find("nowhere"))
