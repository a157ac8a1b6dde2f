"""Measures images per second of one model with one more optimization per rung, all in one run.

It measures only speed; `benchmarks.ways` measures quality.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING, Any

from benchmarks import compiling, provenance, record
from contract import plan, tuned
from contract.card import FULL, TINY
from contract.image import ImageParameters
from core.batching.request import Request
from core.batching.runner import Lane
from core.config import Settings
from core.kernels.device import TORCH
from pipeline import plans
from pipeline.families.family import ImageModel
from pipeline.folder import TINY_VAE, ModelError
from pipeline.load import defaults_of, family_of

if TYPE_CHECKING:
    from workers.build import Runtime


@dataclass(frozen=True)
class Rung:
    """How the engine draws. `compile` is torch's compiler, `kernels` are our own instead.

    `plan` is the name of one that `diptych tune` found; `interval` is the steps with guidance, as shares of all. A
    student draws in its own steps.
    """

    precision: str = "int8"
    kernels: bool = True
    compile: bool = False
    deepcache: str = "off"
    interval: tuple[float, float] | None = None
    plan: str = ""
    vae: str = FULL
    student: bool = False

    def settings(self, given: Settings) -> Settings:
        """Of the rung's engine."""
        fields = ("precision", "kernels", "compile", "deepcache")
        return given.model_copy(update={field: getattr(self, field) for field in fields})


_ENGINE = {
    "step-batching": Rung("fp32", kernels=False),
    "+compile": Rung("fp32", kernels=False, compile=True),
    "+kernels": Rung("fp32"),
    "+int8": Rung(),
    "+deepcache": Rung(deepcache="auto"),
    "+gate": Rung(deepcache="auto", interval=(0.0, 0.5)),
    "+plan": Rung(plan=tuned.BALANCED),
    "+tiny": Rung(plan=tuned.BALANCED, vae=TINY),
    "fast+tiny": Rung(plan=tuned.FAST, vae=TINY),
    "turbo": Rung(student=True),
    "turbo+tiny": Rung(student=True, vae=TINY),
}
RUNGS = ("diffusers", "diffusers-static-batch", *_ENGINE)
STATIC_BATCH = 8
IN_FLIGHT = 16  # twice as many of one row each
_ROUND = 32  # pictures of each rung at least before it is the next one's turn: drift of the machine meets all alike
_TURN_S, _MOST_ROUNDS = 4.0, 16  # a fast rung's turn has more: its first and last pictures are in few's company

Draw = Callable[[Sequence[tuple[str, int]]], None]
"""Draws a picture for each (prompt, seed)."""


class LeftOut(RuntimeError):
    """A rung cannot be measured here. The message has the reason."""


def run(
    settings: Settings,
    *,
    steps: int,
    pictures: int,
    results: Path | None,
    rungs: Sequence[str] = RUNGS,
    student: str | None = None,
    compile_limit_s: float = compiling.LIMIT_S,
) -> dict[str, Any]:
    """Measure the rungs in turns of at least `_ROUND` images, at least `pictures` of each; report the median turn.

    A rung runs its first turn before the next rung is prepared; later turns alternate. A rung that
    cannot run here, or that torch.compile does not compile within `compile_limit_s`, is left out, with the reason.
    `student` is the model of the rungs that draw with one; default: the model's own name and "-turbo".
    """
    unknown = [name for name in rungs if name not in RUNGS]
    if unknown:
        raise record.BenchError(f"--rungs: there is no {', '.join(unknown)}; there are {', '.join(RUNGS)}")
    memory: dict[str, Any] = {}
    models = dict.fromkeys(rungs, Path(settings.model_name).name)
    left_out: dict[str, str] = {}
    with record.alone(), ExitStack() as stack:
        lane = Lane("rungs")  # all compute on one thread: see Lane
        turns = Turns(-(-pictures // _ROUND))
        if any(name.startswith("diffusers") for name in rungs):
            stock = stock_pipeline(settings, steps, lane)
        # What torch compiles comes last: it takes minutes to prepare.
        for name in sorted(rungs, key=lambda name: name in _ENGINE and _ENGINE[name].compile):
            if name not in _ENGINE:
                turns.begin(name, partial(_in_batches, stock, size=STATIC_BATCH if "static" in name else 1))
                continue
            rung = _ENGINE[name]
            bounded = f" (torch.compile, at most {compile_limit_s:g} s)" if rung.compile else ""
            turns.say(f"preparing {name}{bounded}")
            try:
                own, own_steps = _drawn_by(rung, settings, steps, student)
                works = _engine(own, lane, stack, compile_limit_s)
            except LeftOut as error:
                left_out[name] = str(error)
                turns.say(f"{name} is left out: {error}")
                continue
            models[name] = works.images.model.name
            memory[name] = works.images.backend.held_bytes()
            turns.begin(name, _closed_loop(works, name, own_steps))
        if not turns.rates:
            raise record.BenchError(f"no rung can be measured here: {left_out}")
        measured = turns.finish([name for name in rungs if name not in left_out])
    rows = [row | {"model": models[row["name"]]} for row in _rows(settings, steps, measured, memory)]
    result = {
        "rungs": rows,
        "left_out": left_out,
        "model": Path(settings.model_name).name,
        "steps": steps,
        "pictures": -(-pictures // _ROUND) * _ROUND,
        "in_flight": IN_FLIGHT,
        "static_batch": STATIC_BATCH,
        "resident_mib": record.resident_mib(),
    }
    return record.publish("ladder", result, results, rooms=(*provenance.IMAGES, "benchmarks/ladder.py"))


def _rows(
    settings: Settings, steps: int, measured: Mapping[str, tuple[float, float, float]], memory: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The rungs as recorded and printed."""
    first, defaults = next(iter(measured.values())), defaults_of(settings.model_name, settings.variant)
    guided = defaults.rows(defaults.guidance_scale) > 1
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "images_per_s": round(rate, 4),
            "speedup": round(rate / first[0], 3),
            "spread": [round(value, 4) for value in (low, high)],
            "memory": memory.get(name),
        }
        for name, (rate, low, high) in measured.items()
    ]
    record.table(
        f"{Path(settings.model_name).name}, {steps} steps, {'with' if guided else 'without'} guidance",
        ("rung", "pictures/s", "speedup", "lowest to highest"),
        [
            (r["name"], f"{r['images_per_s']:.3f}", f"{r['speedup']:.2f}×", "{:.3f} to {:.3f}".format(*r["spread"]))
            for r in rows
        ],
    )
    return rows


def _in_batches(draw: Draw, jobs: Sequence[tuple[str, int]], size: int) -> None:
    for start in range(0, len(jobs), size):
        draw(jobs[start : start + size])


class Turns:
    """Runs turns of `_ROUND` images of each rung, or of about `_TURN_S` where these are more, and prints each rate."""

    def __init__(self, count: int) -> None:
        from rich.console import Console

        self.rates: dict[str, list[float]] = {}
        self._count = max(1, count)
        self._draws: dict[str, Draw] = {}
        self._sizes: dict[str, int] = {}  # pictures of a turn
        self._number = 0
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.say: Callable[[str], None] = lambda text: console.print(text, markup=False)

    def begin(self, name: str, draw: Draw) -> None:
        """Warm a rung up and give it its first turn."""
        self.say(f"warming up {name}")
        started = time.perf_counter()
        draw([(f"a warm cup of tea, {i}", i) for i in range(STATIC_BATCH)])
        rate = STATIC_BATCH / (time.perf_counter() - started)
        self._draws[name], self.rates[name] = draw, []
        self._sizes[name] = _ROUND * min(_MOST_ROUNDS, max(1, round(_TURN_S * rate / _ROUND)))
        self._take(name)

    def finish(self, order: Sequence[str]) -> dict[str, tuple[float, float, float]]:
        """Run the remaining turns, alternating; returns each rung's (median, lowest, highest) images per second."""
        for _ in range(1, self._count):
            for name in order:
                self._take(name)
        return {
            name: (statistics.median(rates), min(rates), max(rates)) for name in order if (rates := self.rates[name])
        }

    def _take(self, name: str) -> None:
        # Every picture has a prompt of its own: no rung lives on remembered embeddings.
        first, size = self._number, self._sizes[name]
        jobs = [(f"picture {first + i} of a small red boat on a lake", first + i) for i in range(size)]
        self._number += size
        started = time.perf_counter()
        self._draws[name](jobs)
        rates = self.rates[name]
        rates.append(size / (time.perf_counter() - started))
        self.say(f"turn {len(rates)} of {self._count}: {name} {rates[-1]:.3f} pictures/s")


def stock_pipeline(settings: Settings, steps: int, lane: Lane) -> Draw:
    """The stock pipeline on its own copy of the weights, run on the lane's thread like everything else.

    It draws at the model's native size with its family's default guidance, as the engine's rungs do.
    """
    import torch
    from diffusers import DiffusionPipeline

    from pipeline import tiny, tiny_zimage

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision, torch.float32)
    name, family = settings.model_name, family_of(settings.model_name, settings.variant)[0]
    guidance = defaults_of(name, settings.variant).guidance_scale

    def make() -> Any:
        if name in tiny.SHAPES:
            return tiny.make(tiny.SHAPES[name]).to(dtype)
        if name in tiny_zimage.SHAPES:
            return tiny_zimage.make(tiny_zimage.SHAPES[name]).to(dtype)
        return DiffusionPipeline.from_pretrained(name, torch_dtype=dtype)

    pipeline = lane.call(make)
    pipeline.set_progress_bar_config(disable=True)
    model = ImageModel(name, "", settings.precision, pipeline.device, dtype, family, pipeline.components, {})

    def draw(jobs: Sequence[tuple[str, int]]) -> None:
        lane.call(
            lambda: pipeline(
                [prompt for prompt, _ in jobs],
                width=model.native,
                height=model.native,
                num_inference_steps=steps,
                guidance_scale=guidance,
                generator=[torch.Generator().manual_seed(seed) for _, seed in jobs],
            )
        )

    return draw


def _drawn_by(rung: Rung, settings: Settings, steps: int, student: str | None) -> tuple[Settings, int]:
    """The settings of a rung's engine, and the steps of its pictures. Raises `LeftOut` for what the model lacks."""
    _check_plan(rung, settings, steps)
    wanted, own = rung.settings(settings), _folder(settings)
    if rung.student:
        name = student or ("" if own is None else f"{own}-turbo")
        if student is None and not (name and Path(name).is_dir()):
            raise LeftOut("the model has no student beside it, of its name and -turbo; --student names one")
        wanted, steps = wanted.model_copy(update={"model": name}), defaults_of(name).steps
        own = _folder(wanted)
    if rung.vae == TINY and not (settings.tiny_vae or (own is not None and (own / TINY_VAE).is_dir())):
        raise LeftOut("the model has no tiny decoder")
    return wanted, steps


def _check_plan(rung: Rung, settings: Settings, steps: int) -> None:
    """Raise `LeftOut` where the model, or so few steps, do not have what the rung leaves out."""
    defaults = defaults_of(settings.model_name, settings.variant)
    if rung.interval is not None and defaults.rows(defaults.guidance_scale) == 1:
        raise LeftOut("the model draws without guidance")
    if rung.interval is not None and steps < 2:
        raise LeftOut("guidance ends after one step at least")
    if rung.plan and rung.plan not in plans.of_model(_folder(settings), settings.plans, rung.precision, ""):
        raise LeftOut("the model was not tuned; `diptych tune` finds plans")


def _folder(settings: Settings) -> Path | None:
    return family_of(settings.model_name, settings.variant)[1]


def _engine(wanted: Settings, lane: Lane, stack: ExitStack, compile_limit_s: float) -> Runtime:
    """The engine of a rung, with measured costs. Raises `LeftOut` if it cannot run here."""
    from core.graphs import compiler
    from workers.build import build

    if wanted.compile:
        if compiler() is None:
            raise LeftOut("there is no C++ compiler")
        try:
            compiling.ahead(_compile, wanted, limit_s=compile_limit_s)
        except compiling.CompileError as error:
            raise LeftOut(str(error)) from error
    try:
        works = stack.enter_context(build(wanted, lane=lane, measure_s=10.0))
    except ModelError as error:
        raise LeftOut(str(error)) from error
    if wanted.kernels and works.images.backend.kernels.name == TORCH:
        raise LeftOut("our own kernels do not run here")
    if wanted.compile:
        works.images.backend.wait()
        works.images.prepare(measure_s=10.0)
    return works


def _compile(settings: Settings) -> None:
    """Compile the executables of the settings' engine into Inductor's cache."""
    from workers.build import build

    with build(settings) as works:
        works.images.backend.wait()


def _closed_loop(works: Runtime, rung: str, steps: int) -> Draw:
    """A closed loop of `IN_FLIGHT` requests, of twice as many where they have one row."""
    model, how = works.images.model, _ENGINE[rung]
    native, guidance = model.native, model.defaults.guidance_scale
    cached = plan.parse(works.settings.deepcache)

    def draw(jobs: Sequence[tuple[str, int]]) -> None:
        room = Semaphore(IN_FLIGHT if model.defaults.rows(guidance) > 1 else 2 * IN_FLIGHT)
        futures = []
        for prompt, seed in jobs:
            room.acquire()
            wanted = ImageParameters(
                prompt, seed, native, native, steps=steps, guidance_scale=guidance, deepcache=cached,
                guidance_interval=how.interval, vae=how.vae,
            )  # fmt: skip
            if how.plan:
                wanted = wanted.planned(model.plans[how.plan])
            future = works.engine.submit(Request(f"{rung}-{prompt}-{seed}", "image", wanted))
            future.add_done_callback(lambda _: room.release())
            futures.append(future)
        for future in futures:
            future.result()

    return draw
