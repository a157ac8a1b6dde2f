"""What is counted as in hand, and for which queues there is room. That Celery keeps to it, test_worker.py shows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.intake import Intake

LIMITS = {"image": 2, "text": 3}


@given(st.lists(st.tuples(st.sampled_from(["image", "text"]), st.booleans())))
def test_one_queue_never_takes_the_room_of_another(steps: list[tuple[str, bool]]) -> None:
    intake, inside = Intake(["image", "text"]), {"image": 0, "text": 0}
    intake.serve(LIMITS)
    for queue, comes in steps:
        if comes and intake.room(queue):
            intake.take(queue)
            inside[queue] += 1
        elif not comes and inside[queue]:
            intake.give(queue)
            inside[queue] -= 1
        assert intake.counts() == inside
        for name, limit in LIMITS.items():
            assert inside[name] <= limit
            assert intake.room(name) is (inside[name] < limit)


def test_only_served_queues_are_consumed() -> None:
    intake = Intake(["image", "text"])
    assert intake.queues == []
    intake.serve({"text": 4})
    assert intake.queues == ["text"]
    assert intake.limits == {"text": 4}
    assert intake.counts() == {"text": 0}
    assert not intake.room("image")


def test_nothing_is_taken_in_while_it_is_held_up() -> None:
    held_up = True
    intake = Intake(["image"], held_up=lambda: held_up)
    intake.serve({"image": 1})
    assert not intake.room("image")
    held_up = False
    assert intake.room("image")
    intake.wake()  # before Celery is there it does nothing
    intake.close(0)
    assert intake.closed
