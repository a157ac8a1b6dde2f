"""Compares one UNet forward on stock diffusers, torch.compile, OpenVINO, and the native kernels.

All use the same rows, which are at different steps as in step-level batching, and both INT8 models are calibrated on
the same forwards.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import compiling, openvino_unet, provenance, record
from core.batching.runner import Lane
from core.config import Settings
from core.graphs import CompiledCache, ExecutableKey, compiler
from core.kernels.cpu.library import KernelsUnavailable, library
from core.ops.cpu import CpuLowering
from core.ops.reference import TorchLowering
from core.quant.convert import quantize_
from core.quant.statistics import Statistics
from pipeline.denoise import DenoiserInputs
from pipeline.drawing import Denoiser
from pipeline.families.sdxl import FAMILY
from pipeline.load import ImageModel, load
from unet_opt import recipe as recipes
from unet_opt.calibrate import CalibrationPart, CalibrationSettings, calibrate, observe_modules
from unet_opt.deepcache import SplitUNet

ROWS, FEW_ROWS = 16, 2
FORWARDS = 25
PACKAGES = ("torch", "diffusers", "openvino", "nncf")
CALIBRATION = (
    "red heart", "cat face on a navy background", "rocket", "woman teacher: dark skin tone", "snow-capped mountain",
    "green apple on a beige background", "trumpet", "person surfing", "hot dog", "lady beetle on a pink background",
    "sunflower", "thumbs up: medium skin tone", "steam locomotive", "flag: Japan", "pizza on a purple background",
    "ghost",
)  # fmt: skip
DRAWN = (
    "hibiscus", "octopus on a teal background", "alarm clock", "fox", "sailboat on a light blue background", "cherries",
    "man running", "umbrella",
)  # fmt: skip
_WATCHED = CalibrationSettings().watched_steps
_REST_S = 0.02  # OpenMP's threads spin for some milliseconds after a forward, which would slow the next contender's

Forward = Callable[[], Tensor]
Bind = Callable[[DenoiserInputs], Mapping[str, Forward]]
"""The forward of given rows, under each setting worth trying; the fastest counts."""


class Missing(RuntimeError):
    """A contender cannot run here. The message has the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """The inputs of contenders: the stock model, and calibration data as forwards and as ranges."""

    settings: Settings
    model: ImageModel
    forwards: Sequence[DenoiserInputs]
    ranges: Statistics
    compile_limit_s: float = compiling.LIMIT_S  # of torch.compile, for each number of rows


class Measured(NamedTuple):
    """A contender's milliseconds at one number of rows: under its best setting, and under each."""

    best: str
    ms: Mapping[str, tuple[float, float, float]]  # median, lower and upper quartile
    error: float

    @property
    def best_ms(self) -> float:
        return self.ms[self.best][0]


Race = dict[str, Measured]


def run(
    settings: Settings,
    *,
    steps: int | None = None,
    pictures: int | None = None,
    results: Path | None = None,
    rows: int = ROWS,
    forwards: int = FORWARDS,
    compile_limit_s: float = compiling.LIMIT_S,
) -> dict[str, Any]:
    """Time `forwards` forwards of each contender in turn, at `rows` rows and at two.

    `steps` and `pictures` are unused options of other benchmarks. A contender that cannot run, or that torch.compile
    does not compile within `compile_limit_s`, is left out by name.
    """
    if settings.device.startswith("cuda"):
        raise record.BenchError("--device: the peers are compared on a processor, not on a GPU")
    with record.alone():
        lane = Lane("peers")  # all compute on one thread: see Lane
        try:
            measured, left_out, keys_ms = lane.call(lambda: _compare(settings, rows, forwards, compile_limit_s))
            threads = lane.call(torch.get_num_threads)
        finally:
            lane.close()
    _show(settings, rows, measured, left_out, keys_ms)
    many, few = measured[rows], measured[FEW_ROWS]
    result: dict[str, Any] = {
        "unet_ms": {name: m.best_ms for name, m in many.items()},
        "rows": rows,
        "unet_ms_2_rows": {name: m.best_ms for name, m in few.items()},
        "quartiles_ms": {name: m.ms[m.best][1:] for name, m in many.items()},
        "relative_error": {name: m.error for name, m in many.items()},
        "keys_ms": keys_ms,
        "settings": {
            name: {
                str(count): {label: ms[0] for label, ms in race[name].ms.items()} for count, race in measured.items()
            }
            for name, m in many.items()
            if len(m.ms) > 1
        },
        "left_out": left_out,
        "forwards": forwards,
        "calibration": {"captions": len(CALIBRATION), "steps": _WATCHED},
        "model": Path(settings.model_name).name,
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "threads": threads,
    }
    rooms = (*provenance.IMAGES, "benchmarks/peers.py", "benchmarks/openvino_unet.py")
    return record.publish("peers", result, results, rooms=rooms)


# -- the contenders ------------------------------------------------------------------------------------------------


def _diffusers(stage: Stage) -> Bind:
    return lambda inputs: {"": lambda: FAMILY.call(stage.model.denoiser, inputs)[0]}


def _torch_compile(stage: Stage) -> Bind:
    if compiler() is None:
        raise Missing("no C++ compiler")
    compiled: list[Callable[[DenoiserInputs], Forward]] = []  # made for the first rows, and then for all

    def bind(inputs: DenoiserInputs) -> dict[str, Forward]:
        try:
            compiling.ahead(_compile, stage.settings, inputs, torch.get_num_threads(), limit_s=stage.compile_limit_s)
        except compiling.CompileError as error:
            raise Missing(str(error)) from error
        if not compiled:
            compiled.append(_compiled_unet(stage.settings))
        return {"": compiled[0](inputs)}

    return bind


def _compile(settings: Settings, inputs: DenoiserInputs, threads: int) -> None:
    """Compile the UNet for inputs of this shape into Inductor's cache; its code is for so many threads."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        _compiled_unet(settings)(inputs)


def _compiled_unet(settings: Settings) -> Callable[[DenoiserInputs], Forward]:
    unet = load(settings.model_name, precision="bf16", variant=settings.variant).denoiser
    executables = CompiledCache({"unet": unet}, compiled=True, cache=settings.compiled_code)

    def bind(inputs: DenoiserInputs) -> Forward:
        half = dataclasses.replace(
            inputs,
            sample=inputs.sample.to(torch.bfloat16),
            conditioning={name: tensor.to(torch.bfloat16) for name, tensor in inputs.conditioning.items()},
        )
        key = ExecutableKey("unet", half.sample.shape[0], tuple(half.sample.shape[2:]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what diffusers caches
            executables.want(key, lambda unet: FAMILY.call(unet, half))
            executables.wait()
        found = executables.find(key)
        if found is None:
            raise Missing(f"does not compile: {executables.failed['unet']}")
        return lambda: FAMILY.call(found, half)[0]

    return bind


def _openvino(stage: Stage, *, quantized: bool) -> Bind:
    threads = torch.get_num_threads()
    try:
        model = openvino_unet.convert(stage.model.denoiser, stage.forwards[0])
        if quantized:
            model = openvino_unet.quantize(model, stage.forwards)
    except ImportError as error:
        raise Missing(f"not installed: {error.name or error}") from error
    precisions = ("f32", "bf16") if quantized else ("f32",)
    return lambda inputs: openvino_unet.settings(model, inputs, precisions, threads)


def _diptych(stage: Stage, *, quantized: bool) -> Bind:
    unet = copy.deepcopy(stage.model.denoiser)
    if quantized:
        quantize_(unet, recipes.unet(unet), stage.ranges, digest=stage.model.digest)
    try:
        kernels = library(stage.settings.cache_dir.expanduser())
        split = SplitUNet(CpuLowering(kernels, unet, half=quantized), unet)
    except (KernelsUnavailable, ValueError) as error:
        raise Missing(str(error)) from error

    def bind(inputs: DenoiserInputs) -> dict[str, Forward]:
        given = inputs.conditioning
        packed = dataclasses.replace(inputs, conditioning={**given, "kv": split.prepare_text(given["kv"])})
        return {"": lambda: FAMILY.call(split.deep, packed)[0]}

    return bind


CONTENDERS: dict[str, Callable[[Stage], Bind]] = {
    "diffusers-fp32": _diffusers,
    "openvino-fp32": lambda stage: _openvino(stage, quantized=False),
    "openvino-int8": lambda stage: _openvino(stage, quantized=True),
    "diptych-fp32": lambda stage: _diptych(stage, quantized=False),
    "diptych-int8": lambda stage: _diptych(stage, quantized=True),
    "torch-compile-bf16": _torch_compile,  # last: it takes minutes to prepare
}


# -- what they are given -------------------------------------------------------------------------------------------


def _set(settings: Settings) -> tuple[Stage, list[DenoiserInputs]]:
    """The stage, and forwards of generations outside the calibration set."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = load(settings.model_name, precision="fp32", device="cpu", variant=settings.variant)
    unpacked: Any = SimpleNamespace(prepare_text=lambda hidden: hidden)  # stock cross-attention reads hidden states
    drawing = Denoiser(model, unpacked)
    seen: list[DenoiserInputs] = []
    drawn: list[DenoiserInputs] = []

    def draw(batch: Sequence[str], around: Any) -> None:
        # The recipe asks for the first steps; NNCF also quantizes what reads the time, and must see all.
        drawing.latents(
            batch, range(len(batch)), forward=_listen(model.denoiser, seen),
            around=lambda step: around("unet", step) if step < _WATCHED else contextlib.nullcontext(),
        )  # fmt: skip

    layers = recipes.unet(model.denoiser).targets(model.denoiser)
    parts = {"unet": CalibrationPart(layers, observe_modules(model.denoiser))}
    ranges = calibrate(parts, CALIBRATION, draw, digest=model.digest)["unet"]
    drawing.latents(DRAWN, range(100, 100 + len(DRAWN)), forward=_listen(model.denoiser, drawn))
    return Stage(settings, model, seen, ranges), drawn


def _listen(unet: Any, heard: list[DenoiserInputs]) -> Callable[..., Any]:
    """The UNet, which also records its inputs."""

    def forward(sample: Tensor, timestep: Tensor, **given: Any) -> Any:
        added = given["added_cond_kwargs"]
        read = {"kv": given["encoder_hidden_states"], "pooled": added["text_embeds"], "time_ids": added["time_ids"]}
        heard.append(DenoiserInputs(sample, timestep, read))
        return unet(sample, timestep, **given)

    return forward


def _mixed(forwards: Sequence[DenoiserInputs], rows: int) -> DenoiserInputs:
    """Two rows of each of rows / 2 generations, each at a different step."""
    pairs = rows // 2
    chosen = [(forwards[(2 * i + 1) * len(forwards) // rows], 2 * i) for i in range(pairs)]

    def gather(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part[first : first + 2] for part, (_, first) in zip(parts, chosen, strict=True)])

    given = [inputs for inputs, _ in chosen]
    conditioning = {name: gather([one.conditioning[name] for one in given]) for name in given[0].conditioning}
    return DenoiserInputs(gather([one.sample for one in given]), gather([one.timestep for one in given]), conditioning)


# -- the race ------------------------------------------------------------------------------------------------------


def _compare(
    settings: Settings, rows: int, forwards: int, compile_limit_s: float = compiling.LIMIT_S
) -> tuple[dict[int, Race], dict[str, str], float]:
    """Measurements by rows, contenders that were left out, with reasons, and the time of packing keys in ms."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("drawing what the contenders will read")
    stage, drawn = _set(settings)
    stage = dataclasses.replace(stage, compile_limit_s=compile_limit_s)
    inputs = {count: _mixed(drawn, count) for count in (rows, FEW_ROWS)}
    bound: dict[str, dict[int, Mapping[str, Forward]]] = {}
    left_out: dict[str, str] = {}
    with torch.inference_mode():
        for name, make in CONTENDERS.items():
            bounded = f" (torch.compile, at most {compile_limit_s:g} s)" if make is _torch_compile else ""
            console.print(f"preparing {name}{bounded}")
            try:
                bind = make(stage)
                bound[name] = {count: bind(given) for count, given in inputs.items()}
            except Missing as error:
                left_out[name] = str(error)
                console.print(f"{name} is left out: {error}")
                continue
            first_ms = min(1000 * _timed(forward) for forward in bound[name][rows].values())
            console.print(f"{name}: {first_ms:.1f} ms at {rows} rows, once")
        measured = {}
        for count in inputs:
            console.print(f"{forwards} forwards of {count} rows, each contender in turn")
            measured[count] = _race({name: forward[count] for name, forward in bound.items()}, forwards)
            for name, one in measured[count].items():
                console.print(f"{name}: {one.best_ms:.1f} ms at {count} rows, the median of {forwards}")
        split = SplitUNet(TorchLowering(torch.float32), stage.model.denoiser)
        keys_ms = [1000 * _timed(lambda: split.prepare_text(inputs[rows].conditioning["kv"])) for _ in range(5)]
    return measured, left_out, round(statistics.median(keys_ms), 3)


def _race(contenders: Mapping[str, Mapping[str, Forward]], forwards: int) -> Race:
    took: dict[tuple[str, str], list[float]] = {(name, label): [] for name, own in contenders.items() for label in own}
    for _ in range(forwards):
        for (name, label), times in took.items():
            times.append(1000 * _timed(contenders[name][label]))
    truth = contenders["diffusers-fp32"][""]().float()
    measured = {}
    for name, own in contenders.items():
        ms = {label: _quartiles(took[name, label]) for label in own}
        best = min(ms, key=lambda label: ms[label][0])
        error = torch.linalg.vector_norm(own[best]().float() - truth) / torch.linalg.vector_norm(truth)
        measured[name] = Measured(best, ms, _significant(float(error)))
    return measured


def _timed(forward: Callable[[], Any]) -> float:
    """Seconds of a forward with its weights in the caches, as in serving."""
    time.sleep(_REST_S)
    forward()
    started = time.perf_counter()
    forward()
    return time.perf_counter() - started


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return round(median, 3), round(low, 3), round(high, 3)


def _significant(value: float) -> float:
    return float(f"{value:.3g}") if math.isfinite(value) else value


# -- what is told --------------------------------------------------------------------------------------------------


def _show(settings: Settings, rows: int, measured: dict[int, Race], left_out: dict[str, str], keys_ms: float) -> None:
    many, few = measured[rows], measured[FEW_ROWS]
    stock = many["diffusers-fp32"].best_ms

    def row(name: str) -> tuple[str, ...]:
        if name in left_out:
            return name, left_out[name], "", "", "", ""
        m = many[name]
        return (
            name,
            f"{m.best_ms:.1f} ms",
            f"{stock / m.best_ms:.2f}×",
            f"{few[name].best_ms:.1f} ms",
            f"{m.error:.1e}",
            m.best,
        )

    record.table(
        f"one UNet forward of {Path(settings.model_name).name}; keys and values, which Diptych packs once a picture: "
        f"{keys_ms:.1f} ms",
        ("contender", f"{rows} rows", "speedup", f"{FEW_ROWS} rows", "relative error", "best setting"),
        [row(name) for name in CONTENDERS],
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
