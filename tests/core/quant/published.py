"""Writes layers in the published layouts of 4 bits, by plain loops, with the weights that these stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from core.quant.fp4_layouts import Fp4Layout
from core.quant.int4_layouts import Layout

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(levels: Tensor, dim: int, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """int32 of eight levels along `dim`: bits 4·i to 4·i + 3 are the level number `order[i]`."""
    levels = levels.long() if dim == 1 else levels.long().t()
    missing = -levels.shape[1] % 8
    levels = torch.nn.functional.pad(levels, (0, missing))
    words = torch.zeros(len(levels), levels.shape[1] // 8, dtype=torch.long)
    for column in range(words.shape[1]):
        for i, place in enumerate(order):
            words[:, column] |= levels[:, 8 * column + place] << (4 * i)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return (words if dim == 1 else words.t()).contiguous()


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def draw_fp4(layout: Fp4Layout, n: int, k: int, *, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of a random layer in NVFP4, and its weight fp32 [N, K]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    scales = (torch.rand(n, k // 16, generator=generator) * 448).to(torch.float8_e4m3fn)
    total = torch.tensor(1 / 4096 / k**0.5)
    weight = torch.empty(n, k)
    for column in range(k):
        numbers = torch.tensor([E2M1[code % 8] * (-1) ** (code // 8) for code in codes[:, column].tolist()])
        weight[:, column] = numbers * scales[:, column // 16].float() * total
    words = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    if layout.method == "compressed-tensors":
        return {"weight_packed": words, "weight_scale": scales, "weight_global_scale": (1 / total).reshape(1),
                "input_global_scale": torch.ones(1)}, weight  # fmt: skip
    parts = {"weight": words, "weight_scale": scales, "weight_scale_2": total, "input_scale": torch.tensor(1.0)}
    return parts, weight


def draw(
    layout: Layout, n: int, k: int, dtype: torch.dtype, *, symmetric: bool, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of a random layer, and its weight fp32 [N, K]."""
    generator = torch.Generator().manual_seed(seed)
    size = layout.group or k
    groups = k // size
    levels = torch.randint(0, 16, (n, k), generator=generator)
    zeros = torch.full((n, groups), 8)
    if not symmetric:
        zeros = torch.randint(1 if layout.shifted else 0, 16, (n, groups), generator=generator)
        zeros[0, 0] = 3
    scales = ((torch.rand(n, groups, generator=generator) + 0.5) * 2 / k**0.5 / 8).to(dtype)
    weight = torch.empty(n, k)
    for column in range(k):
        group = column // size
        weight[:, column] = (levels[:, column] - zeros[:, group]) * scales[:, group].float()
    if layout.method == "awq":
        parts = {"qweight": packed(levels.t(), 1, AWQ_ORDER), "scales": scales.t().contiguous()}
        parts |= {"qzeros": packed(zeros.t(), 1, AWQ_ORDER)} if layout.zeros else {}
    elif layout.method == "gptq":
        stored = zeros.t() - int(layout.shifted)
        parts = {"qweight": packed(levels.t(), 0), "scales": scales.t().contiguous(), "qzeros": packed(stored, 1),
                 "g_idx": (torch.arange(k) // size).int()}  # fmt: skip
    else:
        parts = {"weight_packed": packed(levels, 1), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
        parts |= {"weight_zero_point": packed(zeros, 0)} if layout.zeros else {}
    return parts, weight
