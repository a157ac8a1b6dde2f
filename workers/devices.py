"""What the settings' device can do: describes it, refuses what it lacks, and says which kernels draw on it."""

from __future__ import annotations

import logging

import torch

from core.config import Settings
from core.quant.kernels import describe as description
from core.quant.kernels.cuda import driver, language
from core.quant.kernels.device import EVERY_LAYER, TORCH, Decision, Device, decisions, instead, lacks, say
from pipeline.folder import ModelError
from pipeline.load import Model

log = logging.getLogger(__name__)


def describe(settings: Settings, device: str) -> Device:
    """What the choice of kernels on this device depends on. On a CPU they are compiled for it, once."""
    return description.describe(torch.device(device), settings.compiled_kernels)


def check_gpu(settings: Settings, device: str, precision: str) -> None:
    """Raises `ModelError` for 8 bits on a GPU that does not multiply them: emulated they would be slower than bf16."""
    if precision not in ("int8", "fp8"):
        return
    found = describe(settings, device)
    if (why := lacks(found, precision)) is not None:
        raise ModelError(f"{precision} does not run on {device}: {why}; take {instead(found, precision)}")


def decided(settings: Settings, model: Model, why_torch: str) -> tuple[Decision, ...]:
    """Which kernels draw with this model, each said in a line of the log; `why_torch` if torch's do."""
    found: tuple[Decision, ...]
    if why_torch:
        where, found = str(model.device), (Decision(EVERY_LAYER, TORCH, why_torch),)
    else:
        device = describe(settings, str(model.device))
        where, found = str(device), decisions(device, model.precision)
    log.info("%s draws in %s on %s", model.name, model.precision, where)
    for decision in found:
        say(decision)
    return found


def keep_compiled(settings: Settings, device: str) -> None:
    """Have what is compiled for a GPU kept in the settings' cache, so that the next start finds it."""
    if device == "cpu":
        return
    driver.keep_in(settings.compiled_kernels)
    language.keep_in(settings.compiled_kernels / "triton")
