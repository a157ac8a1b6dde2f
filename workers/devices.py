"""Describes the settings' device, rejects what it cannot run, and selects and logs the kernels."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable

import psutil
import torch

from contract.precision import cpu_kernels_lack, is_quantized
from core.config import Settings
from core.kernels import describe as description
from core.kernels.cuda import driver, language, tiles
from core.kernels.device import EVERY_LAYER, TORCH, DeviceInfo, KernelChoice, decisions, instead, lacks, say
from core.threads import LIMITED, compute_threads
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel

log = logging.getLogger(__name__)


def device_of(settings: Settings) -> str:
    """Return the device that the settings select."""
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_bytes(device: torch.device) -> int:
    """Return the memory of this device that is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)  # with what caches of files would give back


def describe(settings: Settings, device: str) -> DeviceInfo:
    """The properties of this device that select kernels. On a CPU the kernels are compiled for it, once."""
    return description.describe(torch.device(device), settings.compiled_kernels)


def set_threads(settings: Settings, device: str) -> None:
    """Set the number of CPU threads that compute: the setting's, else two on a GPU and torch's default on a CPU.

    Where this process was limited for a GPU that torch does not see, a CPU gets one thread per core again.
    """
    gpu = device != "cpu"
    threads = compute_threads(settings.threads, gpu=gpu)
    if settings.threads or gpu or LIMITED:
        torch.set_num_threads(threads)
    if gpu:
        log.info("%d CPU threads beside %s%s", threads, device, "" if settings.threads else "; DIPTYCH_THREADS sets it")


def check_gpu(settings: Settings, device: str, precision: str) -> None:
    """Raise `ModelError` for 8 bits on a GPU without 8-bit matrix units: emulation would be slower than bf16."""
    if not is_quantized(precision):
        return
    described = describe(settings, device)
    if (reason := lacks(described, precision)) is not None:
        raise ModelError(f"{precision} does not run on {device}: {reason}; take {instead(described, precision)}")


def kernels(settings: Settings, model: ImageModel) -> tuple[ctypes.CDLL | None, str]:
    """The CPU kernels for this model; or None, and on a CPU the reason why torch's are used.

    Raises `ModelError` for INT8 without them: emulation would be slower than fp32.
    """
    from core.kernels.cpu.library import KernelsUnavailable, library
    from core.kernels.cpu.program import HEAD_MULTIPLE

    if model.device.type != "cpu":
        return None, ""
    if not (settings.kernels or model.precision == "int8"):
        return None, "the native kernels are turned off"
    if (reason := cpu_kernels_lack(model.precision)) is not None:
        return None, reason
    try:
        model.family.check_network(model.denoiser, head_multiple=HEAD_MULTIPLE)
        return library(settings.compiled_kernels), ""
    except (KernelsUnavailable, ValueError) as error:
        if model.precision == "int8":
            raise ModelError(f"int8 does not run here: {error}; take fp32") from error
        return None, str(error)


def compile_kernels(settings: Settings, say: Callable[[str], None]) -> None:
    """Compile the CPU kernels, and say so, where they will run and are not compiled yet. Failures are reported where
    kernels are chosen.
    """
    from core.kernels.cpu.library import KernelsUnavailable, is_compiled, library

    if settings.kernels and not is_compiled(settings.compiled_kernels):
        say("compiling kernels, once for this machine")
        with contextlib.suppress(KernelsUnavailable):
            library(settings.compiled_kernels)


def fused(settings: Settings, model: ImageModel) -> tuple[bool, str]:
    """Return whether this model runs fused layers in CUDA graphs, and on a GPU the reason if not.

    Raises `ModelError` for 8 bits without them: emulation would be slower than bf16.
    """
    from core.ops.cuda import HEAD_MULTIPLE
    from unet_opt.layout import check_decoder

    if model.device.type != "cuda":
        return False, ""
    in_8_bits = is_quantized(model.precision)
    try:
        if not (settings.kernels or in_8_bits):
            raise ValueError("the native kernels are turned off")
        if model.dtype is not torch.bfloat16:
            raise ValueError(f"the GPU kernels support bf16 and 8 bits, not {model.precision}")
        if (reason := lacks(describe(settings, str(model.device)), model.precision)) is not None:
            raise ValueError(reason)
        model.family.check_network(model.denoiser, head_multiple=HEAD_MULTIPLE)
        check_decoder(model.vae, head_multiple=HEAD_MULTIPLE)
    except ValueError as error:
        if in_8_bits:
            raise ModelError(f"{model.precision} does not run here: {error}; take bf16") from error
        return False, str(error)
    return True, ""


def widest(settings: Settings, model: ImageModel) -> int:
    """Maximum rows per forward: the setting, but on a GPU no more than its tiles were tuned for, which is logged.

    A device without tuning results uses the setting: its tiles are chosen by estimated cost, at any width.
    """
    from unet_opt.widths import tuned_rows

    if model.device.type != "cuda":
        return settings.max_rows
    side, name = model.native // model.vae_scale, torch.cuda.get_device_name(model.device)
    tuned = tuned_rows(model.denoiser, side, side, name, driver.multiprocessors(model.device.index or 0))
    if tuned is None:
        log.info(
            "no tiles were measured on %s for %s: forwards have up to %d rows, tiles by estimate; "
            "`diptych tune-kernels` measures them", name, model.name, settings.max_rows,
        )  # fmt: skip
        return settings.max_rows
    if tuned < settings.max_rows:
        log.info("forwards have at most %d rows, not %d: on %s no tiles were measured for more",
                 tuned, settings.max_rows, name)  # fmt: skip
    return max(2, min(tuned, settings.max_rows))


def choose_kernels(settings: Settings, model: ImageModel, why_torch: str) -> tuple[KernelChoice, ...]:
    """Return which kernels run this model, each logged; `why_torch` if they are torch's."""
    choices: tuple[KernelChoice, ...]
    if why_torch:
        where, choices = str(model.device), (KernelChoice(EVERY_LAYER, TORCH, why_torch),)
    else:
        device = describe(settings, str(model.device))
        where, choices = str(device), decisions(device, model.precision)
    log.info("%s runs in %s on %s", model.name, model.precision, where)
    for decision in choices:
        say(decision, requested=not settings.kernels or settings.backend == TORCH)
    return choices


def keep_compiled(settings: Settings, device: str) -> None:
    """Store code compiled for a GPU in the settings' cache, so that the next start finds it."""
    if device == "cpu":
        return
    driver.keep_in(settings.compiled_kernels)
    tiles.keep_in(settings.measured_tiles)
    language.keep_in(settings.compiled_kernels / "triton")
