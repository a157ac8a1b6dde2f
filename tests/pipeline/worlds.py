"""What the pipeline's tests share: models of several shapes, their stock diffusers twins, and a hand-cranked engine.

The crank drives the real scheduler and runner one iteration at a time, so that who joins whom at which step is decided
by the test and not by the clock.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contract.image import ImageParameters
from core.batching.batcher import Batch
from core.batching.request import Request, State
from core.batching.runner import Lane, Ticket
from core.batching.scheduler import Scheduler
from core.cuda_graphs import Recorder
from pipeline.backends.backend import ImageBackend, Widths
from pipeline.backends.graphs import GraphBackend
from pipeline.backends.programs import ProgramBackend
from pipeline.backends.torch_backend import TorchBackend
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, load
from pipeline.checkpoints.tiny import SDXLShape
from pipeline.extensions.adapters import LoraFolder, refused
from pipeline.extensions.control import ControlExtension, ControlFolder
from pipeline.extensions.extension import Extension
from pipeline.extensions.image_prompts import ImagePromptExtension, ImagePromptFolder
from pipeline.extensions.lora_extension import LoraExtension
from pipeline.extensions.upscaling import UpscaleExtension, UpscalerFolder
from pipeline.families.family import TinyVae
from pipeline.quantization import quantized
from pipeline.runner import ImageRunner
from tests.core.tape import Tape

SHAPES = {
    "plain": SDXLShape(),
    "three-levels": SDXLShape(native=64, channels=(16, 24, 32), transformers=(1, 1, 2), heads=(2, 3, 4)),
    "many-heads": SDXLShape(heads=(4, 8), groups=4, force_zeros=False),
    "two-resnets": SDXLShape(resnets=2, transformers=(1, 3), groups=16, pooled_width=32),
    "v-prediction": SDXLShape(prediction_type="v_prediction", scheduler={"rescale_betas_zero_snr": True}),
    "distilled": SDXLShape(time_cond=32, prediction_type="sample"),
}

MORE: dict[str, SDXLShape] = {}
"""Of single tests, which put them here; what runs over all shapes leaves them out."""


def shape(name: str) -> SDXLShape:
    return SHAPES[name] if name in SHAPES else MORE[name]


def await_end(ticket: Ticket) -> None:
    """Wait until an iteration has ended, without asking what it came to."""
    ended = threading.Event()
    ticket.notify(ended.set)
    assert ended.wait(60)


def broken(batch: Batch, ticket: Ticket) -> Any:
    """A batch that ran, and then failed: what it computed must not count."""
    await_end(ticket)

    class Broken:
        def outcome(self) -> Any:
            raise RuntimeError("planted")

    return Broken()


@functools.cache
def shared_lane() -> Lane:
    """The lane of runners whose tests need none of their own. It starts when asked for: a thread survives no fork."""
    return Lane("tests")


@functools.cache
def model(name: str) -> ImageModel:
    """A model of this shape; made by way of the registry that `load` reads."""
    key = f"random:test-{name}"
    tiny.SHAPES[key] = shape(name)
    return load(key)


def in_int8(where: Path, shape: SDXLShape, kernels: ctypes.CDLL | None) -> Path:
    """A folder with a model of this shape and its INT8 variant."""
    folder = tiny.save(where / "tiny", shape)
    prompts = [f"a {colour} hat" for colour in ("red", "green", "blue", "old", "new", "big")]
    report = quantized.make(load(str(folder)), prompts, folder, kernels=kernels)
    assert report["unet"][0].changed and report["vae"][0].changed
    return folder


@functools.cache
def tiny_model(name: str) -> ImageModel:
    """The same with a tiny decoder beside its VAE."""
    from tests.unet_opt.shapes import tiny_vae  # which imports this file

    plain = model(name)
    blocks = (1,) * len(plain.vae.config.block_out_channels)
    return replace(plain, tiny_vae=TinyVae(tiny_vae(8, blocks, plain.latent_channels), "0123456789abcdef"))


@functools.cache
def stock(name: str) -> Any:
    """The stock diffusers pipeline with the same weights, in memory of its own."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    pipeline = tiny.make(shape(name))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock_parts(name: str) -> dict[str, Any]:
    """The parts of the stock pipeline, for another pipeline over them."""
    return {
        part: own for part, own in stock(name).components.items() if part not in ("image_encoder", "feature_extractor")
    }


def stock_options(wanted: ImageParameters) -> dict[str, Any]:
    """What diffusers' pipelines are given for a request."""
    return {
        "prompt": wanted.prompt, "negative_prompt": wanted.negative_prompt, "width": wanted.width,
        "height": wanted.height, "num_inference_steps": wanted.steps, "guidance_scale": wanted.guidance_scale,
        "generator": torch.Generator().manual_seed(wanted.seed),
    }  # fmt: skip


@functools.cache
def stock_picture(name: str, wanted: ImageParameters) -> np.ndarray:
    """What diffusers draws for these parameters, [H, W, 3] in levels."""
    from tests.schedulers import replaced, scheduler

    pipeline = stock(name)
    own = pipeline.scheduler
    pipeline.scheduler = scheduler(own.config, wanted.scheduler or "euler", **replaced(wanted.schedule_type))
    try:
        image = pipeline(
            **stock_options(wanted),
            **{name: [*given] for name in ("timesteps", "sigmas") if (given := getattr(wanted, name)) is not None},
            **({} if wanted.eta is None else {"eta": wanted.eta}),
        ).images[0]
    finally:
        pipeline.scheduler = own
    return np.asarray(image).astype(int)


def backend_of(
    model: ImageModel,
    *,
    kernels: ctypes.CDLL | None = None,
    fused: bool = False,
    recorder: Recorder | None = None,
    release: Sequence[str] = (),
    max_rows: int = 32,
    deterministic_rows: int = 8,
    buckets: Sequence[int] = (2, 4, 8, 16, 32),
    **options: Any,
) -> ImageBackend:
    """On these kernels, on fused layers or, without either, on torch."""
    widths = Widths(max_rows, deterministic_rows, tuple(buckets))
    if kernels is not None:
        return ProgramBackend(model, kernels, widths, release=release, **options)
    if fused:
        return GraphBackend(model, widths, recorder=recorder, **options)
    return TorchBackend(model, widths, **options)


def options_of(backend: str, kernels: ctypes.CDLL) -> dict[str, Any]:
    """The options of `backend_of` by a backend's name."""
    options: dict[str, dict[str, Any]] = {
        "torch": {}, "kernels": {"kernels": kernels}, "layers": {"fused": True},
        "graphs": {"fused": True, "recorder": Tape()},
    }  # fmt: skip
    return options[backend]


class Watching(ImageRunner):
    """The real runner, which also notes who rode in each forward, at which step.

    Its cost curve is flat, so that every batch is as wide as can be, however the machine feels today.
    """

    def __init__(
        self,
        model: ImageModel,
        *,
        loras: Path | None = None,
        lora_bytes: int = 2**30,
        frugal: bool = False,
        lane: Lane | None = None,
        max_requests: int = 32,
        memory_bytes: int | None = None,
        upscalers: UpscalerFolder | None = None,
        controls: Path | None = None,
        control_bytes: int = 2**30,
        image_prompts: Path | None = None,
        image_prompt_bytes: int = 2**30,
        refiner: ImageModel | None = None,
        **options: Any,
    ) -> None:
        """On `backend_of` the model with these options; `frugal` releases all weights that nothing else reads.

        `loras` is the folder of those that requests may use, within `lora_bytes`, `controls` that of control networks,
        within `control_bytes`, `image_prompts` that of IP-Adapters, within `image_prompt_bytes`.
        """
        if frugal:
            packed = loras is None or options.get("kernels") is not None
            options["release"] = ("unet", "vae") if packed else ("vae",)
        backend = backend_of(model, **options)
        extensions: list[Extension[Any]] = [UpscaleExtension(model, backend, upscalers)]
        if loras is not None and refused(model, packs=backend.packs) is None:
            pack = backend.pack_adapter if backend.packs else None
            extensions.append(LoraExtension(model, backend, LoraFolder(loras, model, lora_bytes, pack)))
        if controls is not None:
            folder = ControlFolder(controls, model, backend.lowering_for, control_bytes, release=frugal)
            extensions.append(ControlExtension(model, backend, folder))
        if image_prompts is not None:
            dtype = backend.denoiser.lowering.dtype
            prompts = ImagePromptFolder(image_prompts, backend.model, dtype, image_prompt_bytes)
            extensions.append(ImagePromptExtension(model, backend, prompts))
        second = None if refiner is None else backend_of(refiner, **{**options, "release": ()})
        super().__init__(
            backend, extensions, refiner=second, lane=lane, max_requests=max_requests, memory_bytes=memory_bytes
        )
        self.rides: list[tuple[str, list[tuple[str, int]]]] = []

    def folder(self, field: str) -> Any:
        """The files that requests may bring along under a field."""
        return self.extensions[field].folder

    def cost(self, group: Hashable, rows: int) -> float:
        return 1.0

    def launch(self, requests: Sequence[Request]) -> Any:
        steps = [(r.id, r.work.trajectory.step if r.work.trajectory else -1) for r in requests]
        self.rides.append((requests[0].phase, steps))
        return super().launch(requests)

    @property
    def companions(self) -> list[set[str]]:
        """The names of those that shared each UNet forward."""
        return [{name for name, _ in ride} for phase, ride in self.rides if phase == "deep"]

    @property
    def shared_steps(self) -> set[frozenset[int]]:
        """The sets of different steps that shared one UNet forward."""
        return {frozenset(step for _, step in ride) for phase, ride in self.rides if phase == "deep"}


class Crank:
    """The engine's loop without its thread: `turn` is one tick, and time is the number of ticks."""

    def __init__(self, runner: ImageRunner) -> None:
        self.runner = runner
        self.scheduler = Scheduler([runner], starvation_s=1e9)
        self.now = 0.0
        self.ended: dict[str, Request] = {}

    def submit(self, name: str, wanted: ImageParameters, **options: Any) -> Request:
        request = Request(name, "image", wanted, **options)
        self.runner.check(request)
        self.scheduler.add(request, self.now)
        return request

    def turn(self, alter: Callable[[Batch, Ticket], Ticket] = lambda _, ticket: ticket) -> bool:
        """One iteration; False once nothing is live. `alter` may break a ticket, or act while it is under way."""
        self.now += 1
        assert self.now < 10_000, "something never ends"
        batches = self.scheduler.schedule(self.now)
        if not batches:
            time.sleep(0.001)  # a file is read in the background
        for batch in batches:
            try:
                outcomes = alter(batch, self.runner.launch(batch.requests)).outcome()
            except Exception as error:
                self.scheduler.fail(batch, error, self.now)
            else:
                self.scheduler.finish(batch, outcomes, self.now)
        self.ended |= {request.id: request for request in self.scheduler.take_ended()}
        return not self.scheduler.idle

    def run(self) -> dict[str, Request]:
        while self.turn():
            pass
        self.scheduler.check_idle()
        return self.ended

    def pictures(self) -> dict[str, Any]:
        ended = self.run()
        failed = {name: r.error for name, r in ended.items() if r.state is State.FAILED}
        assert not failed, failed
        return {name: r.result for name, r in ended.items() if r.state is State.DONE}


def levels(picture: Any) -> np.ndarray:
    """The levels of a picture, or of an array of levels."""
    return np.asarray(picture if isinstance(picture, np.ndarray) else picture.image).astype(int)


def apart(one: Any, other: Any) -> int:
    """The most levels that two pictures differ by at any pixel; either may be an array of levels."""
    return int(np.abs(levels(one) - levels(other)).max())


def check_parity(shape: str, wanted: ImageParameters, picture: Any) -> None:
    """Require what diffusers draws, but for a level."""
    expected = stock_picture(shape, wanted)
    assert expected.std() > 10, "a flat picture would prove nothing"
    assert apart(picture, expected) <= 1, wanted


def solo(runner: ImageRunner, wanted: ImageParameters) -> Any:
    """The picture drawn with no companions."""
    crank = Crank(runner)
    crank.submit("solo", wanted)
    return crank.pictures()["solo"]


def together(runner: ImageRunner, wanted: Sequence[ImageParameters], turns: Callable[[], int] = lambda: 1) -> list[Any]:
    """The pictures drawn in one engine, each joining so many iterations after the one before."""
    crank = Crank(runner)
    for index, one in enumerate(wanted):
        crank.submit(str(index), one)
        for _ in range(turns()):
            crank.turn()
    pictures = crank.pictures()
    return [pictures[str(index)] for index in range(len(wanted))]


def psnr(one: Any, other: Any) -> float:
    """In dB, of two pictures or arrays of levels; 78 where they are equal."""
    first, second = (each if isinstance(each, np.ndarray) else levels(each) for each in (one, other))
    return 10 * math.log10(255**2 / max(float(((first - second) ** 2).mean()), 1e-3))
