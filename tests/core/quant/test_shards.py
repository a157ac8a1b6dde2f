"""Slices of linear layers: those of the whole, and their sum is the whole's result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from core.quant.dynamic import Int8DynamicLinear
from core.quant.fp8 import Fp8Linear
from core.quant.int4 import Int4Linear
from core.quant.linear import Int8Linear
from core.quant.shards import input_slice, output_slice

K, N = 768, 24
KINDS = [None, Int8Linear, Fp8Linear, Int4Linear]


def layer(kind: type | None, *, bias: bool = True) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(K, N, bias=bias).requires_grad_(False)
    linear.weight.copy_(torch.randn(N, K, generator=generator))
    if kind is None:
        return linear
    inverse = 10 + 20 * torch.rand(K, generator=generator)
    made: nn.Module = kind.of(linear, inverse)  # type: ignore[attr-defined]
    return made


def x() -> Tensor:
    return torch.randn(5, K, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_outputs_are_those_of_the_whole(kind: type | None) -> None:
    whole = layer(kind)
    parts = [output_slice(whole, start, start + 8) for start in range(0, N, 8)]
    torch.testing.assert_close(torch.cat([part(x()) for part in parts], dim=-1), whole(x()), rtol=1e-4, atol=1e-4)
    padded = output_slice(whole, 16, N, size=10)(x())
    assert torch.equal(padded[:, 8:], torch.zeros(5, 2))
    torch.testing.assert_close(padded[:, :8], whole(x())[:, 16:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 6])  # 3 × 256; 2 and 6 cut blocks of 4-bit weights, not their groups
def test_slices_of_inputs_sum_to_the_whole(kind: type | None, ranks: int) -> None:
    whole, each = layer(kind), K // ranks
    parts = [input_slice(whole, n * each, (n + 1) * each, bias=n == 0) for n in range(ranks)]
    total = sum(part(x()[:, n * each : (n + 1) * each]) for n, part in enumerate(parts))
    assert isinstance(total, Tensor)
    torch.testing.assert_close(total, whole(x()), rtol=1e-4, atol=1e-4)
    if kind is not None:
        assert all(type(part) is kind for part in parts)


def test_what_a_slice_would_change_is_refused() -> None:
    with pytest.raises(ValueError, match="input 96 cuts a group of 128"):
        input_slice(layer(Int4Linear), 96, 192, bias=False)
    with pytest.raises(ValueError, match="whole rows of inputs"):
        input_slice(layer(Int8DynamicLinear), 0, 8, bias=False)
    with pytest.raises(ValueError, match="layers of Conv1d are not split"):
        output_slice(nn.Conv1d(1, 1, 1), 0, 1)
