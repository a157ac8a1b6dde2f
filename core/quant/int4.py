"""Linear layers with weights of 4 bits: what they share, and those with integers and inputs in floating point (W4A16).

Weights are in groups of 128 inputs. A level is -8…7. Two groups are a block, whose levels lie in 64 words of 16 bits:
bits 4·i to 4·i + 3 of word j are the level, plus 8, of input 64·i + j. So the kernels of
`core.kernels.cuda.int4_kernel` read a block as four operands. A depth that is no multiple of 256 is filled up with
zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

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


def pack_codes(codes: Tensor, dtype: torch.dtype, fill: int = 0) -> Tensor:
    """Words [N, blocks · 256 / p] of codes 0…15 [N, K], p of them in a word of `dtype`: 4 in int16, 2 in int8.

    Bits 4·i to 4·i + 3 of a block's word j are its code i · 256 / p + j. `fill` are the codes beyond K.
    """
    (n, depth), parts = codes.shape, 2 * dtype.itemsize
    blocks = block_count(depth)
    padded = F.pad(codes.to(torch.int32), (0, blocks * BLOCK - depth), value=fill).view(n, blocks, parts, -1)
    words = sum(padded[:, :, part] << (4 * part) for part in range(parts))
    assert isinstance(words, Tensor)
    return words.to(dtype).reshape(n, -1)  # its bits: larger ones become negative


def unpack_codes(words: Tensor, depth: int) -> Tensor:
    """Codes uint8 [N, K] of words as `pack_codes` makes them."""
    parts = 2 * words.dtype.itemsize
    blocks = words.view(len(words), -1, BLOCK // parts).to(torch.int32)
    codes = torch.stack([blocks >> (4 * part) & 15 for part in range(parts)], dim=2)
    return codes.to(torch.uint8).flatten(1)[:, :depth]


def pack(levels: Tensor) -> Tensor:
    """Words int16 [N, blocks · 64] of levels [N, K]."""
    return pack_codes(levels.to(torch.int32) - LOWEST, torch.int16, -LOWEST)


def unpack(words: Tensor, depth: int) -> Tensor:
    """Levels int8 [N, K] of words int16 [N, blocks · 64]."""
    return unpack_codes(words, depth).to(torch.int8) + LOWEST


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


class FourBitLinear(ScaledLinear):
    """A linear layer whose weight [N, K] is packed. `DTYPES` are the types that its stored parts may have."""

    DTYPES: ClassVar[dict[str, tuple[torch.dtype, ...]]]

    def __init__(
        self, weight: Tensor, scale: Tensor, inverse: Tensor | None, bias: Tensor | None, *, in_features: int,
        **parts: Tensor | None,
    ) -> None:  # fmt: skip
        """`weight` are words as `pack_codes` makes them; `parts` are those of the scheme alone."""
        super().__init__(weight, scale, inverse, bias)
        for name, part in parts.items():
            self.register_buffer(name, part)
        self.in_features = in_features

    @classmethod
    def of_taps(cls, weight: Tensor, inverse: Tensor | None) -> Self:
        inverse, weight = cls._proportions(inverse), weight.flatten(0, 1)
        return cls._rounding(weight if inverse is None else weight / inverse, inverse, None)

    @classmethod
    def of(cls, layer: nn.Linear, inverse: Tensor | None) -> Self:
        """The layer with inputs scaled by `_proportions` of `inverse` [K]."""
        return cls.scaled(layer, cls._proportions(inverse))

    @staticmethod
    def _proportions(inverse: Tensor | None) -> Tensor | None:
        """`inverse` [K] over its geometric mean; None where all are equal. Inputs that are not rounded need no more."""
        if inverse is None or bool((inverse == inverse[0]).all()):
            return None
        inverse = inverse.float()
        return inverse / inverse.log().mean().exp()

    @classmethod
    def _part_shapes(cls, n: int, k: int) -> dict[str, tuple[int, ...]]:
        """The shapes of all stored parts of a weight [n, k] but inverse and bias."""
        raise NotImplementedError

    @classmethod
    def shapes(cls, layer: nn.Linear | nn.Conv2d) -> dict[str, tuple[int, ...]]:
        n, k = layer.weight.shape[:2]
        shapes = cls._part_shapes(n, k) | {"inverse": (k,)}
        return shapes if layer.bias is None else shapes | {"bias": (n,)}

    @classmethod
    def restored(cls, layer: nn.Linear, tensors: Mapping[str, Tensor]) -> Self:
        """The stored layer with these tensors. Raises ValueError for types that are not its own."""
        if "weight" not in tensors:
            return cls.scaled(layer, tensors.get("inverse"))
        dtypes = cls.DTYPES | {"inverse": (torch.float32,), "bias": (torch.float32,)}
        for part, accepted in dtypes.items():
            if part in tensors and tensors[part].dtype not in accepted:
                raise ValueError(f"{part} is {tensors[part].dtype}, not {' or '.join(map(str, accepted))}")
        parts = {part: tensors.get(part) for part in dtypes.keys() - {"weight", "scale"}}
        return cls(tensors["weight"], tensors["scale"], in_features=layer.in_features, **parts)

    @property
    def _codes(self) -> Tensor:
        """uint8 [N, K], 0…15."""
        return unpack_codes(self.weight, self.in_features)

    def read(self, x: Tensor) -> Tensor:
        return x if self.inverse is None else (x * self.inverse).to(x.dtype)

    def dense(self) -> Tensor:
        """The weight fp32 [N, K] that scaled inputs are multiplied by."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N] of x's type, computed in it."""
        y = F.linear(self.read(x), self.dense().to(x.dtype))
        return y if self.bias is None else (y + self.bias).to(x.dtype)


class Int4Linear(FourBitLinear):
    """y[n] = Σ_k x[k] · inverse[k] · scale[n, k // 128] · (level[n, k] - zero[n, k // 128]) + bias[n].

    `weight` are words int16 [N, blocks · 64], `scale` is fp16 or bf16 [N, groups]. `inverse` is AWQ's scaling of inputs
    (Lin et al., 2023), by which weights were divided, or None. `zero`, int8 [N, groups] or None, is that of checkpoints
    with asymmetric weights.
    """

    ROUNDS = False
    RANGE = (LOWEST, TOP_LEVEL)
    OPTIONAL = frozenset({"inverse", "zero"})
    DTYPES: ClassVar[dict[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.int16,),
        "scale": (torch.float16, torch.bfloat16),
        "zero": (torch.int8,),
    }

    zero: Tensor | None

    @classmethod
    def _rounding(cls, weight: Tensor, inverse: Tensor | None, bias: Tensor | None) -> Self:
        scale = group_scale(weight)
        return cls(pack(nearest(weight, scale)), scale, inverse, bias, in_features=weight.shape[1], zero=None)

    @classmethod
    def _part_shapes(cls, n: int, k: int) -> dict[str, tuple[int, ...]]:
        groups = (n, 2 * block_count(k))
        return {"weight": (n, block_count(k) * _QUARTER), "scale": groups, "zero": groups}

    @property
    def levels(self) -> Tensor:
        return unpack(self.weight, self.in_features)

    @levels.setter
    def levels(self, levels: Tensor) -> None:
        self.weight = pack(levels)

    @property
    def level_scale(self) -> Tensor:
        return per_input(self.scale, self.in_features)

    def dense(self) -> Tensor:
        levels = self.levels.float()
        levels = levels if self.zero is None else levels - per_input(self.zero, self.in_features)
        return levels * self.level_scale
