"""Draws images as one rung of the ladder, in a process of its own: `python -m lab.bench.rungs`, by requests on stdin.

Requests and answers are lines of JSON. The first request describes the rung, and its answer says what was prepared, or
why the rung is left out; every other one asks for images or for another variant of the stock pipeline.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING, Any

from contract import plan, tuned
from contract.card import FULL, TINY
from contract.image import ImageParameters
from core.batching.request import Request
from core.batching.runner import Lane
from core.config import Settings
from core.kernels.device import TORCH
from lab.bench.harness import provenance
from lab.bench.harness.turns import LeftOut
from lab.bench.harness.variants import Variant
from pipeline import plans
from pipeline.checkpoints.folder import TINY_VAE, ModelError
from pipeline.checkpoints.load import defaults_of, family_of
from pipeline.families.family import ImageModel

if TYPE_CHECKING:
    from PIL.Image import Image

    from workers.build import Runtime


@dataclass(frozen=True)
class Rung:
    """A configuration of the engine. `compile` is torch's compiler, `kernels` are our own instead.

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

    def settings(self, settings: Settings) -> Settings:
        """Settings of the rung's engine."""
        fields = ("precision", "kernels", "compile", "deepcache")
        return settings.model_copy(update={field: getattr(self, field) for field in fields})


ENGINE = {
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
STOCK = "diffusers"
RUNGS = (STOCK, *ENGINE)
PROMPT = "picture {} of a small red boat on a lake"
IN_FLIGHT = 16  # twice as many of one row each
MEASURE_S = 4.0  # for an engine's costs

Jobs = Sequence[tuple[str, int]]
Keep = Callable[[int, "Image"], None]
"""Keeps the image of a job, by its index."""
Draw = Callable[[Jobs, Keep], list[float]]
"""Draws an image for each (prompt, seed), and passes it on; returns when each ended, by `time.perf_counter`."""


# -- the stock pipeline ------------------------------------------------------------------------------------------------


class Stock:
    """diffusers' own pipeline of the settings' model, at the native size with its family's default guidance."""

    def __init__(self, settings: Settings, steps: int) -> None:
        import torch
        from diffusers import DiffusionPipeline

        from pipeline.checkpoints import tiny, tiny_zimage

        logging.getLogger("diffusers").setLevel(logging.ERROR)
        name = settings.model_name
        if name in tiny.SHAPES:
            self._pipeline: Any = tiny.make(tiny.SHAPES[name])
        elif name in tiny_zimage.SHAPES:
            self._pipeline = tiny_zimage.make(tiny_zimage.SHAPES[name])
        else:
            self._pipeline = DiffusionPipeline.from_pretrained(name, dtype=torch.float32)
        self._pipeline.set_progress_bar_config(disable=True)
        family = family_of(name, settings.variant)[0]
        self._part, self._steps = family.denoiser, steps
        self._plain, self._decode = getattr(self._pipeline, self._part), self._pipeline.vae.decode
        device, dtype = self._pipeline.device, torch.float32
        self._native = ImageModel(name, "", "fp32", device, dtype, family, self._pipeline.components, {}).native
        self._guidance = defaults_of(name, settings.variant).guidance_scale
        self.vary(Variant())

    def vary(self, variant: Variant) -> None:
        """Draw in this way from now on."""
        import torch

        torch.set_num_threads(variant.threads)
        self._pipeline.to(torch.bfloat16 if variant.bf16 else torch.float32)
        layout = torch.channels_last if variant.channels_last else torch.contiguous_format
        for part in (self._plain, self._pipeline.vae):
            part.to(memory_format=layout)
        denoiser, decode = self._plain, self._decode
        if variant.compile:  # of static shapes: a second batch size would be compiled for any
            torch.compiler.reset()
            denoiser, decode = (torch.compile(part, dynamic=False) for part in (denoiser, decode))
        setattr(self._pipeline, self._part, denoiser)
        self._pipeline.vae.decode = decode
        self._batch = variant.batch

    def draw(self, jobs: Jobs, keep: Keep) -> list[float]:
        import torch

        ends: list[float] = []
        for start in range(0, len(jobs), self._batch):
            batch = jobs[start : start + self._batch]
            images = self._pipeline(
                [prompt for prompt, _ in batch],
                width=self._native,
                height=self._native,
                num_inference_steps=self._steps,
                guidance_scale=self._guidance,
                generator=[torch.Generator().manual_seed(seed) for _, seed in batch],
            ).images
            ends += [time.perf_counter()] * len(batch)
            for index, image in enumerate(images, start):
                keep(index, image)
        return ends


# -- the engine --------------------------------------------------------------------------------------------------------


def drawn_by(rung: Rung, settings: Settings, steps: int, student: str | None) -> tuple[Settings, int]:
    """The settings of a rung's engine, and the steps of its images. Raises `LeftOut` for what the model lacks."""
    _check_plan(rung, settings, steps)
    rung_settings, embedded = rung.settings(settings), _folder(settings)
    if rung.student:
        name = student or ("" if embedded is None else f"{embedded}-turbo")
        if student is None and not (name and Path(name).is_dir()):
            raise LeftOut("the model has no student beside it, of its name and -turbo; --student names one")
        rung_settings, steps = rung_settings.model_copy(update={"model": name}), defaults_of(name).steps
        embedded = _folder(rung_settings)
    if rung.vae == TINY and not (settings.tiny_vae or (embedded is not None and (embedded / TINY_VAE).is_dir())):
        raise LeftOut("the model has no tiny decoder")
    return rung_settings, steps


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


@contextmanager
def _engine(settings: Settings, measure_s: float) -> Iterator[Runtime]:
    """The engine of a rung, with measured costs. Raises `LeftOut` if it cannot run here."""
    from core.graphs import compiler
    from workers.build import build

    if settings.compile and compiler() is None:
        raise LeftOut("there is no C++ compiler")
    try:
        runtime = build(settings, lane=Lane("rung"), measure_s=measure_s)
    except ModelError as error:
        raise LeftOut(str(error)) from error
    with runtime:
        if settings.kernels and runtime.images.backend.kernels.name == TORCH:
            raise LeftOut("our own kernels do not run here")
        if settings.compile:
            runtime.images.backend.wait()
            runtime.images.prepare(measure_s=measure_s)
        yield runtime


def closed_loop(runtime: Runtime, rung: Rung, steps: int) -> Draw:
    """A closed loop of `IN_FLIGHT` requests, of twice as many where they have one row."""
    model = runtime.images.model
    native, guidance = model.native, model.defaults.guidance_scale
    cached = plan.parse(runtime.settings.deepcache)

    def draw(jobs: Jobs, keep: Keep) -> list[float]:
        places = IN_FLIGHT if model.defaults.rows(guidance) > 1 else 2 * IN_FLIGHT
        room = Semaphore(places)
        futures, ends = [], []

        def done(_: object) -> None:
            ends.append(time.perf_counter())
            room.release()

        for prompt, seed in jobs:
            room.acquire()
            parameters = ImageParameters(
                prompt, seed, native, native, steps=steps, guidance_scale=guidance, deepcache=cached,
                guidance_interval=rung.interval, vae=rung.vae,
            )  # fmt: skip
            if rung.plan:
                parameters = parameters.planned(model.plans[rung.plan])
            future = runtime.engine.submit(Request(f"{prompt}-{seed}", "image", parameters))
            future.add_done_callback(done)
            futures.append(future)
        for index, future in enumerate(futures):
            keep(index, future.result().image)
        for _ in range(places):  # callbacks run after `result` returns
            room.acquire()
        return ends

    return draw


# -- the process -------------------------------------------------------------------------------------------------------


def jobs(first: int, count: int) -> list[tuple[str, int]]:
    """Every image has a prompt of its own: no rung lives on remembered embeddings."""
    return [(PROMPT.format(number), number) for number in range(first, first + count)]


def timed(draw: Draw, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request for images: of numbers, or of `prompts` and `seeds`, whose images go to `folder`."""
    folder = request.get("folder")
    if folder is None:
        requests = jobs(request["first"], request["count"])
    else:
        requests = list(zip(request["prompts"], request["seeds"], strict=True))

    def keep(index: int, image: Image) -> None:
        if folder is not None:
            image.save(Path(folder) / f"{requests[index][1]:05d}.png")

    started = time.perf_counter()
    ends = draw(requests, keep)
    return {"seconds": time.perf_counter() - started, "ends": [end - started for end in ends]}


def serve(requests: Iterator[dict[str, Any]], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests until there are no more."""
    import torch

    first = next(requests)
    settings, steps, name = Settings(**first["settings"]), first["steps"], first["rung"]
    capability = torch.backends.cpu.get_cpu_capability()
    if name == STOCK:
        stock = Stock(settings, steps)
        stock.vary(Variant(**first["variant"]))
        answer({"model": Path(settings.model_name).name, "capability": capability})
        for request in requests:
            if "variant" in request:
                stock.vary(Variant(**request["variant"]))
                answer({})
            else:
                answer(timed(stock.draw, request) | {"imported": sorted(provenance.loaded())})
        return
    rung = ENGINE[name]
    embedded, own_steps = drawn_by(rung, settings, steps, first["student"])
    with _engine(embedded, first["measure_s"]) as runtime:
        model, backend = runtime.images.model.name, runtime.images.backend
        description = {"model": model, "memory": backend.held_bytes(), "kernels": backend.kernels.name}
        answer(description | {"capability": capability})
        draw = closed_loop(runtime, rung, own_steps)
        for request in requests:
            answer(timed(draw, request) | {"imported": sorted(provenance.loaded())})


def first_request(
    name: str, settings: Settings, steps: int, student: str | None, variant: Variant | None
) -> dict[str, Any]:
    """The request that describes a rung."""
    options = settings.model_dump(mode="json", exclude_unset=True)
    described = {"rung": name, "settings": options, "steps": steps, "student": student, "measure_s": MEASURE_S}
    return described | {"variant": asdict(variant or Variant())}


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        serve(map(json.loads, sys.stdin), answer)
    except LeftOut as error:
        answer({"left_out": str(error)})
    except Exception as error:
        logging.getLogger(__name__).debug("the rung failed", exc_info=True)
        answer({"left_out": f"{type(error).__name__}: {str(error).strip()[:300]}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
