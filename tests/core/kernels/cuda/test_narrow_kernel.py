"""Top k and top p by the digits of numbers, against the sort: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.core.kernels.cuda.device import DEVICE

# isort: split
from core.kernels.cuda import narrow_kernel
from llm.sampling import sample


def test_what_a_sort_keeps_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shares and counts, of flat and steep distributions, and of equal numbers those that come first."""
    monkeypatch.setattr(narrow_kernel, "_BLOCK", 16)  # of 40 tokens
    top_k = torch.tensor([0, 1, 5, 20, 45])
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.99, 0.3], dtype=torch.float64)
    spread = torch.tensor([0.3, 8.0, 2.0, 0.5, 8.0])[:, None]
    logits = torch.randn(len(top_k), 40, generator=torch.Generator().manual_seed(0)) * spread
    logits[::2] = (logits[::2] * 2).round() / 2
    p = torch.softmax(logits, -1)
    expected = p.clone()
    sample._narrow_(expected, torch.arange(len(p)), top_k, top_p)
    kept = narrow_kernel.narrow(p.to(DEVICE), top_k.to(DEVICE), top_p.to(DEVICE)).cpu()
    assert torch.equal(kept, expected)
