"""Calibration: of batches of prompts, resumed where it was killed, and refused where a checkpoint is another's."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.quant.statistics import Statistics, StatisticsError
from tests.children import in_fork
from tests.core.quant.blocks import LAYERS, block, same
from tests.core.quant.stage import normal
from unet_opt.calibrate import Around, CalibrationPart, CalibrationSettings, calibrate, observe_modules

SETTINGS = CalibrationSettings()
BATCH = SETTINGS.batch
PROMPTS = [f"a picture of {number} cats" for number in range(3 * BATCH - 2)]


class Killed(BaseException):
    pass


class Run:
    """Draws prompts with a small model over two steps; what it draws depends on the prompts alone."""

    def __init__(self, *, dies_at: tuple[int, int] | None = None) -> None:
        self.model = block()
        self.batches: list[list[str]] = []
        self._dies_at = dies_at

    def __call__(self, batch: Sequence[str], around: Around) -> None:
        self.batches.append(list(batch))
        for step in range(2):
            x = torch.cat([normal(hash_of(prompt) + step, 1, 32, 6, 6) for prompt in batch])
            with around("block", step), torch.inference_mode():
                self.model(x)
            if (len(self.batches) - 1, step) == self._dies_at:
                raise Killed


def hash_of(prompt: str) -> int:
    return sum(prompt.encode())


def collect(run: Run, checkpoint: Path | None = None, prompts: Sequence[str] = PROMPTS, **options: Any) -> Statistics:
    part = CalibrationPart(options.pop("layers", LAYERS), observe_modules(run.model), checkpoint)
    return calibrate({"block": part}, prompts, run, digest=options.pop("digest", "digest"), **options)["block"]


def test_all_prompts_are_run_in_batches_and_progress_is_told() -> None:
    run, told = Run(), list[int]()
    found = collect(run, tell=told.append)
    assert [prompt for batch in run.batches for prompt in batch] == PROMPTS
    assert [len(batch) for batch in run.batches] == [BATCH, BATCH, BATCH - 2]
    assert told == [0, BATCH, 2 * BATCH, len(PROMPTS)]
    assert found.batches == [3, 3] and {*found.largest} == {*LAYERS}


@pytest.mark.parametrize("dies_at", [(0, 0), (1, 0), (1, 1), (2, 1)])
def test_a_run_that_was_killed_goes_on_to_the_same_statistics(dies_at: tuple[int, int], tmp_path: Path) -> None:
    whole = collect(Run())
    dying, again = Run(dies_at=dies_at), Run()
    with pytest.raises(Killed):
        collect(dying, tmp_path / "checkpoint")
    told = list[int]()
    assert same(collect(again, tmp_path / "checkpoint", tell=told.append), whole)
    assert len(again.batches) == 3 - dies_at[0], "what was done is not done again"
    assert told[-1] == len(PROMPTS)
    assert not any(len(module._forward_pre_hooks) for module in dying.model.modules())


def test_a_finished_checkpoint_is_not_run_again(tmp_path: Path) -> None:
    whole, again = collect(Run(), tmp_path / "checkpoint"), Run()
    assert same(collect(again, tmp_path / "checkpoint"), whole) and not again.batches


def test_more_prompts_go_on_from_what_was_done(tmp_path: Path) -> None:
    collect(Run(), tmp_path / "checkpoint", PROMPTS[: 2 * BATCH])
    again = Run()
    assert same(collect(again, tmp_path / "checkpoint"), collect(Run())) and len(again.batches) == 1


class Both:
    """Draws with two models, of which one is observed in two steps and the other in one."""

    def __init__(self) -> None:
        self.first, self.second = Run(), Run()
        self.observed: list[tuple[str, int]] = []

    def __call__(self, batch: Sequence[str], around: Around) -> None:
        def seen(name: str) -> Around:
            def entered(_: str, step: int) -> AbstractContextManager[None]:
                if name == "second" and step:
                    return nullcontext()
                context = around(name, step)
                if not isinstance(context, nullcontext):
                    self.observed.append((name, step))
                return context

            return entered

        self.first(batch, seen("first"))
        self.second(batch, seen("second"))

    def parts(self, folder: Path) -> Mapping[str, CalibrationPart]:
        return {
            name: CalibrationPart(LAYERS, observe_modules(run.model), folder / name)
            for name, run in (("first", self.first), ("second", self.second))
        }


def test_of_two_parts_the_one_that_is_behind_goes_on_alone(tmp_path: Path) -> None:
    """Killed between the files of two parts: neither misses a batch, and none counts twice."""
    whole = Both()
    wanted = calibrate(whole.parts(tmp_path), PROMPTS, whole, digest="digest")
    assert {name: found.batches for name, found in wanted.items()} == {"first": [3, 3], "second": [3]}
    behind = Both()
    (tmp_path / "second").unlink()
    calibrate({"second": behind.parts(tmp_path)["second"]}, PROMPTS[:BATCH], behind_only(behind), digest="digest")
    again = Both()
    found = calibrate(again.parts(tmp_path), PROMPTS, again, digest="digest")
    assert all(same(found[name], wanted[name]) for name in wanted)
    assert again.observed == [("second", 0)] * 2


def behind_only(both: Both) -> Any:
    return lambda batch, around: both.second(batch, lambda _, step: nullcontext() if step else around("second", step))


class Dies(Run):
    def __call__(self, batch: Sequence[str], around: Around) -> None:
        super().__call__(batch, around)
        if len(self.batches) == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_leaves_a_checkpoint_that_is_whole(tmp_path: Path) -> None:
    assert in_fork(lambda: collect(Dies(), tmp_path / "checkpoint")) == -signal.SIGKILL
    again = Run()
    assert same(collect(again, tmp_path / "checkpoint"), collect(Run())) and len(again.batches) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"digest": "other"}, "checkpoint: was begun with another model or recipe; remove it to begin anew"),
        ({"layers": LAYERS[1:]}, "checkpoint: was begun with another model or recipe"),
        (
            {"prompts": ["others", *PROMPTS[1:]]},
            "checkpoint: was begun with other prompts or settings; remove it to begin anew",
        ),
        ({"prompts": PROMPTS[:3]}, "checkpoint: was begun with other prompts"),
        ({"prompts": [*PROMPTS, "one more in a batch that was full of fewer"]}, "was begun with other prompts"),
        ({"settings": replace(SETTINGS, guidance=5.0)}, "was begun with other prompts or settings"),
        ({"prompts": []}, "calibration needs prompts, and there are none"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    collect(Run(), tmp_path / "checkpoint")
    with pytest.raises(StatisticsError, match=said):
        collect(Run(), tmp_path / "checkpoint", **options)


def test_a_damaged_checkpoint_is_refused_and_an_uneven_one_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(b"damaged")
    with pytest.raises(StatisticsError, match="holds no statistics"):
        collect(Run(), path)
    uneven = Statistics("digest")
    for step in (0, 0, 1):
        with uneven.observe(Run().model, [], step):
            pass
    whole = collect(Run())
    uneven.largest, uneven.smallest, uneven.typical = whole.largest, whole.smallest, whole.typical
    uneven.save(path)
    assert same(collect(Run(), path), whole)
