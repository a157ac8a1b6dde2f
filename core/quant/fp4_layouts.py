"""The published layouts of NVFP4, compressed-tensors' and ModelOpt's, and their parts as an `Fp4Linear`.

Both pack two codes into a byte, the first in its lower half, with outputs first. compressed-tensors divides by the
tensor's scale, ModelOpt multiplies by it. Scales of inputs and of keys and values are for GPUs that round these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.quant.fp4 import SCALED, Fp4Linear
from core.quant.int4 import BLOCK, block_count, pack_codes

_LARGEST = 0x7E  # 448: above are NaN and the negatives
_Parts = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Fp4Layout:
    """How a layer [N, K] is stored by this method."""

    method: str

    @property
    def weight_key(self) -> str:
        """The part that every layer in 4 bits has, and no other."""
        return "weight_packed" if self.method == "compressed-tensors" else "weight_scale_2"

    @property
    def optional(self) -> frozenset[str]:
        """The parts that may be absent. They are not read."""
        return frozenset({"input_global_scale", "input_scale", "k_scale", "v_scale"})

    def parts(self, n: int, k: int) -> _Parts:
        """The types and shape of each part of a layer; types by their names in safetensors files.

        Raises ValueError for a layer that the layout does not fit.
        """
        if k % SCALED:
            raise ValueError(f"{k} inputs are no multiple of {SCALED}")
        packed = self.method == "compressed-tensors"
        names = ("weight_packed", "weight_global_scale") if packed else ("weight", "weight_scale_2")
        number = (("F32",), (1,))
        parts: _Parts = {names[0]: (("U8",), (n, k // 2)), "weight_scale": (("F8_E4M3",), (n, k // SCALED))}
        return parts | {names[1]: number} | dict.fromkeys(self.optional, number)

    def layer(self, n: int, k: int, parts: Mapping[str, Tensor], bias: Tensor | None) -> Fp4Linear:
        """The layer of parts that are as `parts` says. Raises ValueError for scales that are no positive numbers."""
        if self.method == "compressed-tensors":
            packed, total = parts["weight_packed"], parts["weight_global_scale"].reshape(1).reciprocal()
        else:
            packed, total = parts["weight"], parts["weight_scale_2"].reshape(1)
        scale = parts["weight_scale"].view(torch.uint8)
        if bool((scale > _LARGEST).any()) or not bool((total > 0) & total.isfinite()):
            raise ValueError("its scales are not all finite and positive")
        scale = F.pad(scale, (0, block_count(k) * BLOCK // SCALED - scale.shape[1])).view(torch.float8_e4m3fn)
        codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)
        bias = None if bias is None else bias.float()
        words = pack_codes(codes, torch.int16)
        return Fp4Linear(words, scale, None, bias, in_features=k, total=total.repeat(n))
