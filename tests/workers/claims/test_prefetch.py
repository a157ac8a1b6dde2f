"""What is counted as in hand, and for which queues there is room. That Celery keeps to it, test_worker.py shows."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from workers.claims.prefetch import PrefetchLimiter

LIMITS = {"image": 2, "text": 3}


@given(st.lists(st.tuples(st.sampled_from(["image", "text"]), st.booleans())))
def test_one_queue_never_takes_the_room_of_another(steps: list[tuple[str, bool]]) -> None:
    prefetch, inside = PrefetchLimiter(["image", "text", "unserved"]), {"image": 0, "text": 0}
    assert prefetch.limits == {} and not prefetch.room("image")
    prefetch.serve(LIMITS)
    assert prefetch.limits == LIMITS and not prefetch.room("unserved")
    for queue, comes in steps:
        if comes and prefetch.room(queue):
            prefetch.take(queue)
            inside[queue] += 1
        elif not comes and inside[queue]:
            prefetch.give(queue)
            inside[queue] -= 1
        assert prefetch.counts() == inside
        for name, limit in LIMITS.items():
            assert inside[name] <= limit
            assert prefetch.room(name) is (inside[name] < limit)


def test_nothing_is_taken_in_while_it_is_held_up() -> None:
    held_up = True
    prefetch = PrefetchLimiter(["image"], held_up=lambda: held_up)
    prefetch.serve({"image": 1})
    assert not prefetch.room("image")
    held_up = False
    assert prefetch.room("image")
    prefetch.wake()  # before Celery is there it does nothing
    prefetch.close(0)
    assert prefetch.closed


@given(st.lists(st.sampled_from(["take", "store", "give"]), max_size=60))
def test_jobs_that_are_stored_leave_their_places_to_as_many_others(steps: list[str]) -> None:
    prefetch, drawn, stored = PrefetchLimiter(["image"]), 0, list[ExitStack]()
    prefetch.serve({"image": 3})
    for step in steps:
        if step == "take" and prefetch.room("image"):
            prefetch.take("image")
            drawn += 1
        elif step == "store" and drawn:
            drawn -= 1
            stack = ExitStack()
            stack.enter_context(prefetch.storing("image"))
            stored.append(stack)
        elif step == "give" and stored:
            stored.pop().close()
            prefetch.give("image")
        assert prefetch.counts() == {"image": drawn + len(stored)}
        assert drawn <= 3 and drawn + len(stored) <= 2 * 3
        assert prefetch.room("image") is (drawn < 3 and len(stored) < 3)
