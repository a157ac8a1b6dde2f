"""Statistics: equal to a recomputation in numpy, kept in a file as they are, and refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from core.quant.statistics import Statistics, StatisticsError
from tests.core.quant.blocks import LAYERS, block, inputs, observed, same
from tests.core.quant.stage import Few, Seed, normal


class Pair(nn.Module):
    """A convolution, and a linear layer that is called twice, once by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 2, 3), nn.Linear(5, 2)

    def forward(self, maps: Tensor, rows: Tensor) -> None:
        self.conv(maps)
        self.linear(rows[:1])
        self.linear(input=rows[1:])


def numpys(maps: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> dict[str, tuple[Any, Any]]:
    """Largest magnitude and 99.9th percentile of each channel: of at most 1,024 rows at equal distances."""
    spread = maps.transpose(0, 2, 3, 1).reshape(-1, 3)
    sample = spread[:: -(-len(spread) // 1024)]
    both = (rows[:1].reshape(-1, 5), rows[1:].reshape(-1, 5))
    return {
        "conv": (np.abs(spread).max(0), np.quantile(np.abs(sample), 0.999, axis=0)),
        "linear": (
            np.maximum(*(np.abs(part).max(0) for part in both)),
            np.maximum(*(np.quantile(np.abs(part), 0.999, axis=0) for part in both)),
        ),
    }


@settings(max_examples=15)
@given(...)
def test_what_is_observed_equals_numpys(
    batches: Few, steps: Few, side: Annotated[int, st.integers(3, 40)], seed: Seed
) -> None:
    model, found = Pair(), Statistics("digest")
    seen: dict[str, list[list[tuple[Any, Any]]]] = {"conv": [], "linear": []}
    for batch in range(batches):
        for name in seen:
            seen[name].append([])
        for step in range(steps):
            maps, rows = normal(seed + 7 * batch + step, 2, 3, side, side), normal(seed + step, 3, 4, 5)
            with found.observe(model, ["conv", "linear"], step):
                model(maps, rows)
            for name, extremes in numpys(maps.numpy(), rows.numpy()).items():
                seen[name][-1].append(extremes)
    assert found.batches == [batches] * steps
    for name, by_batch in seen.items():
        largest = np.array([[extremes[0] for extremes in batch] for batch in by_batch])  # [batches, steps, K]
        high = np.array([[extremes[1] for extremes in batch] for batch in by_batch])
        assert np.array_equal(found.largest[name].numpy(), largest.max(0))
        assert np.array_equal(found.smallest[name].numpy(), largest.min(0))
        assert np.allclose(found.typical[name].numpy(), high.mean(0), rtol=1e-5)
        assert np.array_equal(found.ranges(name).numpy(), largest.max((0, 1)))
        assert np.allclose(found.ranges(name, "percentile").numpy(), high.mean(0).max(0), rtol=1e-5)
        assert np.allclose(found.ranges(name, "min-mean").numpy(), largest.min(0).mean(0), rtol=1e-5)


def test_steps_that_did_not_come_to_a_layer_do_not_count() -> None:
    model, found = block(), Statistics("digest")
    with found.observe(model, ["conv"], 0), torch.inference_mode():
        model(inputs(0))
    with found.observe(model, LAYERS, 2), torch.inference_mode():
        model(inputs(1))
    assert found.batches == [1, 0, 1]
    for method in ("max", "percentile", "min-mean"):
        assert found.ranges("out", method).isfinite().all() and found.ranges("conv", method).isfinite().all()
    assert torch.equal(found.ranges("out", "min-mean"), found.largest["out"][2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("method", ["max", "percentile", "min-mean"])
def test_what_is_not_finite_is_refused_by_the_layers_name(value: float, method: Any) -> None:
    model, x = block(), inputs(5)
    found = observed(model)
    x[0, 3] = value
    for batch in (x, inputs(6)):  # what follows does not hide it
        with found.observe(model, LAYERS, 0), torch.inference_mode():
            model(batch)
    with pytest.raises(StatisticsError, match=r"^conv: its range is not finite: the model made NaN or infinity"):
        found.ranges("conv", method)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def test_hooks_are_removed_and_nothing_is_added_if_the_model_raises() -> None:
    model, found = block(), Statistics("digest")
    with pytest.raises(RuntimeError), found.observe(model, LAYERS, 0):
        assert hooks(model) == len(LAYERS)
        model(torch.zeros(1, 3, 2, 2))
    assert hooks(model) == 0 and not found.largest and not found.batches
    with (
        pytest.raises(StatisticsError, match=r"^ghost: the model has no such layer"),
        found.observe(model, ["conv", "ghost"], 0),
    ):
        pass
    assert hooks(model) == 0 and not found.batches


def test_half_precision_is_observed_in_fp32() -> None:
    layer, found = nn.Linear(3, 3).bfloat16(), Statistics("digest")
    with found.observe(layer, [""], 0):
        layer(torch.full((4, 3), 1.5, dtype=torch.bfloat16))
    assert found.largest[""].dtype == torch.float32 and found.ranges("").tolist() == [1.5] * 3


def test_a_file_holds_all_and_may_be_gone_on_with(tmp_path: Path) -> None:
    model, path = block(), tmp_path / "statistics"
    found, alone = observed(model), observed(model)
    found.data = alone.data = "prompts"
    found.save(path)
    again = Statistics.load(path)
    assert same(again, alone) and [*tmp_path.iterdir()] == [path]
    for both in (again, alone):
        with both.observe(model, LAYERS, 1), torch.inference_mode():
            model(inputs(77))
        both.save(path)
    assert same(again, alone) and same(Statistics.load(path), alone)


def damage(path: Path, **changes: Any) -> None:
    """Write the file anew with other tensors or metadata."""
    tensors = {**load_file(path), **changes.pop("tensors", {})}
    for name in changes.pop("lost", ()):
        del tensors[name]
    about = {"model": "digest", "data": "", "batches": json.dumps([3, 3]), **changes}
    save_file(tensors, path, {name: value for name, value in about.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": None}, "it does not say of which model"),
        ({"batches": "[3, 3"}, "holds no statistics"),
        ({"batches": "3"}, "its tables do not fit one another"),
        ({"batches": "[3, 3, 3]"}, "its tables do not fit one another"),
        ({"batches": "[3, -1]"}, "its tables do not fit one another"),
        ({"tensors": {"other/conv": torch.ones(2, 32)}}, "holds no statistics"),
        ({"tensors": {"typical/conv": torch.ones(2, 31)}}, "its tables do not fit one another"),
        ({"tensors": {"typical/conv": torch.ones(2, 32).double()}}, "its tables do not fit one another"),
        ({"tensors": {"largest/conv": torch.ones(())}}, "its tables do not fit one another"),
        ({"lost": ["smallest/out"]}, "its tables do not fit one another"),
        ({"lost": ["largest/out"]}, "its tables do not fit one another"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "statistics"
    observed(block()).save(path)
    damage(path, **changes)
    with pytest.raises(StatisticsError, match=said) as caught:
        Statistics.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("contents", [b"", b"garbage", b"\xff" * 64])
def test_garbage_and_half_a_file_are_refused(contents: bytes, tmp_path: Path) -> None:
    path = tmp_path / "statistics"
    path.write_bytes(contents)
    with pytest.raises(StatisticsError, match="holds no statistics"):
        Statistics.load(path)
    observed(block()).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StatisticsError, match="holds no statistics"):
        Statistics.load(path)
    with pytest.raises(StatisticsError, match="holds no statistics"):
        Statistics.load(tmp_path / "absent")


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    with pytest.raises(StatisticsError, match="cannot be written"):
        observed(block()).save(tmp_path / "absent" / "statistics")
