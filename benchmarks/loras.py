"""Measures what LoRAs of requests cost on a CPU's kernels: a deep step whose rows have different ones, against none.

The UNet is the settings' model's, or one of SDXL's widths with fewer transformer blocks, in INT8 with random weights:
what a branch costs beside its layer follows from the layers' widths.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import provenance, record
from core.batching.runner import Lane
from core.config import Settings
from core.kernels.cpu.library import KernelsUnavailable, library
from core.ops.branches import LowRank
from core.ops.cpu import CpuLowering
from core.quant.convert import swap_
from core.quant.linear import Int8Conv2d, Int8Linear, ScaledConv2d, ScaledLinear
from unet_opt import recipe
from unet_opt.deepcache import SplitUNet
from workers.build import load_model

LAYERS = {  # names of layers that a LoRA has a share in; keys and values of the text are computed once a prompt
    "attention": r".*\.(attn1\.to_[kv]|attn[12]\.to_(q|out\.0))",
    "linear": r".*\.(attn1\.to_[kv]|attn[12]\.to_(q|out\.0)|proj_in|proj_out|ff\.net\.(0\.proj|2)|time_emb_proj)",
    "all": r"(?!.*\.attn2\.to_[kv]$).*",
}
SDXL = "SDXL's widths"
_WIDTHS: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 3), "attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048,
    "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
_SIDE = 32  # of latents


class Wanted(NamedTuple):
    """`loras` different ones among `rows` rows, of this rank, with a share in `layers`; timed in so many rounds."""

    rows: int = 16
    loras: int = 8
    rank: int = 8
    layers: str = "linear"
    rounds: int = 10


def run(
    settings: Settings, wanted: Wanted, *, sdxl: bool = False, widths: Mapping[str, Any] = _WIDTHS, side: int = _SIDE,
    results: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time rounds of one step without LoRAs and one with them. `sdxl`: of a UNet of these widths.

    Raises `record.BenchError` for what cannot be measured.
    """
    if not (1 <= wanted.loras <= wanted.rows and wanted.rank >= 1 and wanted.rounds >= 1):
        raise record.BenchError("--loras must be between 1 and --rows; --rank and --rounds at least 1")
    if settings.device.startswith("cuda"):
        raise record.BenchError("--device: a GPU draws requests with LoRAs by torch")
    with record.alone():
        lane = Lane("loras")  # all compute on one thread: see Lane
        try:
            unet, name, precision = lane.call(lambda: _unet(settings, sdxl, widths))
            measured = lane.call(lambda: _measure(settings, unet, precision, wanted, side))
            threads = lane.call(torch.get_num_threads)
        finally:
            lane.close()
    ratio = measured["plain_ms"] / measured["loras_ms"]
    title = f"{name} in {precision}: {wanted.loras} LoRAs of rank {wanted.rank} among {wanted.rows} rows"
    rows = [("without", measured["plain_ms"], 1.0), (f"with, in {wanted.layers}", measured["loras_ms"], ratio)]
    record.table(title, ("a deep step", "ms", "throughput"), [(n, f"{ms:.1f}", f"{r:.3f}") for n, ms, r in rows])
    result = {
        **measured, "ratio": ratio, **wanted._asdict(), "model": name, "precision": precision, "threads": threads,
        "latents": side,
    }  # fmt: skip
    return record.publish("loras", result, results, rooms=(*provenance.IMAGES, "benchmarks/loras.py"))


def _unet(settings: Settings, sdxl: bool, widths: Mapping[str, Any]) -> tuple[Any, str, str]:
    """The UNet, its model's name and its precision."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if sdxl:
        return _random(widths), SDXL, "int8"
    model = load_model(settings)
    if not isinstance(getattr(model.denoiser, "conv_in", None), nn.Conv2d):
        raise record.BenchError(f"--model: {model.name} has no UNet")
    return model.denoiser, Path(model.name).name, model.precision


def _random(widths: Mapping[str, Any]) -> Any:
    """A UNet in INT8 as the recipe has it, with random weights and scales."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(sample_size=_SIDE, in_channels=4, out_channels=4, layers_per_block=2, **widths)
    unet.eval().requires_grad_(False)
    rules, scales = recipe.unet(unet), dict[str, Tensor]()
    made: dict[str, nn.Module] = {}
    for name, layer in unet.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d) or rules.rule(name).reason:
            continue
        channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        by = scales.setdefault(rules.shares(name), 20 + 10 * torch.rand(channels))
        made[name] = Int8Linear.of(layer, by) if isinstance(layer, nn.Linear) else Int8Conv2d.of(layer, by)
    swap_(unet, made)
    return unet


def _measure(settings: Settings, unet: Any, precision: str, wanted: Wanted, side: int) -> dict[str, Any]:
    try:
        lowering = CpuLowering(library(settings.compiled_kernels), unet, half=precision != "fp32")
        network = SplitUNet(lowering, unet)
    except (KernelsUnavailable, ValueError) as error:
        raise record.BenchError(f"the CPU's kernels do not run this UNet: {error}") from error
    started = time.perf_counter()
    adapters = [lowering.pack_branches(_factors(unet, wanted, seed)) for seed in range(wanted.loras)]
    pack_s = (time.perf_counter() - started) / wanted.loras
    rows = [[(adapters[row * wanted.loras // wanted.rows], 0.8)] for row in range(wanted.rows)]
    step = _step(network, unet, wanted.rows, side)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(wanted.rounds + 1):
        for adapted in (False, True):
            with torch.inference_mode(), lowering.adapted(rows if adapted else []):
                begun = time.perf_counter()
                step()
                if turn:  # the first writes programs
                    times[adapted].append(1000 * (time.perf_counter() - begun))
    plain, adapted_ms = times[False], times[True]
    return {
        "plain_ms": statistics.median(plain), "loras_ms": statistics.median(adapted_ms),
        "plain_all_ms": plain, "loras_all_ms": adapted_ms, "pack_s": pack_s,
        "adapter_bytes": adapters[0].size_bytes,
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


def _step(network: SplitUNet, unet: Any, rows: int, side: int) -> Callable[[], object]:
    generator, config = torch.Generator().manual_seed(0), unet.config
    sample = torch.randn(rows, config.in_channels, side, side, generator=generator)
    text = torch.randn(rows, 77, network.text_width, generator=generator)
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    added = {"text_embeds": torch.randn(rows, pooled, generator=generator), "time_ids": torch.ones(rows, 6)}
    times = torch.full((rows,), 500.0)
    return lambda: network.deep(sample, times, text, None, added)
