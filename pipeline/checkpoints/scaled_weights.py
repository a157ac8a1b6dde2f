"""Undoes the scaling of 8-bit weights in files, as ComfyUI writes them: a weight is its 8 bits times a scale beside it.

A layer `X.weight` in 8 bits has `X.scale_weight`, or in newer files `X.weight_scale`, in fp32: one for all, or one for
each output. `X.scale_input` and `X.input_scale` are of inputs that are quantized too, which ours are not.
`X.comfy_quant` names the format as JSON, and `scaled_fp8` marks a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from contract.printable import printable
from pipeline.extensions.weight_files import in_16_bits

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = (".scale_weight", ".weight_scale")
_FORMAT = ".comfy_quant"
_FORMATS = {  # and what torch calls their type
    "float8_e4m3fn": "torch.float8_e4m3fn", "float8_e5m2": "torch.float8_e5m2", "int8_tensorwise": "torch.int8",
}  # fmt: skip
_ROTATED = "convrot"
# What a format may say beside its name that changes no value: how to compute, the original's type and shape, and what
# the scale's shape says too.
_HARMLESS = ("full_precision_matrix_mult", "orig_dtype", "orig_shape", "per_row", f"{_ROTATED}_groupsize")
_IGNORED = (".scale_input", ".input_scale", _FORMAT)
_MARK = "scaled_fp8"
ENDINGS = (*_SCALES, *_IGNORED, ".weight_scale_inv", ".weight_scale_2")
"""The endings of keys that belong to a quantized weight: whoever drops one of them has another weight."""


def unscaled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a file in the precision that they stand for, floats of 8 bits as fp16, without the scales.

    Raises ValueError, naming the key, for a scale without its weight or of another shape, for another format, and for
    weights that are rotated or not in their format's type.
    """
    scales = {key: value for key, value in tensors.items() if key.endswith(ENDINGS)}
    marks = {key for key in tensors if key == _MARK or key.endswith(f".{_MARK}")}
    weights = {key: value for key, value in tensors.items() if key not in scales and key not in marks}
    for key, value in scales.items():
        if key.endswith(_FORMAT):
            _check_format(key, value, tensors.get(f"{key.removesuffix(_FORMAT)}.weight"))
        elif key.endswith(_SCALES):
            weight = f"{key.rpartition('.')[0]}.weight"
            if weight not in weights:
                raise ValueError(f"{printable(key)} is the scale of {printable(weight)}, which is not there")
            weights[weight] = _scaled(key, weights[weight], value)
        elif not key.endswith(_IGNORED):
            raise ValueError(f"{printable(key)} is a scale of blocks, which is not supported")
    for key, value in weights.items():
        if key.endswith(".weight") and value.itemsize == 1 and not value.is_floating_point():
            raise ValueError(f"{printable(key)} is in {value.dtype} without a scale")
    return {key: in_16_bits(value) for key, value in weights.items()}


def _check_format(key: str, value: Tensor, weight: Tensor | None) -> None:
    try:
        config = dict(json.loads(bytes(value.flatten().tolist())))
        name = config["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{printable(key)} names no format") from error
    if name not in [*_FORMATS]:
        raise ValueError(f"{printable(key)} is of the format {printable(str(name))}; read are {', '.join(_FORMATS)}")
    if config.get(_ROTATED):
        raise ValueError(f"{printable(key)} says {_ROTATED}: the weight is rotated, which is not supported")
    if unknown := sorted(config.keys() - {"format", _ROTATED, *_HARMLESS}):
        raise ValueError(f"{printable(key)} says {printable(unknown[0])}, which is not known")
    if weight is None or str(weight.dtype) != _FORMATS[name]:
        state = "not there" if weight is None else f"in {weight.dtype}"
        raise ValueError(f"{printable(key)} is of the format {name}, and its weight is {state}")


def _scaled(key: str, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the weight [out, …] times its scale, in fp16; computed in fp32."""
    import torch

    if str(weight.dtype) not in _FORMATS.values():
        raise ValueError(f"{printable(key)} is the scale of a weight in {weight.dtype}; read are {', '.join(_FORMATS)}")
    count = scale.numel()
    each = weight.dim() and scale.dim() and count == scale.shape[0] == weight.shape[0]  # one for each output
    if not scale.is_floating_point() or not (count == 1 or each):
        raise ValueError(f"{printable(key)} is {[*scale.shape]}, for a weight {[*weight.shape]}")
    factors = scale.float().reshape(-1, *[1] * (weight.dim() - 1)) if count > 1 else scale.float().reshape(())
    return (weight.float() * factors).to(torch.float16)
