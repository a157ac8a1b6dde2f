"""Batch lines: slow pictures never hold another's line, a line that is retried is prepared once, and its deadline is
held against the queued work that counts.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api.batches import inputs as batch_inputs
from api.batches.inputs import BatchInputs
from api.batches.line_handler import BatchLineHandler
from api.batches.lines import BatchLine
from api.batches.routes import GENERATIONS
from api.cards import RegistrySnapshot
from api.errors import ApiError
from api.service import Service
from core.jobs.batches import BatchRecord
from core.jobs.cards import WorkerCard
from core.jobs.record import JobDraft, QueueBacklog
from tests.api.world import CARD, eventually


class Loop:
    """An event loop in a thread, as the part of a service that preparations need."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def submit(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop)


def draft(id: str) -> JobDraft:
    return JobDraft(id, "image", "m", {"n": 1})


def test_a_slow_line_is_asked_for_again_and_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_inputs, "_WAIT_S", 0.05)
    loop, begun = Loop(), []
    inputs, go = BatchInputs(cast(Service, loop)), threading.Event()

    async def slow() -> JobDraft:
        begun.append("slow")
        while not go.is_set():
            await asyncio.sleep(0.01)
        return draft("slow")

    async def quick() -> JobDraft:
        return draft("quick")

    for _ in range(3):
        with pytest.raises(ApiError) as caught:
            inputs.draft("slow", slow)
        assert (caught.value.status, caught.value.code) == (503, "decoder_overloaded")
        assert inputs.draft("quick", quick) == draft("quick")
    go.set()

    def ready() -> bool:
        try:
            return inputs.draft("slow", slow) == draft("slow")
        except ApiError:
            return False

    assert eventually(ready) and begun == ["slow"]


@pytest.mark.parametrize("error", [ApiError(400, "image: no", param="image"), TimeoutError("image: no")])
def test_a_refused_line_is_prepared_anew(error: Exception) -> None:
    inputs, begun = BatchInputs(cast(Service, Loop())), []

    async def refused() -> JobDraft:
        begun.append(1)
        raise error

    for _ in range(2):
        with pytest.raises(type(error), match="image: no"):
            inputs.draft("a", refused)
    assert len(begun) == 2


def test_a_line_that_is_ready_as_the_wait_ends_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_inputs, "_WAIT_S", 0.01)

    class LateFuture(Future[JobDraft]):
        """Has its result just after a wait for it has timed out."""

        def result(self, timeout: float | None = None) -> JobDraft:
            if timeout is not None:
                self.set_result(draft("late"))
                raise TimeoutError
            return super().result()

    class LateService:
        def submit(self, work: Any) -> LateFuture:
            work.close()
            return LateFuture()

    async def late() -> JobDraft:
        return draft("late")

    try:
        assert BatchInputs(cast(Service, LateService())).draft("late", late) == draft("late")
    except ApiError as error:
        assert error.code == "decoder_overloaded", "it is asked for again"


@pytest.mark.parametrize(("share", "accepted"), [(0.0, True), (0.01, True), (1.0, False)])
def test_a_lines_deadline_is_held_against_queued_work_as_far_as_its_estimate_is_reliable(
    share: float, accepted: bool
) -> None:
    """As that of a request."""
    queued = QueueBacklog(1, 100_000, 0, 0)
    worker = WorkerCard("w", "host", 1, "ready", "", 0.0, [CARD])
    now = RegistrySnapshot(
        (worker,), (CARD,), {"image": queued}, {CARD.name: queued}, reliable_shares={CARD.name: share}
    )
    service = SimpleNamespace(
        ignore_unknown=False,
        cards=SimpleNamespace(now=now, seen_by=now.seen_by),
        store=SimpleNamespace(backlog=now.backlogs.__getitem__),
    )
    batch = BatchRecord(
        id="batch_1", owner="", endpoint=GENERATIONS, input_file="", key="", status="in_progress", created=0,
        ended=None, total=1, next=0, completed=0, failed=0, base="", metadata=None, errors=None, output_file=None,
        error_file=None,
    )  # fmt: skip
    line = BatchLine(custom_id="1", body={"prompt": "a cat", "deadline_s": 5}, bytes=1)
    with nullcontext() if accepted else pytest.raises(ApiError, match="deadline_s"):
        BatchLineHandler(cast(Service, service)).draft(batch, 0, line)
