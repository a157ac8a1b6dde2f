"""The list of compute precisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ImageScheme = Literal["int8", "fp8", "int8-dynamic", "int8-sparse"]
Scheme = Literal[ImageScheme, "w4a16", "w4a8", "nvfp4"]
"""Those with weights of 4 bits, w4a8 with inputs in INT8 and the others with inputs in floating point, are for language
models."""
Name = Literal["fp32", "bf16", "fp16", Scheme]
Choice = Literal["auto", Name]
"""As the setting for texts names one; "auto" is resolved where the device and the model's variants are known."""
EngineChoice = Literal["auto", "fp32", "bf16", "fp16", ImageScheme]
"""As images that the engine draws have one."""
ImageChoice = Literal[EngineChoice, "nf4"]
"""As the setting for images names one: also those of pipelines that run by diffusers' own loop alone."""


@dataclass(frozen=True, slots=True)
class Precision:
    """A compute precision.

    `scheme` is the quantization scheme; None: all layers are floating point. `dtype` is torch's name of the type for
    unquantized layers; None: the device's own (`unquantized`). `devices` are the kinds of device that run it.
    `calibrated`: models are quantized by what they compute on prompts. `cpu_kernels`: ours run it. `gpu_kernels`: ours
    run it from this compute capability on; None: not at all. `emulated`: no device here multiplies its numbers, which
    become others first.
    """

    name: Name
    dtype: str | None = None
    scheme: Scheme | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    calibrated: bool = True
    cpu_kernels: bool = False
    gpu_kernels: tuple[int, int] | None = None
    emulated: bool = False


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        # bf16 and int8 from Triton's own minimum on (Ampere); fp8 (E4M3) where tensor cores multiply it (Ada).
        Precision("fp32", "float32", cpu_kernels=True),
        Precision("bf16", "bfloat16", gpu_kernels=(8, 0)),
        Precision("fp16", "float16"),
        Precision("int8", scheme="int8", cpu_kernels=True, gpu_kernels=(8, 0)),
        Precision("fp8", scheme="fp8", devices=("cuda",), gpu_kernels=(8, 9)),
        Precision("int8-dynamic", scheme="int8-dynamic", calibrated=False, cpu_kernels=True),
        Precision("int8-sparse", scheme="int8-sparse", cpu_kernels=True, gpu_kernels=(8, 0)),
        Precision("w4a16", scheme="w4a16", gpu_kernels=(8, 0)),
        Precision("w4a8", scheme="w4a8", cpu_kernels=True, gpu_kernels=(8, 0)),
        Precision("nvfp4", scheme="nvfp4", gpu_kernels=(8, 0), emulated=True),
    )
}
CHOICES: tuple[str, ...] = get_args(EngineChoice)
SCHEMES: tuple[str, ...] = get_args(Scheme)
GPTQ_SCHEMES: tuple[Scheme, ...] = ("int8", "int8-sparse", "w4a16", "w4a8")
"""Those whose weights GPTQ rounds."""
IMAGE_SCHEMES: tuple[str, ...] = get_args(ImageScheme)


def is_quantized(precision: str) -> bool:
    """Return whether it has quantized layers."""
    return precision in SCHEMES


def is_calibrated(scheme: str) -> bool:
    """Return whether models are quantized by what they compute on prompts."""
    return PRECISIONS[scheme].calibrated


def cpu_kernels_lack(precision: str) -> str | None:
    """Return why our CPU kernels do not run it, or None if they do."""
    *names, last = (name for name, entry in PRECISIONS.items() if entry.cpu_kernels)
    supported = f"{', '.join(names)} and {last}"
    return None if PRECISIONS[precision].cpu_kernels else f"the CPU kernels support {supported}, not {precision}"


def unquantized(device: str) -> str:
    """The precision of unquantized models on this kind of device."""
    return "fp32" if device == "cpu" else "bf16"


def dtype(precision: str, device: str) -> str:
    """torch's name of the dtype of unquantized layers, on this kind of device."""
    return PRECISIONS[precision].dtype or str(PRECISIONS[unquantized(device)].dtype)


def runs(precision: str, device: str) -> bool:
    """Return whether a kind of device ever runs it; a GPU's compute capability decides further."""
    return device.partition(":")[0] in PRECISIONS[precision].devices
