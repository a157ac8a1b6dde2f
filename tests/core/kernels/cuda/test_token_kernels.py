"""The ends of a step: tokens that are known, and the most likely ones, as torch finds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.core.kernels.cuda.device import DEVICE, ints, seeded

# isort: split
from core.kernels.cuda import token_kernels
from llm.sampling import sample


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


def test_tokens_that_are_not_known_are_the_latest_ones_or_the_guesses() -> None:
    unknown = ints([[5, -1, 9], [6, 7, -1], [8, 2, 4]])
    tokens = ints([3, -1, -1, -1, 0, -2, -3, -2])
    sequences = ints([0, 0, 1, 2, 2, 1, 2, 2])
    out = torch.full_like(tokens, 77)
    assert token_kernels.known(tokens, sequences, unknown, out) is out
    assert out.tolist() == [3, 5, 0, 9, 0, 7, 4, 0]
    assert token_kernels.known(tokens[:4], sequences[:4], unknown[:1], out[:4]).tolist() == [3, 5, 0, 9]


def test_drawn_tokens_are_those_of_the_distributions_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_kernels, "_BLOCK", 16)
    logits = seeded(1, 6, 70) * 3
    logits[1, 5:] = logits[2, :40] = -torch.inf  # whole blocks are excluded
    logits[3, 69] = 60.0
    rows, u = torch.arange(6).repeat(7), torch.tensor([0, 1e-9, 0.2, 0.5, 0.8, 0.99, 1 - 2**-53], dtype=torch.float64)
    u = u.repeat_interleave(6)
    temperatures = torch.linspace(0.3, 3, 42)
    p = torch.softmax(logits[rows.to(DEVICE)] / temperatures.to(DEVICE)[:, None], -1)
    expected = sample.draw(p, u)
    numbers = torch.stack([rows.double(), temperatures.double(), u]).to(DEVICE)
    drawn = token_kernels.draw(logits, *numbers)
    assert bool((p.gather(1, drawn[:, None]) > 0).all())
    assert torch.equal(drawn[:36], expected[:36]), "but at the very end, where sums differ in their last bits"
    assert torch.equal(token_kernels.draw(logits, *numbers[:, 7:8]), drawn[7:8]), "alone"


def test_rows_are_drawn_as_their_probabilities_say() -> None:
    logits, rows = seeded(2, 9, 300) * 3, [8, 0, 3, 5]
    settings = sample.gathered([sample.RowSettings(0.2 + row, 0, 1.0, 0.0, 7 * row) for row in rows])
    indices = np.array([3, 1, 4, 1])
    p, u = sample.probabilities(logits[rows], settings), sample.uniform(settings.seeds, indices, sample.TOKEN)
    drawn = sample.draw_whole(logits, rows, settings, indices)
    assert torch.equal(drawn, sample.draw(p, u))
