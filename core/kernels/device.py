"""Selects the kernels for a device and precision, from a description of the device.

Does not query hardware (`describe.py` does), so that every decision can be tested for devices that are absent.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from contract.precision import PRECISIONS, cpu_kernels_lack

log = logging.getLogger(__name__)

Capability = tuple[int, int]

HOPPER, TRITON, AVX512, AVX2, TORCH = "hopper", "triton", "avx512-vnni", "avx2", "torch"  # fastest first on each kind
_RANK = (HOPPER, TRITON, AVX512, AVX2, TORCH)
TITLES = {
    HOPPER: "Hopper kernels", TRITON: "Triton kernels", AVX512: "AVX-512 VNNI kernels", AVX2: "AVX2 kernels",
    TORCH: "torch",
}  # fmt: skip
EVERY_LAYER = "all layers"
LINEAR, GEGLU, CONV, UPSAMPLE = "linear", "geglu", "conv", "upsample conv"
LAYER_NORM, GROUP_NORM, ATTENTION, QUANTIZE = "layer norm", "group norm", "attention", "quantize"

_LEAST = {name: known.gpu_kernels for name, known in PRECISIONS.items() if known.gpu_kernels is not None}
_HOPPER: Capability = (9, 0)  # `wgmma` exists only here: neither older nor newer GPUs have it


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The properties that select kernels.

    `capability` is None for a CPU, and without such a GPU. `triton` is its version, None if not installed.
    `nvrtc_lacks` says why CUDA programs cannot be compiled, `cpu_lacks` why there are no (or no faster) CPU kernels;
    `instructions` is what the CPU kernels are compiled for, None without them.
    """

    kind: str  # cpu or cuda
    name: str
    capability: Capability | None = None
    triton: str | None = None
    nvrtc_lacks: str | None = None
    instructions: str | None = None
    cpu_lacks: str | None = None

    def __str__(self) -> str:
        return self.name if self.capability is None else f"{self.name}, compute capability {_dotted(self.capability)}"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels of an operation. `reason` is why no faster ones run, empty if these are the fastest."""

    operation: str
    implementation: str
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.operation}: {TITLES[self.implementation]}"
        return f"{text}: {self.reason}" if self.reason else text


def lacks(device: DeviceInfo, precision: str) -> str | None:
    """Return why our kernels cannot run a model of this precision on the device, or None if they can."""
    if device.kind == "cpu":
        if (reason := cpu_kernels_lack(precision)) is not None:
            return reason
        return None if device.instructions is not None else device.cpu_lacks or "there are no CPU kernels"
    if precision not in _LEAST:
        return f"the GPU kernels support {', '.join(_LEAST)}, not {precision}"
    if device.triton is None:
        return "Triton is not installed"
    if device.capability is None:
        return "no CUDA device"
    minimum = _LEAST[precision]
    if device.capability < minimum:
        return (
            f"{precision} needs compute capability {_dotted(minimum)}, {device.name} has {_dotted(device.capability)}"
        )
    return None


def instead(device: DeviceInfo, precision: str) -> str:
    """Alternatives to a precision that the device lacks, in words."""
    alternatives = [other for other in ("int8", "bf16") if other != precision and lacks(device, other) is None]
    if device.kind == "cpu":
        alternatives = [*(other for other in alternatives if other != "bf16"), "fp32"]
    elif not alternatives:  # torch multiplies them itself
        alternatives = ["bf16" if (device.capability or _HOPPER) >= _LEAST["bf16"] else "fp16"]
    return " or ".join(alternatives)


def hopper_lacks(capability: Capability | None, nvrtc_lacks: str | None = None) -> str | None:
    """Return why the Hopper kernels cannot run, or None if they can."""
    if capability is None:
        return "no CUDA device"
    if capability != _HOPPER:
        return f"not a Hopper device (compute capability {_dotted(capability)})"
    return nvrtc_lacks


def decisions(device: DeviceInfo, precision: str) -> tuple[KernelChoice, ...]:
    """The kernels of each operation of an image model in this precision, as far as the device determines them.

    8-bit precisions that `lacks` rejects are refused before generation (`workers.devices`), as torch would only emulate
    them. A layer whose shape the Hopper kernels do not support falls back to Triton's, and logs it (`say`).
    """
    reason = lacks(device, precision)
    if reason is not None:
        return (KernelChoice(EVERY_LAYER, TORCH, reason),)
    if device.instructions is not None:
        return (KernelChoice(EVERY_LAYER, device.instructions, device.cpu_lacks or ""),)
    reason = hopper_lacks(device.capability, device.nvrtc_lacks)

    def best(operation: str, otherwise: str) -> KernelChoice:
        return KernelChoice(operation, HOPPER) if reason is None else KernelChoice(operation, otherwise, reason)

    attention, group_norm = best(ATTENTION, TORCH), KernelChoice(GROUP_NORM, TRITON)
    if precision == "bf16":
        plain = "ours multiply 8 bits"
        layer_norm = KernelChoice(LAYER_NORM, TORCH, "ours writes 8 bits")
        return (KernelChoice(LINEAR, TORCH, plain), KernelChoice(CONV, TORCH, plain), layer_norm, attention, group_norm)
    eight_bits = [best(operation, TRITON) for operation in (LINEAR, GEGLU, CONV, UPSAMPLE, LAYER_NORM)]
    return (*eight_bits, attention, group_norm, KernelChoice(QUANTIZE, TRITON))


def summary(choices: Sequence[KernelChoice]) -> tuple[str, str]:
    """The fastest kernels among the decisions, and why no faster ones run ("" if these are the fastest)."""
    best = min(choices, key=lambda decision: _RANK.index(decision.implementation))
    # Operations that always run on Triton need no reason; attention runs on Hopper's whenever anything does.
    reason = next((choice.reason for choice in choices if choice.operation == ATTENTION), best.reason)
    return best.implementation, reason


@functools.cache
def say(decision: KernelChoice, *, requested: bool = False) -> None:
    """Log a decision, once per process; torch for all layers as a warning, unless that was requested."""
    warn = decision.operation == EVERY_LAYER and decision.implementation == TORCH and not requested
    log.log(logging.WARNING if warn else logging.INFO, "%s", decision)


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
