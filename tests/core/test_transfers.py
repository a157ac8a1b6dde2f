"""Copies to the device: what arrives, and where; on a GPU beside work that is queued there."""

from __future__ import annotations

import pytest
import torch

from core import transfers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_copies_arrive_beside_others() -> None:
    given = [torch.arange(7), torch.rand(3, 5)]
    made = [*transfers.copy_to_device(given, DEVICE), transfers.to_device(given[1], DEVICE)]
    assert all(one.device.type == DEVICE.type for one in made)
    assert all(torch.equal(one.cpu(), wanted) for one, wanted in zip(made, [*given, given[1]], strict=True))


@pytest.mark.parametrize("size", [1, transfers._PART, transfers._PART + 3])
def test_memory_is_filled_where_it_was_allocated(size: int) -> None:
    memory = transfers.allocated(size, DEVICE)
    address, host = memory.data_ptr(), torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert torch.equal(transfers.filled(memory, host).cpu(), host) and memory.data_ptr() == address
