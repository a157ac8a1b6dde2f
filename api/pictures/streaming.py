"""Streams images for `stream: true`: previews and finished images as OpenAI's server-sent events.

These events carry no id and cannot be resumed.
"""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import anyio
from fastapi.sse import format_sse_event

from api.errors import ApiError, job_error, store_error
from api.jobs.follower import not_followed
from api.jobs.presentation import facts, results, shown, size, warnings
from api.pictures.inline_images import Inline, InlineDocument
from api.pictures.links import ImageLinks
from api.service import Service
from contract.image import ImageJob
from core.artifacts import ArtifactError
from core.jobs.connection import StoreError
from core.jobs.record import Job, JobState

_MARK = "{}"  # where an event's data goes
# Images have no tokens, but clients expect these fields.
_USAGE = {
    "total_tokens": 0, "input_tokens": 0, "output_tokens": 0,
    "input_tokens_details": {"text_tokens": 0, "image_tokens": 0},
}  # fmt: skip


async def stream_images(
    service: Service, job: Job, kind: str, links: ImageLinks | None, partial_images: int, *, stays: bool
) -> AsyncGenerator[bytes]:
    """Stream at most this many previews of each image while it is generated, then the images, as links if `links` is
    given. `kind` is the endpoint's, before the dot in each event's type.

    If closed early the job is cancelled, unless it `stays`. Raises `ArtifactError` within an event.
    """
    ended: Job | None = None
    sent: Counter[int] = Counter()
    open_event = False  # whether a part of an event is sent
    try:
        async with aclosing(service.follower.until_end(job)) as events:
            async for event in events:
                for image in event.data.get("previews", []):
                    look = await _look(service, job, image) if sent[image] < partial_images else None
                    if look is not None:
                        data = {"partial_image_index": sent[image], "image_index": image, "b64_json": look}
                        sent[image] += 1
                        yield _partial(f"{kind}.partial_image", job, data)
        ended = await service.follower.final_record(job)
        if ended is None:
            yield _error(not_followed(service.closing.is_set()))
        elif ended.state is not JobState.SUCCEEDED:
            yield _error(job_error(ended))
        else:
            for k, _ in enumerate(results(ended)):
                data = {**content(ended, k, links), "image_index": k, "usage": _USAGE}
                completed = f"{kind}.completed"
                if "error" in data:  # clients raise over it, and look for bytes in what is completed
                    completed, data["code"] = f"{kind}.refused", data.pop("error")["code"]
                document = InlineDocument(service, job.owner, _document(completed, ended, data))
                await document.verify()
                before, after = format_sse_event(event=completed, data_str=_MARK).split(_MARK.encode())
                open_event = True
                yield before
                async for piece in document.stream():
                    yield piece
                yield after
                open_event = False
    except ArtifactError as error:
        if open_event:  # another event would be taken for its data: the connection is closed
            raise
        yield _error(store_error(error))
    finally:
        if ended is None and not stays:
            with anyio.CancelScope(shield=True):
                await service.follower.cancel(job)


def content(job: Job, k: int, links: ImageLinks | None) -> dict[str, Any]:
    """A finished image: inline or as a link, or neither if it was refused; and what is told of how it was drawn."""
    image = results(job)[k]
    content = {**facts(image), "seed": image["seed"], "warnings": warnings(job, image)}
    if not shown(image):
        return content
    if links is not None:
        return {"url": links.image(job, k, image["key"]), **content}
    return {"b64_json": Inline(image["key"], image.get("size_bytes")), **content}


async def _look(service: Service, job: Job, image: int) -> str | None:
    try:
        look = await service.call(job.owner, service.store.preview, job.id, image, job.incarnation)
    except StoreError:
        return None
    return None if look is None else base64.b64encode(look).decode("ascii")


def _partial(event_type: str, job: Job, data: dict[str, Any]) -> bytes:
    times = {"created_at": int(time.time()), "output_format": "png"}
    document = {**_document(event_type, job, data), **times}
    return format_sse_event(event=event_type, data_str=json.dumps(document, separators=(",", ":"), allow_nan=False))


def _document(event_type: str, job: Job, data: dict[str, Any]) -> dict[str, Any]:
    """An event's data."""
    request = ImageJob.read(job.parameters)
    return {
        "type": event_type,
        **data,
        "created_at": int(job.created),
        "size": size(job, request),
        "quality": "auto",
        "background": "opaque",
        "output_format": request.output_format,
    }


def _error(error: ApiError) -> bytes:
    return format_sse_event(event="error", data_str=json.dumps(error.content, separators=(",", ":")))
