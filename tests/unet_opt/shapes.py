"""UNets and decoders of the pipeline's tests' shapes, with heads that the kernels know, and what they are run on."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.ops.cpu import CpuLowering
from core.quant.convert import Recipe, quantize_
from core.quant.statistics import Statistics
from pipeline.checkpoints import sdxl, tiny
from tests.core.quant.stage import kernels, normal
from tests.pipeline.worlds import SHAPES
from unet_opt import recipe
from unet_opt.deepcache import SplitUNet
from unet_opt.inputs import DenoiserInputs

# The pipeline's shapes have narrower heads than the kernels know: other widths, all else alike.
KNOWN = {
    "plain": {"heads": (1, 2)},
    "three-levels": {"channels": (16, 48, 64), "heads": (1, 3, 2)},
    "many-heads": {"channels": (64, 128), "heads": (4, 8)},
    "two-resnets": {"heads": (1, 2)},
    "v-prediction": {"heads": (1, 1)},
    "distilled": {"heads": (1, 2)},
}
UNETS = (*KNOWN, "conv1x1")
# As "plain", but with convolutions where SDXL has linear projections, or with attention in the first and last blocks.
CHANGED: dict[str, dict[str, Any]] = {
    "conv1x1": {"use_linear_projection": False},
    "attention-last": {
        "down_block_types": ["CrossAttnDownBlock2D"] * 2, "up_block_types": ["CrossAttnUpBlock2D"] * 2,
    },
}  # fmt: skip


@functools.cache
def _pipeline(name: str) -> Any:
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    name = "plain" if name in CHANGED else name
    return tiny.make(replace(SHAPES[name], **KNOWN[name]))  # type: ignore[arg-type]


def unet(name: str) -> Any:
    """A UNet of this shape, a fresh copy."""
    found = _pipeline(name).unet
    if name in CHANGED:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found = type(found).from_config({**found.config, **CHANGED[name]})
    return copy.deepcopy(found).eval().requires_grad_(False)


def vae(name: str, **config: Any) -> Any:
    found = _pipeline(name).vae
    if config:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found = type(found).from_config({**found.config, **config})
    return copy.deepcopy(found).eval().requires_grad_(False)


def tiny_vae(width: int = 16, blocks: tuple[int, ...] = (3, 3, 3, 1), channels: int = 4, seed: int = 0) -> Any:
    """A tiny autoencoder with random weights, whose decoder keeps its signal; a fresh one."""
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoencoderTiny(
            latent_channels=channels,
            encoder_block_out_channels=(width,) * len(blocks),
            decoder_block_out_channels=(width,) * len(blocks),
            num_encoder_blocks=(1,) * len(blocks),
            num_decoder_blocks=blocks,
        )
        for layer in made.decoder.modules():  # torch's own would leave hardly a signal behind ten layers
            if isinstance(layer, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                layer.weight.data.mul_(0.7)
    return made.eval().requires_grad_(False)


class Inputs(NamedTuple):
    sample: Tensor  # [B, C, h, w]
    timestep: Tensor  # [B]
    hidden: Tensor  # [B, T, D]
    pooled: Tensor  # [B, P]
    time_ids: Tensor  # [B, 6]
    time_cond: Tensor | None  # [B, G]

    def rows(self, which: Sequence[int]) -> Inputs:
        return Inputs(*(None if part is None else part[list(which)] for part in self))

    def of_denoiser(self, kv: Tensor | None = None) -> DenoiserInputs:
        parts = {"kv": kv, "pooled": self.pooled, "time_ids": self.time_ids, "time_cond": self.time_cond}
        known = {name: part for name, part in parts.items() if part is not None}
        return DenoiserInputs(self.sample, self.timestep, known)

    def double(self) -> Inputs:
        return Inputs(*(None if part is None else part.double() for part in self))


def inputs(of: Any, rows: int, height: int, width: int, *, tokens: int = 7, seed: int = 0) -> Inputs:
    config = of.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return Inputs(
        sample=normal(seed, rows, config.in_channels, height, width),
        timestep=torch.arange(rows) * 150.0 + 21.0,
        hidden=normal(seed + 1, rows, tokens, config.cross_attention_dim),
        pooled=normal(seed + 2, rows, pooled),
        time_ids=normal(seed + 3, rows, 6).abs() * 64,
        time_cond=None if config.time_cond_proj_dim is None else normal(seed + 4, rows, config.time_cond_proj_dim),
    )


@torch.inference_mode()
def stock(of: Any, given: Inputs) -> Tensor:
    """What diffusers computes."""
    added = {"text_embeds": given.pooled, "time_ids": given.time_ids}
    return of(  # type: ignore[no-any-return]
        given.sample, given.timestep, given.hidden, timestep_cond=given.time_cond, added_cond_kwargs=added,
        return_dict=False,
    )[0]  # fmt: skip


def row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Of each row, relative."""
    return (found - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)


@torch.inference_mode()
def ours(split: SplitUNet, given: Inputs) -> Tensor:
    """What we compute, on any lowering."""
    return deep(split, given)[0]


@torch.inference_mode()
def deep(split: SplitUNet, given: Inputs, kv: Tensor | None = None) -> tuple[Tensor, ...]:
    """The output and the features; `kv` are keys and values that were packed before."""
    kv = split.prepare_text(given.hidden) if kv is None else kv
    return split.deep(given.of_denoiser(kv))


def on_kernels(of: Any, *, half: bool = False) -> SplitUNet:
    """On the CPU kernels."""
    return SplitUNet(CpuLowering(kernels(), of, half=half), of)


def calibrated(of: Any, made: Recipe, *given: Inputs) -> Statistics:
    """What the layers of a recipe read while the UNet computes these."""
    found = Statistics("digest")
    for one in given:
        with found.observe(of, made.targets(of), 0):
            stock(of, one)
    return found


@functools.cache
def _in_8_bits(name: str, scheme: str) -> Any:
    return quantized(unet(name), scheme=scheme)


def in_8_bits(name: str, scheme: str = "int8") -> Any:
    """The UNet of this shape in 8 bits, calibrated on noise; a fresh copy."""
    return copy.deepcopy(_in_8_bits(name, scheme))


def quantized(of: Any, *, side: int = 8, alpha: float | None = recipe.ALPHA, scheme: Any = "int8") -> Any:
    """This UNet in 8 bits, calibrated on noise."""
    made = recipe.unet(of, alpha=alpha)
    quantize_(of, made, calibrated(of, made, *(inputs(of, 4, side, side, seed=n) for n in range(4))), scheme=scheme)
    return of


def of_sdxl() -> Any:
    """SDXL's UNet without weights."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel(**sdxl.UNET)
