"""What is counted as in hand, and for which queues there is room. That Celery keeps to it, test_worker.py shows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.prefetch import PrefetchLimiter

LIMITS = {"image": 2, "text": 3}


@given(st.lists(st.tuples(st.sampled_from(["image", "text"]), st.booleans())))
def test_one_queue_never_takes_the_room_of_another(steps: list[tuple[str, bool]]) -> None:
    prefetch, inside = PrefetchLimiter(["image", "text"]), {"image": 0, "text": 0}
    prefetch.serve(LIMITS)
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


def test_only_served_queues_are_consumed() -> None:
    prefetch = PrefetchLimiter(["image", "text"])
    assert prefetch.queues == []
    prefetch.serve({"text": 4})
    assert prefetch.queues == ["text"]
    assert prefetch.limits == {"text": 4}
    assert prefetch.counts() == {"text": 0}
    assert not prefetch.room("image")


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
