"""The sum of ranks with its norm, in Triton's interpreter: ranks are tensors of one process, one after another."""

from __future__ import annotations

import pytest
import torch

from tests.core.kernels.cuda.device import CUDA, DEVICE, DTYPE, draw, normal

# isort: split
from core.kernels.cuda.exchange_kernel import Exchange
from core.kernels.cuda.fused_kernels import SplitSums, add_norm_reference

C = 96


def ranks(size: int) -> tuple[list[torch.Tensor], list[Exchange]]:
    memory = [torch.zeros(Exchange.size_bytes(size, C, DTYPE), dtype=torch.uint8, device=DEVICE) for _ in range(size)]
    addresses = [each.data_ptr() for each in memory]
    return memory, [Exchange(addresses, rank, C, DTYPE, torch.device(DEVICE)) for rank in range(size)]


@pytest.mark.parametrize(("size", "to"), [(2, torch.int8), (4, DTYPE)])
def test_all_ranks_add_all_parts_in_their_order(size: int, to: torch.dtype) -> None:
    generator, rows = draw(0), 3
    _memory, exchanges = ranks(size)
    weight, inverse = normal(generator, C).to(DTYPE), 20 * torch.ones(C, device=DEVICE)
    streams = [normal(generator, rows, C).to(DTYPE)] * size
    streams = [x.clone() for x in streams]
    for step in range(5):  # of changing rows, in both slots
        count = rows - step % 2
        xs = [x[:count] for x in streams]
        parts = [torch.randint(-99, 99, (2, count, C), dtype=torch.int32, device=DEVICE) for _ in range(size)]
        sums = [SplitSums(part, torch.full((C,), 0.01, device=DEVICE)) for part in parts]
        total = torch.zeros(count, C, device=DEVICE)
        for each in sums:
            total += each.whole().to(DTYPE).float()
        kept, expected = add_norm_reference(xs[0], weight, 1e-5, inverse, to, SplitSums(total[None]))
        options = {"slot": step % 2}
        for exchange, x, each in zip(exchanges, xs, sums, strict=True):
            exchange.add_norm_(x, each, weight, 1e-5, inverse, to, read=False, **options)
        outs = [
            exchange.add_norm_(x, each, weight, 1e-5, inverse, to, write=False, **options)
            for exchange, x, each in zip(exchanges, xs, sums, strict=True)
        ]
        for out, x in zip(outs, xs, strict=True):
            assert torch.equal(out, outs[0]) and torch.equal(x, xs[0])
            assert (out.float() - expected.float()).abs().max() <= (1 if to == torch.int8 else 1e-2 if CUDA else 1e-4)
            torch.testing.assert_close(x, kept)


def test_a_missing_rank_is_noticed_by_the_check() -> None:
    _memory, exchanges = ranks(2)
    x, one = torch.zeros(1, C, dtype=DTYPE, device=DEVICE), torch.ones(1, 1, C, device=DEVICE)
    exchanges[0].add_norm_(x, SplitSums(one), torch.ones(C, device=DEVICE), 1e-5, None, DTYPE, slot=0, patience=3)
    assert bool((x != 2).all())
