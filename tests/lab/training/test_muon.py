"""Muon's updates are near orthogonal, and it learns what AdamW learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lab.training.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 8, 32), (2, 48, 12)])
def test_singular_values_end_near_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
    assert float(values.min()) > 0.3 and float(values.max()) < 1.4


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) is no matrix"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)


def test_it_fits_a_linear_map_and_its_state_is_kept() -> None:
    torch.manual_seed(0)
    true, layer = torch.randn(8, 16), nn.Linear(16, 8, bias=False)
    other = nn.Linear(16, 8, bias=False)
    optimizer = Muon(layer.parameters(), lr=0.05)
    losses = []
    for number in range(200):
        if number == 100:  # a copy takes over in mid-run
            other.load_state_dict(layer.state_dict())
            copy = Muon(other.parameters(), lr=0.05)
            copy.load_state_dict(optimizer.state_dict())
            layer, optimizer = other, copy
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - number / 200)
        x = torch.randn(64, 16)
        loss = (layer(x) - x @ true.T).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]
    assert losses[101] < losses[99] * 1.5
