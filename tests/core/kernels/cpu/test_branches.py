"""How branches are packed: refused where they do not fit the weights, and read back as the product reads them."""

from __future__ import annotations

import pytest
import torch

from core.kernels.branches import BranchPart
from core.kernels.cpu.branches import pack_branch
from core.kernels.cpu.program import Weights, pack_float, pack_int8
from tests.core.quant.stage import kernels, normal, whole


def weights() -> Weights:
    return pack_float(kernels(), normal(0, 48, 1, 32), None)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        (BranchPart(0, torch.zeros(2, 1, 31), torch.zeros(48, 2)), "down: must be"),
        (BranchPart(0, torch.zeros(2, 9, 32), torch.zeros(48, 2)), "down: must be"),
        (BranchPart(0, torch.zeros(2, 1, 32).double(), torch.zeros(48, 2)), "down: must be"),
        (BranchPart(0, torch.zeros(2, 1, 32), torch.zeros(48, 3)), "up: must be"),
        (BranchPart(16, torch.zeros(2, 1, 32), torch.zeros(48, 2)), "rank 2 for columns 16 to 64"),
        (BranchPart(0, torch.zeros(0, 1, 32), torch.zeros(48, 0)), "rank 0"),
    ],
)
def test_what_does_not_fit_the_weights_is_refused(part: BranchPart, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        pack_branch(kernels(), weights(), None, [part])


def test_ranks_are_padded_below_and_not_above() -> None:
    """So that a small adapter is small in memory: sixteen ranks of down in a group, the exact ranks of up."""
    made = pack_branch(kernels(), weights(), None, [BranchPart(0, normal(1, 4, 1, 32), normal(2, 48, 4))])
    down, up, spans = made.tensors
    assert down.numel() == 32 * 16 and up.numel() == 48 * 4 and spans.shape == (3, 3)
    eight = pack_int8(kernels(), whole(0, 48, 1, 32), torch.ones(48), None)
    made = pack_branch(kernels(), eight, torch.ones(32), [BranchPart(0, normal(1, 17, 1, 32), normal(2, 48, 17))])
    assert made.tensors[0].dtype == torch.int8 and made.tensors[0].numel() == 2 * 2 * 32 * 16
    assert made.size_bytes == sum(tensor.nbytes for tensor in made.tensors)
