"""Rows gathered from a table, joined to sequences and taken out of them again: exactly torch's."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kernels.cpu.token_program import TokenProgram
from tests.core.quant.stage import Few, Many, Seed, Several, Watched, called, kernels, normal, seeded, threads


@settings(max_examples=60)
@given(...)
def test_embed(
    images: Few, tokens: Several, channels: Many, count: Many, half: bool, placed: bool,
    scale: Annotated[float, st.sampled_from((1.0, 2.3))], seed: Seed,
) -> None:  # fmt: skip
    """Of fp32 and bf16 tables, which may be slices, scaled, with and without positions."""
    table = normal(seed, count, channels + 3).to(torch.bfloat16 if half else torch.float32)[:, 2:-1]
    table[0, 0] = -0.0
    indices = torch.randint(0, count, (images * tokens,), generator=seeded(seed), dtype=torch.int32)
    positions = normal(seed + 1, tokens, channels)
    found = called(lambda p: p.embed(table, indices, scale=scale, positions=positions if placed else None))
    wanted = table[indices.long()].float() * scale
    wanted = wanted + positions.repeat(images, 1) if placed else wanted
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def test_an_embedding_of_a_buffer_gathers_its_rows() -> None:
    """Padding of tokens: a row of the table takes the place of some. Indices are read when the program runs."""
    x, indices = normal(0, 6, 20), torch.zeros(8, dtype=torch.int32)
    p = Watched()
    held = p.buffer(7, 20)
    p.place(x, held[:6], images=1)
    out = p.buffer(8, 20)
    assert p.embed(held, indices, out=out) is out
    held[6] = normal(1, 20)
    for order in ([0, 1, 2, 6, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0, 0]):
        indices.copy_(torch.tensor(order))
        p.run()
        assert torch.equal(out, torch.cat([x, normal(1, 1, 20).view(1, 20)])[order])


@settings(max_examples=25)
@given(...)
def test_sequences_are_joined_and_split(
    images: Few, n1: Several, n2: Several, padding: Annotated[int, st.integers(0, 3)], channels: Many, as_bytes: bool,
    seed: Seed,
) -> None:  # fmt: skip
    """[images, n1] and [images, n2] tokens in one sequence, whatever pads it left alone; all may be slices."""
    tokens = n1 + n2 + padding
    parts = [normal(seed + n, images * n, channels + 2, scale=50) for n in (n1, n2)]
    if as_bytes:
        parts = [part.clamp(0, 255).to(torch.uint8) for part in parts]
    first, second = (part[:, 1:-1] for part in parts)
    p = Watched()
    wide = p.buffer(images * tokens, channels + 3, dtype=first.dtype).fill_(7)
    out = wide[:, 2:-1]
    p.place(first, out, images=images)
    p.place(second, out, images=images, at=n1)
    back = [p.take(out, images=images, at=0, rows=n1), p.take(out, images=images, at=n1, rows=n2)]
    with threads(2):
        p.run()
    rest = torch.full((images, padding, channels), 7).to(first.dtype)
    whole = torch.cat([first.reshape(images, n1, -1), second.reshape(images, n2, -1), rest], dim=1)
    assert torch.equal(out, whole.flatten(0, 1))
    assert torch.equal(back[0], first) and torch.equal(back[1], second)
    assert (wide[:, :2] == 7).all() and (wide[:, -1] == 7).all()


X, INDICES = torch.zeros(6, 8), torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "arguments", "options", "said"),
    [
        ("embed", (X, torch.zeros(4)), {}, "indices: must be torch.int32"),
        ("embed", (X.double(), INDICES), {}, "table: must be torch.float32"),
        ("embed", (X, INDICES), {"positions": torch.zeros(3, 8)}, "4 rows are no multiple"),
        ("embed", (X, INDICES), {"positions": torch.zeros(2, 7)}, "positions: must be"),
        ("embed", (X, INDICES), {"out": torch.zeros(4, 7)}, "out: must be"),
        ("place", (X, torch.zeros(6, 7)), {"images": 2}, r"out: must be torch.float32 \[6, 8\]"),
        ("place", (X, torch.zeros(6, 8, dtype=torch.uint8)), {"images": 2}, "out: must be torch.float32"),
        ("place", (X.double(), torch.zeros(6, 8)), {"images": 2}, "x: must be torch.float32"),
        ("place", (X, torch.zeros(9, 8)), {"images": 2}, "6 and 9 rows are not those of 2 images"),
        ("place", (X, torch.zeros(9, 8)), {"images": 4}, "6 and 9 rows are not those of 4 images"),
        ("place", (X, torch.zeros(8, 8)), {"images": 2, "at": 2}, "place: 3 rows from 0 of 3 do not fit from 2 of 4"),
        ("place", (X, torch.zeros(8, 8)), {"images": 2, "at": -1}, "place: 3 rows from 0 of 3 do not fit from -1 of 4"),
        ("take", (X,), {"images": 2, "at": 2, "rows": 2}, "take: 2 rows from 2 of 3 do not fit from 0 of 2"),
        ("take", (X,), {"images": 2, "at": -1, "rows": 1}, "take: 1 rows from -1 of 3 do not fit from 0 of 1"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, arguments: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        getattr(TokenProgram(kernels()), name)(*arguments, **options)
