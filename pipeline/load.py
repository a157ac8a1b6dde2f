"""Loads any SDXL model in diffusers' format, from a folder or a hub id, and refuses what is not one, part by part.

Knows files and formats; knows nothing of how the parts are run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import tiny

if TYPE_CHECKING:
    import torch

PARTS = ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "unet", "vae", "scheduler")
_FAMILY = ("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline")
_WEIGHTS = {
    "text_encoder": "model",
    "text_encoder_2": "model",
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_HASH_WHOLE_BYTES = 256 * 2**20
_HASH_SAMPLE_BYTES = 4 * 2**20


class ModelError(ValueError):
    """A model that cannot be loaded. The message names the folder, the part and what is wrong with it."""


@dataclass(eq=False)
class Model:
    """The parts of one SDXL model, in evaluation mode on one device. `digest` tells its weights from any others."""

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
        """Pixels a side for each latent."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def native(self) -> int:
        """The side of the square picture that the model was made for, in pixels."""
        sample = self.unet.config.sample_size
        return int(sample if isinstance(sample, int) else max(sample)) * self.vae_scale

    @property
    def multiple(self) -> int:
        """What every side must be a multiple of, so that each UNet level halves evenly. In pixels."""
        return int(self.vae_scale * 2 ** (len(self.unet.config.block_out_channels) - 1))


def load(name: str, *, precision: str = "fp32", device: str = "cpu", variant: str | None = None) -> Model:
    """Load a model.

    Args:
        name: a folder as `save_pretrained` lays it out, a hub id, or a seeded model of `pipeline.tiny.SHAPES`.
        precision: fp32, bf16 or fp16. A VAE that says `force_upcast` stays in fp32 where fp16 is asked for.
        variant: of the weight files, such as "fp16" in `diffusion_pytorch_model.fp16.safetensors`.

    Raises:
        ModelError: naming the part, if one is missing, damaged or of another architecture.
    """
    import torch

    if precision not in _DTYPES:
        raise ModelError(f"precision: must be one of {', '.join(_DTYPES)}, not {precision!r}")
    dtype = getattr(torch, _DTYPES[precision])
    if name in tiny.SHAPES:
        with _quiet():
            pipeline = tiny.make(tiny.SHAPES[name])
        loaded = {part: getattr(pipeline, part) for part in PARTS}
        loaded["scheduler"] = {**pipeline.scheduler.config, "_class_name": type(pipeline.scheduler).__name__}
        digest, force_zeros = (
            f"{name}-seed0-torch{torch.__version__}",
            bool(pipeline.config.force_zeros_for_empty_prompt),
        )
    else:
        folder = _find(name, variant)
        index = _check_index(folder)
        files = {part: _check_part(folder, part, variant) for part in PARTS}
        loaded = {part: _load_part(folder, part, dtype, variant) for part in PARTS}
        digest, force_zeros = _digest(folder, files), bool(index.get("force_zeros_for_empty_prompt", True))
    _check_fit(name, loaded)
    with _quiet():
        modules = [loaded[part].to(device=device, dtype=dtype).eval().requires_grad_(False) for part in _WEIGHTS]
        vae = modules[3]
        if dtype is torch.float16 and vae.config.force_upcast:
            vae.to(dtype=torch.float32)  # such decoders overflow in fp16
    return Model(
        name=name if name in tiny.SHAPES else Path(name).name,
        digest=digest,
        precision=precision,
        device=torch.device(device),
        dtype=dtype,
        tokenizers=(loaded["tokenizer"], loaded["tokenizer_2"]),
        text_encoders=(modules[0], modules[1]),
        unet=modules[2],
        vae=vae,
        scheduler_config=loaded["scheduler"],
        force_zeros=force_zeros,
    )


def _find(name: str, variant: str | None) -> Path:
    """The folder of a model, downloading it first if `name` is a hub id and no folder."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{name}: is a file; a model is a folder in diffusers' format")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "/")):
        raise ModelError(f"{name}: no such folder, and not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    ending = f".{variant}.safetensors" if variant else ".safetensors"
    wanted = ["model_index.json", "*/*.json", "*/*.txt", *(f"{part}/*{ending}" for part in _WEIGHTS)]
    if variant:
        wanted += [f"{part}/*.{variant}-*-of-*.safetensors" for part in _WEIGHTS]
    else:
        wanted += [f"{part}/*.safetensors.index.json" for part in _WEIGHTS]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"{name}: no such folder, and the hub did not have it ({type(error).__name__})") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value


def _check_index(folder: Path) -> dict[str, Any]:
    index = _read_json(folder / "model_index.json")
    family = index.get("_class_name")
    if family not in _FAMILY:
        raise ModelError(f"{folder}/model_index.json: is a {family}; this engine runs {_FAMILY[0]}")
    for part in PARTS:
        entry = index.get(part)
        if not isinstance(entry, list) or len(entry) != 2 or None in entry:
            raise ModelError(f"{folder}/model_index.json: names no {part}; SDXL has {', '.join(PARTS)}")
        if not (folder / part).is_dir():
            raise ModelError(f"{folder}: the part {part} is missing")
    return index


def _check_part(folder: Path, part: str, variant: str | None) -> list[Path]:
    """The weight files of a part, each one complete, or none for a part without weights."""
    where = folder / part
    if part == "scheduler":
        _read_json(where / "scheduler_config.json")
        return []
    if part not in _WEIGHTS:
        return []
    _read_json(where / "config.json")
    stem = _WEIGHTS[part] + (f".{variant}" if variant else "")
    listing = where / (
        f"{_WEIGHTS[part]}.safetensors.index.{variant}.json" if variant else f"{stem}.safetensors.index.json"
    )
    single = where / f"{stem}.safetensors"
    if single.is_file():
        files = [single]
    elif listing.is_file():
        shards = _read_json(listing).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ModelError(f"{listing}: has no weight_map")
        files = [where / shard for shard in sorted(set(shards.values()))]
    else:
        found = sorted(path.name for path in where.glob("*.safetensors"))
        also = f" (there is {', '.join(found)}: give its variant)" if found else ""
        raise ModelError(f"{where}: {single.name} is missing{also}")
    for file in files:
        _check_safetensors(file)
    return files


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            if not list(tensors.keys()):
                raise ModelError(f"{file}: holds no tensors")
    except FileNotFoundError:
        raise ModelError(f"{file.parent}: {file.name} is missing") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: is damaged ({error})") from error


def _load_part(folder: Path, part: str, dtype: torch.dtype, variant: str | None) -> Any:
    if part == "scheduler":
        return _read_json(folder / part / "scheduler_config.json")
    try:
        with _quiet():
            if part.startswith("tokenizer"):
                from transformers import CLIPTokenizer

                return CLIPTokenizer.from_pretrained(str(folder / part))
            options: dict[str, Any] = {"variant": variant, "use_safetensors": True, "output_loading_info": True}
            loaded, info = _class(part).from_pretrained(
                str(folder), subfolder=part, local_files_only=True, torch_dtype=dtype, **options
            )
    except ModelError:
        raise
    except Exception as error:  # many libraries, many exceptions: all say that this part does not load
        raise ModelError(f"{folder}/{part}: does not load ({type(error).__name__}: {_first_line(error)})") from error
    wrong = {what: sorted(info.get(what) or ()) for what in ("missing_keys", "mismatched_keys")}
    for what, keys in wrong.items():
        if keys:
            raise ModelError(f"{folder}/{part}: {len(keys)} {what.replace('_', ' ')}, the first is {keys[0]}")
    return loaded


def _class(part: str) -> Any:
    # Module paths in full: diffusers' and transformers' top levels import slowly.
    if part == "unet":
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

        return UNet2DConditionModel
    if part == "vae":
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

        return AutoencoderKL
    from transformers.models.clip.modeling_clip import CLIPTextModel, CLIPTextModelWithProjection

    return CLIPTextModel if part == "text_encoder" else CLIPTextModelWithProjection


def _check_fit(name: str, loaded: Mapping[str, Any]) -> None:
    """Refuse parts that load but do not make an SDXL together, before the first picture fails."""
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
    for what, found, wanted in facts:
        if found != wanted:
            raise ModelError(f"{name}: not a text-to-image SDXL: {what} is {found}, not {wanted}")


def _digest(folder: Path, files: Mapping[str, list[Path]]) -> str:
    """SHA-256 over the configurations and the weights; of files over 256 MB only size, head, middle and tail."""
    digest = hashlib.sha256()
    configs = [folder / "model_index.json", *(p for part in PARTS for p in sorted((folder / part).glob("*.json")))]
    for path in [*configs, *(file for part in PARTS for file in files[part])]:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}\0{size}\0".encode())
        with path.open("rb") as stream:
            if size <= _HASH_WHOLE_BYTES:
                while block := stream.read(_HASH_SAMPLE_BYTES):
                    digest.update(block)
            else:
                for offset in (0, size // 2, size - _HASH_SAMPLE_BYTES):
                    stream.seek(offset)
                    digest.update(stream.read(_HASH_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading is shown by our own progress; the libraries' bars and advice would talk over it."""
    from transformers.utils import logging as transformers_logging

    loud = [logging.getLogger("diffusers"), logging.getLogger("transformers")]
    levels = [logger.level for logger in loud]
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
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
