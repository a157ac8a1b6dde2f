"""The training loop of all stages: budget, learning-rate schedule, averaged weights, curves, checkpoints, pausing.

A stage provides modules and a loss.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from training import checkpoint
from training.group import agree, average_
from training.muon import Muon
from training.run import TrainingRun

Loss = Callable[[int, torch.Generator], tuple[torch.Tensor, dict[str, torch.Tensor]]]

# What stands at a model's edge is no map between hidden spaces: embeddings, padding, first and last layers go to AdamW.
_EDGES = re.compile(r"embed|pad_token|conv_in|conv_out|lm_head|^head|final_layer")


@dataclass
class Stage:
    """One model in training.

    `loss(iteration, generator)` draws a batch and returns the scalar to minimise and what else to log.
    `generator` lives on the run's device and is the only source of the batch's randomness. `rates` scales the
    learning rate for modules by name.
    """

    name: str
    modules: dict[str, nn.Module]
    loss: Loss
    rate: float
    decay: float = 0.01
    warmup: int = 200
    average: float = 0.999
    cooldown: float = 0.3
    clip: float = 1.0
    rates: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a command ended: `done` is False when the run's `until` came before the end of the stage's budget."""

    iteration: int
    minutes: float
    loss: float
    done: bool


def train(stage: Stage, run: TrainingRun) -> Outcome:
    """Trains from the last checkpoint to the end of the budget, and leaves averaged weights in the modules.

    Matrices are stepped by Muon, the rest by AdamW: in a trial on the codec (64 px, 150 steps of 8 pictures) the
    loss came to 1.08 so, and to 1.5 with AdamW alone. The schedule is trapezoidal (warm-up, constant, linear to
    zero over the last `cooldown` of the budget), so that a longer budget can take up a run that has not cooled
    down yet. Averaging follows Karras et al. 2022 (EDM) in form, with a ramp so that early weights are forgotten.
    Raises `ValueError` when neither `minutes` nor `iterations` is given, and `FloatingPointError` when the
    loss is not finite ten times in a row.
    """
    if run.minutes is None and run.iterations is None:
        raise ValueError(f"stage {stage.name}: give --minutes or --iterations")
    state = _State(stage, run)
    state.restore(checkpoint.load(run.folder(stage.name) / "state.pt"), run)
    log = _Log(stage, run, state)
    pause = run.work / "PAUSE"
    while state.goes_on(run):
        while pause.exists():
            time.sleep(1)
        started = _clock(run)
        logged = state.step(stage, run)
        state.seconds += _clock(run) - started
        log.stepped(logged)
    log.ended()
    for name, module in stage.modules.items():
        module.load_state_dict(state.averaged[name].state_dict())
    return Outcome(state.iteration, state.seconds / 60, state.smooth, state.progress(run) >= 1)


def begin(name: str, modules: dict[str, nn.Module], run: TrainingRun) -> bool:
    """Loads into `modules` what `start/NAME.pt` has, for a stage without a checkpoint; returns whether it did."""
    state = checkpoint.load(run.work / "start" / f"{name}.pt")
    if state is None or (run.folder(name) / "state.pt").exists():
        return False
    for key, module in modules.items():
        missing, unknown = module.load_state_dict(state[key], strict=False)
        if unknown:
            raise ValueError(f"start/{name}.pt: {unknown[0]} is no part of {key}")
        print(f"{name}: {key} starts from start/{name}.pt, {len(missing)} parts fresh", flush=True)
    return True


def restore_average(name: str, modules: dict[str, nn.Module], run: TrainingRun) -> bool:
    """Loads a stage's averaged weights into `modules`; False where it has no checkpoint."""
    state = checkpoint.load(run.folder(name) / "state.pt")
    if state is None:
        return False
    for key, module in modules.items():
        module.load_state_dict(state["averaged"][key])
    return True


def load_average(name: str, modules: dict[str, nn.Module], run: TrainingRun) -> None:
    """`restore_average` for inference; raises `FileNotFoundError` where the stage is not trained."""
    if not restore_average(name, modules, run):
        raise FileNotFoundError(f"{name}/state.pt: train the stage {name} first")
    for module in modules.values():
        module.eval().requires_grad_(False)


def _clock(run: TrainingRun) -> float:
    # On a CPU that others use too, wall time says little about how far training is; its own processor time does.
    return time.monotonic() if run.on_gpu else time.process_time() / torch.get_num_threads()


def _seed(run: TrainingRun) -> int:
    return run.seed + 2**40 * run.rank


class _State:
    """What a checkpoint holds: weights, averages, optimizer, randomness, and how far the run is."""

    def __init__(self, stage: Stage, run: TrainingRun) -> None:
        torch.manual_seed(run.seed)
        self.generator = torch.Generator(device=run.device).manual_seed(_seed(run))
        self.iteration = 0
        self.seconds = 0.0
        self.smooth = float("nan")
        self.bad = 0
        self.modules = stage.modules
        self.averaged = {name: copy.deepcopy(module).eval() for name, module in stage.modules.items()}
        for module in self.averaged.values():
            module.requires_grad_(False)
        matrices: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for name, module in stage.modules.items():
            scale = stage.rates.get(name, 1.0)
            trained = {key: p for key, p in module.named_parameters() if p.requires_grad}
            inner = [p for key, p in trained.items() if p.ndim >= 2 and not _EDGES.search(key)]
            outer = [p for key, p in trained.items() if p.ndim < 2 or _EDGES.search(key)]
            matrices.append({"params": inner, "weight_decay": stage.decay, "scale": scale})
            # Norms, biases and embeddings are not pulled to zero.
            others.append({"params": outer, "weight_decay": 0.0, "scale": 0.5 * scale})
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "muon": Muon(matrices, lr=stage.rate),
            "adamw": torch.optim.AdamW(others, lr=stage.rate, betas=(0.9, 0.98), fused=True),
        }
        self.trained = [p for group in (*matrices, *others) for p in group["params"]]

    def progress(self, run: TrainingRun) -> float:
        if run.iterations is not None:
            return self.iteration / run.iterations
        assert run.minutes is not None
        return self.seconds / (run.minutes * 60)

    def goes_on(self, run: TrainingRun) -> bool:
        """Whether another step is within the budget and before the command's end, by the first process's clock."""
        now = time.time()
        if run.world > 1:
            self.seconds, now = agree(self.seconds, now)
        return self.progress(run) < 1 and (run.until is None or now < run.until)

    def step(self, stage: Stage, run: TrainingRun) -> dict[str, float] | None:
        warm = min(1.0, (self.iteration + 1) / stage.warmup)
        cool = min(1.0, max(0.0, 1 - self.progress(run)) / stage.cooldown)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = stage.rate * group["scale"] * warm * cool
        loss, logged = stage.loss(self.iteration, self.generator)
        loss.backward()
        if run.world > 1:
            average_([p.grad for p in self.trained if p.grad is not None])
        norm = torch.nn.utils.clip_grad_norm_(self.trained, stage.clip)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.iteration += 1
        self._average(min(stage.average, (1 + self.iteration) / (10 + self.iteration)))
        if self.iteration % 20 and self.iteration != 1:  # reading a value waits for the device
            return None
        value = float(loss.detach())
        self.bad = 0 if value == value and abs(value) != float("inf") else self.bad + 1
        if self.bad >= 10:
            raise FloatingPointError(f"stage {stage.name}: loss is {value} at iteration {self.iteration}")
        self.smooth = value if self.smooth != self.smooth else 0.9 * self.smooth + 0.1 * value
        extra = {key: float(number) for key, number in logged.items()}
        return {
            "loss": value,
            "smooth": self.smooth,
            "norm": float(norm),
            "rate": stage.rate * warm * cool,
            **extra,
        }

    @torch.no_grad()
    def _average(self, keep: float) -> None:
        for name, module in self.modules.items():
            into: list[torch.Tensor] = list(self.averaged[name].parameters())
            torch._foreach_lerp_(into, [p.detach() for p in module.parameters()], 1 - keep)
            for kept, current in zip(self.averaged[name].buffers(), module.buffers(), strict=True):
                kept.copy_(current)

    def packed(self, stage: Stage) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {
            "iteration": self.iteration,
            "seconds": self.seconds,
            "smooth": self.smooth,
            "modules": {name: module.state_dict() for name, module in stage.modules.items()},
            "averaged": {name: module.state_dict() for name, module in self.averaged.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }

    def restore(self, state: dict[str, Any] | None, run: TrainingRun) -> None:
        if state is None:
            return
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
            self.averaged[name].load_state_dict(state["averaged"][name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])
        self.iteration = int(state["iteration"])
        self.seconds = float(state["seconds"])
        self.smooth = float(state["smooth"])
        if run.rank > 0:  # the checkpoint has the first process's randomness
            self.generator.manual_seed(_seed(run) + self.iteration)


class _Log:
    """Writes a stage's curve and checkpoints; of several processes the first does."""

    def __init__(self, stage: Stage, run: TrainingRun, state: _State) -> None:
        self._stage, self._run, self._state = stage, run, state
        self._writes = run.rank == 0
        self._curve = run.folder(stage.name) / "curve.jsonl"
        self._checkpoint = run.folder(stage.name) / "state.pt"
        self._began = state.seconds
        self._saved = time.monotonic()
        if self._writes:
            checkpoint.trim_lines(self._curve, state.iteration)

    def stepped(self, logged: dict[str, float] | None) -> None:
        """Notes what a step logged, if anything, and saves a checkpoint where one is due."""
        if not self._writes:
            return
        state = self._state
        if logged is not None:
            record = {"iteration": state.iteration, "minutes": round(state.seconds / 60, 3), **logged}
            checkpoint.append_line(self._curve, record)
            if state.iteration % 200 == 0 or state.iteration == 20:
                print(self._stage.name, *(f"{key}={value:.5g}" for key, value in record.items()), flush=True)
        if time.monotonic() - self._saved >= self._run.checkpoint_s:
            checkpoint.save(self._checkpoint, state.packed(self._stage))
            self._saved = time.monotonic()

    def ended(self) -> None:
        """Saves the last checkpoint, unless nothing was trained."""
        if self._writes and (self._state.seconds > self._began or not self._checkpoint.exists()):
            checkpoint.save(self._checkpoint, self._state.packed(self._stage))
