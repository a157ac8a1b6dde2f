"""Linear layers with weights in NVFP4, and inputs in floating point.

A weight is an E2M1 (a sign and 0, ½, 1, 1½, 2, 3, 4, 6), times an E4M3 scale for each 16 inputs, times an fp32 one for
the tensor. No GPU before Blackwell multiplies these, and no kernel here: weights become bf16 in registers, which is
exact. NVFP4 is emulated, as a type that weights are stored in.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from core.quant.fp8 import E4M3_MAX, to_e4m3
from core.quant.int4 import BLOCK, FourBitLinear, block_count, pack_codes

SCALED = 16  # inputs with one scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What codes 0…7 stand for; 8…15 stand for the negatives."""
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours: to the one whose code is even


def nearest_codes(x: Tensor) -> Tensor:
    """The codes uint8 of the nearest E2M1 of fp32 numbers; beyond ±6 saturated, ties to even."""
    ties = torch.tensor(_TIES, device=x.device)
    ties[1::2] = torch.nextafter(ties[1::2], torch.zeros_like(ties[1::2]))
    return (torch.bucketize(x.abs(), ties) + 8 * (x < 0)).to(torch.uint8)


def values(codes: Tensor) -> Tensor:
    """What codes stand for, in fp32."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=codes.device)
    return table[codes.long()]


class Fp4Linear(FourBitLinear):
    """y[n] = total[n] · Σ_k x[k] · inverse[k] · value(code[n, k]) · scale[n, k // 16] + bias[n].

    `weight` are words int16 [N, blocks · 64], `scale` is E4M3 [N, blocks · 16], `total` is fp32 [N]: the tensor's
    scale, for each row, since layers that are computed as one have their own. `inverse` is as an `Int4Linear`'s.
    """

    ROUNDS = False
    OPTIONAL = frozenset({"inverse"})
    DTYPES: ClassVar[dict[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.int16,),
        "scale": (torch.float8_e4m3fn,),
        "total": (torch.float32,),
    }

    total: Tensor

    @classmethod
    def _rounding(cls, weight: Tensor, inverse: Tensor | None, bias: Tensor | None) -> Self:
        n, depth = weight.shape
        blocks = F.pad(weight, (0, block_count(depth) * BLOCK - depth)).view(n, -1, SCALED)
        largest = blocks.abs().amax(-1) / VALUES[-1]
        total = largest.max() / E4M3_MAX
        total = torch.where(total > 0, total, torch.ones_like(total))
        scale = to_e4m3(largest / total)
        unit = (scale.float() * total)[..., None]
        codes = nearest_codes(torch.where(unit > 0, blocks / unit, torch.zeros_like(blocks)))
        words = pack_codes(codes.flatten(1), torch.int16)
        return cls(words, scale, inverse, bias, in_features=depth, total=total.repeat(n))

    @classmethod
    def _part_shapes(cls, n: int, k: int) -> dict[str, tuple[int, ...]]:
        blocks = block_count(k)
        return {"weight": (n, blocks * BLOCK // 4), "scale": (n, blocks * BLOCK // SCALED), "total": (n,)}

    def dense(self) -> Tensor:
        scale = self.scale.float().repeat_interleave(SCALED, dim=1)[:, : self.in_features]
        return values(self._codes) * scale * self.total[:, None]
