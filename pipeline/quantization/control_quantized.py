"""Creates control networks in 8 bits, calibrated on edges of what the model itself draws of prompts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from contract.precision import Scheme, is_calibrated
from core.ops.cpu import CpuLowering
from core.ops.reference import TorchLowering
from core.quant import store
from core.quant.convert import QuantizationReport, quantize_
from core.quant.statistics import Statistics
from pipeline.checkpoints.folder import ModelError
from pipeline.drawing import Denoiser
from pipeline.extensions import canny, control_file
from pipeline.extensions.control_file import ControlFile
from pipeline.pixels import vae
from pipeline.quantization.calibration import observed, seed, settings_of
from pipeline.quantization.quantized import calibration_of, manifest_of
from pipeline.quantization.quantized_parts import folder
from unet_opt import recipe as recipes
from unet_opt.calibrate import (
    Around,
    CalibrationPart,
    CalibrationSettings,
    calibrate,
    observe_modules,
    observe_programs,
)
from unet_opt.control import Condition, ControlBranch, UnionBranch
from unet_opt.inputs import TEXT, DenoiserInputs

if TYPE_CHECKING:
    from pipeline.families.family import ImageModel

_PART = "control"
_EDGES = 3  # the kind of picture that edges are, of the published ControlNet-Unions


def make(
    model: ImageModel,
    name: str,
    path: Path,
    prompts: Sequence[str],
    out: Path,
    *,
    scheme: Scheme = "int8",
    alpha: float | None = None,
    plain: bool = False,
    weights: bool = True,
    kernels: ctypes.CDLL | None = None,
    tell: Callable[[int], None] = lambda count: None,
) -> tuple[QuantizationReport, int]:
    """Calibrate a network of this model, quantize it, and write `NAME-int8` (or `-fp8`) under `out`; resumable.

    `path` is as `control_file.find` returns it; the others are as for
    `pipeline.quantization.quantized.make`, which raises the same.
    Raises `ModelError` for a network that does not fit the model.
    """
    settings = settings_of(model.family, model.defaults)
    control = control_file.read(name, path, model, model.dtype)
    if type(control.network).__name__ == control_file.ADAPTER:
        reason = "is a T2I-Adapter, which runs once a picture: there is nothing to gain"
        raise ModelError(f"{name}: {reason}", kind="control")
    net = control.network.to(model.device).eval().requires_grad_(False)
    strength = None if plain or not is_calibrated(scheme) else model.family.alpha if alpha is None else alpha
    recipe = recipes.control(net, alpha=strength)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / f".{name}-{scheme}.statistics"
    statistics = None
    if is_calibrated(scheme):
        layers = recipe.targets(net)
        statistics = _collect(model, control, layers, prompts, settings, kernels, checkpoint, tell)
    report = quantize_(net, recipe, statistics, scheme=scheme, digest=control.digest)
    calibration = calibration_of(scheme, prompts, settings)
    manifest = manifest_of(net, report, recipe, scheme, control.digest, model.dtype, calibration)
    size_bytes = store.save(net, folder(out, name, scheme), manifest, weights=weights)
    checkpoint.unlink(missing_ok=True)
    return report, size_bytes


def _collect(
    model: ImageModel, control: ControlFile, layers: Sequence[str], prompts: Sequence[str],
    settings: CalibrationSettings, kernels: ctypes.CDLL | None, checkpoint: Path, tell: Callable[[int], None],
) -> Statistics:  # fmt: skip
    """Collect statistics of the network's layers: each prompt is drawn, then drawn again by the edges of that."""
    networks, _ = observed(model, kernels)
    on_programs = isinstance(networks.denoiser.lowering, CpuLowering) and kernels is not None
    lowering = CpuLowering(kernels, control.network) if on_programs and kernels else TorchLowering(model.dtype)
    try:
        kind = UnionBranch if type(control.network).__name__ == control_file.UNION else ControlBranch
        branch = kind(lowering, control.network, model.denoiser, model.vae_scale)
    except ValueError as error:
        raise ModelError(f"control: is of another model: {error}") from error
    observe = observe_programs(lowering) if isinstance(lowering, CpuLowering) else observe_modules(control.network)
    drawing = Denoiser(model, networks.denoiser, guidance=settings.guidance, steps=settings.steps)

    deep: Callable[..., tuple[Tensor, ...]] = networks.denoiser.deep  # a UNet's, which takes residuals

    def run(batch: Sequence[str], around: Around) -> None:
        seeds = [seed(prompt) for prompt in batch]
        hints = _hints(model, branch, networks.decoder, drawing.latents(batch, seeds))
        hidden = drawing.embeddings(batch)
        rows = len(hidden) // len(batch)
        kv, kind = branch.prepare_text(hidden), min(_EDGES, branch.kinds - 1) if branch.kinds else 0

        def forward(inputs: DenoiserInputs) -> tuple[Tensor, ...]:
            read = inputs.sample[:, : model.latent_channels]
            pairs = zip(read.split(rows), hints.split(1), strict=True)
            moving = [branch.step_inputs(sample, [Condition(hint, 1.0, kind)]) for sample, hint in pairs]
            control_inputs = {name: torch.cat([entry[name] for entry in moving]) for name in moving[0]}
            residuals = branch(
                DenoiserInputs(read, inputs.timestep, {**inputs.conditioning, **control_inputs, TEXT: kv})
            )
            return deep(inputs, residuals=[part.clone() for part in residuals])

        drawing.latents(
            batch, seeds, forward=forward, until=settings.watched_steps, around=lambda step: around(_PART, step)
        )

    parts = {_PART: CalibrationPart(layers, observe, checkpoint)}
    return calibrate(parts, prompts, run, digest=control.digest, settings=settings, tell=tell)[_PART]


@torch.inference_mode()
def _hints(model: ImageModel, branch: ControlBranch, decoder: Any, latents: Tensor) -> Tensor:
    """Return the embeddings [B, h, w, C] of the edges of finished latents' pictures."""
    hints = []
    for latent in latents.split(1):
        pixels = vae.levels(decoder(vae.unscale(latent.to(model.vae.dtype), model.vae.config)))[0].cpu().numpy()
        edges = canny.edges(np.ascontiguousarray(pixels))
        hints.append(branch.hint(torch.from_numpy(edges)[None]))
    return torch.cat(hints)
