"""Converts a checkpoint in one safetensors file, of Stability's own layout, to a folder in diffusers' format.

By diffusers' own tables of names. Configs and tokenizers, which such a file lacks, come from a folder of the same
family, such as SDXL base.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline import folder as folders
from pipeline.families import registry
from pipeline.folder import ModelError

_UNET, _VAE = "model.diffusion_model.", "first_stage_model."
_TEXT, _TEXT_2 = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."
_CONV_IN = f"{_UNET}input_blocks.0.0.weight"
# What else such files are, by how a key begins, or a part of it.
_OTHERS = (
    ("conditioner.embedders.0.model.", "is an SDXL refiner, which is not supported"),
    ("cond_stage_model.", "is a checkpoint of Stable Diffusion 1 or 2, and only SDXL's are converted"),
    ("lora_unet_", "is a LoRA; put it into a folder and name that with --lora-dir"),
    (".lora_A.", "is a LoRA; put it into a folder and name that with --lora-dir"),
    (".lora_down.", "is a LoRA; put it into a folder and name that with --lora-dir"),
    ("control_model.", "is a ControlNet, which is not supported"),
    ("double_blocks.", "is a checkpoint of Flux, which is not supported"),
    ("joint_blocks.", "is a checkpoint of Stable Diffusion 3, which is not supported"),
)


def convert(
    file: Path,
    base: str,
    out: Path,
    *,
    v_prediction: bool | None = None,
    zero_snr: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the checkpoint as a folder `out`, which must not exist, and return it.

    base: a folder of SDXL in diffusers' format, or a hub id: configs and tokenizers are taken from there, and the VAE
        where the file has none.
    v_prediction: whether the model predicts v; None: if the file has a key `v_pred`, or metadata that say so
        (`modelspec.prediction_type`).
    zero_snr: whether its noise schedule ends in noise alone (Lin et al., 2023); None: if it has a key `ztsnr`.

    Raises `ModelError`, naming the file, and the key or part that is wrong.
    """
    weights, metadata = _read(file)
    _recognise(file, weights)
    if out.exists():
        raise ModelError(f"{out}: is there already")
    has_vae = any(key.startswith(_VAE) for key in weights)
    configs = folders.find_configs(base, *(() if has_vae else ("vae/*.safetensors",)))
    family = registry.read(configs)
    if "text_encoder_2" not in family.parts:
        raise ModelError(f"{base}: is a {family.label}, and not SDXL")
    partial = out.with_name(f".{out.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for name, part in family.parts.items():
            say(f"converting {name}")
            if part.kind == "tokenizer":
                shutil.copytree(configs / name, partial / name)
            elif part.kind == "scheduler":
                predicts_v = "v_pred" in weights or metadata.get("modelspec.prediction_type") == "v"
                _write_scheduler(
                    configs / name, partial / name,
                    predicts_v if v_prediction is None else v_prediction,
                    "ztsnr" in weights if zero_snr is None else zero_snr,
                )  # fmt: skip
            else:
                _write_part(file, name, part.classes[0], part.module, weights, configs, partial)
        shutil.copy(configs / "model_index.json", partial)
        partial.rename(out)
    except OSError as error:
        raise ModelError(f"{out}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _read(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors, mapped from the file, and its metadata."""
    from safetensors import SafetensorError, safe_open

    if file.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        raise ModelError(f"{file}: is a pickle, which can run code when it is loaded; only .safetensors files are read")
    try:
        with safe_open(str(file), framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}, dict(opened.metadata() or {})  # noqa: SIM118
    except FileNotFoundError as error:
        raise ModelError(f"{file}: there is no such file") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: is no whole safetensors file ({folders.first_line(error)})") from error


def _recognise(file: Path, weights: Mapping[str, Any]) -> None:
    """Raise `ModelError` for anything but a whole checkpoint of SDXL's text-to-image model."""
    for key in weights:
        for sign, what in _OTHERS:
            if sign in key:
                raise ModelError(f"{file}: {what} (it has {key})")
    for sign, what in ((_UNET, "UNet"), (_TEXT, "first text encoder"), (_TEXT_2, "second text encoder")):
        if not any(key.startswith(sign) for key in weights):
            first = min(weights, default="no key at all")
            raise ModelError(f"{file}: has no {what} (keys that begin with {sign}); its first key is {first}")
    channels = weights[_CONV_IN].shape[1] if _CONV_IN in weights else 4
    if channels != 4:
        what = "an inpainting model" if channels == 9 else "a model of another kind"
        raise ModelError(f"{file}: is {what}, which is not supported: {_CONV_IN} has {channels} channels, not 4")


def _write_part(
    file: Path, name: str, class_name: str, module: str, weights: Mapping[str, Any], base: Path, out: Path
) -> None:
    """Write a network with the file's weights, in the type that they have there; the base's VAE where it has none."""
    import importlib

    import torch

    if name == "vae" and not any(key.startswith(_VAE) for key in weights):
        shutil.copytree(base / name, out / name)
        return
    cls = getattr(importlib.import_module(module), class_name)
    config = folders.read_json(base / name / "config.json")
    with torch.device("meta"):
        configured = getattr(cls, "config_class", None)  # of transformers
        network = cls.from_config(config) if configured is None else cls(configured(**config))
    found = _renamed(name, weights, config, network)
    _check_fit(file, name, found, network)
    network.load_state_dict(found, strict=True, assign=True)
    network.save_pretrained(out / name, safe_serialization=True)


def _renamed(name: str, weights: Mapping[str, Any], config: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """A part's weights by diffusers' and transformers' names."""
    from diffusers.loaders import single_file_utils as tables

    if name == "unet":
        own = {key: value for key, value in weights.items() if key.startswith(_UNET)}
        return dict(tables.convert_ldm_unet_checkpoint(own, config))
    if name == "vae":
        own = {key: value for key, value in weights.items() if key.startswith(_VAE)}
        return dict(tables.convert_ldm_vae_checkpoint(own, config))
    if name == "text_encoder":
        own = {key.removeprefix(_TEXT): value for key, value in weights.items() if key.startswith(_TEXT)}
    else:
        own = {key: value for key, value in weights.items() if key.startswith(_TEXT_2)}
        own = dict(tables.convert_open_clip_checkpoint(network, own, prefix=_TEXT_2))
    return {key: value for key, value in own.items() if not key.endswith(("position_ids", "logit_scale"))}


def _check_fit(file: Path, name: str, found: Mapping[str, Any], network: Any) -> None:
    """Raise `ModelError` for a weight that is missing, of another shape, or unknown to the network."""
    wanted = network.state_dict()
    for key, tensor in wanted.items():
        if key not in found:
            raise ModelError(f"{file}: has no weights for {name}.{key}")
        if found[key].shape != tensor.shape:
            shapes = f"{list(found[key].shape)}, not {list(tensor.shape)}"
            raise ModelError(f"{file}: does not fit the base's config: {name}.{key} is {shapes}")
    if unknown := sorted(found.keys() - wanted.keys()):
        raise ModelError(f"{file}: has weights that the base's {name} has no use for, the first is {unknown[0]}")


def _write_scheduler(base: Path, out: Path, v_prediction: bool, zero_snr: bool) -> None:
    config = folders.read_json(base / "scheduler_config.json")
    if v_prediction:
        config["prediction_type"] = "v_prediction"
    if zero_snr:  # trailing timesteps begin at the one of noise alone
        config |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    out.mkdir()
    (out / "scheduler_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
