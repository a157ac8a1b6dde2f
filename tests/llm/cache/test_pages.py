"""Pages: nothing leaks, nothing is held twice by strangers, equal beginnings share, and what is idle is found again."""

from __future__ import annotations

import random

import pytest

from core.batching.slots import IntegrityError
from llm.cache.pages import PAGE, PageAllocator, SequencePages


def published(pages: PageAllocator, tokens: list[int], count: int | None = None) -> SequencePages:
    """A sequence that holds pages for these tokens, the first `count` of which are computed."""
    holding = SequencePages()
    assert pages.extend(holding, len(tokens))
    pages.publish(holding, tokens, len(tokens) if count is None else count)
    return holding


def found(pages: PageAllocator, tokens: list[int]) -> SequencePages:
    holding = SequencePages()
    pages.find(holding, tokens)
    return holding


def test_10_000_operations_leave_every_page_free() -> None:
    """Begin, grow, publish and release in any order; whoever finds a page finds what was written for these tokens."""
    draw = random.Random(0)
    pages = PageAllocator(24)
    live: list[tuple[SequencePages, list[int]]] = []
    written: dict[tuple[int, int], tuple[int, ...]] = {}  # page → the tokens up to its end, as of the last write
    shared = refused = 0
    for _ in range(10_000):
        what = draw.random()
        if what < 0.3:
            # Few different beginnings, so that many are shared.
            tokens = [draw.randint(0, 1) for _ in range(3)] * draw.randint(1, 30)
            holding = found(pages, tokens)
            shared += holding.shared
            for number in range(holding.shared):
                assert written[holding.pages[number], number] == tuple(tokens[: (number + 1) * PAGE])
            if not pages.extend(holding, len(tokens)):
                refused += 1
                pages.release(holding)
                continue
            live.append((holding, tokens))
            for number in range(holding.shared, len(holding.pages)):
                written[holding.pages[number], number] = tuple(tokens[: (number + 1) * PAGE])
            pages.publish(holding, tokens, len(tokens))
        elif what < 0.6 and live:
            holding, tokens = draw.choice(live)
            tokens += [draw.randint(0, 1) for _ in range(draw.randint(1, 20))]
            if not pages.extend(holding, len(tokens)):
                del tokens[holding.room :]
            for number in range(holding.published, len(holding.pages)):
                written[holding.pages[number], number] = tuple(tokens[: (number + 1) * PAGE])
            pages.publish(holding, tokens, len(tokens))
        elif live:
            pages.release(live.pop(draw.randrange(len(live)))[0])
        if draw.random() < 0.02:
            pages.check()
        mine = [holding.pages[holding.published :] for holding, _ in live]
        assert len({p for own in mine for p in own}) == sum(map(len, mine)), "an unpublished page has two holders"
    for holding, _ in live:
        pages.release(holding)
    pages.check()
    assert pages.free == pages.capacity and pages.held == 0
    assert shared > 1000 and refused > 100


def test_the_last_token_is_never_found() -> None:
    pages, tokens = PageAllocator(4), list(range(PAGE))
    first = published(pages, tokens)
    assert found(pages, tokens).pages == [] and found(pages, [*tokens, 99]).pages == first.pages
    assert pages.hits == PAGE


def test_two_that_computed_the_same_keep_a_page_each() -> None:
    pages, tokens = PageAllocator(8), [5] * (2 * PAGE)
    one, other = published(pages, tokens), published(pages, tokens)
    third = found(pages, [*tokens, 0])
    assert third.pages == one.pages != other.pages
    for holding in (one, other, third):
        pages.release(holding)
    pages.check()
    assert pages.free == 8


def test_idle_pages_are_found_until_their_place_is_needed() -> None:
    """The longest unused go first, and of one sequence the end before the beginning."""
    pages = PageAllocator(4)
    old, new = [1] * (2 * PAGE), [2] * (2 * PAGE)
    for tokens in (old, new):
        pages.release(published(pages, tokens))
    assert pages.free == 4 and pages.held == 0 and pages.usage() == 0
    assert pages.extend(SequencePages(), PAGE) and pages.usage() == 1 / 4
    assert [len(found(pages, [*tokens, 0]).pages) for tokens in (old, new)] == [1, 2]


def test_books_that_do_not_balance_are_told() -> None:
    pages, holding = PageAllocator(2), SequencePages()
    assert pages.extend(holding, PAGE)
    stolen = SequencePages(list(holding.pages))
    pages.release(holding)
    with pytest.raises(IntegrityError, match="not held"):
        pages.release(stolen)
    assert pages.extend(holding, PAGE)
    with pytest.raises(IntegrityError, match="cannot begin"):
        pages.find(holding, [1] * 40)


def test_a_drafter_that_looks_ahead_is_left_a_position_to_guess_from() -> None:
    """As an answer has when it was not preempted, wherever its pages end."""
    pages, tokens = PageAllocator(8, lookahead=1), [*range(2 * PAGE + 2)]
    published(pages, tokens, 2 * PAGE)
    for count, shared in ((2 * PAGE + 2, 2), (2 * PAGE + 1, 1), (PAGE + 1, 0)):
        again = found(pages, tokens[:count])
        assert again.shared == shared
        pages.release(again)
