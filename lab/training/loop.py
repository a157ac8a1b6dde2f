"""The training loop of all stages: budget, learning-rate schedule, averaged weights, curves, checkpoints, pausing.

A stage provides modules and a loss.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lab.training import checkpoint
from lab.training.group import average_, values_of_first
from lab.training.muon import Muon
from lab.training.run import TrainingRun

Logged = dict[str, Tensor]
Loss = Callable[[int, torch.Generator], tuple[Tensor, Logged]]

# What stands at a model's edge is no map between hidden spaces: embeddings, padding, first and last layers go to AdamW.
_EDGES = re.compile(r"embed|pad_token|conv_in|conv_out|lm_head|^head|final_layer")
_LOG_EVERY, _PRINT_EVERY, _MOST_BAD = 20, 200, 10


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
class StageOutcome:
    """The end of a command: `done` is False when the run's `until` came before the end of the stage's budget."""

    iteration: int
    minutes: float
    loss: float
    done: bool


def train(stage: Stage, run: TrainingRun) -> StageOutcome:
    """Train from the last checkpoint to the end of the budget, and leave averaged weights in the modules.

    Matrices are stepped by Muon, the rest by AdamW: in a trial on the codec (64 px, 150 steps of 8 pictures) the
    loss came to 1.08 so, and to 1.5 with AdamW alone. The schedule is trapezoidal (warm-up, constant, linear to
    zero over the last `cooldown` of the budget), so that a longer budget can take up a run that has not cooled
    down yet. Averaging follows Karras et al. 2022 (EDM) in form, with a ramp so that early weights are forgotten.
    Raises `ValueError` when neither `minutes` nor `iterations` is given, and `FloatingPointError` when the
    loss is not finite ten times in a row.
    """
    if run.minutes is None and run.iterations is None:
        raise ValueError(f"stage {stage.name}: give --minutes or --iterations")
    return _Trainer(stage, run).train()


def begin(name: str, modules: dict[str, nn.Module], run: TrainingRun) -> bool:
    """Load into `modules` what `start/NAME.pt` has, for a stage without a checkpoint; returns whether it did."""
    state = checkpoint.load(run.work / "start" / f"{name}.pt")
    if state is None or (run.folder(name) / "state.pt").exists():
        return False
    for key, module in modules.items():
        missing, unknown = module.load_state_dict(state[key], strict=False)
        if unknown:
            raise ValueError(f"start/{name}.pt: {unknown[0]} is no part of {key}")
        print(f"{name}: {key} starts from start/{name}.pt, {len(missing)} parts fresh", flush=True)
    return True


def load_average(name: str, modules: dict[str, Any], run: TrainingRun) -> Any:
    """Load a stage's averaged weights for inference and return the first module.

    Raises `FileNotFoundError` where the stage is not trained.
    """
    state = checkpoint.load(run.folder(name) / "state.pt")
    if state is None:
        raise FileNotFoundError(f"{name}/state.pt: train the stage {name} first")
    for key, module in modules.items():
        module.load_state_dict(state["averaged"][key])
        module.eval().requires_grad_(False)
    return next(iter(modules.values()), None)


def factory(generator: torch.Generator) -> Any:
    """The arguments by which random tensors come from this generator, on its device."""
    return {"generator": generator, "device": generator.device}


class _Trainer:
    """The state of training in a checkpoint: weights, averages, optimizers, randomness, and how far the run is.

    Of several processes the first writes curves and checkpoints.
    """

    def __init__(self, stage: Stage, run: TrainingRun) -> None:
        torch.manual_seed(run.seed)
        self.stage, self.run = stage, run
        self.seed = run.seed + 2**40 * run.rank
        self.generator = torch.Generator(device=run.device).manual_seed(self.seed)
        self.iteration, self.seconds, self.smooth, self.bad = 0, 0.0, float("nan"), 0
        self.averaged = {name: copy.deepcopy(module).eval() for name, module in stage.modules.items()}
        for module in self.averaged.values():
            module.requires_grad_(False)
        matrices: list[dict[str, Any]] = []
        plain_groups: list[dict[str, Any]] = []
        for name, module in stage.modules.items():
            scale = stage.rates.get(name, 1.0)
            trained = {key: p for key, p in module.named_parameters() if p.requires_grad}
            inner = [p for key, p in trained.items() if p.ndim >= 2 and not _EDGES.search(key)]
            outer = [p for key, p in trained.items() if p.ndim < 2 or _EDGES.search(key)]
            matrices.append({"params": inner, "weight_decay": stage.decay, "scale": scale})
            # Norms, biases and embeddings are not pulled to zero.
            plain_groups.append({"params": outer, "weight_decay": 0.0, "scale": 0.5 * scale})
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "muon": Muon(matrices, lr=stage.rate),
            "adamw": torch.optim.AdamW(plain_groups, lr=stage.rate, betas=(0.9, 0.98), fused=True),
        }
        self.trained = [p for group in (*matrices, *plain_groups) for p in group["params"]]
        folder = run.folder(stage.name)
        self.curve, self.file = folder / "curve.jsonl", folder / "state.pt"
        self._restore(checkpoint.load(self.file))

    def train(self) -> StageOutcome:
        run, began, saved = self.run, self.seconds, time.monotonic()
        if run.rank == 0 and self.curve.exists():  # what a killed run wrote after its last checkpoint is done again
            lines = self.curve.read_text(encoding="utf-8").splitlines(keepends=True)
            log_lines = [line for line in lines if json.loads(line)["iteration"] <= self.iteration]
            self.curve.write_text("".join(log_lines), encoding="utf-8")
        while self._goes_on():
            while (run.work / "PAUSE").exists():
                time.sleep(1)
            started = self._clock()
            logged = self._step()
            self.seconds += self._clock() - started
            if run.rank == 0:
                self._log(logged)
                if time.monotonic() - saved >= run.checkpoint_s:
                    checkpoint.save(self.file, self._packed())
                    saved = time.monotonic()
        if run.rank == 0 and (self.seconds > began or not self.file.exists()):
            checkpoint.save(self.file, self._packed())
        for name, module in self.stage.modules.items():
            module.load_state_dict(self.averaged[name].state_dict())
        return StageOutcome(self.iteration, self.seconds / 60, self.smooth, self._progress() >= 1)

    def _clock(self) -> float:
        # On a CPU that others use too, wall time says little about how far training is; its own processor time does.
        return time.monotonic() if self.run.on_gpu else time.process_time() / torch.get_num_threads()

    def _progress(self) -> float:
        run = self.run
        return self.iteration / run.iterations if run.iterations is not None else self.seconds / 60 / (run.minutes or 1)

    def _goes_on(self) -> bool:
        """Return whether the budget and the command's end allow another step, by the first process's clock."""
        now = time.time()
        if self.run.world > 1:
            self.seconds, now = values_of_first(self.seconds, now)
        return self._progress() < 1 and (self.run.until is None or now < self.run.until)

    def _step(self) -> dict[str, float] | None:
        """One step; what it logs, if anything."""
        stage = self.stage
        warm = min(1.0, (self.iteration + 1) / stage.warmup)
        cool = min(1.0, max(0.0, 1 - self._progress()) / stage.cooldown)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = stage.rate * group["scale"] * warm * cool
        loss, logged = stage.loss(self.iteration, self.generator)
        loss.backward()
        if self.run.world > 1:
            average_([p.grad for p in self.trained if p.grad is not None])
        norm = torch.nn.utils.clip_grad_norm_(self.trained, stage.clip)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.iteration += 1
        self._average(min(stage.average, (1 + self.iteration) / (10 + self.iteration)))
        if self.iteration % _LOG_EVERY and self.iteration != 1:  # reading a value waits for the device
            return None
        value = float(loss.detach())
        self.bad = 0 if value == value and abs(value) != float("inf") else self.bad + 1
        if self.bad >= _MOST_BAD:
            raise FloatingPointError(f"stage {stage.name}: loss is {value} at iteration {self.iteration}")
        self.smooth = value if self.smooth != self.smooth else 0.9 * self.smooth + 0.1 * value
        entry = {"loss": value, "smooth": self.smooth, "norm": float(norm), "rate": stage.rate * warm * cool}
        return {**entry, **{key: float(number) for key, number in logged.items()}}

    @torch.no_grad()
    def _average(self, keep: float) -> None:
        for name, module in self.stage.modules.items():
            into: list[Tensor] = list(self.averaged[name].parameters())
            torch._foreach_lerp_(into, [p.detach() for p in module.parameters()], 1 - keep)
            for buffer, current in zip(self.averaged[name].buffers(), module.buffers(), strict=True):
                buffer.copy_(current)

    def _log(self, logged: dict[str, float] | None) -> None:
        if logged is None:
            return
        record = {"iteration": self.iteration, "minutes": round(self.seconds / 60, 3), **logged}
        with self.curve.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
        if self.iteration % _PRINT_EVERY == 0 or self.iteration == _LOG_EVERY:
            print(self.stage.name, *(f"{key}={value:.5g}" for key, value in record.items()), flush=True)

    def _packed(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "seconds": self.seconds,
            "smooth": self.smooth,
            "modules": {name: module.state_dict() for name, module in self.stage.modules.items()},
            "averaged": {name: module.state_dict() for name, module in self.averaged.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def _restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        for name, module in self.stage.modules.items():
            module.load_state_dict(state["modules"][name])
            self.averaged[name].load_state_dict(state["averaged"][name])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])
        self.iteration, self.seconds, self.smooth = state["iteration"], state["seconds"], state["smooth"]
        if self.run.rank > 0:  # the checkpoint has the first process's randomness
            self.generator.manual_seed(self.seed + self.iteration)
