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

from benchmarks import provenance, record
from core.batching.runner import Lane
from core.config import Settings
from core.cuda_graphs import CapturedGraph, CudaRecorder, Recorder
from core.kernels.cpu.library import KernelsUnavailable, library
from core.ops.branches import LowRank
from core.ops.cpu import CpuLowering
from core.ops.cuda import CudaLowering
from core.quant.convert import Recipe, swap_
from core.quant.linear import Int8Conv2d, Int8Linear, ScaledConv2d, ScaledLinear
from pipeline.backends.timing import synchronize
from unet_opt import recipe
from unet_opt.deepcache import SplitUNet
from workers.build import device_of, load_model

LAYERS = {  # names of layers that a LoRA has a share in; keys and values of the text are computed once a prompt
    "attention": r".*\.(attn1\.to_[kv]|attn[12]\.to_(q|out\.0))",
    "linear": r".*\.(attn1\.to_[kv]|attn[12]\.to_(q|out\.0)|proj_in|proj_out|ff\.net\.(0\.proj|2)|time_emb_proj)",
    "all": r"(?!.*\.attn2\.to_[kv]$).*",
}
WAYS: dict[str, bool | None] = {"behind the products": False, "in the products": True}  # of a GPU, by `folds`
SDXL, SDXL_WHOLE = "SDXL's widths", "SDXL's shape"
_WIDTHS: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 3), "attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048,
    "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
_WHOLE: dict[str, Any] = {**_WIDTHS, "transformer_layers_per_block": (1, 2, 10)}
_SIDE, _WHOLE_SIDE = 32, 128  # of latents


class Wanted(NamedTuple):
    """`loras` different ones among `rows` rows, of this rank, with a share in `layers` (a name of `LAYERS`; for `run`
    several, with commas); timed in so many rounds.
    """

    rows: int = 16
    loras: int = 8
    rank: int = 8
    layers: str = "linear"
    rounds: int = 10


def run(
    settings: Settings, wanted: Wanted, *, sdxl: bool = False, widths: Mapping[str, Any] | None = None,
    side: int | None = None, results: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time rounds of one step without LoRAs and one with them. `sdxl`: of a UNet of these widths, with random weights.

    Raises `record.BenchError` for what cannot be measured.
    """
    device = torch.device(device_of(settings))
    kinds, whole = _kinds(wanted, device), device.type == "cuda"
    side = side or (_WHOLE_SIDE if whole else _SIDE)
    with record.alone():
        lane = Lane("loras")  # all compute on one thread: see Lane
        try:
            unet, name, precision = lane.call(
                lambda: _unet(settings, sdxl, widths or (_WHOLE if whole else _WIDTHS), device)
            )
            recorder = CudaRecorder(device) if whole else None
            lowering = lane.call(lambda: _lowering(settings, unet, precision, wanted.rows))
            found = {
                kind: lane.call(partial(measure, lowering, unet, wanted._replace(layers=kind), side, recorder))
                for kind in kinds
            }
            threads = lane.call(torch.get_num_threads)
        finally:
            lane.close()
    title = f"{name} in {precision}: {wanted.loras} LoRAs of rank {wanted.rank} among {wanted.rows} rows"
    _table(title, found)
    result = {
        "layers": found, **{key: value for key, value in wanted._asdict().items() if key != "layers"}, "model": name,
        "precision": precision, "threads": threads, "latents": side,
        "device": torch.cuda.get_device_name(device) if whole else "cpu",
    }  # fmt: skip
    return record.publish("loras", result, results, rooms=(*rooms(sdxl), "benchmarks/loras.py"))


def rooms(sdxl: bool) -> tuple[str, ...]:
    """Parts of the tree that decide these figures: of random weights the model's files do not."""
    return *(provenance.GPU_IMAGES if sdxl else provenance.IMAGES), "core/kernels", "core/ops"


def _kinds(wanted: Wanted, device: torch.device) -> list[str]:
    """The kinds of layers, fewer first: a lowering launches for all that it has had adapters of."""
    given = wanted.layers.split(",")
    if unknown := sorted({*given} - {*LAYERS}):
        raise record.BenchError(f"--layers: {unknown[0] or 'nothing'} is none of {', '.join(LAYERS)}")
    if not (1 <= wanted.loras <= wanted.rows and wanted.rank >= 1 and wanted.rounds >= 1):
        raise record.BenchError("--loras must be between 1 and --rows; --rank and --rounds at least 1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise record.BenchError("DIPTYCH_DEVICE: there is no GPU here")
    return [kind for kind in LAYERS if kind in given]


def _table(title: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    rows = list[tuple[str, ...]]()
    for kind, measured in found.items():
        rows.append((kind, "no LoRAs", f"{measured['plain_ms']:.1f}", "1.000", ""))
        for way, told in measured["ways"].items():
            equal = "equal" if told["equal"] and told["changed"] else "NOT EQUAL" if told["changed"] else "NO SHARES"
            rows.append((kind, way, f"{told['ms']:.1f}", f"{told['ratio']:.3f}", equal))
    record.table(title, ("layers", "added", "deep step, ms", "throughput", "bits in any company"), rows)


def _unet(settings: Settings, sdxl: bool, widths: Mapping[str, Any], device: torch.device) -> tuple[Any, str, str]:
    """The UNet, its model's name and its precision."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if sdxl:
        return random_unet(widths, device), SDXL_WHOLE if device.type == "cuda" else SDXL, "int8"
    model = load_model(settings)
    if not isinstance(getattr(model.denoiser, "conv_in", None), nn.Conv2d):
        raise record.BenchError(f"--model: {model.name} has no UNet")
    return model.denoiser, Path(model.name).name, model.precision


def random_unet(widths: Mapping[str, Any], device: torch.device) -> Any:
    """A UNet in INT8 as the recipe has it, with random weights and scales; what is in floats is bf16 on a GPU."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    with device:
        unet = UNet2DConditionModel(sample_size=_SIDE, in_channels=4, out_channels=4, layers_per_block=2, **widths)
    unet.eval().requires_grad_(False)
    if device.type == "cuda":
        unet.to(torch.bfloat16)
    quantize(unet, recipe.unet(unet))
    return unet


def quantize(network: nn.Module, rules: Recipe) -> None:
    """Replace what this recipe quantizes by layers in INT8 with random scales."""
    scales, made = dict[str, Tensor](), dict[str, nn.Module]()
    for name, layer in network.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d) or rules.rule(name).reason:
            continue
        channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        by = scales.setdefault(rules.shares(name), (20 + 10 * torch.rand(channels)).to(layer.weight.device))
        made[name] = Int8Linear.of(layer, by) if isinstance(layer, nn.Linear) else Int8Conv2d.of(layer, by)
    swap_(network, made)


def _lowering(settings: Settings, unet: Any, precision: str, rows: int) -> Any:
    """The lowering that serves this UNet. Raises `record.BenchError` without the CPU's kernels."""
    weight = unet.conv_in.weight
    if weight.is_cuda:
        return CudaLowering(weight.dtype, rows, unet)
    try:
        return CpuLowering(library(settings.compiled_kernels), unet, half=precision != "fp32")
    except KernelsUnavailable as error:
        raise record.BenchError(f"there are no CPU kernels: {error}") from error


def measure(lowering: Any, unet: Any, wanted: Wanted, side: int, recorder: Recorder | None) -> dict[str, Any]:
    """Milliseconds of a step without LoRAs, and of one with them in all `ways` of the lowering; as graphs with a
    `recorder`.

    `equal`: whether a row with a LoRA has the bits that it has where no other row has one, and rows without the same
    bits in either step. Raises `record.BenchError` for a UNet that the kernels do not run.
    """
    try:
        network = SplitUNet(lowering, unet)
    except ValueError as error:
        raise record.BenchError(f"the kernels do not run this UNet: {error}") from error
    started = time.perf_counter()
    adapters = [lowering.pack_branches(_factors(unet, wanted, seed)) for seed in range(wanted.loras)]
    pack_s = (time.perf_counter() - started) / wanted.loras
    rows = [[(adapters[row * wanted.loras // wanted.rows], 0.8)] for row in range(wanted.rows)]
    step, device = _step(network, unet, wanted.rows, side), unet.conv_in.weight.device
    ways = ways_of(lowering)
    steps: dict[str, Callable[[], Any]] = dict.fromkeys(("", *ways), step)  # "": without
    times: dict[str, list[float]] = {way: [] for way in steps}

    @contextmanager
    def having(way: str, given: Any) -> Iterator[Callable[[], Any]]:
        with _added(lowering, ways.get(way)), lowering.adapted(given if way else []):
            yield steps[way]

    with torch.inference_mode():
        if recorder is not None:
            for way in steps:
                with having(way, rows):
                    steps[way] = CapturedGraph(step, (), {}, recorder)
        for turn in range(wanted.rounds + 1):
            for way in steps:
                with having(way, rows) as run_step:
                    synchronize(device)
                    begun = time.perf_counter()
                    run_step()
                    synchronize(device)
                if turn:  # the first writes programs, and uploads graphs
                    times[way].append(1000 * (time.perf_counter() - begun))
        made = dict[str, list[Tensor]]()
        for way in steps:
            for given in (rows, [rows[0], *[[]] * (wanted.rows - 1)]):
                with having(way, given) as run_step:
                    made.setdefault(way, []).append(run_step()[0].clone())
    plain_ms, none = statistics.median(times[""]), made[""][0]
    told = {way: _told(times[way], plain_ms, none, *made[way]) for way in ways}
    sizes = {"pack_s": pack_s, "adapter_bytes": adapters[0].size_bytes}
    return {"plain_ms": plain_ms, "plain_all_ms": times[""], **sizes, "ways": told}


def ways_of(lowering: Any) -> Mapping[str, bool | None]:
    """`WAYS`; on a CPU the one that there is."""
    return WAYS if isinstance(lowering, CudaLowering) else {"in the products": None}


@contextmanager
def _added(lowering: Any, folds: bool | None) -> Iterator[None]:
    """Context: adapters' shares are added that way; None: as ever."""
    if folds is None:
        yield
        return
    before, lowering.folds = lowering.folds, folds
    try:
        yield
    finally:
        lowering.folds = before


def _told(all_ms: list[float], plain_ms: float, none: Tensor, every: Tensor, first: Tensor) -> dict[str, Any]:
    """Of one way; and a step's result without LoRAs, with one in every row, and in the first row alone."""
    ms = statistics.median(all_ms)
    return {
        "ms": ms, "ratio": plain_ms / ms, "all_ms": all_ms,
        "equal": bool(torch.equal(every[0], first[0]) and torch.equal(none[1:], first[1:])),
        "changed": bool((every != none).flatten(1).any(1).all()),
    }  # fmt: skip


def _factors(unet: Any, wanted: Wanted, seed: int) -> dict[str, LowRank]:
    generator, made = torch.Generator().manual_seed(seed), {}
    pattern = re.compile(LAYERS[wanted.layers])
    for name, layer in unet.named_modules():
        shape = _shape(layer)
        if shape is None or not pattern.fullmatch(name) or name.endswith("cond_proj"):
            continue
        down = torch.randn(wanted.rank, *shape[1:], generator=generator) / math.prod(shape[1:]) ** 0.5
        up = torch.randn(shape[0], wanted.rank, *[1] * (len(shape) - 2), generator=generator)
        made[name] = LowRank(down, up, 0.1)
    return made


def _shape(layer: Any) -> tuple[int, ...] | None:
    """Of a layer's weight, as torch has it, also where the weight itself is gone."""
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
    added = {"text_embeds": random(rows, pooled), "time_ids": torch.ones(rows, 6, device=weight.device)}
    times = torch.full((rows,), 500.0, device=weight.device)
    return lambda: network.deep(sample, times, text, None, added)
