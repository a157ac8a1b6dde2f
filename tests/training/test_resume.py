"""A run that is killed, paused or cut into slices ends where an undisturbed one ends."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from training import checkpoint, loop, tokens, vae
from training.run import TrainingRun

LENGTH = 60
PATIENCE_S = 600.0  # a run that hangs ends the test; how fast one is does not


def run_vae(run: TrainingRun) -> subprocess.Popen[bytes]:
    """The command, which saves a checkpoint after each step."""
    options = {
        "data": run.data, "work": run.work, "size": run.size, "shape": "smoke", "batch": run.batch, "threads": 1,
        "held-out": run.held_out, "variants": run.variants, "iterations": run.iterations, "checkpoint-s": 0,
        "dtype": "float32",
    }  # fmt: skip
    command = [sys.executable, "-m", "training.vae", *(f"--{name}={value}" for name, value in options.items())]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2])


def iteration(run: TrainingRun) -> int:
    curve = run.work / "vae" / "curve.jsonl"
    lines = curve.read_text(encoding="utf-8").splitlines() if curve.exists() else []
    return int(json.loads(lines[-1])["iteration"]) if lines else 0


def test_a_killed_run_ends_as_an_undisturbed_one(run: TrainingRun, tmp_path: Path) -> None:
    """The killed one is a process; the undisturbed one and the one that goes on are this one."""
    run = dataclasses.replace(run, iterations=LENGTH, batch=4)
    calm = dataclasses.replace(run, work=tmp_path / "calm")
    tokens.train(run)
    shutil.copytree(run.work / "tokens", calm.work / "tokens")
    broken = run_vae(run)
    deadline = time.monotonic() + PATIENCE_S
    while iteration(run) < 20:
        assert time.monotonic() < deadline and broken.poll() is None
        time.sleep(0.01)
    broken.send_signal(signal.SIGKILL)
    broken.wait()
    kept = checkpoint.load(run.work / "vae" / "state.pt")
    assert kept is not None and kept["iteration"] < LENGTH
    assert vae.train(run).done and vae.train(calm).done
    one, two = (checkpoint.load(where.work / "vae" / "state.pt") for where in (calm, run))
    assert one is not None and two is not None
    assert two["iteration"] == LENGTH
    for key, value in one["averaged"]["vae"].items():
        assert torch.equal(value, two["averaged"]["vae"][key]), key
    lines = (run.work / "vae" / "curve.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line)["iteration"] for line in lines]
    assert steps == sorted(set(steps)) and steps[-1] == LENGTH


def toy(value: float = 1.0) -> tuple[loop.Stage, nn.Linear]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def loss(_: int, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = torch.randn(8, 4, generator=generator)
        return value * (layer(x) - x).square().mean(), {}

    return loop.Stage("toy", {"layer": layer}, loss, rate=0.02, warmup=5), layer


def far(layer: nn.Linear) -> float:
    return float((layer.weight.detach() - torch.eye(4)).norm())


def test_commands_that_end_at_a_time_add_up_to_the_budget(run: TrainingRun) -> None:
    timed = dataclasses.replace(run, iterations=None, minutes=0.02)
    ends: list[loop.Outcome] = []
    while not ends or not ends[-1].done:
        ends.append(loop.train(toy()[0], dataclasses.replace(timed, until=time.time() + 0.5)))
        assert len(ends) < 200
    assert len(ends) > 1
    assert [end.iteration for end in ends] == sorted(end.iteration for end in ends)
    assert ends[-1].minutes >= 0.02
    again = loop.train(toy()[0], timed)
    late = dataclasses.replace(timed, minutes=1.0, until=time.time() - 1)
    assert loop.train(toy()[0], late) == dataclasses.replace(again, done=False)
    assert again.iteration == ends[-1].iteration


def test_averaged_weights_are_left_in_the_modules_and_learn(run: TrainingRun) -> None:
    stage, layer = toy()
    before = far(layer)
    loop.train(stage, dataclasses.replace(run, iterations=300))
    assert far(layer) < 0.2 * before
    other = toy()[1]
    modules: dict[str, nn.Module] = {"layer": other}
    assert loop.restore_average("toy", modules, run)
    assert torch.equal(other.weight, layer.weight)
    assert not loop.restore_average("none", modules, run)


def test_it_waits_while_the_pause_file_exists(run: TrainingRun) -> None:
    run.folder("toy")
    (run.work / "PAUSE").touch()
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(loop.train(toy()[0], run)))
    thread.start()
    thread.join(0.5)
    assert not ended and thread.is_alive()
    (run.work / "PAUSE").unlink()
    thread.join(20)
    assert ended and ended[0].done


def test_a_budget_is_required_and_nan_is_fatal(run: TrainingRun) -> None:
    with pytest.raises(ValueError, match="stage toy: give --minutes or --iterations"):
        loop.train(toy()[0], dataclasses.replace(run, iterations=None))
    with pytest.raises(FloatingPointError, match="stage toy: loss is nan"):
        loop.train(toy(float("nan"))[0], dataclasses.replace(run, iterations=1000))
