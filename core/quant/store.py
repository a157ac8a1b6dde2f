"""Stores quantized models: one safetensors file and a manifest, both validated on load.

Two forms load into equal models: with weights (quantized layers as they are, the matrices of all others in bf16), or
with the layers' input scales only, by which the model's own weights are quantized again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from core.json_files import read_object
from core.quant.convert import swap_
from core.quant.linear import ScaledConv2d, ScaledLinear, ScaledWeights
from core.quant.schemes import LAYERS

MANIFEST, WEIGHTS = "quantization.json", "model.safetensors"
_FORMAT = 1


class QuantizedStoreError(ValueError):
    """A quantized model that cannot be written or read. The message names the file and says why."""


@dataclass(frozen=True)
class Manifest:
    """Describes a quantization. `source` is the digest of the weights it was made from.

    `save` fills in `sha256` of the file, and whether it holds the `weights`.
    """

    scheme: str
    recipe: str
    source: str
    layers: dict[str, str]  # name → class
    skipped: dict[str, str]  # name → reason
    calibration: dict[str, Any]
    weights: bool = True
    sha256: str = ""
    format: int = _FORMAT


def save(model: nn.Module, folder: Path, manifest: Manifest, *, weights: bool = True) -> int:
    """Write a quantized model; returns the bytes of its file. Raises `QuantizedStoreError`.

    Without `weights` only the layers' input scales are stored, a hundredth of the size; then loading needs the weights
    that the model was quantized from.
    """
    quantized = {name: module for name, module in model.named_modules() if isinstance(module, ScaledWeights)}
    if manifest.layers != {name: type(module).__name__ for name, module in quantized.items()}:
        raise QuantizedStoreError(f"{folder}: the manifest names other layers than those that are quantized")
    if weights:
        tensors = {name: _kept(model, name, tensor) for name, tensor in model.state_dict().items()}
    else:
        tensors = {f"{name}.inverse": module.inverse for name, module in quantized.items() if _is_scaled(module)}
    tensors = _apart({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    partial = folder / (WEIGHTS + ".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial)
        partial.chmod(0o644)  # safetensors makes it private: a model is often served by another user
        document = asdict(replace(manifest, weights=weights, sha256=_sha256(partial)))
        partial.replace(folder / WEIGHTS)
        described = folder / (MANIFEST + ".part")
        described.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", "utf-8")
        described.replace(folder / MANIFEST)
        return (folder / WEIGHTS).stat().st_size
    except (OSError, SafetensorError) as error:
        raise QuantizedStoreError(f"{folder}: cannot be written ({error})") from error


def _is_scaled(module: ScaledWeights) -> bool:
    return module.STATIC and module._buffers["inverse"] is not None


def round_(model: nn.Module) -> None:
    """Round the weights of unquantized layers to bf16, in place, as in a stored model."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(_kept(model, name, tensor))


def read_manifest(folder: Path) -> Manifest:
    """Raises `QuantizedStoreError` if there is none, or one of another format."""
    path = folder / MANIFEST
    document = read_object(path, QuantizedStoreError)
    if document.get("format") != _FORMAT:
        raise QuantizedStoreError(f"{path}: format {document.get('format')!r} is not known, only {_FORMAT}")
    kinds = {"str": str, "bool": bool, "int": int}
    for field in fields(Manifest):
        if not isinstance(document.get(field.name), kinds.get(str(field.type), dict)):
            raise QuantizedStoreError(f"{path}: is damaged (no {field.name})")
    if not all(isinstance(kind, str) for kind in document["layers"].values()):
        raise QuantizedStoreError(f"{path}: is damaged (no kinds of layers)")
    return Manifest(**{field.name: document[field.name] for field in fields(Manifest)})


def load_(model: nn.Module, folder: Path, *, source: str | None = None) -> Manifest:
    """Turn the unquantized `model` into the saved one. In place.

    `source`, where given, must be the digest of the weights that the quantized model was made from; it is required if
    only scales were stored, and the model must then be in fp32. Raises `QuantizedStoreError`, and then has changed
    nothing.
    """
    manifest = read_manifest(folder)
    if source is not None and manifest.source != source:
        raise QuantizedStoreError(f"{folder}: was quantized from other weights than the model's")
    if source is None and not manifest.weights:
        raise QuantizedStoreError(f"{folder}: holds scales alone, so the digest of the model's weights must be known")
    tensors = _read(folder / WEIGHTS, manifest)
    layers = {name: _layer(model, folder, manifest, name, tensors) for name in manifest.layers}
    rest = {} if not manifest.weights else _rest(model, folder, layers, tensors)
    swap_(model, layers)
    if manifest.weights:
        model.load_state_dict(rest, strict=False)
    else:
        round_(model)
    return manifest


def _kept(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The stored form: matrices of unquantized layers in bf16; vectors are small and unchanged."""
    owner = model.get_submodule(name.rpartition(".")[0])
    is_exact = isinstance(owner, ScaledWeights) or not tensor.is_floating_point() or tensor.dim() < 2
    return tensor if is_exact else tensor.bfloat16()


def _read(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    try:
        if _sha256(path) != manifest.sha256:
            raise QuantizedStoreError(f"{path}: is not the file that {MANIFEST} describes: damaged or replaced")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise QuantizedStoreError(f"{path}: cannot be read ({error})") from error


def _layer(model: nn.Module, folder: Path, manifest: Manifest, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The quantized layer of this name, on the device of the model's own."""
    kind = LAYERS.get(manifest.layers[name])
    if kind is None:
        raise QuantizedStoreError(f"{folder / MANIFEST}: layer {name} is of the unknown kind {manifest.layers[name]!r}")
    try:
        layer = model.get_submodule(name)
    except AttributeError as error:
        raise QuantizedStoreError(f"{folder}: the model has no layer {name}") from error
    if not isinstance(layer, nn.Conv2d if issubclass(kind, ScaledConv2d) else nn.Linear):
        kind_name = type(layer).__name__
        raise QuantizedStoreError(
            f"{folder}: layer {name} is a {kind_name} in the model, but the manifest has {kind.__name__}"
        )
    if not manifest.weights and layer.weight.dtype != torch.float32:
        raise QuantizedStoreError(
            f"{folder}: holds scales alone, for weights in fp32, and layer {name} is {layer.weight.dtype}"
        )
    shapes = kind.shapes(layer) if manifest.weights else {"inverse": (layer.weight.shape[1],)} if kind.STATIC else {}
    parts = {part: tensors.get(f"{name}.{part}") for part in shapes}
    try:
        return _made(kind, layer, parts, shapes)
    except KeyError as error:
        raise QuantizedStoreError(f"{folder / WEIGHTS}: {error.args[0]} of layer {name} is missing") from error
    except ValueError as error:
        raise QuantizedStoreError(f"{folder / WEIGHTS}: layer {name} does not fit the model's: {error}") from error


def _made(
    kind: type[ScaledLinear] | type[ScaledConv2d],
    layer: nn.Linear | nn.Conv2d,
    parts: Mapping[str, Tensor | None],
    shapes: Mapping[str, tuple[int, ...]],
) -> nn.Module:
    """Raises KeyError for a part that is missing, and ValueError for one of another shape."""
    tensors: dict[str, Tensor] = {}
    for part, shape in shapes.items():
        tensor = parts[part]
        if tensor is None and part in kind.OPTIONAL:
            continue
        if tensor is None:
            raise KeyError(part)
        if tensor.shape != shape:
            raise ValueError(f"{part} is {[*tensor.shape]}, not {[*shape]}")
        tensors[part] = tensor.to(layer.weight.device)
    if issubclass(kind, ScaledConv2d):
        assert isinstance(layer, nn.Conv2d)
        return kind.restored(layer, tensors)
    assert isinstance(layer, nn.Linear)
    return kind.restored(layer, tensors)


def _rest(
    model: nn.Module, folder: Path, replaced: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of unquantized layers. Raises `QuantizedStoreError` if they differ from the model's."""
    remaining = {name: t for name, t in model.state_dict().items() if name.rpartition(".")[0] not in replaced}
    rest = {name: t for name, t in tensors.items() if name.rpartition(".")[0] not in replaced}
    for name in sorted(remaining.keys() ^ rest.keys()):
        raise QuantizedStoreError(f"{folder / WEIGHTS}: does not fit the model (first difference: {name})")
    for name, tensor in remaining.items():
        if tensor.shape != rest[name].shape:
            raise QuantizedStoreError(
                f"{folder / WEIGHTS}: {name} is {[*rest[name].shape]}, and {[*tensor.shape]} in the model"
            )
    return rest


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy of tensors that share memory with an earlier one: a file cannot hold two names for one memory."""
    seen: set[int] = set()
    copies = {}
    for name, tensor in tensors.items():
        where = tensor.untyped_storage().data_ptr()
        copies[name] = tensor.clone() if where in seen else tensor
        seen.add(where)
    return copies


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
