"""Builds an engine from settings: device, model, runners.

The only module that imports every runner.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from contract.parallel import parse
from contract.precision import is_quantized, runs, unquantized
from core.batching.engine import Engine, Tick
from core.batching.runner import Lane, Runner
from core.config import AUTO, STAND_IN_MODEL, Settings
from core.kernels.device import KernelChoice, lacks
from core.transfers import beside
from llm.cache.pages import PAGE
from pipeline import plans
from pipeline.backends.backend import ImageBackend
from pipeline.backends.swapped import SharedBackends
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel, family_of, load, short_name
from pipeline.clip_scorer import ClipScorer
from pipeline.extensions import adapters, lora, refining
from pipeline.extensions.asset_cache import ReadFile
from pipeline.extensions.depth import DepthEstimator
from pipeline.extensions.extension import Extension
from pipeline.extensions.registry import KINDS
from pipeline.families import diffusers
from pipeline.families.diffusers import checkpoint
from pipeline.families.diffusers.runner import DiffusersRunner
from pipeline.memory_ledger import RequestCapacity
from pipeline.model_pool import ModelPool, Pooled, weight_bytes
from pipeline.pixels import provenance
from pipeline.pixels.provenance import Provenance
from pipeline.runner import ImageRunner
from workers import backends, text_encoder, variants
from workers.checker import Checker
from workers.checker import load as load_checker
from workers.devices import check_gpu, compile_kernels, describe, fused, keep_compiled, kernels, set_threads
from workers.gate import Gate
from workers.variants import Count, Say

if TYPE_CHECKING:
    import torch

    from llm.checkpoints.load import TextModel
    from llm.features.adapters import AdapterSource
    from llm.parallel.followers import Followers
    from llm.runner import TextRunner
    from workers.text_pool import TextPool

log = logging.getLogger(__name__)

_SHARE = 0.7  # of free memory: the rest is for the forwards' own buffers
_LEAST = 4  # of the memory for requests, this part stays theirs whatever other models take
_UNLIMITED = 2**63  # bytes
_TEXT_SHARE = 0.1  # of free memory, for the KV cache


@dataclass(eq=False)
class Runtime:
    """An engine and its runners. Closing it ends both."""

    settings: Settings
    engine: Engine
    image_runner: Pooled
    lane: Lane
    texts: TextRunner | None = None
    text_lane: Lane | None = None  # if separate from the images' lane
    checker: Checker | None = None
    provenance: Provenance | None = None
    decisions: tuple[KernelChoice, ...] = ()  # which kernels run, and why
    depth: DepthEstimator | None = None
    pool: ModelPool[Pooled] | None = None  # the images' and those of other models, if there are several
    text_pool: TextPool | None = None  # the texts' and those of other models, if there are several
    gate: Gate | None = None  # of cascades, if there are several models and a scorer

    @property
    def images(self) -> ImageRunner:
        """Return the runner of a native family. Raises `ModelError` for a pipeline by diffusers' own loop."""
        if isinstance(self.image_runner, DiffusersRunner):
            name = self.image_runner.model.name
            raise ModelError(f"{name}: {diffusers.NOTICE}; this needs a model of a native family")
        return self.image_runner

    def close(self) -> None:
        self.engine.close()
        for part in (self.gate, self.checker):
            if part is not None:
                part.close()
        (self.pool or self.image_runner).close()
        texts = self.text_pool or self.texts
        if texts is not None:
            texts.close()
        for lane in (self.lane, self.text_lane):
            if lane is not None:
                lane.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def device_of(settings: Settings) -> str:
    """The device that the settings select."""
    import torch

    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


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
    return int(_SHARE * max(0, _free_bytes(model.device) - asset_bytes))


def _free_bytes(device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)  # with what caches of files would give back


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


def text_lane(settings: Settings) -> Lane | None:
    """A separate lane for text if the device runs several streams at once; None if it alternates with images."""
    import torch

    from llm.lane import StreamLane

    device = torch.device(device_of(settings))
    return StreamLane("text", device) if device.type == "cuda" else None


def text_runner(
    settings: Settings, lane: Lane, say: Say, *, pages: int = 0, beside_lane: bool = False
) -> TextRunner | None:
    """The settings' text model, ready to serve; None if none is set or embedded.

    Raises `ModelError`. The KV cache's memory is reserved here, before images get the rest, and logged: so many
    `pages`; 0: as the settings say. It is loaded on the lane, or with `beside_lane` on this thread.
    """
    from core.kernels.cpu.library import KernelsUnavailable, library
    from llm.checkpoints.load import TextModelError
    from llm.drafts.load_draft import load as load_draft
    from llm.runner import TextRunner

    name = settings.text_model_name
    followers: list[Followers] = []
    if name is None:
        return None
    device = device_of(settings)
    if device == "cpu":
        compile_kernels(settings, say)
    say(f"loading {name}")
    kernel_library, refusal = None, None
    keep_compiled(settings, device)
    if device != "cpu":
        check_gpu(settings, device, settings.text_precision)
        refusal = lacks(describe(settings, device), "int8")
    elif not settings.kernels:
        refusal = "the native kernels are turned off"
    else:
        try:
            kernel_library = library(settings.compiled_kernels)
        except KernelsUnavailable as error:
            refusal = str(error)
            log.warning("text generation runs on torch: %s", error)

    def make() -> TextRunner:
        set_threads(settings, device)
        model = _load_text(settings, name, device, refusal, followers)
        draft = load_draft(settings.text_draft, model, lacks=refusal) if settings.text_draft else None
        return TextRunner(
            model, lane=lane, max_requests=settings.text_requests, pages=pages or _pages(settings, model),
            kv=settings.text_kv, kernels=kernel_library, draft=draft, patience_s=settings.text_first_s,
            pace_s=settings.text_token_s, followers=followers[0] if followers else None,
        )  # fmt: skip

    try:
        runner = make() if beside_lane else lane.call(make)
    except TextModelError as error:
        for each in followers:
            each.close()
        if settings.text_model or settings.text_parallel:
            raise ModelError(f"text: {error}") from error
        # Images are served all the same.
        log.warning("text generation is off: the embedded model does not load: %s", error)
        return None
    runner.release_weights()
    runner.adapters = _text_loras(settings, runner)
    cache = runner.execution.cache
    say(f"{runner.model.name}: {runner.pages.tokens} tokens of keys and values in {cache.size_bytes / 2**20:.0f} MiB")
    return runner


def _text_loras(settings: Settings, runner: TextRunner) -> AdapterSource | None:
    """The adapters that requests of this model may name: those of its own folder, if it has one."""
    from workers.text_loras import TextLoraFolder

    if not settings.text_loras:
        return None
    folder = Path(settings.text_loras).expanduser()
    own = folder / runner.model.name
    return TextLoraFolder(own if own.is_dir() else folder, runner.execution, settings.text_loras_mib * 2**20)


def _load_text(
    settings: Settings, name: str, device: str, lacks: str | None, followers: list[Followers]
) -> TextModel:  # fmt: skip
    """Load the text model; with `DIPTYCH_TEXT_PARALLEL` its part of rank 0, and `followers` receives the other ranks.

    Raises `TextModelError`.
    """
    import torch

    from llm.checkpoints.precision import load as load_text
    from llm.parallel.followers import Followers
    from llm.parallel.shards import Rank

    split, rank = parse(settings.text_parallel), None
    if split.ranks > 1:
        arguments = {"name": name, "requested": settings.text_precision, "lacks": lacks, "threads": settings.threads}
        followers.append(Followers(split, arguments, device=torch.device(device)))
        rank = Rank(0, split)
    model, reason = load_text(name, settings.text_precision, device=device, lacks=lacks, rank=rank)
    log.info("text: %s in %s: %s", model.name, model.precision, reason)
    for other in followers:
        other.loaded(model.digest)
    return model


def _text_pool(text_settings: Sequence[Settings], first: TextRunner, lane: Lane) -> TextPool:
    """Return a pool of these settings' text models, of which the first is loaded. A model has a KV cache of the same
    size each time that it is loaded. Raises `ModelError`.
    """
    from workers.text_pool import TextPool, size_bytes

    settings = text_settings[0]
    settings_of = {short_name(str(each.text_model_name)): each for each in text_settings}
    pages: dict[str, int] = {}
    loaded = [first]

    def load(name: str) -> ReadFile[TextRunner]:
        if loaded:
            runner = loaded.pop()
        else:
            with beside(first.model.device):
                made = text_runner(settings_of[name], lane, log.info, pages=pages.get(name, 0), beside_lane=True)
                assert made is not None, "a model that is named is loaded, or refused"
                runner = made
                try:
                    runner.prepare(beside_lane=True)  # or its first steps would, and hold up the lane
                except BaseException:
                    runner.close()
                    raise
        pages[name] = runner.pages.capacity
        return ReadFile(runner, runner.model.digest, size_bytes(runner))

    pool = TextPool(
        [*settings_of], load, settings.text_models_mib * 2**20 or _UNLIMITED, patience_s=settings.text_first_s,
        idle_s=settings.model_idle_s,
    )  # fmt: skip
    pool.start()
    return pool


def _pages(settings: Settings, model: TextModel) -> int:
    """Pages for all answers at full length, as far as memory allows; at least for one answer."""
    pages_per_sequence = -(-model.context // PAGE)
    each = 2 * model.layers * model.kv_heads * model.head_dim * PAGE
    each_bytes = each if settings.text_kv != "float" else each * (4 if model.device.type == "cpu" else 2)
    allowed = settings.text_memory_mib * 2**20 or int(_TEXT_SHARE * _free_bytes(model.device))
    return max(pages_per_sequence, min(settings.text_requests * pages_per_sequence, allowed // each_bytes))


def build(
    settings: Settings,
    *,
    lane: Lane | None = None,
    measure_s: float = 0.0,
    text: bool = False,
    say: Say = lambda text: None,
    count: Count | None = None,
    on_tick: Callable[[Tick], None] | None = None,
) -> Runtime:
    """Load the model and start an engine. `measure_s` limits the time for measuring cost curves.

    `say` receives the current step; `count` receives the progress of countable steps, or `say` does if `count` is None.
    On a GPU, CUDA graphs are recorded within this time, and the remaining ones while serving. With `text` the settings'
    text model is served too, by the same engine on the same device. `on_tick` is called after every iteration.
    """
    backends.check(settings)
    text_settings = settings.text_catalogue if text else []
    names = _names(settings, text_settings)
    checker = load_checker(settings, device_of(settings))
    signer = provenance.of(settings)
    lane = lane or Lane("device")
    llm_lane = text_lane(settings) if text else None
    texts = text_runner(text_settings[0], llm_lane or lane, say) if text_settings else None
    if texts is not None and measure_s:  # before its size is asked for: graphs count
        say("measuring what tokens cost")
        texts.prepare(measure_s=min(1.0, measure_s))
    text_pool = _text_pool(text_settings, texts, llm_lane or lane) if texts and len(text_settings) > 1 else None
    first, *others = settings.catalogue
    gate = Gate(ClipScorer(settings.scorer_folder)) if others and settings.scorer_folder else None
    depth = lane.call(lambda: DepthEstimator(Path(settings.depth_model))) if settings.depth_model else None
    # After all else: requests get most of the memory that is left.
    shared = SharedBackends(lane) if others else None
    images, decisions = lane.call(lambda: image_runner(first, lane, say, count, shared=shared))
    pool = None if shared is None else _pool(settings, names, images, decisions, lane, shared)
    others_bytes = 0 if pool is None else _others_bytes(settings, images)
    if texts is not None:
        others_bytes += _text_others_bytes(text_settings, texts)
    if not settings.memory_mib:
        memory = images.capacity.memory
        memory.capacity = max(memory.capacity // _LEAST, memory.capacity - others_bytes)
    if measure_s or settings.compile:
        say("measuring what forwards cost")
        images.prepare(measure_s=measure_s)
    runners: list[Runner] = [pool or images, *([] if texts is None else [text_pool or texts])]
    engine = Engine(runners, starvation_s=settings.starvation_s, on_tick=on_tick)
    if pool is not None:
        pool.retry_admission = engine.retry_admission
    if text_pool is not None:
        text_pool.retry_admission = engine.retry_admission
    return Runtime(
        settings, engine, images, lane, texts, llm_lane, checker, signer, decisions, depth, pool, text_pool, gate
    )


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


def _names(settings: Settings, text_settings: Sequence[Settings]) -> list[str]:
    """The names of the settings' image models. Raises `ModelError` for two models of one name."""
    names = [short_name(each.model_name) for each in settings.catalogue]
    every = [*names, *(short_name(str(each.text_model_name)) for each in text_settings)]
    if max(len(names), len(text_settings)) > 1 and len({*every}) < len(every):
        raise ModelError(f"models of one worker must have different names, not {', '.join(every)}")
    return names


def _others_bytes(settings: Settings, first: Pooled) -> int:
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


def _text_others_bytes(text_settings: Sequence[Settings], first: TextRunner) -> int:
    """The memory that all may take later, and others than the first, with their caches, as `_others_bytes`."""
    from llm.checkpoints.load import TextModelError, file_bytes
    from workers.text_pool import later_bytes, size_bytes

    files, own = [0] * len(text_settings), size_bytes(first)
    for at, each in enumerate(text_settings):
        with suppress(TextModelError):  # one that cannot be loaded takes nothing
            files[at] = file_bytes(str(each.text_model_name))
    weights = own - first.execution.cache.size_bytes
    most = int(sum(files[1:]) * min(1.0, weights / files[0] if files[0] else 1.0))
    most += len(files[1:]) * first.execution.cache.size_bytes
    allowed = text_settings[0].text_models_mib * 2**20
    most = min(most, max(0, allowed - own)) if allowed else most
    return most + len(files) * later_bytes(text_settings[0], first)


def _pool(
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
