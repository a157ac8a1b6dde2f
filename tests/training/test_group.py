"""Two processes, each with half of the rows, train what one trains of all of them, and write one checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from training import loop
from training.run import TrainingRun

PROGRAM = """
import sys
from pathlib import Path
from torch import distributed
from tests.training.test_group import train
from training.group import join

rank, world = join(on_gpu=False)
folder = Path(sys.argv[1])
train(folder / "straight", rank, world)
train(folder / "resumed", rank, world, 20)
distributed.barrier()  # the first has written the checkpoint
train(folder / "resumed", rank, world)
"""


def train(folder: Path, rank: int = 0, world: int = 1, iterations: int = 40) -> None:
    """Trains a process's rows, from a checkpoint if there is one, and saves what it ends with."""
    folder.mkdir(exist_ok=True)
    run = TrainingRun(data=folder, work=folder, models=folder, iterations=iterations, rank=rank, world=world)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    rows = torch.randn(50, 12, 4, generator=torch.Generator().manual_seed(1))
    mine = rows.chunk(world, dim=1)[rank]

    def loss(iteration: int, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = mine[iteration]
        return (model(x)[:, 0] - x.prod(1)).square().mean(), {"draw": torch.rand((), generator=generator)}

    loop.train(loop.Stage("line", {"model": model}, loss, rate=0.02, warmup=1), run)
    torch.save(model.state_dict(), folder / f"ended-{rank}.pt")


def ended(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / f"ended-{rank}.pt", weights_only=True)
    return state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes of `torchrun` trained: `straight`, and `resumed` from a checkpoint."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(folder / "program.py"), str(folder)],
        cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_two_processes_train_what_one_does_of_all_rows(folder: Path, tmp_path: Path) -> None:
    train(tmp_path / "alone")
    first, second = (ended(folder / "straight", rank) for rank in range(2))
    for key, tensor in ended(tmp_path / "alone", 0).items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], tensor, atol=1e-5, rtol=1e-4)
    lines = (folder / "straight" / "line" / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 20, 40], "one process writes"


def test_two_processes_resume_together(folder: Path) -> None:
    first, second = (ended(folder / "resumed", rank) for rank in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    state = torch.load(folder / "resumed" / "line" / "state.pt", weights_only=True)
    assert state["iteration"] == 40
