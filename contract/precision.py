"""The list of compute precisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Scheme = Literal["int8", "fp8"]
Name = Literal["fp32", "bf16", "fp16", Scheme]
Choice = Literal["auto", Name]
"""As a setting names one; "auto" is resolved where the device and the model's variants are known."""


@dataclass(frozen=True, slots=True)
class Precision:
    """A compute precision.

    `scheme` is the quantization scheme; None: all layers are floating point. `dtype` is torch's name of the type for
    unquantized layers; None: the device's own (`unquantized`). `devices` are the kinds of device that run it.
    """

    name: Name
    dtype: str | None = None
    scheme: Scheme | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", "float32"),
        Precision("bf16", "bfloat16"),
        Precision("fp16", "float16"),
        Precision("int8", scheme="int8"),
        Precision("fp8", scheme="fp8", devices=("cuda",)),
    )
}
CHOICES: tuple[str, ...] = get_args(Choice)
SCHEMES: tuple[str, ...] = get_args(Scheme)


def is_quantized(precision: str) -> bool:
    """Whether it has quantized layers."""
    return precision in SCHEMES


def unquantized(device: str) -> str:
    """The precision of unquantized models on this kind of device."""
    return "fp32" if device == "cpu" else "bf16"


def dtype(precision: str, device: str) -> str:
    """torch's name of the dtype of unquantized layers, on this kind of device."""
    return PRECISIONS[precision].dtype or str(PRECISIONS[unquantized(device)].dtype)


def runs(precision: str, device: str) -> bool:
    """Whether a kind of device ever runs it; a GPU's compute capability decides further."""
    return device.partition(":")[0] in PRECISIONS[precision].devices
