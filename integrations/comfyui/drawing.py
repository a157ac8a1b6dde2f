"""Runs one job: creates it, shows its progress in ComfyUI, fetches its pictures, and cancels it if ComfyUI stops.

Coroutines run on ComfyUI's event loop. What blocks runs on threads of its own, so that several jobs of a workflow are
in the service at once, and a stop is noticed within `POLL_S` whatever the service does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import comfy.model_management
import comfy.utils

from . import pictures
from .service import Busy, Client, DiptychError, Event, ServiceError, Unreachable

T = TypeVar("T")

POLL_S = 0.25  # between looks at ComfyUI's stop button
CALL_S = 120.0  # for one call, with up to 16 MiB of a picture
RETRY_S = 1.0
LOST_S = 30.0  # how long a service that does not answer is waited for
CANCEL_S = 5.0
GRACE_S = 10.0  # beyond the job's deadline, for the service to say so
PREVIEW_SIDE = 512
_ENDS = ("succeeded", "failed", "cancelled", "expired")

log = logging.getLogger("diptych")


@dataclass(frozen=True)
class Drawn:
    """The job object of a job that succeeded, and the files of those of its pictures that the service shows."""

    job: dict[str, Any]
    files: list[bytes]

    @property
    def images(self) -> list[dict[str, Any]]:
        """What the service says of the files."""
        return [image for image in self.job["images"] if _is_shown(image)]

    @property
    def warnings(self) -> list[str]:
        """What the service says of the pictures, each sentence once."""
        refused = len(self.job["images"]) - len(self.images)
        refusals = [f"{refused} of the images are refused by the service's checker of contents"] if refused else []
        return list(dict.fromkeys([*refusals, *(text for image in self.job["images"] for text in image["warnings"])]))


async def draw(
    client: Client, request: Mapping[str, Any], pngs: Sequence[bytes], place: Callable[[list[str]], dict[str, Any]],
    timeout_s: float,
) -> Drawn:  # fmt: skip
    """Draw a request within `timeout_s`. `place` returns the fields that name its pictures, given the ids of their
    files.

    Raises `DiptychError`, and what ComfyUI raises when it is stopped; the job is cancelled then.
    """
    try:
        return await asyncio.wait_for(_draw(client, request, pngs, place), timeout_s + GRACE_S)
    except asyncio.TimeoutError:  # noqa: UP041 (another error before Python 3.11)
        raise DiptychError(f"timeout_s: nothing was drawn within {timeout_s:g} s; the job is cancelled") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DiptychError(f"{client.service.name!r} answers otherwise than Diptych does: {error!r}") from error
    finally:
        client.close()


async def _draw(
    client: Client, request: Mapping[str, Any], pngs: Sequence[bytes], place: Callable[[list[str]], dict[str, Any]]
) -> Drawn:
    ids: list[str] = []
    try:
        for png in pngs:
            ids.append(await _watched(partial(client.upload, png)))
        return await _run(client, {**request, **place(ids)})
    finally:
        # The job has copies. What is not deleted here the service deletes later.
        remover = Client(client.service, CANCEL_S, total_s=CALL_S)
        for id in ids:
            _on_thread(partial(remover.json, "DELETE", f"/v1/files/{id}"))


async def _run(client: Client, request: Mapping[str, Any]) -> Drawn:
    id = f"comfyui-{uuid.uuid4().hex}"  # chosen here: a job whose creation is not answered can be cancelled
    create = partial(client.json, "PUT", f"/v1/jobs/{id}", request)
    created = _on_thread(create)
    try:
        while True:
            try:
                await _watch(created)
                break
            except Busy as busy:
                log.warning("Diptych: %s; asking again in %g s", busy, busy.retry_s)
                await _pause(busy.retry_s)
                created = _on_thread(create)
        job = await _follow(client, id)
        shown = [k for k, image in enumerate(job["images"][: request["n"]]) if _is_shown(image)]
        files = [await _watched(partial(client.content, f"/v1/jobs/{id}/images/{k}")) for k in shown]
    except BaseException as error:
        if not isinstance(error, ServiceError):
            # A thread: a loop that ends cancels this coroutine more than once.
            cancelled = _on_thread(partial(_cancel, client, id, created))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({_wrapped(cancelled)}, timeout=2 * CANCEL_S)
        raise
    return Drawn(job, [file for file in files if file is not None])


def _is_shown(image: Mapping[str, Any]) -> bool:
    """Whether an image of a job object has a file: the service's checker of contents did not refuse it."""
    return image["url"] is not None


def _cancel(client: Client, id: str, created: concurrent.futures.Future[Any]) -> None:
    """Cancel a job, also one that is being created. One that has ended stays as it is. Blocks."""
    concurrent.futures.wait([created], CANCEL_S)
    client.close()
    try:
        Client(client.service, CANCEL_S, total_s=CALL_S).json("POST", f"/v1/jobs/{id}/cancel")
    except Unreachable:
        log.warning("Diptych: job %s could not be cancelled, and may run until its deadline", id)
    except DiptychError:  # it was never created
        pass


async def _follow(client: Client, id: str) -> dict[str, Any]:
    """Show a job's events until it succeeds, and return the job object. Raises `DiptychError` if it ends otherwise.

    A stream that breaks is resumed where it ended.
    """
    progress, last, lost_at = Progress(client, id), "", None
    while True:
        events = client.events(id, last)
        try:
            while (event := await _watched(partial(next, events, None), None)) is not None:
                last = event.id or last
                if event.type in _ENDS:
                    return _succeeded(event.data)
                if event.type == "progress":
                    await progress.show(event)
        except Unreachable:
            pass
        finally:
            with contextlib.suppress(ValueError):  # a thread still reads it, which `Client.close` ends
                events.close()
        # The stream broke, the server stops, or the events have expired.
        now = asyncio.get_running_loop().time()
        try:
            job = await _watched(partial(client.json, "GET", f"/v1/jobs/{id}"))
            lost_at = None
        except Unreachable:
            lost_at = now if lost_at is None else lost_at
            if now - lost_at >= LOST_S:
                raise
        else:
            if job["status"] in _ENDS:
                return _succeeded(job)
        await _pause(RETRY_S)


def _succeeded(job: dict[str, Any]) -> dict[str, Any]:
    if job["status"] == "succeeded":
        return job
    error = job.get("error") or {"message": f"the job was {job['status']}", "code": job["status"]}
    # Not cancelled again: it has ended.
    raise ServiceError(f"{error['message']} ({error['code']}, job {job['id']})")


class Progress:
    """Shows a job's steps and previews at the node that runs."""

    def __init__(self, client: Client, id: str) -> None:
        self._client, self._id = client, id
        self._bar = comfy.utils.ProgressBar(1)

    async def show(self, event: Event) -> None:
        """Show an event's progress, with the preview of its first picture that has a new one."""
        preview = None
        if event.data.get("previews"):
            path = f"/v1/jobs/{self._id}/preview?image={int(event.data['previews'][0])}"
            with contextlib.suppress(DiptychError):  # the next one may come
                file = await _watched(partial(self._client.content, path), CANCEL_S)
                preview = None if file is None else ("JPEG", pictures.read(file), PREVIEW_SIDE)
        self._bar.update_absolute(event.data["steps_done"], event.data["steps"], preview)


async def _pause(seconds: float) -> None:
    """Wait. Raises what ComfyUI raises when it is stopped."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while (left := until - loop.time()) > 0:
        await asyncio.sleep(min(POLL_S, left))
        comfy.model_management.throw_exception_if_processing_interrupted()


async def _watched(call: Callable[[], T], timeout_s: float | None = CALL_S) -> T:
    """The result of a call that blocks, on a thread of its own. Raises what ComfyUI raises when it is stopped."""
    return await _watch(_on_thread(call), timeout_s)


async def _watch(call: concurrent.futures.Future[T], timeout_s: float | None = CALL_S) -> T:
    future, loop = _wrapped(call), asyncio.get_running_loop()
    until = None if timeout_s is None else loop.time() + timeout_s
    while not (await asyncio.wait({future}, timeout=POLL_S))[0]:
        comfy.model_management.throw_exception_if_processing_interrupted()
        if until is not None and loop.time() > until:
            raise Unreachable(f"The Diptych service did not answer within {timeout_s:g} s")
    comfy.model_management.throw_exception_if_processing_interrupted()
    return call.result()


def _wrapped(call: concurrent.futures.Future[T]) -> asyncio.Future[T]:
    """For this loop; an error is not logged when nobody is left to read it, as after a stop."""
    future = asyncio.wrap_future(call)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _on_thread(call: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run a call that blocks on a daemon thread: neither the event loop nor ComfyUI waits for it to end."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="diptych", daemon=True).start()
    return future
