"""What the ranks of one model exchange: sums in the order of ranks, so that a row's bits depend neither on the run nor
on the other rows.

On GPUs in symmetric memory where that works, else by NCCL, on the current stream and capturable in CUDA graphs; on
CPUs by gloo.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from core.kernels.cuda.exchange_kernel import ROWS, Exchange, RankSums
from core.kernels.cuda.fused_kernels import SplitSums

_FEW = 2**20  # elements: beyond, each rank sums a part


class Peers:
    """The ranks that share each layer, `size` of them; of these this is number `index`."""

    def __init__(self, group: dist.ProcessGroup | None, index: int, size: int) -> None:
        """Without a group there is one rank."""
        self.index, self.size = index, size
        self._group = group
        self.exchange: Exchange | None = None  # by symmetric memory

    def gather(self, x: Tensor) -> Tensor:
        """Each rank's x, in their order: [size, ...]."""
        x = x.contiguous()
        if self._group is None or self.size == 1 or not x.numel():
            return x[None].expand(self.size, *x.shape)
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._group._allgather_base(out.view(-1), x.view(-1)).wait()
        return out

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, rounded once, to x's type."""
        if self.size == 1:
            return x
        if self.exchange is not None and (summed := self.exchange.sum_many(x)) is not None:
            return summed
        if self._group is None or not x.is_cuda or x.numel() <= _FEW or x.numel() % self.size:
            return _ordered(self.gather(x)).to(x.dtype)
        parts = torch.empty(self.size, x.numel() // self.size, dtype=x.dtype, device=x.device)
        self._group.alltoall_base(parts.view(-1), x.contiguous().view(-1), [], []).wait()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._group._allgather_base(out.view(-1), _ordered(parts).to(x.dtype)).wait()
        return out

    def parts(self, sums: SplitSums, dtype: torch.dtype) -> SplitSums:
        """Each rank's part of a product of few rows, rounded to `dtype`, to be summed by the kernel that reads them."""
        if self.exchange is not None and sums.parts.shape[1] <= ROWS:
            return RankSums(sums.parts, sums.scale, sums.bias)
        return self.gathered(sums, dtype)

    def gathered(self, sums: SplitSums, dtype: torch.dtype) -> SplitSums:
        """The same, without symmetric memory."""
        return SplitSums(self.gather(sums.whole().to(dtype)).float())

    def likeliest(self, logits: Tensor, count: int) -> Tensor:
        """The most likely token of each row, of which this rank has the logits [L, V] of `count` tokens: int64 [L].

        -1 where they are not all finite. Of equals the first, as of the whole row. Every rank but the last has V
        tokens.
        """
        own = logits[:, :count]
        value, token = own.max(-1)
        value = torch.where(own.sum(-1).isfinite(), value, torch.nan)
        values, tokens = self.gather(torch.stack([value, (token + self.index * logits.shape[1]).float()])).unbind(1)
        best = tokens.gather(0, values.argmax(0, keepdim=True))[0].long()
        return torch.where(values.isfinite().all(0), best, -1)

    def whole(self, logits: Tensor, vocabulary: int) -> Tensor:
        """Logits [L, vocabulary] of each rank's [L, V]."""
        if self.size == 1:
            return logits
        return self.gather(logits).transpose(0, 1).flatten(1)[:, :vocabulary].contiguous()


def _ordered(parts: Tensor) -> Tensor:
    """The sum over the first dimension in its order, in fp32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total
