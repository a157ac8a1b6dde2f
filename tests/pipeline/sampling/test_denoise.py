"""Conditioning of many requests in one batch: what each row holds, for tensors of one length and of many."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sampling import sigmas
from pipeline.sampling.denoise import BatchGatherer, Conditioning, DenoisingState, guide
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
    owners = [(one, number) for one in riders for number in range(one.conditioning.rows)]
    owners += [(riders[0], 0)] * padding
    made = BatchGatherer(torch.float32, {"text": multiple}).inputs(riders, len(owners))
    longest = max(tokens for _, tokens in requests)
    length = made.conditioning["text"].shape[1]
    assert length % multiple == 0 and longest <= length < longest + multiple
    assert made.sample.shape[0] == len(owners)
    for row, (one, number) in enumerate(owners):
        own, found = one.conditioning.tensors, {name: tensor[row] for name, tensor in made.conditioning.items()}
        tokens = own["text"].shape[1]
        assert torch.equal(found["text"][:tokens], own["text"][number]) and not found["text"][tokens:].any()
        assert found["lengths"] == tokens and torch.equal(found["pooled"], own["pooled"][number])
        assert made.timestep[row] == TABLE.timesteps[one.step]


@given(REQUESTS, st.integers(0, 3))
def test_guidance_is_of_each_requests_own_rows(requests: list[tuple[int, int]], padding: int) -> None:
    """Of one row it is that row, of two their mixture, in whatever order they come."""
    riders = [rider(seed, *one) for seed, one in enumerate(requests)]
    rows = sum(one.conditioning.rows for one in riders)
    output = torch.randn(rows + padding, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    mixed, first = guide(output, riders), 0
    for number, one in enumerate(riders):
        own = output[first : first + one.conditioning.rows]
        first += one.conditioning.rows
        expected = own[0] if len(own) == 1 else own[0] + 5.0 * (own[1] - own[0])
        torch.testing.assert_close(mixed[number], expected)


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
