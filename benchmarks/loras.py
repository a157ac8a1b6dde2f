"""Measures what LoRAs of requests cost on our kernels: a deep step whose rows have different ones, against none.

The UNet is the settings' model's, or one in INT8 with random weights. On a GPU that has SDXL's shape, and steps are
replayed as CUDA graphs, in both ways of adding shares; on a CPU it has SDXL's widths and fewer transformer blocks, as
what a branch costs beside its layer follows from the layers' widths.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import models, provenance, record
from benchmarks.harness.timing import elapsed_ms, turns
from core.batching.runner import Lane
from core.config import Settings
from core.cuda_graphs import CapturedGraph, CudaRecorder, Recorder
from core.kernels.cpu.library import KernelsUnavailable, library
from core.ops.branches import LowRank
from core.ops.cpu import CpuLowering
from core.ops.cuda import CudaLowering
from core.quant.linear import ScaledConv2d, ScaledLinear
from pipeline.backends.timing import synchronize
from unet_opt.deepcache import SplitUNet
from unet_opt.inputs import DenoiserInputs
from workers.build import device_of, load_model

LAYERS = {  # names of layers that a LoRA has a share in; keys and values of the text are computed once a prompt
    "attention": r".*\.(attn1\.to_[kv]|attn[12]\.to_(q|out\.0))",
    "linear": r".*\.(attn1\.to_[kv]|attn[12]\.to_(q|out\.0)|proj_in|proj_out|ff\.net\.(0\.proj|2)|time_emb_proj)",
    "all": r"(?!.*\.attn2\.to_[kv]$).*",
}
PLACES: dict[str, bool | None] = {"behind the products": False, "in the products": True}  # of a GPU, by `folds`
_SIDE, _WHOLE_SIDE = 32, 128  # of latents


class LoraStep(NamedTuple):
    """`loras` different ones among `rows` rows, of this rank, with a share in `layers` (a name of `LAYERS`; for `run`
    several, with commas); timed in so many rounds.
    """

    rows: int = 16
    loras: int = 8
    rank: int = 8
    layers: str = "linear"
    rounds: int = 10


def run(
    settings: Settings, options: LoraStep, *, sdxl: bool = False, widths: Mapping[str, Any] | None = None,
    side: int | None = None, results: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time rounds of one step without LoRAs and one with them. `sdxl`: of a UNet of these widths, with random weights.

    Raises `record.BenchError` for what cannot be measured.
    """
    device = torch.device(device_of(settings))
    kinds, cuda = _kinds(options, device), device.type == "cuda"
    side = side or (_WHOLE_SIDE if cuda else _SIDE)
    with record.alone():
        lane = Lane("loras")  # all compute on one thread: see Lane
        try:
            unet, name, precision = lane.call(lambda: _unet(settings, sdxl, widths, device))
            recorder = CudaRecorder(device) if cuda else None
            lowering = lane.call(lambda: _lowering(settings, unet, precision, options.rows))
            layers = {
                kind: lane.call(partial(measure, lowering, unet, options._replace(layers=kind), side, recorder))
                for kind in kinds
            }
            threads = lane.call(torch.get_num_threads)
        finally:
            lane.close()
    rows = list[tuple[object, ...]]()
    for kind, measured in layers.items():
        rows.append((kind, "no LoRAs", f"{measured['plain_ms']:.1f}", "1.000", None))
        for place, figures in measured["ways"].items():
            same = "equal" if figures["equal"] else "NOT EQUAL"
            equal = same if figures["changed"] else "NO SHARES"
            rows.append((kind, place, f"{figures['ms']:.1f}", f"{figures['ratio']:.3f}", equal))
    title = f"{name} in {precision}: {options.loras} LoRAs of rank {options.rank} among {options.rows} rows"
    record.table(title, ("layers", "added", "deep step, ms", "throughput", "bits in any company"), rows)
    result = {
        "layers": layers, "rows": options.rows, "loras": options.loras, "rank": options.rank, "rounds": options.rounds,
        "model": name, "precision": precision, "threads": threads, "latents": side,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
    }  # fmt: skip
    return record.publish("loras", result, results, artifacts=() if sdxl else provenance.EMOJI_XL)


def _kinds(options: LoraStep, device: torch.device) -> list[str]:
    """The kinds of layers, fewer first: a lowering launches for all that it has had adapters of."""
    kinds = options.layers.split(",")
    if unknown := sorted({*kinds} - {*LAYERS}):
        raise record.BenchError(f"--layers: {unknown[0] or 'nothing'} is none of {', '.join(LAYERS)}")
    if not (1 <= options.loras <= options.rows and options.rank >= 1 and options.rounds >= 1):
        raise record.BenchError("--loras must be between 1 and --rows; --rank and --rounds at least 1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise record.BenchError("DIPTYCH_DEVICE: there is no GPU here")
    return [kind for kind in LAYERS if kind in kinds]


def _unet(
    settings: Settings, sdxl: bool, widths: Mapping[str, Any] | None, device: torch.device
) -> tuple[Any, str, str]:
    """The UNet, its model's name and its precision."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if sdxl:
        full = device.type == "cuda"
        unet = models.random_unet(widths or (models.WHOLE if full else models.WIDTHS), device)
        return unet, models.SDXL_WHOLE if full else models.SDXL, "int8"
    model = load_model(settings)
    if not isinstance(getattr(model.denoiser, "conv_in", None), nn.Conv2d):
        raise record.BenchError(f"--model: {model.name} has no UNet")
    return model.denoiser, Path(model.name).name, model.precision


def _lowering(settings: Settings, unet: Any, precision: str, rows: int) -> Any:
    """The lowering that serves this UNet. Raises `record.BenchError` without the CPU's kernels."""
    weight = unet.conv_in.weight
    if weight.is_cuda:
        return CudaLowering(weight.dtype, rows, unet)
    try:
        return CpuLowering(library(settings.compiled_kernels), unet, half=precision != "fp32")
    except KernelsUnavailable as error:
        raise record.BenchError(f"there are no CPU kernels: {error}") from error


def measure(lowering: Any, unet: Any, options: LoraStep, side: int, recorder: Recorder | None) -> dict[str, Any]:
    """Milliseconds of a step without LoRAs, and of one with them in all `places` of the lowering; as graphs with a
    `recorder`.

    `equal`: whether a row with a LoRA has the bits that it has where no other row has one, and rows without the same
    bits in either step. Raises `record.BenchError` for a UNet that the kernels do not run.
    """
    try:
        network = SplitUNet(lowering, unet)
    except ValueError as error:
        raise record.BenchError(f"the kernels do not run this UNet: {error}") from error
    started = time.perf_counter()
    adapters = [lowering.pack_branches(factors(unet, options, seed)) for seed in range(options.loras)]
    pack_s = (time.perf_counter() - started) / options.loras
    rows = [[(adapters[row * options.loras // options.rows], 0.8)] for row in range(options.rows)]
    step, device = _step(network, unet, options.rows, side), unet.conv_in.weight.device
    places = places_of(lowering)
    steps: dict[str, Callable[[], Any]] = dict.fromkeys(("", *places), step)  # "": without

    @contextmanager
    def having(place: str, adapted: Any) -> Iterator[Callable[[], Any]]:
        with lowering.adapted(adapted if place else []):
            if (folds := places.get(place)) is not None:  # stays until the next place is set
                lowering.folds = folds
            yield steps[place]

    def timed(place: str, _: Any) -> float:
        with having(place, rows) as run_step:
            return elapsed_ms(run_step, lambda: synchronize(device))

    with torch.inference_mode():
        if recorder is not None:
            for place in steps:
                with having(place, rows):
                    steps[place] = CapturedGraph(step, (), {}, recorder)
        times = turns(steps, options.rounds, timed)
        outputs = dict[str, list[Tensor]]()
        for place in steps:
            for adapted in (rows, [rows[0], *[[]] * (options.rows - 1)]):
                with having(place, adapted) as run_step:
                    outputs.setdefault(place, []).append(run_step()[0].clone())
    plain_ms, none = statistics.median(times[""]), outputs[""][0]
    comparisons = {place: _compared(times[place], plain_ms, none, *outputs[place]) for place in places}
    sizes = {"pack_s": pack_s, "adapter_bytes": adapters[0].size_bytes}
    return {"plain_ms": plain_ms, "plain_all_ms": times[""], **sizes, "ways": comparisons}


def places_of(lowering: Any) -> Mapping[str, bool | None]:
    """`PLACES`; on a CPU the one that there is."""
    return PLACES if isinstance(lowering, CudaLowering) else {"in the products": None}


def _compared(all_ms: list[float], plain_ms: float, none: Tensor, every: Tensor, first: Tensor) -> dict[str, Any]:
    """Figures of one place, from a step's result without LoRAs, with one in every row, and in the first row alone."""
    ms = statistics.median(all_ms)
    return {
        "ms": ms, "ratio": plain_ms / ms, "all_ms": all_ms,
        "equal": bool(torch.equal(every[0], first[0]) and torch.equal(none[1:], first[1:])),
        "changed": bool((every != none).flatten(1).any(1).all()),
    }  # fmt: skip


def factors(unet: Any, options: LoraStep, seed: int) -> dict[str, LowRank]:
    generator, layers = torch.Generator().manual_seed(seed), {}
    pattern = re.compile(LAYERS[options.layers])
    for name, layer in unet.named_modules():
        shape = _shape(layer)
        if shape is None or not pattern.fullmatch(name) or name.endswith("cond_proj"):
            continue
        down = torch.randn(options.rank, *shape[1:], generator=generator) / math.prod(shape[1:]) ** 0.5
        up = torch.randn(shape[0], options.rank, *[1] * (len(shape) - 2), generator=generator)
        layers[name] = LowRank(down, up, 0.1)
    return layers


def _shape(layer: Any) -> tuple[int, ...] | None:
    """The shape of a layer's weight, as torch has it, also where the weight itself is gone."""
    if isinstance(layer, nn.Linear | ScaledLinear):
        return layer.out_features, layer.in_features
    if isinstance(layer, nn.Conv2d | ScaledConv2d):
        return layer.out_channels, layer.in_channels, *layer.kernel_size
    return None


def _step(network: SplitUNet, unet: Any, rows: int, side: int) -> Callable[[], Any]:
    weight = unet.conv_in.weight
    generator, config = torch.Generator(weight.device).manual_seed(0), unet.config

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)

    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    sample, text = random(rows, config.in_channels, side, side), random(rows, 77, network.text_width)
    sizes, times = torch.ones(rows, 6, device=weight.device), torch.full((rows,), 500.0, device=weight.device)
    inputs = DenoiserInputs(sample, times, {"kv": text, "pooled": random(rows, pooled), "time_ids": sizes})
    return lambda: network.deep(inputs)
