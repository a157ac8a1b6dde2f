"""Loads SDXL models in diffusers' format, from a folder or a hub id, and rejects others, naming the part.

`pipeline.folder` checks the files.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contract.precision import PRECISIONS, is_quantized
from contract.precision import dtype as dtype_of
from pipeline import folder as folders
from pipeline import lora, sdxl, tiny
from pipeline.folder import PARTS, WEIGHTS
from pipeline.folder import ModelError as ModelError
from pipeline.lora import Lora

if TYPE_CHECKING:
    import torch

_TRANSFORMERS = ("text_encoder", "text_encoder_2")
_ANY_STEPS = 4  # enough to build every sampler's table
_SAMPLE_SIZE = 128  # diffusers' default for a UNet without a sample size


@dataclass(eq=False)
class ImageModel:
    """The parts of one SDXL model, in evaluation mode on one device. `digest` identifies its weights."""

    name: str
    digest: str
    precision: str
    device: torch.device
    dtype: torch.dtype
    tokenizers: tuple[Any, Any]
    text_encoders: tuple[Any, Any]
    unet: Any
    vae: Any
    scheduler_config: dict[str, Any]
    force_zeros: bool

    @property
    def vae_scale(self) -> int:
        """Pixels per latent, along one side."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def native(self) -> int:
        """The native side length of a square image, in pixels."""
        sample = self.unet.config.sample_size or _SAMPLE_SIZE
        return int(sample if isinstance(sample, int) else max(sample)) * self.vae_scale

    @property
    def multiple(self) -> int:
        """Every side must be a multiple of this many pixels, so that each UNet level halves evenly."""
        return int(self.vae_scale * 2 ** (len(self.unet.config.block_out_channels) - 1))


def load(
    name: str,
    *,
    precision: str = "fp32",
    device: str = "cpu",
    variant: str | None = None,
    unet: Path | None = None,
    loras: Sequence[Lora] = (),
) -> ImageModel:
    """Load a model.

    Args:
        name: a folder as `save_pretrained` lays it out, a hub id, or a `seeded` model.
        precision: fp32, bf16, fp16, or int8 or fp8 for a model with a quantized variant. A VAE that says
            `force_upcast` stays in fp32 where fp16 is asked for.
        variant: of the weight files, such as "fp16" in `diffusion_pytorch_model.fp16.safetensors`.
        unet: folder of the quantized UNet; default: `unet-int8` or `unet-fp8` in the model's own folder.
        loras: added to the weights, before these are quantized; a variant must then hold scales alone.

    Raises:
        ModelError: naming the part, if one is missing, damaged or of another architecture; also for a device that is
            not there.
    """
    import torch

    if precision not in PRECISIONS:
        raise ModelError(f"precision: must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    where = _device(device)
    dtype = getattr(torch, dtype_of(precision, where.type))
    source = _build_seeded(name, where) if seeded(name) else _read_folder(name, precision, dtype, variant)
    parts, digest = source.parts, source.digest
    _check_fit(name, parts)
    if loras:
        with _quiet():
            lora.fuse_(parts, loras)
    if is_quantized(precision):
        from pipeline import quantized_parts

        variants = quantized_parts.variant(source.folder, precision, unet)
        if loras:
            quantized_parts.check_scales_alone(variants["unet"])
        digest = quantized_parts.apply_(parts, variants, digest=digest)
    if loras:
        digest = lora.digest(digest, loras)
    encoder, encoder_2, denoiser, vae = _place(parts, where, dtype)
    return ImageModel(
        name=source.name,
        digest=digest,
        precision=precision,
        device=where,
        dtype=dtype,
        tokenizers=(parts["tokenizer"], parts["tokenizer_2"]),
        text_encoders=(encoder, encoder_2),
        unet=denoiser,
        vae=vae,
        scheduler_config=parts["scheduler"],
        force_zeros=source.force_zeros,
    )


class _Source(NamedTuple):
    """A model's parts by name as they were read or built: without LoRAs, not quantized, on the CPU or the device."""

    name: str
    digest: str
    folder: Path | None
    parts: dict[str, Any]
    force_zeros: bool


def _build_seeded(name: str, device: torch.device) -> _Source:
    with _quiet():
        parts = sdxl.parts(device) if name == sdxl.NAME else tiny.parts(tiny.SHAPES[name])
    scheduler = parts["scheduler"]
    parts["scheduler"] = {**scheduler.config, "_class_name": type(scheduler).__name__}
    force_zeros = name == sdxl.NAME or tiny.SHAPES[name].force_zeros
    return _Source(name, _seeded_digest(name, device), None, parts, force_zeros)


def _read_folder(name: str, precision: str, dtype: torch.dtype, variant: str | None) -> _Source:
    import torch

    folder = folders.find(name, variant)
    index, files = folders.check(folder, variant)
    # The VAE in fp32 until its config is read: rounding to fp16 is irreversible. So are layers before quantization:
    # rounding first would give another quantized model.
    late = {"vae"} if dtype is torch.float16 else {"unet", "vae"} if is_quantized(precision) else set()
    dtypes = {part: torch.float32 if part in late else dtype for part in PARTS}
    parts = {part: _load_part(folder, part, dtypes[part], variant) for part in PARTS}
    # A folder is called by its own name, independent of the path given; a hub id by its last word.
    short = Path(name).expanduser().resolve().name if Path(name).expanduser().is_dir() else Path(name).name
    force_zeros = bool(index.get("force_zeros_for_empty_prompt", True))
    return _Source(short, folders.digest(folder, files), folder, parts, force_zeros)


def _place(parts: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> list[Any]:
    """The modules, in the order of `WEIGHTS`, on the device in evaluation mode."""
    import torch

    upcast = dtype is torch.float16 and bool(parts["vae"].config.force_upcast)  # such decoders overflow in fp16
    with _quiet():
        return [
            parts[part]
            .to(device=device, dtype=torch.float32 if part == "vae" and upcast else dtype)
            .eval()
            .requires_grad_(False)
            for part in WEIGHTS
        ]


def seeded(name: str) -> bool:
    """Whether this names a model with random weights, built in code."""
    return name == sdxl.NAME or name in tiny.SHAPES


def check_name(name: str) -> None:
    """Reject a name that leads to no model, before anything heavy is imported. Raises `ModelError`."""
    if not seeded(name):
        folders.local(name)


def weights_digest(name: str, *, variant: str | None = None, device: str = "cpu") -> str:
    """The digest of the model's weights without quantization and LoRAs. Raises `ModelError`."""
    if seeded(name):
        return _seeded_digest(name, _device(device))
    folder = folders.find(name, variant)
    return folders.digest(folder, folders.check(folder, variant)[1])


def _seeded_digest(name: str, device: torch.device) -> str:
    import torch

    drawn = f"-{device.type}" if name == sdxl.NAME else ""  # its weights are drawn on the device, by another generator
    return f"{name}-seed0-torch{torch.__version__}{drawn}"


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


def _load_part(folder: Path, part: str, dtype: torch.dtype, variant: str | None) -> Any:
    if part == "scheduler":
        return folders.read_json(folder / part / "scheduler_config.json")
    try:
        with _quiet():
            if part.startswith("tokenizer"):
                from transformers.models.clip.tokenization_clip import CLIPTokenizer

                return CLIPTokenizer.from_pretrained(str(folder / part), local_files_only=True)
            options: dict[str, Any] = {"variant": variant, "use_safetensors": True, "output_loading_info": True}
            if part in _TRANSFORMERS:
                options["ignore_mismatched_sizes"] = True  # mismatches are then listed, and rejected below
            loaded, info = _class(part).from_pretrained(
                str(folder), subfolder=part, local_files_only=True, torch_dtype=dtype, **options
            )
    except Exception as error:  # many libraries, many exceptions: this part does not load
        reason = folders.first_line(error).split(". If you want")[0]  # advice for programmers follows
        raise ModelError(f"{folder}/{part}: does not load ({type(error).__name__}: {reason})") from error
    # Unused weights of a text encoder are harmless; a UNet with more weights than its config is a different one.
    wrong = ["missing_keys", "mismatched_keys"] + (["unexpected_keys"] if part == "unet" else [])
    for what in wrong:
        keys = sorted(key if isinstance(key, str) else key[0] for key in info.get(what) or ())
        if keys:
            raise ModelError(
                f"{folder}/{part}: does not fit its config.json: {len(keys)} {what.replace('_', ' ')}, "
                f"the first is {keys[0]}"
            )
    return loaded


def _class(part: str) -> Any:
    # Full module paths: diffusers' and transformers' top levels import slowly.
    if part == "unet":
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

        return UNet2DConditionModel
    if part == "vae":
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        return AutoencoderKL
    from transformers.models.clip.modeling_clip import CLIPTextModel, CLIPTextModelWithProjection

    return CLIPTextModel if part == "text_encoder" else CLIPTextModelWithProjection


def _check_fit(name: str, loaded: Mapping[str, Any]) -> None:
    """Reject parts that load but do not form an SDXL together, before the first image fails."""
    from pipeline import sigmas

    unet, vae = loaded["unet"].config, loaded["vae"].config
    widths = [loaded[part].config.hidden_size for part in ("text_encoder", "text_encoder_2")]
    added = 6 * (unet.addition_time_embed_dim or 0) + loaded["text_encoder_2"].config.projection_dim
    facts: list[tuple[str, Any, Any]] = [
        ("unet addition_embed_type", unet.addition_embed_type, "text_time"),
        ("unet cross_attention_dim (the text encoders' widths together)", unet.cross_attention_dim, sum(widths)),
        (
            "unet projection_class_embeddings_input_dim",
            unet.projection_class_embeddings_input_dim,
            added,
        ),
        ("unet encoder_hid_dim_type", unet.encoder_hid_dim_type, None),
        ("unet class_embed_type", unet.class_embed_type, None),
        ("unet in_channels (the VAE's latent_channels)", unet.in_channels, vae.latent_channels),
        ("unet out_channels (the VAE's latent_channels)", unet.out_channels, vae.latent_channels),
    ]
    lengths = [loaded[part].model_max_length for part in ("tokenizer", "tokenizer_2")]
    facts.append(("tokenizer_2 model_max_length", lengths[1], lengths[0]))
    for what, found, wanted in facts:
        if found != wanted:
            raise ModelError(f"{name}: not a text-to-image SDXL: {what} is {found}, not {wanted}")
    for tokenizer, encoder in (("tokenizer", "text_encoder"), ("tokenizer_2", "text_encoder_2")):
        config = loaded[encoder].config
        for what, found, most in (
            ("words", len(loaded[tokenizer]), config.vocab_size),
            ("tokens a prompt", loaded[tokenizer].model_max_length, config.max_position_embeddings),
        ):
            if found > most:
                raise ModelError(f"{name}: {tokenizer} has {found} {what}, and {encoder} has room for {most}")
    try:
        sigmas.table(loaded["scheduler"], sigmas.default_name(loaded["scheduler"]), _ANY_STEPS)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"{name}: scheduler: {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the libraries' progress bars and advice: loading has its own progress display."""
    from transformers.utils import logging as transformers_logging

    loud = [logging.getLogger("diffusers"), logging.getLogger("transformers")]
    levels = [logger.level for logger in loud]
    from diffusers.utils import logging as diffusers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    diffusers_logging.disable_progress_bar()
    for logger in loud:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loud, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
            diffusers_logging.enable_progress_bar()
