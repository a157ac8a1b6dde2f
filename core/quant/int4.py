"""Linear layers with weights of 4 bits in groups of 128 inputs, and inputs in floating point (W4A16).

A level is -8…7. Two groups are a block, whose levels lie in 64 words of 16 bits: bits 4·i to 4·i + 3 of word j are the
level, plus 8, of input 64·i + j. So the kernels of `core.kernels.cuda.int4_kernel` read a block as four operands. A
depth that is no multiple of 256 is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.quant.linear import ScaledLinear

GROUP, BLOCK = 128, 256
_QUARTER = BLOCK // 4
LOWEST, TOP_LEVEL = -8, 7
_SMALLEST = 2.0**-14  # of fp16's normal numbers


def block_count(depth: int) -> int:
    """The number of blocks of so many inputs."""
    return -(-depth // BLOCK)


def pack(levels: Tensor) -> Tensor:
    """Words int16 [N, blocks · 64] of levels [N, K]."""
    n, depth = levels.shape
    blocks = block_count(depth)
    four = F.pad(levels.to(torch.int32), (0, blocks * BLOCK - depth)).view(n, blocks, 4, _QUARTER) - LOWEST
    words = sum(four[:, :, quarter] << (4 * quarter) for quarter in range(4))
    assert isinstance(words, Tensor)
    return words.to(torch.int16).reshape(n, blocks * _QUARTER)  # its bits: larger ones become negative


def unpack(words: Tensor, depth: int) -> Tensor:
    """Levels int8 [N, K] of words int16 [N, blocks · 64]."""
    blocks = words.view(len(words), -1, _QUARTER).to(torch.int32)
    four = torch.stack([(blocks >> (4 * quarter) & 15) + LOWEST for quarter in range(4)], dim=2)
    return four.to(torch.int8).flatten(1)[:, :depth]


def per_input(groups: Tensor, depth: int) -> Tensor:
    """[N, groups] as fp32 [N, K]: each group's number at each of its inputs."""
    return groups.float().repeat_interleave(GROUP, dim=1)[:, :depth]


def group_scale(weight: Tensor) -> Tensor:
    """The symmetric scale of each group of a weight [N, K] in fp16 [N, groups]: its largest magnitude over 7."""
    n, depth = weight.shape
    groups = F.pad(weight.float().abs(), (0, block_count(depth) * BLOCK - depth)).view(n, -1, GROUP)
    return (groups.amax(-1) / TOP_LEVEL).clamp_min(_SMALLEST).half()


def nearest(weight: Tensor, scale: Tensor) -> Tensor:
    """The nearest levels int8 [N, K] of a weight with the scale [N, groups]."""
    return (weight / per_input(scale, weight.shape[1])).round().clamp(LOWEST, TOP_LEVEL).to(torch.int8)


class Int4Linear(ScaledLinear):
    """y[n] = Σ_k x[k] · inverse[k] · scale[n, k // 128] · (level[n, k] - zero[n, k // 128]) + bias[n].

    `inverse` is AWQ's scaling of inputs (Lin et al., 2023), by which weights were divided, or None. `zero` is that of
    checkpoints with asymmetric weights.
    """

    ROUNDS = False
    RANGE = (LOWEST, TOP_LEVEL)
    OPTIONAL = frozenset({"inverse", "zero"})

    zero: Tensor | None  # int8 [N, groups]

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        inverse: Tensor | None,
        bias: Tensor | None,
        *,
        in_features: int,
        zero: Tensor | None = None,
    ) -> None:
        """`weight` are words int16 [N, blocks · 64], `scale` is fp16 or bf16 [N, groups]."""
        super().__init__(weight, scale, inverse, bias)
        self.register_buffer("zero", zero)
        self.in_features = in_features

    @classmethod
    def of(cls, layer: nn.Linear, inverse: Tensor | None) -> Self:
        """The layer with inputs scaled in the proportions of `inverse` [K], whose geometric mean becomes one."""
        return cls.scaled(layer, _proportions(inverse))

    @classmethod
    def scaled(cls, layer: nn.Linear, inverse: Tensor | None) -> Self:
        bias = None if layer.bias is None else layer.bias.detach().float()
        return cls(*_nearest(layer.weight.detach().float(), inverse), inverse, bias, in_features=layer.in_features)

    @classmethod
    def of_taps(cls, weight: Tensor, inverse: Tensor | None) -> Self:
        inverse, weight = _proportions(inverse), weight.flatten(0, 1)
        return cls(*_nearest(weight, inverse), inverse, None, in_features=weight.shape[1])

    @classmethod
    def shapes(cls, layer: nn.Linear | nn.Conv2d) -> dict[str, tuple[int, ...]]:
        n, k = layer.weight.shape[:2]
        groups = (n, 2 * block_count(k))
        shapes = {"weight": (n, block_count(k) * _QUARTER), "scale": groups, "zero": groups, "inverse": (k,)}
        return shapes if layer.bias is None else shapes | {"bias": (n,)}

    @classmethod
    def restored(cls, layer: nn.Linear, tensors: Mapping[str, Tensor]) -> Self:
        """The stored layer with these tensors. Raises ValueError for types that are not its own."""
        if "weight" not in tensors:
            return cls.scaled(layer, tensors.get("inverse"))
        for part, dtypes in _DTYPES.items():
            if part in tensors and tensors[part].dtype not in dtypes:
                raise ValueError(f"{part} is {tensors[part].dtype}, not {' or '.join(map(str, dtypes))}")
        optional = (tensors.get(part) for part in ("inverse", "bias"))
        return cls(
            tensors["weight"], tensors["scale"], *optional, in_features=layer.in_features, zero=tensors.get("zero")
        )

    @property
    def levels(self) -> Tensor:
        return unpack(self.weight, self.in_features)

    @levels.setter
    def levels(self, levels: Tensor) -> None:
        self.weight = pack(levels)

    @property
    def level_scale(self) -> Tensor:
        return per_input(self.scale, self.in_features)

    def read(self, x: Tensor) -> Tensor:
        return x if self.inverse is None else (x * self.inverse).to(x.dtype)

    def dense(self) -> Tensor:
        """The weight fp32 [N, K] that scaled inputs are multiplied by."""
        levels = self.levels.float()
        levels = levels if self.zero is None else levels - per_input(self.zero, self.in_features)
        return levels * self.level_scale

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N] of x's type, computed in it."""
        y = F.linear(self.read(x), self.dense().to(x.dtype))
        return y if self.bias is None else (y + self.bias).to(x.dtype)


_DTYPES = {
    "weight": (torch.int16,), "scale": (torch.float16, torch.bfloat16), "zero": (torch.int8,),
    "inverse": (torch.float32,), "bias": (torch.float32,),
}  # fmt: skip


def _nearest(weight: Tensor, inverse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The words of the nearest levels, and the scale, of a weight [N, K] for inputs multiplied by `inverse` before."""
    weight = weight if inverse is None else weight / inverse
    scale = group_scale(weight)
    return pack(nearest(weight, scale)), scale


def _proportions(inverse: Tensor | None) -> Tensor | None:
    """`inverse` [K] over its geometric mean; None where all are equal."""
    if inverse is None or bool((inverse == inverse[0]).all()):
        return None
    inverse = inverse.float()
    return inverse / inverse.log().mean().exp()
