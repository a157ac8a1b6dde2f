"""The interface of a backend: it runs a model's forwards on the model's KV cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from core.kernels.kv_cache import KVCache, TokenBatch
from core.ops.branches import LowRank, PackedAdapter
from core.ops.packed import PackedLayers
from llm.backends.forward import Forward, LatestTokens
from llm.backends.step_graphs import StepGraphs
from llm.checkpoints.load import TextModel
from llm.parallel.ranks import RankGroup

KERNELS, FUSED, TORCH = "kernels", "fused", "torch"


class TextBackend:
    """One model on one cache, called by one thread at a time, on one stream. `llm.backends.select` chooses among them.

    `kind` is KERNELS, FUSED or TORCH; `kernels_reason` says why no faster one runs the model.
    """

    kind: str
    packed: PackedLayers | None = None  # the layers as the CPU kernels read them, if these run the model
    step_graphs: StepGraphs | None = None  # which a drafter's graphs share memory with, if there are any
    spread = False  # whether other processes hold parts of the model

    def __init__(self, model: TextModel, cache: KVCache, table: Tensor | None = None) -> None:
        """`table` is that of the latest tokens, if the backend itself has one."""
        self.model, self.cache = model, cache
        self.group: RankGroup | None = None  # the ranks of which this is one
        self.kernels_reason = ""
        if table is None:
            table = torch.zeros(len(cache.table) + 1, dtype=torch.int32, device=model.device)
        self.latest = LatestTokens(table)

    def forward(self, batch: TokenBatch) -> Forward:
        """Compute one forward. A row whose token is -1 takes its sequence's latest one."""
        raise NotImplementedError

    @property
    def kernels(self) -> str:
        """The kernels that run the model, by their name in `core.kernels.device`."""
        raise NotImplementedError

    def pack(self, factors: Mapping[str, LowRank]) -> PackedAdapter:
        """Return an adapter for rows of batches, made of factors by the layers' names. On any thread.

        Raises ValueError, naming the layer, for a factor that does not fit it.
        """
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights, packed ones included, of the cache, and of the CUDA graphs captured so far."""
        network = self.model.network
        storages = [tensor.untyped_storage() for tensor in (*network.parameters(), *network.buffers())]
        unique = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return int(sum(unique.values()) + self.cache.size_bytes)

    def keep(self, batch: TokenBatch, tokens: Tensor) -> None:
        """Make tokens the latest ones; see `LatestTokens.keep`."""
        self.latest.keep(batch, tokens)

    def prepare(self, sequences: int) -> None:
        """Compile and capture what is needed to decode so many sequences, and to read their prompts."""

    def release(self) -> None:
        """Free duplicate weights: once our kernels have packed them, the model's own are dropped for good."""

    def close(self) -> None:
        """Leave the group of ranks, if there is one. The model runs no more."""
