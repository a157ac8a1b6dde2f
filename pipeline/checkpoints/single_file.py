"""Converts a checkpoint in one safetensors file, of SDXL's or Stable Diffusion 1's layout, to diffusers' format.

By diffusers' own tables of names. Configs and tokenizers, which such a file lacks, come from a folder of the same
family, such as SDXL base.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.printable import printable
from pipeline.checkpoints import folder as folders
from pipeline.checkpoints.checkpoint import (
    CONV_IN,
    INPAINTING_CHANNELS,
    SDXL,
    TEXT_2,
    VAE,
    Layout,
    check_checkpoint,
    only_vae,
    read_header,
)
from pipeline.checkpoints.folder import ModelError, Part
from pipeline.checkpoints.load import quiet
from pipeline.checkpoints.scaled_weights import unscaled
from pipeline.families import registry

EDM_V = "edm_v_prediction"
PREDICTION_TYPES = ("epsilon", "v_prediction", EDM_V)
_EDM_KEYS = ("edm_mean", "edm_std")  # of latents, in files of Playground v2.5
_EDM = {"_class_name": "EDMEulerScheduler", "num_train_timesteps": 1000, "final_sigmas_type": "zero", "rho": 7.0}
# As diffusers' documentation has CosXL's, and its tables Playground v2.5's.
_COSXL = {"prediction_type": "v_prediction", "sigma_data": 1.0, "sigma_min": 0.002, "sigma_max": 120.0}
_PLAYGROUND = {"prediction_type": "epsilon", "sigma_data": 0.5, "sigma_min": 0.002, "sigma_max": 80.0}
_PLAYGROUND_SCALE = 0.5
# By modelspec.prediction_type, whose own words are "v" and "epsilon"; in lower case, with _ for - and blanks.
_DECLARED_TYPES = {
    **dict.fromkeys(("v", "v_pred", "v_prediction", "vpred", "velocity"), "v_prediction"),
    **dict.fromkeys(("epsilon", "eps", "noise"), "epsilon"),
}
# Keys that no picture depends on: averages and states of training, the noise schedule and counts as buffers, losses,
# CLIP's image tower, the projection of the first encoder, whose output is not read, textual inversions under training,
# and signs of what the model predicts, which are read by `_write_scheduler`. No part of the UNet is among them.
_UNREAD = re.compile(
    r"^(?!model\.diffusion_model\.)(.*\.)?(model_ema|ema|optimizer|optimizer_states|lr_schedulers|loss|perceptual_loss|discriminator|logvar)(\.|$)"
    r"|^(?!model\.diffusion_model\.)(.*\.)?(position_ids|logit_scale|attn_mask|num_batches_tracked|global_step|epoch|step|iteration|decay|num_updates)$"
    r"|^(betas|alphas_cumprod(_prev)?|sqrt_\w*alphas\w*|log_one_minus_alphas_cumprod|posterior_\w+|lvlb_weights|scale_factor)$"
    r"|^(log_)?sigmas$|^embedding_manager\.|^(conditioner\.embedders\.0|cond_stage_model)\.(transformer\.)?text_projection(\.weight)?$"
    r"|^denoiser\.|\.visual\.|^(v_pred|ztsnr|edm_mean|edm_std|edm_vpred\.\w+|state_dict_version)$"
)
_LEVEL = "text_model."
_PROJECTION = f"{TEXT_2}text_projection"
_PLAIN, _INPAINTING = "StableDiffusionXLPipeline", "StableDiffusionXLInpaintPipeline"


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """The parts and settings that a checkpoint lacks, or that replace its own.

    base: a folder of the same family in diffusers' format, or a hub id: configs and tokenizers are taken from there,
        and the VAE where there is no other; "": the family's own.
    prediction_type: of `PREDICTION_TYPES`, of which the last is v at EDM's noise levels, as CosXL. None: that if the
        file has a key `edm_vpred.sigma_max`, Playground v2.5's own if it has `edm_mean`, v_prediction if it has a key
        `v_pred` or metadata that say so (`modelspec.prediction_type`, `ss_v_parameterization`), else the base's.
    zero_snr: whether its noise schedule ends in noise alone (Lin et al., 2023); None: if it has a key `ztsnr` or
        metadata that say so (`ss_zero_terminal_snr`).
    vae: a folder or a safetensors file with the VAE; "": the file's own.
    """

    base: str = ""
    prediction_type: str | None = None
    zero_snr: bool | None = None
    vae: str = ""


def convert(
    file: Path,
    out: Path,
    options: CheckpointOptions,
    *,
    name: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the checkpoint as a folder `out`, which must not exist, and return it.

    `name` is what messages call the file; default: its path. A checkpoint that inpaints, with a UNet of nine input
    channels, becomes a `StableDiffusionXLInpaintPipeline`.

    Raises `ModelError`, naming the file, and the key or part that is wrong.
    """
    name = name or str(file)
    header = read_header(file, name)
    layout = check_checkpoint(name, header)
    if out.exists():
        raise ModelError(f"{out}: is there already")
    weights = _read(file, name)
    _check_consumed(name, layout, [key for key in weights if not key.startswith((*layout.prefixes.values(),))])
    has_vae = options.vae or any(key.startswith(VAE) for key in weights)
    base = options.base or layout.base
    try:
        configs = folders.find_configs(base, *(() if has_vae else ("vae/*.safetensors",)))
    except ModelError as error:
        missing = "configs and tokenizers" if has_vae else "configs, tokenizers and the VAE"
        words = f"a file holds weights alone, and {missing} are read from a model of its kind"
        raise ModelError(f"--base: {error}; {words}: name its folder or hub id with --base") from error
    family = registry.read(configs)
    if {name for name, part in family.parts.items() if part.stem} != {*layout.prefixes}:
        raise ModelError(f"{base}: is a {family.label}, and {name} is a {layout.label}")
    partial = out.with_name(f".{out.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_parts(name, layout, header.metadata, weights, configs, partial, options, say)
        partial.rename(out)
    except OSError as error:
        raise ModelError(f"{out}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _write_parts(
    name: str, layout: Layout, metadata: Mapping[str, str], weights: Mapping[str, Any], base: Path, out: Path,
    options: CheckpointOptions, say: Callable[[str], None],
) -> None:  # fmt: skip
    has_vae = not options.vae and any(key.startswith(VAE) for key in weights)
    for part_name, part in registry.read(base).parts.items():
        say(f"converting {part_name}")
        if part.kind == "tokenizer":
            shutil.copytree(base / part_name, out / part_name)
        elif part.kind == "scheduler":
            _write_scheduler(base / part_name, out / part_name, metadata, weights, options)
        elif part_name == "vae" and not has_vae:
            _copy_vae(Path(options.vae) if options.vae else base / part_name, base, out)
        else:
            _write_part(name, layout, part_name, part, weights, base, out)
    _write_index(base, out, CONV_IN in weights and weights[CONV_IN].shape[1] == INPAINTING_CHANNELS)


def _read(file: Path, name: str) -> dict[str, Any]:
    """Return the tensors, mapped from the file, `unscaled`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{name}: is no whole safetensors file ({folders.first_line(error)})") from error
    try:
        return unscaled(tensors)
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from error


def _write_index(base: Path, out: Path, inpaints: bool) -> None:
    index = folders.read_json(base / "model_index.json")
    if inpaints or index["_class_name"] == _INPAINTING:
        index["_class_name"] = _INPAINTING if inpaints else _PLAIN
    for part, entry in index.items():
        if isinstance(entry, list) and not (out / part).is_dir():
            index[part] = [None, None]  # such as a safety checker, which the folder does not have
    index |= {"requires_safety_checker": False} if "requires_safety_checker" in index else {}
    if class_name := folders.read_json(out / "scheduler/scheduler_config.json").get("_class_name"):
        index["scheduler"] = ["diffusers", class_name]
    _write_json(out / "model_index.json", index)


def _copy_vae(source: Path, base: Path, out: Path) -> None:
    """Copy the VAE of a folder as it is, or of a safetensors file with the base's config."""
    part = registry.read(base).parts["vae"]
    source = source.expanduser()
    if source.is_dir():
        if not (source / "config.json").is_file() and (source / "vae").is_dir():
            source = source / "vae"  # a whole model's
        files = folders.check_part(source, "vae", part)
        (out / "vae").mkdir()
        for path in (source / "config.json", *files, *source.glob("*.index.json")):
            shutil.copy(path, out / "vae")
        return
    header = read_header(source)
    if not only_vae(header.shapes) and not any(key.startswith(VAE) for key in header.shapes):
        raise ModelError(f"{source}: has no VAE; its first key is {min(header.shapes, default='no key at all')}")
    _write_part(str(source), SDXL, "vae", part, _read(source, str(source)), base, out)


def _write_part(
    name: str, layout: Layout, part_name: str, part: Part, weights: Mapping[str, Any], base: Path, out: Path
) -> None:
    """Write a network with the file's weights, in the type that they have there."""
    import importlib

    import torch

    cls = getattr(importlib.import_module(part.module), part.classes[0])
    config = folders.read_json(base / part_name / "config.json")
    if part_name == "unet" and CONV_IN in weights:
        config["in_channels"] = weights[CONV_IN].shape[1]
    if part_name == "vae":
        config["force_upcast"] = True  # most overflow in fp16, and a file does not say whether it is one that does not
        if all(key in weights for key in _EDM_KEYS):
            mean, std = (weights[key].flatten().tolist() for key in _EDM_KEYS)
            config |= {"latents_mean": mean, "latents_std": std, "scaling_factor": _PLAYGROUND_SCALE}
    with torch.device("meta"):
        configured = getattr(cls, "config_class", None)  # of transformers
        network = cls.from_config(config) if configured is None else cls(configured(**config))
    prefix = layout.prefixes[part_name]
    weights = _of_part(part_name, prefix, weights)
    keys = [*weights]
    numbers = {key: torch.tensor(float(number)).expand(weights[key].shape) for number, key in enumerate(keys)}
    renamed = _renamed(part_name, prefix, numbers, config, network)
    consumed = {keys[int(value.flatten()[0])] for value in renamed.values()}
    _check_consumed(name, layout, [key for key in keys if key not in consumed])
    state_dict = _renamed(part_name, prefix, weights, config, network)
    _check_fit(name, part_name, state_dict, network)
    network.load_state_dict(state_dict, strict=True, assign=True)
    with quiet():
        network.save_pretrained(out / part_name, safe_serialization=True)


def _of_part(part: str, prefix: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a part; of a VAE's own file all."""
    own = {key: value for key, value in weights.items() if key.startswith(prefix)}
    if part == "text_encoder_2" and _PROJECTION not in own and f"{_PROJECTION}.weight" in own:
        own[_PROJECTION] = own.pop(f"{_PROJECTION}.weight").T  # a linear layer's, as transformers writes it
    return dict(weights) if part == "vae" and not own else own


def _check_consumed(name: str, layout: Layout, left: Iterable[str]) -> None:
    """Raise `ModelError` for a key that no part of the model is made of, unless it is one of `_UNREAD`."""
    if unknown := sorted(key for key in left if not _UNREAD.search(key)):
        count = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        article = "an" if layout is SDXL else "a"
        raise ModelError(
            f"{name}: has weights that {article} {layout.label} has no use for: {printable(unknown[0])}{count}"
        )


def _renamed(
    part: str, prefix: str, weights: Mapping[str, Any], config: Mapping[str, Any], network: Any
) -> dict[str, Any]:
    """Return a part's weights by diffusers' and transformers' names."""
    from diffusers.loaders import single_file_utils as tables

    if part == "unet":
        return dict(tables.convert_ldm_unet_checkpoint(dict(weights), config))
    if part == "vae":
        if any(key.startswith("decoder.up_blocks.") for key in weights):
            return dict(weights)  # a VAE's file by diffusers' own names
        return dict(tables.convert_ldm_vae_checkpoint(dict(weights), config))
    if part == "text_encoder":
        state_dict = _leveled(
            {key.removeprefix(prefix): value for key, value in weights.items() if not _UNREAD.search(key)}, network
        )
    else:
        state_dict = dict(tables.convert_open_clip_checkpoint(network, dict(weights), prefix=TEXT_2))
    return {key: value for key, value in state_dict.items() if not key.endswith(("position_ids", "logit_scale"))}


def _leveled(state_dict: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Return CLIP's weights by the network's names: files, and versions of transformers, have its level or not."""
    expected = network.state_dict().keys()

    def name(key: str) -> str:
        other = key.removeprefix(_LEVEL) if key.startswith(_LEVEL) else f"{_LEVEL}{key}"
        return other if key not in expected and other in expected and other not in state_dict else key

    return {name(key): value for key, value in state_dict.items()}


def _check_fit(name: str, part: str, state_dict: Mapping[str, Any], network: Any) -> None:
    """Raise `ModelError` for a weight that is missing, of another shape, not finite, or unknown to the network."""
    expected = network.state_dict()
    for key, tensor in expected.items():
        if key not in state_dict:
            raise ModelError(f"{name}: has no weights for {part}.{key}")
        if state_dict[key].shape != tensor.shape:
            shapes = f"{list(state_dict[key].shape)}, not {list(tensor.shape)}"
            raise ModelError(f"{name}: does not fit the base's config: {part}.{key} is {shapes}")
        if not state_dict[key].isfinite().all():  # an overflow in fp16, or a merge gone wrong
            raise ModelError(f"{name}: {part}.{key} has values that are not finite")
    if unknown := sorted(state_dict.keys() - expected.keys()):
        raise ModelError(f"{name}: has weights that the base's {part} has no use for, the first is {unknown[0]}")


def _write_scheduler(
    base: Path, out: Path, metadata: Mapping[str, str], weights: Mapping[str, Any], options: CheckpointOptions
) -> None:
    config = _edm(weights, options.prediction_type)
    if config is not None:
        if options.zero_snr:
            raise ModelError("--zero-snr: is for schedules of betas, and EDM's noise levels are none")
        _write_json(out / "scheduler_config.json", config)
        return
    config = folders.read_json(base / "scheduler_config.json")
    said = re.sub(r"[\s-]+", "_", metadata.get("modelspec.prediction_type", "").strip().lower())
    if said and said not in _DECLARED_TYPES and options.prediction_type is None:
        known = f"{said[:40]!a}, which is not known; say --prediction-type"
        raise ModelError(f"modelspec.prediction_type of its metadata is {known}")
    declared = _DECLARED_TYPES.get(said)
    if "v_pred" in weights or _is_true(metadata, "ss_v_parameterization"):
        declared = "v_prediction"
    if prediction_type := options.prediction_type or declared:
        config["prediction_type"] = prediction_type
    zero_snr = "ztsnr" in weights or _is_true(metadata, "ss_zero_terminal_snr")
    if zero_snr if options.zero_snr is None else options.zero_snr:
        # trailing timesteps begin at the one of noise alone
        config |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    elif options.zero_snr is False:
        config["rescale_betas_zero_snr"] = False
    _write_json(out / "scheduler_config.json", config)


def _is_true(metadata: Mapping[str, str], name: str) -> bool:
    """Return whether metadata, whose values are texts, say so: as Python and JSON write it, or as a number."""
    return metadata.get(name, "").strip().lower() in ("true", "1")


def _edm(weights: Mapping[str, Any], prediction_type: str | None) -> dict[str, Any] | None:
    """Return the scheduler's config of a model trained at EDM's noise levels (Karras et al., 2022), or None."""
    sigmas = {end: weights[key] for end in ("sigma_max", "sigma_min") if (key := f"edm_vpred.{end}") in weights}
    if prediction_type == EDM_V or (prediction_type is None and sigmas):
        return {
            **_EDM,
            **_COSXL,
            "sigma_schedule": "exponential",
            **{end: float(value) for end, value in sigmas.items()},
        }
    if prediction_type is None and all(key in weights for key in _EDM_KEYS):
        return {**_EDM, **_PLAYGROUND, "sigma_schedule": "karras"}
    return None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
