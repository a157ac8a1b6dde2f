"""The ends of a step: tokens that are known, and the most likely ones, as torch finds them."""

from __future__ import annotations

import pytest
import torch

from tests.core.kernels.cuda.device import DEVICE, seeded

# isort: split
from core.kernels.cuda import token_kernels
from llm import sample


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 70), (5, 40), (3, 64)])
def test_the_most_likely_tokens_are_torchs(rows: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_kernels, "_BLOCK", 16)
    logits = (seeded(0, 4, rows, vocabulary) * 2).round()  # many are equal
    for each, strange in zip(logits[1:], (torch.nan, torch.inf, -torch.inf), strict=True):
        each[rows // 2, vocabulary - 1] = strange
    logits = logits.flatten(0, 1)
    expected = sample.likeliest(logits)
    assert int((expected < 0).sum()) == 3
    owners = torch.randperm(4 * rows, generator=torch.Generator().manual_seed(0)).int().to(DEVICE)
    latest = torch.full((4 * rows + 1,), vocabulary, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(4 * rows, dtype=torch.int64, device=DEVICE)
    assert token_kernels.likeliest(logits, owners, latest, out) is out
    assert torch.equal(out, expected) and torch.equal(latest[owners.long()].long(), out)
    assert int(latest[-1]) == vocabulary, "others are left as they are"
    token_kernels.likeliest(logits[:0], owners[:0], latest, out[:0])


def test_tokens_that_are_not_known_are_the_latest_ones() -> None:
    latest = torch.tensor([5, -1, 9], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([3, -1, -1, -1, 0], dtype=torch.int32, device=DEVICE)
    sequences = torch.tensor([0, 0, 1, 2, 2], dtype=torch.int32, device=DEVICE)
    assert token_kernels.known(tokens, sequences, latest).tolist() == [3, 5, 0, 9, 0]
