"""Pictures of batch lines: slow ones never hold another's line, and a line that is retried is prepared once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any, cast

import pytest

from api.batches import inputs as batch_inputs
from api.batches.inputs import BatchInputs
from api.errors import ApiError
from api.service import Service
from core.jobs.record import JobDraft
from tests.api.world import eventually


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
