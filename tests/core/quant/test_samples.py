"""Samples of rows: bounded, of all that was seen alike, and the same after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.quant.samples import Samples
from core.quant.statistics import Statistics, StatisticsError
from tests.core.quant.stage import Many, Seed, normal


def seen(batches: list[Tensor], samples: Samples, *, path: Path | None = None) -> Statistics:
    """Statistics of a layer "a" that read these, each a batch of step 0; via a file after each, if there is one."""
    found = Statistics("digest", samples=samples)
    for x in batches:
        with found.batch(0) as see:
            see(["a", "b"], x)
        if path is not None:
            found.save(path)
            found = Statistics.load(path)
    return found


@settings(max_examples=20, deadline=None)
@given(...)
def test_rows_that_were_read_are_kept_up_to_the_count_and_no_row_twice(
    sizes: Annotated[list[int], st.lists(st.integers(1, 40), min_size=1, max_size=4)], count: Many, seed: Seed
) -> None:
    batches = [normal(seed + at, size, 2, 3) for at, size in enumerate(sizes)]
    kept = seen(batches, Samples(["a"], count)).samples
    assert kept is not None and {*kept.rows} == {"a"}
    every = [tuple(row) for x in batches for row in x.flatten(0, 1).tolist()]
    rows = [tuple(row) for row in kept.rows["a"].tolist()]
    assert len(rows) == min(count, len(every)) == len({*rows}) and {*rows} <= {*every}
    assert kept.keys["a"].equal(kept.keys["a"].sort().values)


def test_early_and_late_batches_have_the_same_share() -> None:
    batches = [torch.full((400, 1), float(at)) for at in range(10)]
    kept = seen(batches, Samples(["a"], 1000)).samples
    assert kept is not None
    shares = torch.bincount(kept.rows["a"][:, 0].long(), minlength=10)
    assert shares.min() > 70 and shares.max() < 130  # 100 each, with a standard deviation of 9


def test_a_run_that_goes_on_from_its_file_keeps_the_same_rows(tmp_path: Path) -> None:
    batches = [normal(at, 30, 5) for at in range(4)]
    whole = seen(batches, Samples(["a"], 20)).samples
    again = seen(batches, Samples(["a"], 20), path=tmp_path / "kept").samples
    assert whole is not None and again is not None and again.count == 20 and [*again.layers] == ["a"]
    assert torch.equal(again.rows["a"], whole.rows["a"]) and torch.equal(again.keys["a"], whole.keys["a"])


def test_calls_of_one_batch_have_rows_of_their_own_and_a_batch_that_failed_leaves_none() -> None:
    found = Statistics("digest", samples=Samples(["a"], 100))
    with found.batch(0) as see:
        see(["a"], normal(0, 10, 3))
        see(["a"], normal(1, 10, 3))
    assert found.samples is not None and len({*found.samples.keys["a"].tolist()}) == 20
    with pytest.raises(RuntimeError), found.batch(0) as see:
        see(["a"], normal(2, 10, 3))
        raise RuntimeError
    assert len(found.samples.rows["a"]) == 20


def test_rows_keep_the_type_in_which_they_were_read() -> None:
    kept = seen([normal(0, 10, 3).bfloat16()], Samples(["a"], 4)).samples
    assert kept is not None and kept.rows["a"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("keys/a"),
        lambda tensors: tensors.update({"rows/a": tensors["rows/a"][:, :2].contiguous()}),
        lambda tensors: tensors.update({"keys/a": tensors["keys/a"][:2].contiguous()}),
        lambda tensors: tensors.update({"rows/c": tensors["rows/a"].clone(), "keys/c": tensors["keys/a"].clone()}),
    ],
)
def test_a_file_whose_rows_do_not_fit_is_refused(change: object, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    found = seen([normal(0, 10, 3)], Samples(["a"], 4))
    found.save(path)
    tensors = load_file(path)
    change(tensors)  # type: ignore[operator]
    about = {"model": "digest", "data": "", "batches": "[1]", "sampled": json.dumps([4, ["a"]])}
    save_file(tensors, path, about)
    with pytest.raises(StatisticsError, match="kept: holds no statistics"):
        Statistics.load(path)
