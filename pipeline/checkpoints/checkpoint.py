"""Reads the header of a safetensors file, and says by its keys what kind of file it is; loads no tensor."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from contract.printable import printable
from pipeline.checkpoints import safetensors_header
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.safetensors_header import MAX_BYTES

UNET, VAE = "model.diffusion_model.", "first_stage_model."
TEXT, TEXT_2 = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."
TEXT_1 = "cond_stage_model.transformer."  # of Stable Diffusion 1
CONV_IN = f"{UNET}input_blocks.0.0.weight"
INPAINTING_CHANNELS = 9  # latents, mask and the masked image's latents
_PUT_INTO_FOLDER = "not a checkpoint; put it into a folder and name that with"
_LORA = f"is a LoRA, {_PUT_INTO_FOLDER} --lora-dir"
# What other files are, by a pattern that a key has; the first that any key has decides.
_OTHER_FILES = (
    (r"lora_(unet|te\d?|transformer)_|[._]lora(_[AB]|_down|_up|\.(up|down))[._]|\.lora_[AB]$", _LORA),
    (r"\.(hada_w\d|lokr_w\d|oft_(diag|blocks)|dora_scale)", _LORA),
    (r"^(ip_adapter|image_proj)\.", f"is an IP-Adapter, {_PUT_INTO_FOLDER} --ip-adapter-dir"),
    (
        r"^(control_model|controlnet_(cond_embedding|down_blocks)|input_hint_block|lora_controlnet)(\.|$)",
        f"is a ControlNet, {_PUT_INTO_FOLDER} --control-dir",
    ),
    (r"^(adapter\.)?body\.\d+\.(in_conv|block1|resnets)", f"is a T2I-Adapter, {_PUT_INTO_FOLDER} --control-dir"),
    (r"^conditioner\.embedders\.0\.model\.", "is an SDXL refiner, which is not supported"),
    (r"^cond_stage_model\.model\.", "is a checkpoint of Stable Diffusion 2, which is not supported"),
    (r"double_blocks\.|single_transformer_blocks\.", "is a checkpoint of Flux, which is not supported"),
    (r"joint_blocks\.", "is a checkpoint of Stable Diffusion 3, which is not supported"),
    (r"(^|\.)cap_embedder\.", "is a transformer of Lumina's or Z-Image's kind, of which only folders are read"),
)
# What a file without some part of a checkpoint is, where all of its keys are of one kind.
_PARTS_ALONE = (
    (r"^(clip_[lg]|emb_params|string_to_param\..*)$", "is a textual inversion, not a checkpoint"),
    (
        r"^(first_stage_model\.|vae\.)?((encoder|decoder|quant_conv|post_quant_conv|loss)\.|model_ema)",
        "is a VAE alone, not a checkpoint; name it with --vae beside one",
    ),
    (r"^(text_(model|projection)|transformer|logit_scale|(positional|token)_embedding)", "is a text encoder"),
    (r"^(unet\.)?(down|up|mid)_blocks?\.|^(unet\.)?(conv|time|add)_", "is a UNet alone, in diffusers' layout"),
    (r"^(conv_first|conv_body|conv_up|conv_hr|conv_last|body|model\.\d+)\b", "is an upscaler, not a checkpoint"),
)  # fmt: skip
_UNET_READS = {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 1280: "an SDXL refiner", 2048: "SDXL"}


class Layout(NamedTuple):
    """The layout of a checkpoint of one family.

    prefixes: of the keys of each part. inpaints: whether its UNets with nine input channels are supported. base: the
    hub id that has the configs and tokenizers by default.
    """

    label: str
    prefixes: Mapping[str, str]
    inpaints: bool
    base: str


SDXL = Layout(
    "SDXL", {"unet": UNET, "vae": VAE, "text_encoder": TEXT, "text_encoder_2": TEXT_2}, True,
    "stabilityai/stable-diffusion-xl-base-1.0",
)  # fmt: skip
SD1 = Layout(
    "Stable Diffusion 1", {"unet": UNET, "vae": VAE, "text_encoder": TEXT_1}, False,
    "stable-diffusion-v1-5/stable-diffusion-v1-5",
)  # fmt: skip
_PART_LABELS = {"unet": "UNet", "text_encoder": "first text encoder", "text_encoder_2": "second text encoder"}


class Header(NamedTuple):
    """The header of a safetensors file: the shape and type of each tensor, and its metadata."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    metadata: Mapping[str, str]


def header_bytes(start: bytes) -> int:
    """Return how many of a safetensors file's first bytes hold its header, by the first nine; 0 for another format."""
    length = int.from_bytes(start[:8], "little")
    return 8 + length if start[8:9] == b"{" and length <= MAX_BYTES else 0


def read_header(file: Path, name: str = "", size_bytes: int | None = None) -> Header:
    """Read the header of a file that is whole, or that will be once it has `size_bytes`.

    `name` is what messages call it; default: its path. Raises `ModelError` for a file that is missing, cut short,
    damaged or of another format, which its first bytes tell whatever its name ends in: pickles are not read.
    """
    name = name or str(file)
    try:
        with file.open("rb") as stream:
            _check_format(name, stream.read(512))
        table = safetensors_header.read(file, size_bytes)
        shapes = {key: entry.shape for key, entry in table.tensors.items()}
        return Header(shapes, {key: entry.dtype for key, entry in table.tensors.items()}, table.metadata)
    except FileNotFoundError:
        raise ModelError(f"{name}: there is no such file") from None
    except OSError as error:
        raise ModelError(f"{name}: cannot be read ({error.strerror})") from error
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{name}: is no whole safetensors file: {error}") from error


def read_headers(folder: Path) -> None:
    """Read the headers of a folder's weight files ahead, as `AssetCache` asks; what is wrong is found in its turn."""
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(ModelError):
            read_header(file)


def _check_format(name: str, start: bytes) -> None:
    if header_bytes(start):
        return
    length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and length < 2**40:
        raise ModelError(f"{name}: its header has {length} bytes, and at most {MAX_BYTES} are read")
    if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80" or start[257:262] == b"ustar":
        reason = "can run code when it is loaded; only safetensors files are read"
        raise ModelError(f"{name}: is a pickle, whatever its name ends in, and such a file {reason}")
    if start[:4] == b"GGUF":
        raise ModelError(f"{name}: is a GGUF file, and only safetensors files are read")
    if start.lstrip()[:1] == b"<":
        raise ModelError(f"{name}: is a web page, not a safetensors file")
    raise ModelError(f"{name}: is no whole safetensors file: its first bytes are of another format")


class Sign(NamedTuple):
    """The kind of a file, and the key that tells it."""

    kind: str
    key: str


def sign_of(header: Header, kinds: Sequence[tuple[str, str]]) -> Sign | None:
    """Return the first of `kinds`, (pattern, kind), whose pattern any of the file's keys has; None if there is none."""
    signs = (Sign(kind, key) for pattern, kind in kinds for key in header.shapes if re.search(pattern, key))
    return next(signs, None)


def check_checkpoint(name: str, header: Header) -> Layout:
    """Return the layout of a whole checkpoint. Raises `ModelError` for any other file, saying what else it is and which
    key tells.
    """
    shapes = header.shapes
    if (other := sign_of(header, _OTHER_FILES)) is not None:
        raise ModelError(f"{name}: {other.kind} (it has {printable(other.key)})")
    layout = SD1 if any(key.startswith(TEXT_1) for key in shapes) else SDXL
    missing = [
        (layout.prefixes[part], label)
        for part, label in _PART_LABELS.items()
        if part in layout.prefixes and not any(key.startswith(layout.prefixes[part]) for key in shapes)
    ]
    if missing:
        sign, label = missing[0]
        first = printable(min(shapes, default="no key at all"))
        raise ModelError(
            f"{name}: {_alone(shapes)}it has no {label} (keys that begin with {sign}); its first key is {first}"
        )
    channels = _second(shapes.get(CONV_IN, (0, 4)))
    if channels == INPAINTING_CHANNELS and not layout.inpaints:
        label = f"a {layout.label} that inpaints"
        raise ModelError(f"{name}: is {label}, which is not supported: {CONV_IN} has {channels} channels, not 4")
    if channels not in (4, INPAINTING_CHANNELS):
        label = "a model that edits by instructions" if channels == 8 else "a model of another kind"
        raise ModelError(f"{name}: is {label}, which is not supported: {CONV_IN} has {channels} channels, not 4 or 9")
    return layout


def _alone(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Describe a file that lacks some part of a checkpoint, with a semicolon; "" where nothing tells what it is."""
    reads = next((_second(shape) for key, shape in shapes.items() if key.endswith("attn2.to_k.weight")), 0)
    if any(key.startswith(UNET) for key in shapes) and not any(key.startswith((TEXT, TEXT_2)) for key in shapes):
        whose = f" of {_UNET_READS[reads]}" if reads in _UNET_READS else ""
        return f"is a UNet{whose} without text encoders; "
    kinds = (kind for pattern, kind in _PARTS_ALONE if shapes and all(re.search(pattern, key) for key in shapes))
    label = next(kinds, "")
    return f"{label}; " if label else ""


def _second(shape: tuple[int, ...]) -> int:
    """Return the second side of a tensor, which is a weight's input channels; 0 where it has none."""
    return shape[1] if len(shape) > 1 else 0


def only_vae(keys: Collection[str]) -> bool:
    """Return whether all of these keys are a VAE's."""
    return bool(keys) and all(re.search(_PARTS_ALONE[1][0], key) for key in keys)
