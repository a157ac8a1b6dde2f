"""What the tests of GPU kernels share: on a GPU where there is one, else in Triton's interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.interpreted import CUDA as CUDA

DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32  # the interpreter truncates to bf16 instead of rounding
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
# Triton's interpreter rounds E4M3 wrongly (it loses a carry into the exponent), and a GPU before Ada has no E4M3.
EIGHT = [INT8, E4M3] if CUDA and torch.cuda.get_device_capability() >= (8, 9) else [INT8]


def draw(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=DEVICE)


def seeded(seed: int, *shape: int) -> Tensor:
    return normal(draw(seed), *shape)


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers from 0 to 1."""
    return torch.rand(shape, generator=generator, device=DEVICE)


def levels(generator: torch.Generator, *shape: int) -> Tensor:
    """int8 numbers from -127 to 127."""
    return torch.randint(-127, 128, shape, generator=generator, device=DEVICE, dtype=torch.int8)


def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
