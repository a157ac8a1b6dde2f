"""Builds the runner of an image model, and the pool of several, from settings."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from contract.precision import is_quantized, runs, unquantized
from core.batching.runner import Lane
from core.config import AUTO, STAND_IN_MODEL, Settings
from core.kernels.device import KernelChoice, lacks
from core.transfers import beside
from pipeline import plans
from pipeline.backends.backend import ImageBackend
from pipeline.backends.swapped import SharedBackends
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel, family_of, load
from pipeline.extensions import adapters, lora, refining
from pipeline.extensions.asset_cache import ReadFile
from pipeline.extensions.extension import Extension
from pipeline.extensions.registry import KINDS
from pipeline.families import diffusers
from pipeline.families.diffusers import checkpoint
from pipeline.families.diffusers.runner import DiffusersRunner
from pipeline.memory_ledger import RequestCapacity
from pipeline.model_pool import ModelPool, Pooled, weight_bytes
from pipeline.runner import ImageRunner
from workers import backends, variants
from workers.devices import (
    check_gpu,
    compile_kernels,
    describe,
    device_of,
    free_bytes,
    fused,
    keep_compiled,
    kernels,
    set_threads,
)
from workers.images import text_encoder
from workers.variants import Count, Say

log = logging.getLogger(__name__)

_SHARE = 0.7  # of free memory: the rest is for the forwards' own buffers
_UNLIMITED = 2**63  # bytes


def image_runner(
    settings: Settings,
    lane: Lane,
    say: Say,
    count: Count | None = None,
    *,
    capacity: RequestCapacity | None = None,
    shared: SharedBackends | None = None,
) -> tuple[Pooled, tuple[KernelChoice, ...]]:
    """Load the settings' model; returns its runner on the lane, and which kernels run. Raises `ModelError`.

    Computes on the calling thread. `capacity` is shared with the runners of other models, and so are backends of
    `shared`.
    """
    folder = diffusers.find(settings.model_name)
    if folder is None and device_of(settings) == "cpu":
        compile_kernels(settings, say)
    say(f"loading {settings.model_name}")
    if folder is not None:
        return _pipeline_runner(settings, folder, lane, capacity), ()
    model = load_model(settings, say, count)
    if model.family.refines:
        raise ModelError(f"{model.name}: is a refiner, which draws nothing alone; DIPTYCH_REFINER is for it")
    name, why_torch = backends.select(settings, model)
    kept_parts = _kept_parts(settings, model, name)
    released = tuple({model.family.denoiser, "vae"} - kept_parts)
    release = model.family.language_model not in kept_parts
    encoder = text_encoder.on_kernels(settings, model, name, release=release)
    shared = None if settings.refiner else shared  # whose graphs are recorded by turns with the model's
    backend, decisions = backends.make(name, settings, encoder, release=released, why_torch=why_torch, shared=shared)
    if backend.shared_parts:
        model = backend.model
    extensions = [kind.open(settings, model, backend) for kind in KINDS]
    refiner = _refiner(settings, model, say, count)
    runner = ImageRunner(
        backend,
        extensions,
        refiner=refiner,
        lane=lane,
        max_requests=settings.max_requests,
        patience_s=settings.image_objective_s,
        memory_bytes=memory_bytes(settings, model, extensions),
        capacity=capacity,
    )
    return runner, decisions


def load_model(settings: Settings, say: Say = log.info, count: Count | None = None) -> ImageModel:
    """Load the settings' model on the settings' device. Raises `pipeline.checkpoints.load.ModelError`.

    For 8 bits, a model without a quantized variant is quantized first, once, into the cache; `count` receives the
    number of prompts done.
    """
    device = device_of(settings)
    set_threads(settings, device)
    keep_compiled(settings, device)
    if settings.model_name == STAND_IN_MODEL:
        log.warning(
            "no model is named (--model, DIPTYCH_MODEL) and models/emoji-xl is not installed: %s has random weights: "
            "images are noise",
            STAND_IN_MODEL,
        )
    requested, plain = precision(settings, device), unquantized(device)
    unet = variants.unet_of(
        settings, device, requested, plain, lambda: unquantized_model(settings, requested), say, count
    )
    model = load(
        settings.model_name,
        precision=requested,
        device=device,
        variant=settings.variant,
        unet=unet,
        loras=lora.find(settings.lora, settings.lora_dir),
        tiny_vae=settings.tiny_vae,
    )
    folder = family_of(settings.model_name, settings.variant)[1]
    return replace(
        model,
        plans=plans.of_model(folder, settings.plans, model.precision, settings.plan),
        gates=plans.gates_of_model(folder, settings.plans, model.precision),
        tiled_above=settings.tiled_above,
        max_pixels=settings.max_pixels,
    )


def unquantized_model(settings: Settings, scheme: str) -> tuple[ImageModel, ctypes.CDLL | None]:
    """Load the settings' model for quantization, in its device's own precision, with the CPU kernels that calibrate it.

    Raises `ModelError` also if such a model cannot run in `scheme` on this device, before minutes are spent on it.
    """
    device = device_of(settings)
    model = load(settings.model_name, precision=unquantized(device), device=device, variant=settings.variant)
    in_8_bits = replace(model, precision=scheme)
    fused(settings, in_8_bits)
    return model, kernels(settings, in_8_bits)[0]


def precision(settings: Settings, device: str) -> str:
    """The settings' precision; for "auto" int8 if a variant exists and the kernels run, else unquantized.

    What "auto" resolves to is logged, with the reason. "auto" never quantizes: that takes minutes and must be
    requested. Raises `ModelError` for a precision that the device cannot compute in: emulation would be slower than
    fp32.
    """
    from core.kernels.cpu.library import KernelsUnavailable, library

    on_cpu, requested = device == "cpu", settings.precision
    if requested == "nf4" or settings.offload != "off":
        name = requested if requested == "nf4" else f"offload {settings.offload}"
        raise ModelError(f"{name}: is for pipelines that run by diffusers' own loop, and this is a native family's")
    if requested != "auto" and not runs(requested, device):
        raise ModelError(f"{requested} does not run on a CPU; take int8 or fp32")
    if not on_cpu:
        check_gpu(settings, device, requested)
    if requested != "auto":
        return requested
    plain = unquantized(device)
    has_variant = variants.has_own(settings, "int8")
    if not has_variant and (settings.lora or not variants.cached(settings, device, "int8", plain).exists):
        log.info("%s: the model has no int8 variant; `--precision int8` or `diptych quantize` makes one", plain)
        return plain
    if declined := backends.without_int8(settings):
        log.info("%s instead of int8: %s", plain, declined)
        return plain
    try:
        if on_cpu:
            library(settings.compiled_kernels)
        elif (reason := lacks(describe(settings, device), "int8")) is not None:
            raise KernelsUnavailable(reason)
    except KernelsUnavailable as error:
        log.warning("%s instead of int8: %s", plain, error)
        return plain
    log.info("int8: the model has such a variant%s, and our kernels run", "" if has_variant else " in the cache")
    return "int8"


def memory_bytes(
    settings: Settings, model: ImageModel | checkpoint.DiffusersModel, extensions: Iterable[Extension[Any]] = ()
) -> int:
    """Memory limit for images in progress: the setting, else most of the memory that is free now, without that which
    the extensions' files may take.
    """
    if settings.memory_mib:
        return settings.memory_mib * 2**20
    asset_bytes = sum(kind.folder.size_bytes() for kind in extensions if kind.waits and kind.folder is not None)
    return int(_SHARE * max(0, free_bytes(model.device) - asset_bytes))


def _kept_parts(settings: Settings, model: ImageModel, backend: str) -> set[str | None]:
    """The parts whose own weights torch reads beside the backend of this name, which has packed its own."""
    return adapters.kept_parts(settings, model, packs=backend in backends.PACK)


def _refiner(settings: Settings, base: ImageModel, say: Say, count: Count | None) -> ImageBackend | None:
    """The backend of the settings' refiner; None if none is set. Raises `ModelError` for one that is not the base's.

    It runs in the settings' precision, or, where that is one of 8 bits, in it if it has such a variant.
    """
    if not settings.refiner:
        return None
    say(f"loading {settings.refiner}")
    refiner_precision = "auto" if is_quantized(settings.precision) else settings.precision
    base_only = dict.fromkeys(("unet", "lora", "tiny_vae", "plans", "plan"), "")
    refiner_settings = settings.model_copy(
        update={"model": settings.refiner, "precision": refiner_precision, **base_only}
    )
    model = load_model(refiner_settings, say, count)
    refining.check_pair(model, base)
    name, why_torch = backends.select(refiner_settings, model)
    return backends.make(name, refiner_settings, model, release=(model.family.denoiser, "vae"), why_torch=why_torch)[0]


def _pipeline_runner(settings: Settings, folder: Path, lane: Lane, capacity: RequestCapacity | None) -> DiffusersRunner:
    """Load a pipeline that runs by diffusers' own loop. Raises `ModelError`."""
    for name in ("lora", "refiner", "tiny_vae"):
        if getattr(settings, name):
            raise ModelError(f"{settings.model_name}: {name}: is not supported by a pipeline by diffusers' own loop")
    if settings.backend not in (AUTO, backends.TORCH):
        raise ModelError(f"{settings.model_name}: a pipeline by diffusers' own loop runs on {backends.TORCH} alone")
    device = device_of(settings)
    set_threads(settings, device)
    keep_compiled(settings, device)
    model = checkpoint.load(
        settings.model_name, folder, precision=settings.precision, device=device, variant=settings.variant,
        weights=settings.unet, offload=settings.offload, compiled=settings.compile,
    )  # fmt: skip
    log.info("%s, a %s in %s: %s", model.name, type(model.base).__name__, model.precision, diffusers.NOTICE)
    return DiffusersRunner(
        model, lane=lane, max_requests=settings.max_requests, patience_s=settings.image_objective_s,
        memory_bytes=memory_bytes(settings, model), capacity=capacity,
    )  # fmt: skip


def image_pool(
    settings: Settings,
    names: list[str],
    first: Pooled,
    decisions: tuple[KernelChoice, ...],
    lane: Lane,
    shared: SharedBackends,
) -> ModelPool[Pooled]:
    """Return a pool of the settings' models, of which the first is loaded. Raises `ModelError`."""
    settings_of = dict(zip(names, settings.catalogue, strict=True))
    shared.capacity = first.capacity
    loaded: dict[str, tuple[Pooled, tuple[KernelChoice, ...]]] = {names[0]: (first, decisions)}

    def load(name: str) -> ReadFile[Pooled]:
        if name in loaded:
            runner, kernels = loaded.pop(name)
        else:
            with beside(first.model.device):
                runner, kernels = image_runner(
                    settings_of[name], lane, log.info, capacity=first.capacity, shared=shared
                )
        return ReadFile(runner, runner.model.digest, weight_bytes(runner), kernels)

    pool = ModelPool(
        names, load, settings.models_mib * 2**20 or _UNLIMITED,
        patience_s=settings.image_objective_s, idle_s=settings.model_idle_s,
        host_bytes=settings.models_host_mib * 2**20,
    )  # fmt: skip
    pool.start()
    return pool


def others_bytes(settings: Settings, first: Pooled) -> int:
    """The memory that the other models than the first may take: the rest of the setting's, or as much for a model as
    the first takes of its files' size.
    """
    folders = [
        diffusers.find(each.model_name) or family_of(each.model_name, each.variant)[1] for each in settings.catalogue
    ]
    files = [sum(path.stat().st_size for path in folder.rglob("*.safetensors")) if folder else 0 for folder in folders]
    own = weight_bytes(first)
    most = int(sum(files[1:]) * min(1.0, own / files[0] if files[0] else 1.0))
    return min(most, max(0, settings.models_mib * 2**20 - own)) if settings.models_mib else most
