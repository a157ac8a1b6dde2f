"""Selects and builds the settings' image backend: one of our own, or one that another package brings.

A package brings one as an entry point of the group `diptych.backends`: its name, and a `BackendFactory`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from contract.precision import is_quantized
from core.config import AUTO, Settings, SettingsError
from core.kernels.device import KernelChoice
from pipeline.backends.backend import ImageBackend, Widths
from pipeline.backends.graphs import GraphBackend
from pipeline.backends.programs import ProgramBackend
from pipeline.backends.swapped import SharedBackends
from pipeline.backends.torch_backend import TorchBackend
from pipeline.checkpoints.folder import ModelError, first_line
from pipeline.checkpoints.load import ImageModel
from workers.devices import choose_kernels, fused, kernels, widest

log = logging.getLogger(__name__)

GROUP = "diptych.backends"
TORCH, PROGRAMS, GRAPHS = "torch", "programs", "graphs"
PACK = (PROGRAMS, GRAPHS)  # those of ours that take requests with LoRAs of their own beside all others
_EIGHT_BITS = (AUTO, PROGRAMS, GRAPHS)  # what runs them whenever the device does

_CPU_BUCKETS = (2, 4, 8, 16, 32)
_GPU_BUCKETS = (1, *range(2, 17, 2), *range(20, 129, 4))  # a forward's cost follows its rows, padding included


class BackendFactory(Protocol):
    """Builds a backend for a loaded model."""

    def __call__(
        self, model: ImageModel, widths: Widths, *, settings: Settings, release: Collection[str]
    ) -> ImageBackend:
        """`widths` are those of the settings, and may be narrowed. `release`: the parts (the denoiser, "vae") whose own
        weights nothing else reads, so that they may be dropped. Raises `ModelError` for a model that it cannot run.
        """
        ...


def _torch(model: ImageModel, widths: Widths, *, settings: Settings, release: Collection[str]) -> ImageBackend:
    return TorchBackend(model, widths, compiled=settings.compile, cache=settings.compiled_code)


def _programs(model: ImageModel, widths: Widths, *, settings: Settings, release: Collection[str]) -> ImageBackend:
    library, reason = kernels(settings, model)
    if library is None:
        raise ModelError(f"backend {PROGRAMS}: {reason or 'these kernels are for CPUs'}")
    return ProgramBackend(model, library, widths, release=release)


def _graphs(model: ImageModel, widths: Widths, *, settings: Settings, release: Collection[str]) -> GraphBackend:
    runs, reason = fused(settings, model)
    if not runs:
        raise ModelError(f"backend {GRAPHS}: {reason or 'these kernels are for GPUs'}")
    rows = widest(settings, model)
    return GraphBackend(model, replace(widths, max_rows=rows, deterministic_rows=min(widths.deterministic_rows, rows)))


_OURS: dict[str, BackendFactory] = {TORCH: _torch, PROGRAMS: _programs, GRAPHS: _graphs}


def check(settings: Settings) -> None:
    """Reject what needs no model to be rejected. Raises `SettingsError`, and `ModelError` for 8 bits on a backend that
    is named torch: emulation would be slower than an unquantized model.
    """
    find(settings.backend)
    if settings.backend == TORCH and is_quantized(settings.precision):
        raise ModelError(f"{settings.precision} does not run on the backend {TORCH}")


def without_int8(settings: Settings) -> str:
    """Return why the precision "auto" is not INT8 with these settings, whatever the device; empty if it may be."""
    if not settings.kernels:
        return "the native kernels are turned off"
    return "" if settings.backend in _EIGHT_BITS else f"the settings select the backend {settings.backend}"


def find(name: str) -> BackendFactory | None:
    """The factory of this name; None for "auto". Raises `SettingsError`, which lists all that there are."""
    if name == AUTO or name in _OURS:
        return _OURS.get(name)
    plugins = {point.name: point for point in entry_points(group=GROUP)}
    if name not in plugins:
        raise SettingsError(f"backend: there is no {name}; there are {', '.join([AUTO, *_OURS, *sorted(plugins)])}")
    return _load(plugins[name])


def _load(point: EntryPoint) -> BackendFactory:
    try:
        factory: BackendFactory = point.load()
    except Exception as error:
        raise SettingsError(
            f"backend: {point.name} ({point.value}) cannot be imported ({type(error).__name__}: {first_line(error)})"
        ) from error
    if not callable(factory):
        raise SettingsError(f"backend: {point.name} ({point.value}) is no factory: it cannot be called")
    return factory


def select(settings: Settings, model: ImageModel) -> tuple[str, str]:
    """The name of the backend for this model, and if it is torch the reason why our own kernels do not run.

    Raises `ModelError` for INT8 and FP8 without kernels: emulation would be slower than an unquantized model. Schemes
    that the kernels may lack run on torch.
    """
    if settings.backend != AUTO:
        return settings.backend, f"the settings select {TORCH}" if settings.backend == TORCH else ""
    library, why_torch = kernels(settings, model)
    runs, why_eager = fused(settings, model)
    return PROGRAMS if library is not None else GRAPHS if runs else TORCH, why_torch or why_eager


def make(
    name: str,
    settings: Settings,
    model: ImageModel,
    *,
    release: Collection[str],
    why_torch: str = "",
    shared: SharedBackends | None = None,
) -> tuple[ImageBackend, tuple[KernelChoice, ...]]:
    """The backend of a name that `select` returned, and which kernels it runs, which is logged. One of graphs may be
    one of `shared`.
    """
    factory = find(name)
    assert factory is not None
    buckets = _GPU_BUCKETS if model.device.type == "cuda" else _CPU_BUCKETS
    widths = Widths(settings.max_rows, settings.deterministic_rows, buckets)
    if name in _OURS:
        decisions = choose_kernels(settings, model, why_torch)
    else:
        log.info("%s runs in %s on the backend %s", model.name, model.precision, name)
        decisions = ()
    if shared is not None and factory is _graphs:
        graphs = partial(_graphs, model, widths, settings=settings, release=release)
        return shared.backend_of(model, graphs), decisions
    return factory(model, widths, settings=settings, release=release), decisions
