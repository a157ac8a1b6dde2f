"""Reads control networks: a folder in diffusers' format, or one safetensors file, for a model of SDXL's kind.

What a file lacks, its config, is the model's own UNet's. Other files are refused by what their keys say they are.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from core.digests import digest_of
from core.failures import translate_device_errors
from pipeline.checkpoints import folder as folders
from pipeline.checkpoints.checkpoint import Header, read_header, read_headers, sign_of
from pipeline.checkpoints.folder import ModelError, Part
from pipeline.checkpoints.scaled_weights import unscaled
from pipeline.extensions import weight_files
from pipeline.extensions.weight_files import PICKLE, PICKLES, SUFFIX, is_file

if TYPE_CHECKING:
    import torch

    from pipeline.families.family import ImageModel

_UNSHUFFLED = 16  # pixels along a side that an adapter of SDXL reads as channels of one
CONTROLNET, UNION, ADAPTER = "ControlNetModel", "ControlNetUnionModel", "T2IAdapter"
_MODULES = {
    CONTROLNET: "diffusers.models.controlnets.controlnet", UNION: "diffusers.models.controlnets.controlnet_union",
    ADAPTER: "diffusers.models.adapter",
}  # fmt: skip
_KINDS = "task_embedding"  # which only Unions have, whatever their config calls them
_EMBEDDING = "controlnet_cond_embedding"
_OWN = f"{_EMBEDDING}.conv_in.weight"  # in diffusers' layout
_ADAPTER_OWN = "adapter.conv_in.weight"
_ORIGINAL = re.compile(r"(control_model\.)?(input_hint_block|zero_convs)\.")
# What other files are, by a pattern that a key has; the first that any key has decides.
_OTHERS = (
    (r"^lora_controlnet$|^(input_blocks|middle_block).*\.(up|down)$", "is a Control-LoRA"),
    (r"^lllite_", "is a ControlNet-LLLite"),
    (r"^(ip_adapter|image_proj)\.", "is an IP-Adapter"),
    (r"lora_(unet|te\d?)_|[._]lora(_[AB]|_down|_up|\.(up|down))[._]", "is a LoRA"),
    (r"^(model\.diffusion_model|conditioner|first_stage_model)\.", "is a checkpoint"),
    (r"^(conv_out|up_blocks)\.", "is a UNet"),
)


class ControlFile(NamedTuple):
    """A network as it was read, on the CPU, and what identifies it."""

    network: Any
    digest: str


def offered(folder: Path) -> list[str]:
    """The names in a folder of control networks, sorted; none if it cannot be read."""
    return weight_files.offered(folder, lambda path: is_file(path / "config.json"))


def find(folder: Path, name: str) -> Path:
    """The folder or file of this name. Raises `ModelError`."""
    own = weight_files.path_of(folder, name, "")
    if is_file(own / "config.json"):
        return own
    file = weight_files.path_of(folder, name)
    if is_file(file):
        return file
    if any((folder / f"{name}{ending}").exists() for ending in PICKLES):
        raise ModelError(f"{name}: {PICKLE}", kind="control")
    raise ModelError(f"{name}: there is no folder {name} and no {file.name} in the folder of controls", kind="control")


def size_bytes(path: Path) -> int:
    """Return the size of the weight files at a path that `find` returned, together."""
    files = [path] if path.is_file() else path.glob(f"*{SUFFIX}")
    return sum(file.stat().st_size for file in files if file.is_file())


def check_headers(name: str, path: Path) -> None:
    """Read the headers of the weight files at a path that `find` returned. Raises `ModelError`, as `read`."""
    if path.is_dir():
        read_headers(path)
        return
    with weight_files.errors("control", name, "network", path):
        _check_kind(path.name, read_header(path, path.name))


def read(name: str, path: Path, model: ImageModel, dtype: torch.dtype) -> ControlFile:
    """The network at a path that `find` returned, for this model, in this type. Raises `ModelError`, naming it."""
    with weight_files.errors("control", name, "network", path):
        folder = path.is_dir()
        return translate_device_errors(
            lambda: _read_folder(path, dtype) if folder else _read_file(name, path, model, dtype)
        )


def _read_folder(folder: Path, dtype: torch.dtype) -> ControlFile:
    from pipeline.checkpoints.load import load_part

    kind = str(folders.read_json(folder / "config.json").get("_class_name"))
    if kind not in _MODULES and kind != "ControlNetModel_Union":
        known = ", ".join(sorted(_MODULES))
        raise ModelError(f"{folder}/config.json: is of class {kind}, and a control is one of {known}")
    plain = Part("network", strict=True)
    variants = [path.name.split(".")[1] for path in folder.glob(f"{plain.stem}.*{SUFFIX}")]
    whole = (folder / f"{plain.stem}{SUFFIX}").exists() or any(folder.glob("*.index.json"))
    variant = variants[0] if variants and not whole else None
    files = folders.check_part(folder, "control", plain, variant)
    if any(_KINDS in read_header(file).shapes for file in files):
        kind = UNION
    part = Part("network", (kind,), _MODULES[kind], strict=True)
    network = load_part(folder.parent, folder.name, part, dtype, variant)
    return ControlFile(network, digest_of(folder, [folder / "config.json", *files]))


def _read_file(name: str, file: Path, model: ImageModel, dtype: torch.dtype) -> ControlFile:
    import torch
    from safetensors.torch import load_file

    header = read_header(file, file.name)
    _check_kind(file.name, header)
    kind = ADAPTER if _ADAPTER_OWN in header.shapes else UNION if _KINDS in header.shapes else CONTROLNET
    config = _adapter_config(header) if kind == ADAPTER else _config(model, header)
    cls = getattr(importlib.import_module(_MODULES[kind]), kind)
    with torch.device("meta"):
        network = cls.from_config(config)
    try:
        loaded = unscaled(load_file(file))
    except ValueError as error:
        raise ModelError(f"{file.name}: {error}") from error
    weights = loaded if kind == ADAPTER else _renamed(loaded, config)
    _check_fit(file.name, weights, network)
    network.load_state_dict({key: tensor.to(dtype) for key, tensor in weights.items()}, strict=True, assign=True)
    return ControlFile(network, digest_of(file.parent, [file]))


def _check_kind(name: str, header: Header) -> None:
    """Raise `ModelError` for a file that is no ControlNet, saying what else it is and which key tells."""
    if (other := sign_of(header, _OTHERS)) is not None:
        raise ModelError(f"{name}: {other.kind}, which is not supported as a file (it has {other.key})")
    known = _OWN in header.shapes or _ADAPTER_OWN in header.shapes
    if not known and not any(map(_ORIGINAL.match, header.shapes)):
        first = min(header.shapes, default="no key at all")
        raise ModelError(f"{name}: is no ControlNet or T2I-Adapter of SDXL: its first key is {first}")


def _config(model: ImageModel, header: Header) -> dict[str, Any]:
    """The config of a ControlNet of this model's UNet; the channels of the picture's embedding are the file's."""
    own, shapes = dict(model.denoiser.config), header.shapes
    hints = {key.split("input_hint_block.")[1]: shape for key, shape in shapes.items() if "input_hint_block." in key}
    if hints:
        wide = [hints[f"{2 * at}.weight"] for at in range(7) if f"{2 * at}.weight" in hints]
    else:
        blocks = [f"{_EMBEDDING}.blocks.{at}.weight" for at in range(2 * len(own["block_out_channels"]) + 8)]
        wide = [shapes[key] for key in (_OWN, *blocks) if key in shapes]
    channels = [shape[0] for shape in wide[::2]]  # every other layer widens
    taken = (
        "in_channels", "flip_sin_to_cos", "freq_shift", "down_block_types", "only_cross_attention",
        "block_out_channels", "layers_per_block", "act_fn", "norm_num_groups", "norm_eps", "cross_attention_dim",
        "transformer_layers_per_block", "attention_head_dim", "num_attention_heads", "use_linear_projection",
        "addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim",
    )  # fmt: skip
    return {
        **{key: own[key] for key in taken if own.get(key) is not None},
        **_union_config(header),
        "in_channels": model.latent_channels,
        "conditioning_embedding_out_channels": channels,
    }


def _union_config(header: Header) -> dict[str, Any]:
    """Return what a Union's config has more; nothing for another ControlNet."""
    if _KINDS not in header.shapes:
        return {}
    kinds, width = header.shapes[_KINDS]
    layers = {key.split(".")[1] for key in header.shapes if key.startswith("transformer_layes.")}
    return {"num_control_type": kinds, "num_trans_channel": width, "num_proj_channel": width,
            "num_trans_layer": len(layers)}  # fmt: skip


def _adapter_config(header: Header) -> dict[str, Any]:
    """The config of an adapter of SDXL's kind."""
    shapes, first = header.shapes, r"adapter\.body\.(\d+)\.resnets\.(\d+)\.block1\.weight"
    found = {(int(match[1]), int(match[2])): shapes[key][0] for key in shapes if (match := re.fullmatch(first, key))}
    channels = [found[at, 0] for at in range(len(found)) if (at, 0) in found]
    return {
        "in_channels": shapes[_ADAPTER_OWN][1] // _UNSHUFFLED**2,
        "channels": channels,
        "num_res_blocks": 1 + max((layer for _, layer in found), default=0),
        "downscale_factor": _UNSHUFFLED,
        "adapter_type": "full_adapter_xl",
    }


def _renamed(weights: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The weights under diffusers' names, by its own tables."""
    if _OWN in weights:
        return weights
    from diffusers.loaders.single_file_utils import convert_controlnet_checkpoint

    found = convert_controlnet_checkpoint(weights, config)
    for key, value in weights.items():  # which diffusers' table for ControlNets leaves out
        match = re.search(r"label_emb\.0\.([02])\.(weight|bias)$", key)
        if match is not None:
            found[f"add_embedding.linear_{int(match[1]) // 2 + 1}.{match[2]}"] = value
    return {key: value for key, value in found.items() if value is not None}


def _check_fit(name: str, state: Mapping[str, Any], network: Any) -> None:
    """Raise `ModelError` for a weight that is missing, of another shape, not finite, or unknown to the network."""
    expected = network.state_dict()
    for key, tensor in expected.items():
        if key not in state:
            raise ModelError(f"{name}: is of another model: it has no weights for {key}")
        if state[key].shape != tensor.shape:
            shapes = f"{list(state[key].shape)}, not {list(tensor.shape)}"
            raise ModelError(f"{name}: is of another model: {key} is {shapes}")
        if not state[key].isfinite().all():
            raise ModelError(f"{name}: {key} has values that are not finite")
    if unknown := sorted(state.keys() - expected.keys()):
        raise ModelError(f"{name}: is of another model: it has no use for {unknown[0]}")
