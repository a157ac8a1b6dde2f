"""Finds the layers of a model that the keys of LoRA files name, in the layouts that tools write, for all families.

- kohya's (sd-scripts, OneTrainer, LyCORIS): `lora_unet_` or `lora_te1_` and a layer's name with underscores, in
  diffusers' naming or that of the model's authors, read by a table of the model's own layers.
- ComfyUI's: the authors' names with dots, behind `diffusion_model.`, `clip_l.` and `clip_g.`.
- diffusers' and peft's: dots throughout, behind the part's name, peft's `base_model.model.`, or nothing for a denoiser.

A family's `LoraNames` are the tables of prefixes and of other names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_PEFT = "base_model.model."
ENDINGS = {  # of all tools, as peft's, and those of what is no pair of matrices
    ".lora_down.weight": "lora_A.weight", ".lora_up.weight": "lora_B.weight",
    ".lora_A.weight": "lora_A.weight", ".lora_B.weight": "lora_B.weight",
    ".lora.down.weight": "lora_A.weight", ".lora.up.weight": "lora_B.weight",
    ".lora_magnitude_vector.weight": "lora_magnitude_vector", ".lora_magnitude_vector": "lora_magnitude_vector",
    **{f".{name}": name for name in ("dora_scale", "diff", "diff_b", "w_norm", "b_norm")},
}  # fmt: skip
DIRECT = ("lora_magnitude_vector", "dora_scale", "diff", "diff_b", "w_norm", "b_norm")
_ADAPTER = re.compile(r"\.(lora_(?:[AB]|magnitude_vector))\.[^.]+\.weight$")  # peft's, with the adapter's name
_ALPHA = ".alpha"


def _no_names(part: str, model: Any) -> Iterator[tuple[str, str]]:
    return iter(())


def _no_fused(part: str, model: Any) -> Mapping[str, Sequence[str]]:
    return {}


@dataclass(frozen=True)
class LoraNames:
    """A family's tables of names.

    prefixes: those whose rest is a layer's name with underscores, by part; the denoiser's first.
    dotted: prefixes of names with dots that stand for one of those.
    others: yields, for a part and its model, paths of layers with another name of each, with dots or underscores.
    fused: of a part and its model, names of layers whose outputs stand for those of several, in order, by their paths.
    """

    prefixes: Mapping[str, tuple[str, ...]]
    dotted: Mapping[str, str]
    others: Callable[[str, Any], Iterator[tuple[str, str]]] = _no_names
    fused: Callable[[str, Any], Mapping[str, Sequence[str]]] = _no_fused


def to_peft(
    state: Mapping[str, Tensor], parts: Mapping[str, Any], names: LoraNames
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the file's tensors under the part's name and the layer's, and alphas by the names of `lora_A`.

    Keys of diffusers' older layouts keep their endings. Raises ValueError, naming the key, where the model lacks a
    layer.
    """
    tables = {part: _table(part, parts[part], names) for part in names.prefixes if part in parts}
    prefixes = {prefix: part for part in tables for prefix in names.prefixes[part]}
    denoiser = next(iter(names.prefixes))
    tops = _tops(denoiser, parts[denoiser], names)
    tensors: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    fallback: tuple[dict[str, Tensor], dict[str, float]] = {}, {}  # of files that may hold a layer under both names
    for key, tensor in state.items():
        name = _underscored(_ADAPTER.sub(r".\1.weight", key).replace(_PEFT, "", 1), names.dotted)
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        layer, ending = _split(name.removeprefix(prefix))
        if prefix:
            layers = tables[prefixes[prefix]].get(layer)
            if layers is None:
                raise ValueError(f"{_sanitized(key)} names no layer of this model")
        else:
            path = _layer_path(layer, parts, denoiser, tops)
            part, _, rest = path.partition(".")
            layers = tables.get(part, {}).get(rest.replace(".", "_")) if ending else None
            layers = layers if layers is not None and layers.is_other else _Layers((path,), False)
        own = (tensors, alphas) if not layers.is_other else fallback
        if ending == _ALPHA:
            if tensor.numel() != 1:
                raise ValueError(f"{_sanitized(key)} is no number")
            for path in layers.paths:
                own[1][f"{path}.lora_A.weight.alpha"] = float(tensor)
        elif ending in ENDINGS:
            shares = _shares(key, ENDINGS[ending], tensor, layers.paths, parts)
            for path, share in zip(layers.paths, shares, strict=True):
                own[0][f"{path}.{ENDINGS[ending]}"] = share
        elif len(layers.paths) > 1:
            raise ValueError(f"{_sanitized(key)} cannot be divided among {len(layers.paths)} layers")
        else:
            tensors[layers.paths[0] + ending] = tensor
    return {**fallback[0], **tensors}, {**fallback[1], **alphas}


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers that a name stands for, behind their part's name; `is_other`: it is not the layer's own name."""

    paths: tuple[str, ...]
    is_other: bool


def _shares(key: str, kind: str, tensor: Tensor, paths: Sequence[str], parts: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return what each of several layers side by side gets of a tensor: its own outputs of it, or all of `lora_A`."""
    if len(paths) == 1 or kind == "lora_A.weight":
        return [tensor] * len(paths)
    widths = []
    for path in paths:
        part, _, name = path.partition(".")
        widths.append(int(parts[part].get_submodule(name).out_features))
    if kind not in ("lora_B.weight", "diff", "diff_b", "dora_scale", "lora_magnitude_vector") or not tensor.dim():
        raise ValueError(f"{_sanitized(key)} cannot be divided among {len(paths)} layers")
    if tensor.shape[0] != sum(widths):
        raise ValueError(f"{_sanitized(key)} has {tensor.shape[0]} outputs, and its layers {sum(widths)}")
    shares: tuple[Tensor, ...] = tensor.split(widths)
    return shares


def _underscored(key: str, dotted: Mapping[str, str]) -> str:
    """Rewrite the authors' names with dots as kohya's; other keys are unchanged."""
    for start, prefix in dotted.items():
        if key.startswith(start):
            layer, ending = _split(key.removeprefix(start))
            return prefix + layer.replace(".", "_") + ending
    return key


def _split(key: str) -> tuple[str, str]:
    """Return a layer's name, and a known ending or nothing."""
    for ending in (*ENDINGS, _ALPHA):
        if key.endswith(ending):
            return key.removesuffix(ending), ending
    return key, ""


def _tops(part: str, model: Any, names: LoraNames) -> set[str]:
    """Return what the dotted names of a part's layers begin with."""
    return {name for name, _ in model.named_children()} | {
        other.partition(".")[0] for _, other in names.others(part, model)
    }


def _layer_path(path: str, parts: Mapping[str, Any], denoiser: str, tops: Collection[str]) -> str:
    """Return a dotted name behind its part's; without one it is the denoiser's, if it begins as one of its layers."""
    top = path.partition(".")[0]
    if top in parts:
        return path
    if top == "text_model":
        return f"text_encoder.{path}"
    return f"{denoiser}.{path}" if top in tops else path


def _table(part: str, model: nn.Module, names: LoraNames) -> dict[str, _Layers]:
    """Return for each name with underscores the layers behind their part's name."""
    table = {
        name.replace(".", "_"): _Layers(tuple(f"{part}.{path}" for path in paths), True)
        for name, paths in names.fused(part, model).items()
    }
    table |= {name.replace(".", "_"): _Layers((f"{part}.{path}",), True) for path, name in names.others(part, model)}
    denoiser = next(iter(names.prefixes))
    for path in (path for path, _ in model.named_modules() if path):
        # Some versions of transformers have one level less, and files of both are about.
        bare = path.removeprefix("text_model.")
        own = {path, bare, f"text_model.{bare}"} if part != denoiser else {path}
        table |= {name.replace(".", "_"): _Layers((f"{part}.{path}",), False) for name in own}
    return table


def _sanitized(text: str) -> str:
    """Sanitize a name from a file, which may be anything."""
    return ascii(text[:160])
