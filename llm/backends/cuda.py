"""A decoder on a GPU as a sequence of fused kernels. Weights stay in transformers' modules, which become views of the
joined ones, so that they are stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.kernels.cuda import decode_kernel, token_kernels
from core.kernels.kv_cache import PAGE, KVCache
from core.ops.branches import LowRank
from core.ops.cuda_branches import CudaBranches
from core.ops.cuda_tokens import CudaTokenOps, FusedBatch, Residual
from core.ops.ops import bind
from core.ops.trace import TraceOps
from llm.families import family
from llm.families.network import Decoder, logits, states, trunk
from llm.parallel.ranks import RankGroup
from llm.parallel.shards import vocabulary_slice

_WIDE = 128  # channels of a head: twice as many take 193 KiB of shared memory in prefill


class CudaDecoder:
    """Runs a model on a cache, by one thread at a time, on the current stream."""

    def __init__(
        self, network: Any, cache: KVCache, group: RankGroup | None = None, features: tuple[int, ...] = ()
    ) -> None:
        """Bind the kernels to a network, with a `group` of ranks to this one's part of it. Raises ValueError for a
        model or a cache that the kernels do not support.
        """
        family.check(network)
        if (reason := decode_kernel.unsupported_reason(cache)) is not None:
            raise ValueError(reason)
        if cache.keys.dtype == torch.float8_e4m3fn and torch.cuda.is_available() and _capability() < (8, 9):
            raise ValueError("keys and values in E4M3 want compute capability 8.9")
        if cache.head_dim > _WIDE and torch.cuda.is_available() and _capability() < (9, 0):
            raise ValueError(f"heads wider than {_WIDE} want the shared memory of compute capability 9.0")
        decoder = Decoder.of(network, features)
        self._trunk, self._logits, self._states = (bind(walk, decoder) for walk in (trunk, logits, states))
        embeddings = network.model.embed_tokens.weight
        self.cache, self.dtype, self._cap = cache, embeddings.dtype, decoder.cap
        self.group = int(network.config.num_attention_heads) // cache.kv_heads
        self.ranks = group
        self.vocabulary = len(network.lm_head.weight)  # of a rank its part
        self._tokens = int(network.config.vocab_size)
        self.width = int(network.config.hidden_size)
        self.feature_width = len(features) * embeddings.shape[1]
        angles = family.angles(network, cache.table.shape[1] * PAGE, embeddings.device)
        self.ops = CudaTokenOps(self.dtype, cache, angles, None if group is None else group.peers)
        self._network = network
        followed = TraceOps()
        end = self._trunk(followed, (1,), None)
        if group is None or group.rank.last:
            self._logits(followed, end)
        for call in followed.calls:  # joined weights exist before anything is recorded
            self.ops.pack(call.operation, call.layers)

    def pack(self, factors: Mapping[str, LowRank]) -> CudaBranches:
        """An adapter for rows. On any thread. Raises ValueError, naming the layer, for a factor that does not fit."""
        return self.ops.pack_branches(factors, self._network)

    @torch.inference_mode()
    def stage(self, rows: FusedBatch, before: Tensor | None) -> Tensor:
        """Hidden states [T, C] after a stage's layers, of those `before` it, unless it is the first."""
        x: Residual = self._trunk(self.ops, rows.tokens, rows, None if before is None else Residual(before))
        return x.settle(None if self.ranks is None else self.ranks.peers)

    @torch.inference_mode()
    def __call__(
        self, rows: FusedBatch, out: Tensor | None = None, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute logits [L, V] in fp32 of the picked rows, and the states [S, C] of `state_rows`.

        `out` may receive the logits. `before` as for `stage`.
        """
        x: Residual = self._trunk(self.ops, rows.tokens, rows, None if before is None else Residual(before))
        states: Tensor | None = None
        if rows.state_rows is not None:
            x.output_rows = rows.state_rows
            states = self._states(self.ops, x)
        x.output_rows = rows.output_rows
        logits: Tensor = self._logits(self.ops, x, out)
        return logits.div_(self._cap).tanh_().mul_(self._cap) if self._cap else logits, states

    def likeliest(self, logits: Tensor, owners: Tensor, latest: Tensor, out: Tensor) -> None:
        """Write `sample.likeliest` of the whole vocabulary's logits, of which a rank has a part, to `out`, and to the
        `latest` tokens of their owners.
        """
        if self.ranks is None or self.ranks.peers.size == 1:
            token_kernels.likeliest(logits, owners, latest, out, early=self.ops.early)
            return
        out.copy_(self.ranks.peers.likeliest(logits, len(vocabulary_slice(self._tokens, self.ranks.rank))))
        latest[owners.long()] = out.int()

    def whole(self, logits: Tensor) -> Tensor:
        """The whole vocabulary's logits, of which a rank has a part."""
        return logits if self.ranks is None else self.ranks.peers.whole(logits, self._tokens)


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()
