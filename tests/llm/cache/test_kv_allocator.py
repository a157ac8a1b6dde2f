"""A sequence's place in the KV cache is had whole or not at all, and its row of the table names its pages."""

from __future__ import annotations

import pytest
import torch

from core.kernels.kv_cache import Kind, KVCache, TokenBatch
from llm.cache.kv_allocator import KVAllocator
from llm.cache.pages import PAGE, PageAllocator
from llm.features.beam_search import BeamSearch
from llm.parameters import TextParameters
from llm.sequence import SequenceState
from tests.llm import stage


def places(*, pages: int, sequences: int) -> tuple[KVAllocator, KVCache, PageAllocator]:
    cache = KVCache(layers=1, kv_heads=1, head_dim=16, pages=pages, sequences=sequences, context=8 * PAGE)
    free = PageAllocator(pages)
    return KVAllocator(cache, free, sequences=sequences), cache, free


def sequence(first: int, length: int) -> SequenceState:
    return stage.state_of(TextParameters(tuple(range(first, first + length)), 8))


def test_too_few_pages_hold_nothing() -> None:
    allocator, _, pages = places(pages=2, sequences=2)
    large = sequence(0, 2 * PAGE)  # and a page for the next token
    assert not allocator.allocate(large)
    assert allocator.held == 0 and pages.free == 2 and large.row == -1 and large.holding.pages == []


def test_a_newcomer_leaves_each_of_the_others_a_page_to_grow_into() -> None:
    allocator, _, _ = places(pages=2, sequences=3)
    one, other = sequence(0, 4), sequence(20, 4)
    assert allocator.allocate(one)
    assert not allocator.allocate(other), "the last page is what the first one grows into"
    assert allocator.grow(one, PAGE + 1) and not allocator.grow(one, 2 * PAGE + 1)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_leave_each_of_them_a_copy_and_a_page_to_grow_into(width: int) -> None:
    """And each of the others its page: or the last one admitted would be preempted at once."""
    for pages, enough in ((1 + 2 * (width - 1) + 1, False), (2 + 2 * (width - 1) + 1, True)):
        allocator, _, _ = places(pages=pages, sequences=width + 1)
        other, beams = sequence(50, 4), sequence(0, 4)
        beams.beams = BeamSearch(TextParameters((0,), 8, beams=width, temperature=0.0), frozenset(), 100)
        assert allocator.allocate(other)
        assert allocator.allocate(beams) == enough


@pytest.mark.parametrize("kind", ["float", "int8", "fp8"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_copied_page_has_the_keys_and_values_of_its_source(kind: Kind, turned: bool) -> None:
    cache = KVCache(
        layers=2, kv_heads=2, head_dim=8, pages=4, sequences=2, context=2 * PAGE, kind=kind, turned=turned
    )  # fmt: skip
    cache.place(0, [1])
    cache.place(1, [3])
    step = TokenBatch.of([0] * 5, [*range(5)], [0] * 5, [])
    for layer in range(2):
        keys, values = torch.randn(2, 5, 2, 8, generator=torch.Generator().manual_seed(layer))
        cache.write(layer, keys, values, step)
    cache.copy_page(2, 3)
    cache.copy_page(1, 3)  # the last one counts
    cache.settle()
    for layer in range(2):
        for both in cache.read(layer, torch.tensor([0, 1]), torch.tensor([5, 5])):
            assert torch.equal(both[0], both[1]) and bool((both[0, :, :5] != 0).any())


def test_all_rows_taken_is_full_until_one_is_freed() -> None:
    allocator, _, pages = places(pages=8, sequences=1)
    one, other = sequence(0, 4), sequence(20, 4)
    assert allocator.allocate(one) and allocator.full
    assert not allocator.allocate(other)
    allocator.free(one)
    assert (one.row, one.computed, one.drafted) == (-1, 0, 0) and pages.free == 8
    assert not allocator.full and allocator.allocate(other)


def test_a_forked_beam_forgets_what_its_row_had_drafted() -> None:
    """Of another beam, before; and of its source a drafter has the shared pages alone."""
    allocator, _, _ = places(pages=16, sequences=2)
    first = sequence(0, PAGE + 3)
    first.beams = BeamSearch(TextParameters((0,), 8, beams=2, temperature=0.0), frozenset(), 100)
    beams = first.beams
    assert allocator.allocate(first)
    beams.states, first.computed, first.drafted = [first], PAGE + 3, PAGE + 2
    beams.idle[0].drafted, beams.idle[0].features = 5 * PAGE, torch.ones(3, 4)
    assert allocator.grow_beams(beams, 1)
    allocator.fork(beams, [0, 0])
    assert [state.drafted for state in beams.states] == [PAGE + 2, PAGE] and beams.states[1].features is None
    allocator.free(first)
