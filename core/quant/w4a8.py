"""Linear layers with weights of 4 bits that stand for INT8 ones, and inputs in INT8 (W4A8).

Scales have two levels (QServe: Lin et al., 2024, section 4.1). The first rounds a weight's rows to -112…112 with a
scale in fp32 each. The second rounds these integers, in groups of 128 inputs, to 16 levels that are a step of 1…15
apart. So kernels make INT8 weights of them in registers, multiply these by INT8 inputs as exactly as any, and scale
once, at the end; and what they compute is bit for bit what an `Int8Linear` with these weights does.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from core.quant.int4 import BLOCK, GROUP, FourBitLinear, block_count, pack_codes, per_input
from core.quant.linear import LEVELS, Int8Linear, quantize

_TOP = 112  # so that the largest step is 15, and 16 levels so far apart, of which one is zero, fit -127…127
_CODES, _MOST_STEP = 15, 15
_Module = TypeVar("_Module")


class W4A8Linear(FourBitLinear):
    """y[n] = scale[n] · Σ_k q(x[k] · inverse[k]) · step[n, k // 128] · (code[n, k] - zero[n, k // 128]) + bias[n].

    `weight` are words int8 [N, blocks · 128] of codes 0…15, `scale` is fp32 [N], `group` is uint8 [N, groups]: a step
    less one in bits 0 to 3, a zero in bits 4 to 7. Inputs are those of an `Int8Linear`.
    """

    DTYPES: ClassVar[dict[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.int8,),
        "scale": (torch.float32,),
        "group": (torch.uint8,),
    }

    group: Tensor

    @staticmethod
    def _proportions(inverse: Tensor | None) -> Tensor | None:
        return None if inverse is None else inverse.float()

    @classmethod
    def _rounding(cls, weight: Tensor, inverse: Tensor | None, bias: Tensor | None) -> Self:
        n, depth = weight.shape
        scale = weight.abs().amax(1) / _TOP
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        integers = (weight / scale[:, None]).round()
        groups = F.pad(integers, (0, block_count(depth) * BLOCK - depth)).view(n, -1, GROUP)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)  # a level is zero
        step = ((high - low) / _CODES).ceil().clamp(1, _MOST_STEP)
        # All 16 levels must fit INT8: rounding by GPTQ may choose any.
        least = _CODES - (LEVELS / step).floor()
        zero = torch.minimum(torch.maximum((-low / step).round(), least), (LEVELS / step).floor()).clamp(0, _CODES)
        codes = (integers / per_input(step, depth)).round() + per_input(zero, depth)
        group = (step - 1 + 16 * zero).to(torch.uint8)
        words = pack_codes(codes.clamp(0, _CODES), torch.int8)
        return cls(words, scale, inverse, bias, in_features=depth, group=group)

    @classmethod
    def _part_shapes(cls, n: int, k: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (n, block_count(k) * BLOCK // 2), "scale": (n,), "group": (n, 2 * block_count(k))}

    @property
    def _step(self) -> Tensor:
        return per_input((self.group & 15) + 1, self.in_features)

    @property
    def _zero(self) -> Tensor:
        return per_input(self.group >> 4, self.in_features)

    @property
    def levels(self) -> Tensor:
        return (self._codes.float() - self._zero).to(torch.int8)

    @levels.setter
    def levels(self, levels: Tensor) -> None:
        self.weight = pack_codes(levels.float() + self._zero, torch.int8)

    @property
    def level_scale(self) -> Tensor:
        return self._step * self.scale[:, None]

    @property
    def level_range(self) -> tuple[Tensor, Tensor]:
        return -self._zero, _CODES - self._zero

    def read(self, x: Tensor) -> Tensor:
        return quantize(x, self.inverse)

    def dense(self) -> Tensor:
        return self.levels * self.level_scale

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N] of x's type, as `Int8Linear` computes it."""
        y: Tensor = in_int8(self)(x)
        return y


@overload
def in_int8(module: W4A8Linear) -> Int8Linear: ...
@overload
def in_int8(module: _Module) -> _Module: ...
def in_int8(module: Any) -> Any:
    """The INT8 layer that computes bit for bit what one with weights of 4 bits does; any other module itself."""
    if not isinstance(module, W4A8Linear):
        return module
    weight = (module.levels * per_input((module.group & 15) + 1, module.in_features)).to(torch.int8)
    return Int8Linear(weight, module.scale, module.inverse, module.bias)
