"""Loads models in diffusers' format, from a folder or a hub id, and rejects others, naming the part.

`pipeline.checkpoints.folder` checks the files; `pipeline.families` says what they must be.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contract import loras as selection
from contract import students
from contract.precision import PRECISIONS, is_quantized
from contract.precision import dtype as dtype_of
from core.digests import digest_of
from core.hub_cache import model_name
from pipeline import sizes
from pipeline.checkpoints import folder as folders
from pipeline.checkpoints import scaled_weights
from pipeline.checkpoints.folder import ModelError as ModelError
from pipeline.checkpoints.folder import Part
from pipeline.extensions import lora
from pipeline.extensions.lora import Lora
from pipeline.families import registry
from pipeline.families.family import Family, Seeded, TinyVae
from pipeline.families.family import ImageModel as ImageModel
from pipeline.sampling.nearest import NearestScheduler, nearest

if TYPE_CHECKING:
    import torch

    from contract.card import ImageDefaults

log = logging.getLogger(__name__)

_TINY_VAE = Part("network", ("AutoencoderTiny",), "diffusers.models.autoencoders.autoencoder_tiny")
_ANY_STEPS = 4  # enough to build every sampler's table


def load(
    name: str,
    *,
    precision: str = "fp32",
    device: str = "cpu",
    variant: str | None = None,
    unet: Path | None = None,
    loras: Sequence[Lora] = (),
    tiny_vae: str = "",
) -> ImageModel:
    """Load a model.

    Args:
        name: a folder as `save_pretrained` lays it out, a hub id, or a `seeded` model.
        precision: of `contract.precision`; one of 8 bits is for a model with such a variant. A VAE that says
            `force_upcast`, or has weights beyond fp16's range, stays in fp32 where fp16 is asked for.
        variant: of the weight files, such as "fp16" in `diffusion_pytorch_model.fp16.safetensors`.
        unet: folder of the quantized denoiser; default: such as `unet-int8` in the model's own folder.
        loras: added to the weights, before these are quantized; a variant must then hold scales alone.
        tiny_vae: folder or hub id of a tiny decoder; default: `vae-tiny` in the model's own folder, if there is one.

    Raises:
        ModelError: naming the part, if one is missing, damaged or of another architecture; also for a device that is
            not there.
    """
    import torch

    if precision not in PRECISIONS:
        raise ModelError(f"precision: must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    where = _device(device)
    dtype = getattr(torch, dtype_of(precision, where.type))
    seeded_model = registry.seeded(name)
    source = (
        _read_folder(name, precision, dtype, variant) if seeded_model is None else _build(name, *seeded_model, where)
    )
    family, parts, digest = source.family, source.parts, source.digest
    family.check(name, parts)
    sampling = scheduler_of(name, family, parts["scheduler"])
    if sampling.reason:
        log.warning("%s: %s", name, sampling.reason)
    if loras:
        with quiet():
            lora.fuse_(parts, family.adapters, loras)
    if is_quantized(precision):
        from pipeline.quantization import quantized_parts

        variants = quantized_parts.variant(source.folder, precision, family.quantized, unet)
        if loras:
            quantized_parts.check_scales_alone(variants[family.denoiser])
        digest = quantized_parts.apply_(parts, variants, digest=digest)
    if loras:
        digest = lora.digest(digest, loras)
    scheduler, config = parts.pop("scheduler"), parts[family.denoiser].config
    _place(parts, family, where, dtype)
    student = _student(source.name, family, scheduler, config, [entry.name for entry in loras if entry.scale > 0])
    model = ImageModel(
        source.name, digest, precision, where, dtype, family, parts, sampling.config, source.options, student=student,
        scheduler_reason=sampling.reason,
    )  # fmt: skip
    default_folder = None if source.folder is None else source.folder / folders.TINY_VAE
    tiny_folder = folders.find_network(tiny_vae) if tiny_vae else default_folder
    if tiny_folder is not None and (tiny_vae or tiny_folder.is_dir()):
        model.tiny_vae = _tiny_vae(tiny_folder.resolve(), model)
    model.trained = sizes.trained(source.folder, family.multiple(model))
    return model


class _Source(NamedTuple):
    """The parts of a model by name as they were read or built: without LoRAs, not quantized, on CPU or device."""

    name: str
    digest: str
    folder: Path | None
    family: Family
    parts: dict[str, Any]
    options: Mapping[str, Any]


def _build(name: str, family: Family, seeded: Seeded, device: torch.device) -> _Source:
    with quiet():
        parts = seeded.build(device)
    scheduler = parts["scheduler"]
    parts["scheduler"] = {**scheduler.config, "_class_name": type(scheduler).__name__}
    return _Source(name, _seeded_digest(name, seeded, device), None, family, parts, seeded.options)


def _read_folder(name: str, precision: str, dtype: torch.dtype, variant: str | None) -> _Source:
    import torch

    folder, family = _find(name, variant)
    index, files = folders.check(folder, variant, family.parts, family.label)
    # The VAE in fp32 until its config is read: rounding to fp16 is irreversible. So are layers before quantization:
    # rounding first would give another quantized model.
    fp32_parts = {"vae"} if dtype is torch.float16 else {*family.quantized} if is_quantized(precision) else set()
    parts = {
        part: load_part(folder, part, spec, torch.float32 if part in fp32_parts else dtype, variant)
        for part, spec in family.parts.items()
    }
    return _Source(short_name(name), folders.digest(folder, files), folder, family, parts, family.options(index))


def _tiny_vae(where: Path, model: ImageModel) -> TinyVae:
    """Load the tiny decoder in this folder, on the model's device. Raises `ModelError` for one of another model."""
    from unet_opt.layout import check_tiny_decoder

    files = folders.check_part(where, folders.TINY_VAE, _TINY_VAE)
    network = load_part(where.parent, where.name, _TINY_VAE, model.dtype, None)
    try:
        check_tiny_decoder(network)
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from error
    scale = 2 ** (len(network.config.decoder_block_out_channels) - 1)
    for label, actual, expected in (
        ("latent_channels", network.config.latent_channels, model.latent_channels),
        ("pixels per latent", scale, model.vae_scale),
    ):
        if actual != expected:
            raise ModelError(f"{where}: {label}: {actual}, and the VAE of {model.name} has {expected}")
    network.to(model.device).eval().requires_grad_(False)
    return TinyVae(network, digest_of(where, [where / "config.json", *files]))


def short_name(name: str) -> str:
    """Return the short name: a folder's own, independent of the path given; a hub id's last word."""
    return model_name(Path(name)) if Path(name).expanduser().is_dir() else Path(name).name


def _find(name: str, variant: str | None) -> tuple[Path, Family]:
    folder = folders.find(name, variant, lambda folder: registry.read(folder).parts)
    return folder, registry.read(folder)


def _place(parts: Mapping[str, Any], family: Family, device: torch.device, dtype: torch.dtype) -> None:
    """Put the modules on the device, in evaluation mode."""
    import torch

    half = dtype is torch.float16
    # Such decoders overflow in fp16, and such weights would be infinite.
    upcast = half and (bool(parts["vae"].config.force_upcast) or _beyond(parts["vae"], dtype))
    with quiet():
        for name, part in family.parts.items():
            if part.stem:
                part_dtype = torch.float32 if name == "vae" and upcast else dtype
                parts[name].to(device=device, dtype=part_dtype).eval().requires_grad_(False)


def _beyond(part: Any, dtype: torch.dtype) -> bool:
    """Return whether a module has weights beyond this type's range."""
    import torch

    weights = [weight.detach() for weight in part.parameters() if weight.numel()]
    return any(float(weight.abs().max()) > torch.finfo(dtype).max for weight in weights)


def seeded(name: str) -> bool:
    """Return whether this names a model with random weights, built in code."""
    return registry.seeded(name) is not None


def check_name(name: str) -> None:
    """Reject a name that leads to no model, before anything heavy is imported. Raises `ModelError`."""
    if not seeded(name):
        folders.local(name)


def weights_digest(name: str, *, variant: str | None = None, device: str = "cpu") -> str:
    """Return the digest of the model's weights without quantization and LoRAs. Raises `ModelError`."""
    seeded_model = registry.seeded(name)
    if seeded_model is not None:
        return _seeded_digest(name, seeded_model[1], _device(device))
    folder, family = _find(name, variant)
    return folders.digest(folder, folders.check(folder, variant, family.parts, family.label)[1])


def family_of(name: str, variant: str | None = None) -> tuple[Family, Path | None]:
    """Return the model's family, and its folder unless it is seeded. Raises `ModelError`."""
    seeded_model = registry.seeded(name)
    if seeded_model is not None:
        return seeded_model[0], None
    folder, family = _find(name, variant)
    return family, folder


def defaults_of(name: str, variant: str | None = None, loras: str = "") -> ImageDefaults:
    """Return the defaults of a model's requests, with the LoRAs of this selection in it. Raises `ModelError`."""
    seeded_model = registry.seeded(name)
    if seeded_model is not None:
        return seeded_model[0].defaults
    folder, family = _find(name, variant)
    config = folders.read_json(folder / family.denoiser / "config.json")
    scheduler = folders.read_json(folder / "scheduler" / "scheduler_config.json")
    try:
        fused = [entry.name for entry in selection.read(loras) if entry.scale > 0]
    except ValueError as error:
        raise ModelError(f"lora: {error}") from error
    return _student(short_name(name), family, scheduler, config, fused) or family.defaults


def _student(
    name: str, family: Family, scheduler: Mapping[str, Any], denoiser: Mapping[str, Any], loras: Sequence[str]
) -> ImageDefaults | None:
    """Return how the model is drawn if it, or one of the LoRAs in its weights, is a student the family can draw."""
    candidates = [students.of_model(name, scheduler, denoiser), *map(students.of_lora, loras)]
    return next(
        (candidate for candidate in candidates if candidate is not None and candidate.scheduler in family.samplers),
        None,
    )


def _seeded_digest(name: str, seeded: Seeded, device: torch.device) -> str:
    import torch

    suffix = f"-{device.type}" if seeded.on_device else ""
    return f"{name}-seed0-torch{torch.__version__}{suffix}"


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"cannot be put on {name!r}: no device that torch knows") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ModelError(f"cannot be put on {name}: torch {torch.__version__} sees {count} CUDA devices")
    return device


def load_part(folder: Path, name: str, part: Part, dtype: torch.dtype, variant: str | None) -> Any:
    if part.kind == "scheduler":
        return folders.read_json(folder / name / "scheduler_config.json")
    try:
        with quiet():
            cls = getattr(importlib.import_module(part.module), part.classes[0])
            if part.kind == "tokenizer":
                return cls.from_pretrained(str(folder / name), local_files_only=True)
            options: dict[str, Any] = {"variant": variant, "use_safetensors": True, "output_loading_info": True}
            if part.kind == "encoder":
                options["ignore_mismatched_sizes"] = True  # mismatches are then listed, and rejected below
            loaded, info = cls.from_pretrained(
                str(folder), subfolder=name, local_files_only=True, torch_dtype=dtype, **options
            )
    except Exception as error:  # many libraries, many exceptions: this part does not load
        reason = folders.first_line(error).split(". If you want")[0]  # advice for programmers follows
        raise ModelError(f"{folder}/{name}: does not load ({type(error).__name__}: {reason})") from error
    # Unused weights of a text encoder are harmless; a denoiser with more weights than its config is a different one.
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        keys = sorted(key if isinstance(key, str) else key[0] for key in info.get(problem) or ())
        keys = [key for key in keys if problem != "missing_keys" or not key.startswith(part.unread)]
        if problem == "unexpected_keys" and not part.strict:
            keys = [key for key in keys if key.endswith(scaled_weights.ENDINGS)]  # of weights, which are nothing alone
        if keys:
            raise ModelError(
                f"{folder}/{name}: does not fit its config.json: {len(keys)} {problem.replace('_', ' ')}, "
                f"the first is {keys[0]}"
            )
    return loaded


def scheduler_of(name: str, family: Family, config: Mapping[str, Any]) -> NearestScheduler:
    """Return the scheduler's config as the family draws with it. Raises `ModelError` for one that has no table."""
    from pipeline.sampling import samplers, sigmas

    try:
        scheduler = nearest({**config, **family.scheduler_settings}, family.samplers)
        sampler = samplers.default_name(scheduler.config, samplers.offered(scheduler.config, family.samplers))
        sigmas.table(scheduler.config, sampler, _ANY_STEPS)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"{name}: scheduler: {error}") from error
    return scheduler


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' progress bars and advice: loading has its own progress display."""
    from transformers.utils import logging as transformers_logging

    loggers = [logging.getLogger("diffusers"), logging.getLogger("transformers")]
    levels = [logger.level for logger in loggers]
    from diffusers.utils import logging as diffusers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    diffusers_logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
            diffusers_logging.enable_progress_bar()
