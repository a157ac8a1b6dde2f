"""Two processes, each with half of the rows, train what one trains of all of them, and write one checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

PROGRAM = """
import sys
from pathlib import Path
import torch
from training import loop
from training.run import TrainingRun
from training.group import join

rank, world = join(on_gpu=False)
folder = Path(sys.argv[1])
run = TrainingRun(data=folder, work=folder, models=folder, iterations=int(sys.argv[2]), rank=rank, world=world)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
rows = torch.randn(50, 12, 4, generator=torch.Generator().manual_seed(1))
mine = rows.chunk(world, dim=1)[rank]

def loss(iteration, generator):
    x = mine[iteration]
    return (model(x)[:, 0] - x.prod(1)).square().mean(), {"draw": torch.rand((), generator=generator)}

loop.train(loop.Stage("line", {"model": model}, loss, rate=0.02, warmup=1), run)
torch.save(model.state_dict(), folder / f"ended-{rank}.pt")
"""


def trained(folder: Path, processes: int, iterations: int = 40) -> list[dict[str, torch.Tensor]]:
    """What each process has at the end."""
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*start, str(folder / "program.py"), str(folder), str(iterations)],
        cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"ended-{rank}.pt", weights_only=True) for rank in range(processes)]


def test_two_processes_train_what_one_does_of_all_rows(tmp_path: Path) -> None:
    (alone,) = trained(tmp_path / "alone", 1)
    first, second = trained(tmp_path / "pair", 2)
    for key, tensor in alone.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], tensor, atol=1e-5, rtol=1e-4)
    lines = (tmp_path / "pair" / "line" / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 20, 40], "one process writes"


def test_two_processes_resume_together(tmp_path: Path) -> None:
    trained(tmp_path, 2, 20)
    first, second = trained(tmp_path, 2, 40)
    assert all(torch.equal(first[key], second[key]) for key in first)
    state = torch.load(tmp_path / "line" / "state.pt", weights_only=True)
    assert state["iteration"] == 40
