"""Conditioning of many requests in one batch: what each row holds, for tensors of one length and of many."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sampling import sigmas
from pipeline.sampling.denoise import BatchGatherer, Conditioning, DenoisingState
from tests.pipeline.sampling.test_sigmas import SDXL

TABLE = sigmas.table(SDXL, "euler", 3)
REQUESTS = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 20)), min_size=1, max_size=5)  # rows, tokens


def rider(seed: int, rows: int, tokens: int) -> DenoisingState:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "text": torch.randn(rows, tokens, 4, generator=generator),
        "lengths": torch.full((rows,), tokens),
        "pooled": torch.randn(rows, 3, generator=generator),
    }
    x = torch.randn(1, 4, 2, 2, generator=generator)
    return DenoisingState(TABLE, seed % 3, x, torch.zeros_like(x), Conditioning(tensors, 5.0))


@given(REQUESTS, st.integers(0, 3), st.sampled_from([1, 8, 32]))
def test_every_row_holds_its_requests_tensors(requests: list[tuple[int, int]], padding: int, multiple: int) -> None:
    riders = [rider(seed, *one) for seed, one in enumerate(requests)]
    rows = sum(one.conditioning.rows for one in riders)
    made = BatchGatherer(torch.float32, {"text": multiple}).inputs(riders, rows + padding)
    longest = max(tokens for _, tokens in requests)
    length = made.conditioning["text"].shape[1]
    assert length % multiple == 0 and longest <= length < longest + multiple
    row = 0
    owners = [one for one in riders for _ in range(one.conditioning.rows)]
    numbers = [number for one in riders for number in range(one.conditioning.rows)]
    for one, number in zip([*owners, *riders[:1] * padding], [*numbers, *[0] * padding], strict=True):
        own, tokens = one.conditioning.tensors, one.conditioning.tensors["text"].shape[1]
        assert torch.equal(made.conditioning["text"][row, :tokens], own["text"][number])
        assert not made.conditioning["text"][row, tokens:].any()
        assert made.conditioning["lengths"][row] == tokens
        assert torch.equal(made.conditioning["pooled"][row], own["pooled"][number])
        assert made.timestep[row] == TABLE.timesteps[one.step]
        row += 1
    assert row == rows + padding == made.sample.shape[0]


@given(REQUESTS, st.integers(0, 3))
def test_lengths_are_said_where_they_differ(requests: list[tuple[int, int]], padding: int) -> None:
    riders = [rider(seed, *one) for seed, one in enumerate(requests)]
    rows = sum(one.conditioning.rows for one in riders)
    made = BatchGatherer(torch.float32, {}).inputs(riders, rows + padding).conditioning
    if len({tokens for _, tokens in requests}) == 1:
        assert "text_lengths" not in made
        return
    assert made["text_lengths"].tolist() == made["lengths"].tolist()
    for row, count in enumerate(made["lengths"].tolist()):
        assert made["text"][row, :count].all() and not made["text"][row, count:].any()
