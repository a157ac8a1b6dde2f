"""Top k and top p by the digits of numbers, against the sort: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.core.kernels.cuda.device import DEVICE

# isort: split
from core.kernels.cuda.narrow_kernel import narrow
from llm import sample


@pytest.mark.parametrize("vocabulary", [30, 2600])
@pytest.mark.parametrize("ties", [False, True])
def test_what_a_sort_keeps_is_kept(vocabulary: int, ties: bool) -> None:
    """Whatever the shares and counts, of flat and steep distributions, and of equal numbers those that come first."""
    top_k = torch.tensor([0, 1, 5, 20, 0, 3, vocabulary + 5])
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.99, 0.1, 0.3, 0.999], dtype=torch.float64)
    for seed, spread in enumerate((0.3, 2.0, 8.0)):
        logits = torch.randn(len(top_k), vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
        p = torch.softmax((logits * 2).round() / 2 if ties else logits, -1)
        expected = p.clone()
        sample._narrow_(expected, torch.arange(len(p)), top_k, top_p)
        kept = narrow(p.to(DEVICE), top_k.to(DEVICE), top_p.to(DEVICE)).cpu()
        assert torch.equal(kept, expected)
