"""How a model's forward is run on its pages of keys and values: by our CPU kernels where they know it, else by torch.

Knows a model, its cache and what a forward costs; knows nothing of requests.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.batching.runner import DeviceLost, OutOfMemory
from llm.attention import Paged
from llm.kv_cache import Kind, KVCache, Step
from llm.load import TextModel, TextModelError
from llm.program import LlamaPrograms

log = logging.getLogger(__name__)

KERNELS, TORCH = "kernels", "torch"


class Execution:
    """One model on one cache, called by one thread at a time."""

    def __init__(
        self,
        model: TextModel,
        *,
        pages: int,
        sequences: int,
        context: int,
        kv: Kind = "float",
        kernels: ctypes.CDLL | None = None,
        table: Tensor | None = None,
    ) -> None:
        """`kernels` are the CPU kernels, if there are any. Raises `TextModelError` for INT8 on a CPU without them."""
        self.model = model
        self.cache = KVCache(
            layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim, pages=pages, sequences=sequences,
            context=context, dtype=model.dtype if model.device.type != "cpu" else torch.float32, device=model.device,
            kind=kv, table=table,
        )  # fmt: skip
        self._programs = self._on_kernels(kernels)

    @property
    def kind(self) -> str:
        return TORCH if self._programs is None else KERNELS

    def release(self) -> None:
        """Hold weights once: where our kernels have packed them, the model's own are let go of, for good."""
        if self._programs is not None:
            self._programs.release()

    def __call__(self, step: Step) -> Tensor:
        """Logits [L, V] in fp32 of the step's picked rows. They may be overwritten, and are by the next call."""
        if self._programs is not None:
            return self._programs(step)
        device = self.model.device
        if device.type != "cpu":
            columns = (step.tokens, step.positions, step.sequences, step.picked)
            step = Step(*(column.to(device, non_blocking=True) for column in columns))
        with torch.inference_mode():
            made = self.model.network(
                step.tokens.long()[None],
                position_ids=step.positions.long()[None],
                use_cache=False,
                logits_to_keep=step.picked.long(),
                paged=Paged.of(self.cache, step),
            )
            logits: Tensor = made.logits[0].float()
            return logits

    def _on_kernels(self, kernels: ctypes.CDLL | None) -> LlamaPrograms | None:
        model = self.model
        if model.device.type == "cpu" and model.precision in ("fp32", "bf16", "int8") and kernels is not None:
            try:
                return LlamaPrograms(kernels, model.network, self.cache, half=model.precision != "fp32")
            except ValueError as error:
                if model.precision == "int8":
                    raise TextModelError(f"int8 does not run here: {error}; take fp32") from error
                log.warning("%s is run by torch's own kernels: %s", model.name, error)
        elif model.device.type == "cpu" and model.precision == "int8":
            raise TextModelError("int8 does not run here: without our CPU kernels it would be slower than fp32")
        return None


def translated(compute: Callable[[], Any]) -> Any:
    """Run it, and say of torch's errors what they mean to the engine."""
    try:
        return compute()
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(str(error)) from error
    except RuntimeError as error:
        text = str(error)
        if "can't allocate memory" in text or "out of memory" in text:
            raise OutOfMemory(text) from error
        if "CUDA error" in text or isinstance(error, getattr(torch, "AcceleratorError", ())):
            raise DeviceLost(text) from error
        raise
