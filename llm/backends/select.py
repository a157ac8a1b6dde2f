"""Chooses the backend that runs a text model, with the reason where it is not the fastest one."""

from __future__ import annotations

import ctypes
import logging

import torch

from contract.precision import PRECISIONS, runs
from core.kernels.kv_cache import Kind, KVCache
from llm.backends.backend import TextBackend
from llm.backends.cuda import CudaDecoder
from llm.backends.fused import FusedBackend
from llm.backends.programs import ProgramBackend
from llm.backends.ranked import RankedBackend
from llm.backends.torch_backend import TorchBackend
from llm.checkpoints.load import TextModel, TextModelError
from llm.parallel.followers import Followers
from llm.parallel.ranks import RankGroup, shared_

log = logging.getLogger(__name__)

_IN_INT8 = ("int8", "int8-sparse")
_PROGRAMS = (*_IN_INT8, "fp32", "bf16", "w4a8")  # the last one is packed as INT8


def select(
    model: TextModel,
    *,
    pages: int,
    sequences: int,
    context: int,
    rows: int = 256,
    kv: Kind = "float",
    kernels: ctypes.CDLL | None = None,
    companion: KVCache | None = None,
    group: RankGroup | None = None,
    features: tuple[int, ...] = (),
) -> TextBackend:
    """Return the backend of a model, with a cache of its own.

    `rows` are the most of a batch; `kernels` are the CPU kernels, if there are any; `companion` is a cache whose table
    is shared. `group`: the ranks of which this is one, whose part of the model `model` is. `features` are layers whose
    inputs are captured. Raises `TextModelError` for INT8 on a CPU without kernels, and for FP8 on any CPU.
    """
    on_cpu = model.device.type == "cpu"
    if not runs(model.precision, model.device.type):
        raise TextModelError(f"{model.precision} does not run on a CPU; take int8 or fp32")
    cache = KVCache(
        layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim, pages=pages, sequences=sequences,
        context=context, dtype=torch.float32 if on_cpu else model.dtype, device=model.device, kind=kv,
        companion=companion,
    )  # fmt: skip
    if group is not None:
        shared_(model.network, group)
    fastest: TextBackend | str = ""
    if on_cpu:
        fastest = _programs(model, cache, kernels if group is None else None, features)
    elif model.device.type == "cuda":
        fastest = _fused(model, cache, group, features, sequences=sequences, context=context, rows=rows)
    if isinstance(fastest, TextBackend):
        backend, reason = fastest, ""
    else:
        backend, reason = TorchBackend(model, cache, group=group, features=features), fastest
    if PRECISIONS[model.precision].emulated:
        emulated = f"{model.precision} is emulated: its weights become floats as they are multiplied"
        reason = "; ".join(filter(None, [emulated, reason]))
    backend.kernels_reason = reason
    return backend


def select_ranked(
    model: TextModel, followers: Followers, *, pages: int, sequences: int, context: int, rows: int, kv: Kind
) -> RankedBackend:
    """Return the backend of a model of which `model` is rank 0's part, once all ranks have theirs.

    Raises `TextModelError`.
    """
    group = followers.join({"pages": pages, "sequences": sequences, "context": context, "rows": rows, "kv": kv})
    backend = select(model, pages=pages, sequences=sequences, context=context, rows=rows, kv=kv, group=group)
    followers.ready()
    return RankedBackend(backend, followers)


def _programs(
    model: TextModel, cache: KVCache, kernels: ctypes.CDLL | None, features: tuple[int, ...]
) -> TextBackend | str:
    """Return the backend on CPU kernels, or the reason why torch runs the model. Raises `TextModelError` for INT8."""
    in_int8 = model.precision in _IN_INT8
    if kernels is None or model.precision not in _PROGRAMS:
        if in_int8:
            slower = "without our CPU kernels it would be slower than fp32"
            raise TextModelError(f"{model.precision} does not run here: {slower}")
        return "the CPU kernels are turned off, or do not run here or in this precision"
    try:
        return ProgramBackend(model, cache, kernels, features=features)
    except ValueError as error:
        if in_int8:
            raise TextModelError(f"{model.precision} does not run here: {error}; take fp32") from error
        return _on_torch(model, str(error))


def _fused(
    model: TextModel, cache: KVCache, group: RankGroup | None, features: tuple[int, ...], *, sequences: int,
    context: int, rows: int,
) -> TextBackend | str:  # fmt: skip
    """Return the backend on fused kernels, or the reason why torch runs the model."""
    if model.dtype == torch.float32:
        return _on_torch(model, "ours multiply bf16 and 8 bits, not fp32")
    try:
        if group is not None:
            group.open_exchange(int(model.config.hidden_size), model.dtype)
        decoder = CudaDecoder(model.network, cache, group, features)
        return FusedBackend(model, cache, decoder, sequences=sequences, context=context, rows=rows)
    except ValueError as error:
        return _on_torch(model, str(error))


def _on_torch(model: TextModel, reason: str) -> str:
    log.warning("%s runs on torch: %s", model.name, reason)
    return reason
