"""The published layouts of weights of 4 bits, and their parts as an `Int4Linear`: AWQ's, GPTQ's, compressed-tensors'.

All pack eight levels, 0…15, into an int32. AWQ packs along outputs in the order 0, 2, 4, 6, 1, 3, 5, 7 (its `gemm`
kernel's), GPTQ along inputs and its zeros along outputs, less one before version 2; compressed-tensors along inputs,
with outputs first. What a level stands for is scale · (level - zero).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.quant.int4 import GROUP, LOWEST, Int4Linear, block_count, pack

_EIGHT = torch.arange(0, 32, 4, dtype=torch.int32)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of columns 0…7 among an int32's levels


@dataclass(frozen=True)
class Layout:
    """How a layer [N, K] with groups of `group` inputs is stored. `group` None is one group of all inputs.

    `zeros` says whether there are zero points, `shifted` whether they are stored less one.
    """

    method: str
    group: int | None
    zeros: bool
    shifted: bool = False

    @property
    def optional(self) -> frozenset[str]:
        """The parts that may be absent."""
        return frozenset({"g_idx"})

    @property
    def weight_key(self) -> str:
        """The part that every layer in 4 bits has."""
        return "weight_packed" if self.method == "compressed-tensors" else "qweight"

    def parts(self, n: int, k: int) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """The types and shape of each part of a layer; types by their names in safetensors files.

        Raises ValueError for a layer that the layout does not fit.
        """
        if self.group is not None and k % self.group:
            raise ValueError(f"{k} inputs are no multiple of its group_size {self.group}")
        groups = 1 if self.group is None else k // self.group
        floats, words = ("F16", "BF16"), ("I32",)
        if self.method == "compressed-tensors":
            parts: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
                "weight_packed": (words, (n, -(-k // 8))), "weight_scale": (floats, (n, groups)),
                "weight_shape": (("I64", "I32"), (2,)),
            }  # fmt: skip
            return parts | ({"weight_zero_point": (words, (-(-n // 8), groups))} if self.zeros else {})
        if n % 8 or (self.method == "gptq" and k % 8):
            raise ValueError(f"its sides {n} and {k} are no multiples of 8")
        packed = (k, n // 8) if self.method == "awq" else (k // 8, n)
        parts = {"qweight": (words, packed), "scales": (floats, (groups, n))}
        parts |= {"qzeros": (words, (groups, n // 8))} if self.zeros else {}
        return parts | ({"g_idx": (words, (k,))} if self.method == "gptq" else {})

    def layer(self, n: int, k: int, parts: Mapping[str, Tensor], bias: Tensor | None) -> Int4Linear:
        """The layer of parts that are as `parts` says. Raises ValueError for groups in another order than inputs'."""
        levels, scale, zero = _READERS[self.method](self, n, k, parts)
        full = 2 * block_count(k)
        each = full if self.group is None else self.group // GROUP

        def per_group(groups: Tensor) -> Tensor:
            wide = groups.repeat_interleave(each, dim=1)[:, :full]
            return F.pad(wide, (0, full - wide.shape[1])).contiguous()

        if zero is not None:
            zero = per_group((zero + LOWEST).to(torch.int8)) if bool((zero != -LOWEST).any()) else None
        bias = None if bias is None else bias.float()
        return Int4Linear(pack(levels + LOWEST), per_group(scale), None, bias, in_features=k, zero=zero)


def _levels(words: Tensor, dim: int) -> Tensor:
    """The eight levels, 0…15 as int32, of each int32 of [a, b], in order along `dim`."""
    shifts = _EIGHT.to(words.device)
    if dim == 0:
        return (words[:, None] >> shifts[None, :, None] & 15).flatten(0, 1)
    return (words[:, :, None] >> shifts & 15).flatten(1, 2)


def _awq_levels(words: Tensor) -> Tensor:
    eights: Tensor = _levels(words, 1).unflatten(1, (-1, 8))
    return eights[..., list(_AWQ_PLACES)].flatten(1, 2)


def _awq(layout: Layout, n: int, k: int, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    zero = _awq_levels(parts["qzeros"]).t() if layout.zeros else None
    return _awq_levels(parts["qweight"]).t(), parts["scales"].t(), zero


def _gptq(layout: Layout, n: int, k: int, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    order = parts.get("g_idx")
    if order is not None and not torch.equal(order, torch.arange(k, dtype=torch.int32) // (layout.group or k)):
        raise ValueError("its groups are not in the order of its inputs (desc_act), which is not supported")
    zero = _levels(parts["qzeros"], 1).t() + int(layout.shifted)
    return _levels(parts["qweight"], 0).t(), parts["scales"].t(), zero


def _compressed(layout: Layout, n: int, k: int, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    if parts["weight_shape"].tolist() != [n, k]:
        raise ValueError(f"its weight_shape is {parts['weight_shape'].tolist()}, not {[n, k]}")
    zero = _levels(parts["weight_zero_point"], 0)[:n] if layout.zeros else None
    return _levels(parts["weight_packed"], 1)[:, :k], parts["weight_scale"], zero


_Reader = Callable[[Layout, int, int, Mapping[str, Tensor]], tuple[Tensor, Tensor, Tensor | None]]
_READERS: dict[str, _Reader] = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
"""Levels 0…15 [N, K], scales [N, groups], and zeros [N, groups] on the levels' scale."""
