"""A run that is killed, paused, cut into slices or shared by two processes ends where an undisturbed one ends."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from lab.training import checkpoint, group, loop, vae
from lab.training.run import TrainingRun
from tests.json_lines import whole_lines

LENGTH = 60
PATIENCE_S = 600.0  # a run that hangs ends the test; how fast one is does not
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__, "torch._dynamo"])  # which optimizers import

State = dict[str, Tensor]


def train(
    folder: Path,
    iterations: int = LENGTH,
    *,
    process: tuple[int, int] = (0, 1),
    noisy: bool = False,
    wait_s: float = 0.0,
) -> State:
    """Trains a process's rows from a checkpoint if there is one, saves one after each step; what it ends with."""
    torch.set_num_threads(1)
    rank, world = process
    folder.mkdir(exist_ok=True)
    run = TrainingRun(folder, folder, folder, iterations=iterations, checkpoint_s=0, rank=rank, world=world)
    torch.manual_seed(0)
    parts = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)]
    if noisy:  # with randomness and buffers
        parts[2:2] = [nn.Dropout(0.1), nn.BatchNorm1d(8)]
    model = nn.Sequential(*parts)
    rows = torch.randn(LENGTH, 12, 4, generator=torch.Generator().manual_seed(1))
    mine = rows.chunk(world, dim=1)[rank]

    def loss(iteration: int, generator: torch.Generator) -> tuple[Tensor, loop.Logged]:
        time.sleep(wait_s)
        x = mine[iteration]
        return (model(x)[:, 0] - x.prod(1)).square().mean(), {"draw": torch.rand((), generator=generator)}

    loop.train(loop.Stage("line", {"model": model}, loss, rate=0.02, warmup=1), run)
    return model.state_dict()


def lines(folder: Path) -> list[dict[str, Any]]:
    return whole_lines(folder / "line" / "curve.jsonl")


def same(one: State, other: State) -> bool:
    return all(torch.equal(tensor, other[key]) for key, tensor in one.items())


@pytest.mark.long
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """The killed one is a process; the undisturbed one and the one that goes on are this one."""
    calm, broken = tmp_path / "calm", tmp_path / "broken"
    process = PROCESSES.Process(target=train, args=(broken,), kwargs={"noisy": True, "wait_s": 0.02})
    process.start()
    deadline = time.monotonic() + PATIENCE_S
    while not lines(broken) or lines(broken)[-1]["iteration"] < 20:
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    kept = checkpoint.load(broken / "line" / "state.pt")
    assert kept is not None and 20 <= kept["iteration"] + 1 < LENGTH
    one, two = (train(folder, noisy=True) for folder in (calm, broken))
    assert same(one, two) and len(one) > 6
    curves = [[{**line, "minutes": 0} for line in lines(folder)] for folder in (calm, broken)]
    assert curves[0] == curves[1] and [line["iteration"] for line in curves[0]] == [1, 20, 40, 60]


def test_a_stage_that_is_stopped_goes_on_as_if_it_was_not(
    worded: TrainingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dataclasses.replace(worded, iterations=4, batch=2, checkpoint_s=0)
    calm = dataclasses.replace(run, work=tmp_path / "calm")
    shutil.copytree(run.work, calm.work, symlinks=True)
    save, saved = checkpoint.save, []

    def stopped(path: Path, state: dict[str, Any]) -> None:
        save(path, state)
        saved.append(state["iteration"])
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        vae.train(run)
    assert vae.train(run).done and vae.train(calm).done
    assert saved[:4] == [1, 2, 3, 4]
    one, two = (checkpoint.need(each.work / "vae" / "state.pt", "vae")["averaged"]["vae"] for each in (calm, run))
    assert same(one, two)


def pair(folder: Path, rank: int, port: int) -> None:
    """One of two processes, which train together: once to the end, and once in two commands."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = group.join(on_gpu=False)
    ended = {"straight": train(folder / "straight", process=process)}
    train(folder / "resumed", 20, process=process)
    distributed.barrier()  # the first has written the checkpoint
    ended["resumed"] = train(folder / "resumed", process=process)
    torch.save(ended, folder / f"ended-{rank}.pt")


def test_two_processes_train_what_one_does_of_all_rows(tmp_path: Path) -> None:
    """Also where they resume; and one of them writes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [PROCESSES.Process(target=pair, args=(tmp_path, rank, port)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    first, second = (torch.load(tmp_path / f"ended-{rank}.pt", weights_only=True) for rank in range(2))
    for name, ended in first.items():
        assert same(ended, second[name]), name
    for key, tensor in train(tmp_path / "alone").items():
        torch.testing.assert_close(first["straight"][key], tensor, atol=1e-5, rtol=1e-4)
    assert [line["iteration"] for line in lines(tmp_path / "straight")] == [1, 20, 40, 60]
    assert checkpoint.need(tmp_path / "resumed" / "line" / "state.pt", "line")["iteration"] == LENGTH


def toy(value: float = 1.0) -> tuple[loop.Stage, nn.Linear]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def loss(_: int, generator: torch.Generator) -> tuple[Tensor, loop.Logged]:
        x = torch.randn(8, 4, generator=generator)
        return value * (layer(x) - x).square().mean(), {}

    return loop.Stage("toy", {"layer": layer}, loss, rate=0.02, warmup=5), layer


def far(layer: nn.Linear) -> float:
    return float((layer.weight.detach() - torch.eye(4)).norm())


def test_commands_that_end_at_a_time_add_up_to_the_budget(run: TrainingRun) -> None:
    timed = dataclasses.replace(run, iterations=None, minutes=0.005)
    ends: list[loop.StageOutcome] = []
    deadline = time.monotonic() + 300
    while not ends or not ends[-1].done:
        assert time.monotonic() < deadline, ends  # on a busy machine a command may end before its first iteration
        ends.append(loop.train(toy()[0], dataclasses.replace(timed, until=time.time() + 0.1)))
    assert len(ends) > 1
    assert [end.iteration for end in ends] == sorted(end.iteration for end in ends)
    assert ends[-1].minutes >= 0.005
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
    loop.load_average("toy", {"layer": other}, run)
    assert torch.equal(other.weight, layer.weight) and not other.weight.requires_grad
    with pytest.raises(FileNotFoundError, match="train the stage none first"):
        loop.load_average("none", {}, run)


def test_it_waits_while_the_pause_file_exists(run: TrainingRun) -> None:
    run.folder("toy")
    (run.work / "PAUSE").touch()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(loop.train, toy()[0], run)
        with pytest.raises(TimeoutError):
            ended.result(0.5)
        (run.work / "PAUSE").unlink()
        assert ended.result(PATIENCE_S).done


def test_a_budget_is_required_and_nan_is_fatal(run: TrainingRun) -> None:
    with pytest.raises(ValueError, match="stage toy: give --minutes or --iterations"):
        loop.train(toy()[0], dataclasses.replace(run, iterations=None))
    with pytest.raises(FloatingPointError, match="stage toy: loss is nan"):
        loop.train(toy(float("nan"))[0], dataclasses.replace(run, iterations=1000))
