"""/v1/batches: up to 10,000 requests in a file, run as the queue has room, in OpenAI's format.

lines.py reads the lines, line_handler.py translates them, and feeder.py runs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field

from api import files, schemas
from api.access import By, Caller, key_required
from api.batches import lines as batch_lines
from api.errors import ApiError, invalid_field
from api.http import body
from api.http.paging import Pagination, missing, page
from api.rate_limits import charge, enforce_rate_limit, refund, store_share_full, stored_limit
from api.routers import new_router
from api.service import Given, Service
from api.text.drafts import CHAT, COMPLETIONS, EMBEDDINGS
from contract.card import ImageCard
from contract.strict import StrictModel
from contract.text import Metadata
from core.artifacts import NoArtifact
from core.jobs.batches import BatchRecord
from core.jobs.connection import StoreFull
from core.jobs.files import KeyRequired, ShareFull

router = new_router("batches")

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
WINDOW_S = 86_400
KEEP_S = 2 * WINDOW_S  # minimum retention of a line's result: the API may be down for a day
_PAGES = Pagination(default=20, maximum=100, id="batch_[0-9a-z]{1,57}", kind="a batch")

_QUEUES = {GENERATIONS: "image", EDITS: "image", CHAT: "text", COMPLETIONS: "text", EMBEDDINGS: "text"}
_SCOPES = {"image": "images", "text": "text"}


class BatchFields(StrictModel):
    """The fields of a new batch."""

    model_config = ConfigDict(title="BatchRequest")

    input_file_id: str = Field(max_length=64, description="of a file with the purpose batch")
    endpoint: Literal[
        "/v1/images/generations", "/v1/images/edits", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
    ] = Field(description="that every line asks")  # fmt: skip
    completion_window: Literal["24h"] = Field(description="after which what is not done is given up")
    metadata: Metadata | None = Field(default=None, description="kept, and told again")


@router.post("/v1/batches", summary="Make a batch", openapi_extra=schemas.document(BatchFields))
async def create(request: Request, service: Given, caller: By) -> Response:
    """Create a batch. An unusable file creates a failed one, whose errors name the lines."""
    caller.check("files")
    await enforce_rate_limit(request, service, caller)
    fields = schemas.read(BatchFields, await body.read(request, caller.id))
    caller.check(_SCOPES[queue_of(fields.endpoint)])
    file = await files.find(service, fields.input_file_id, caller, "input_file_id")
    if file.purpose != "batch":
        raise invalid_field("input_file_id", "must be a file with the purpose batch")
    checked, pictures = await service.parsing.run(caller.id, _checked, service, caller, file.key, fields.endpoint)
    costs = [] if checked.errors else caller.limits.picture_costs(pictures)
    await charge(request, service, costs, "input_file_id")
    try:
        batch = await service.call(
            caller.id, service.batches.add, caller.id, fields.endpoint, file, checked.lines,
            service.links(request, caller.id).base, fields.metadata, checked.errors, keyless=not caller.id,
            stored=stored_limit(service, caller.id),
        )  # fmt: skip
    except KeyRequired:
        raise key_required() from None
    except (ShareFull, StoreFull) as error:
        await refund(request, service, costs)
        if isinstance(error, StoreFull):
            raise
        raise store_share_full() from None
    return JSONResponse(_object(batch))


@router.get("/v1/batches", summary="List batches", openapi_extra=_PAGES.document())
async def batches(request: Request, service: Given, caller: By) -> Response:
    """The caller's batches, or everybody's for an admin; newest first."""
    await enforce_rate_limit(request, service, caller)
    limit, after = _PAGES.read(request)
    owner = None if caller.may("admin") else caller.id

    def listed() -> Response:
        batches = service.batches.batches(owner, after=after, limit=limit)
        if batches is None:
            raise missing()
        return JSONResponse(page([_object(batch) for batch in batches.items], more=batches.more))

    return await service.call(caller.id, listed)


@router.get("/v1/batches/{id}", summary="Look at a batch", operation_id="look_v1_batches__id__get")
async def retrieve(id: str, service: Given, caller: By) -> Response:
    return JSONResponse(_object(await _find(service, id, caller)))


@router.post("/v1/batches/{id}/cancel", summary="Cancel a batch")
async def cancel(id: str, service: Given, caller: By) -> Response:
    """Cancel a batch: its jobs are cancelled within seconds; finished lines stay. An ended batch is unchanged."""
    batch = await _find(service, id, caller)
    if batch.status == "in_progress":
        await service.call(caller.id, service.batches.turn, batch, "cancelling")
    return JSONResponse(_object(await _find(service, id, caller)))


def queue_of(endpoint: str) -> str:
    """The queue of its lines' jobs, which is also their modality."""
    return _QUEUES[endpoint]


def _checked(
    service: Service, caller: Caller, key: str, endpoint: str
) -> tuple[batch_lines.CheckedFile, Mapping[str, int]]:
    """Check every line; also return the images by model. Blocks. Raises `ApiError` (404) and `ArtifactError`."""
    try:
        checked = batch_lines.check(batch_lines.raw_lines(service.artifacts, key, check=True), endpoint)
    except NoArtifact:
        raise files.gone("input_file_id") from None
    return checked, by_model(service, caller.id, endpoint, checked.pictures)


def by_model(service: Service, owner: str, endpoint: str, pictures: Mapping[str | None, int]) -> Mapping[str, int]:
    """The images of lines by the models that serve the given names, also of those that no worker announces yet; under
    "" those for which any model will do. None of texts.
    """
    seen, counts = service.cards.seen_by(owner), Counter[str]()
    if queue_of(endpoint) != "image":
        return counts
    for name, n in pictures.items():
        card = seen.model(name, ImageCard)
        counts[(seen.served_name(name) or "") if card is None else card.name] += n
    return counts


async def _find(service: Service, id: str, caller: Caller) -> BatchRecord:
    is_valid = id.isascii() and len(id) < 64 and id.startswith("batch_") and id.removeprefix("batch_").isalnum()
    batch = await service.call(caller.id, service.batches.batch, id) if is_valid else None
    if batch is None or not (batch.owner == caller.id or "admin" in caller.scopes):
        raise ApiError(404, "There is no such batch, or it has expired.", param="id", code="batch_not_found")
    return batch


def _object(batch: BatchRecord) -> dict[str, Any]:
    at = {f"{status}_at": None for status in ("finalizing", "completed", "failed", "cancelled", "expired")}
    if batch.ended is not None:
        at[f"{batch.status}_at"] = batch.ended  # type: ignore[assignment]
    errors = None if batch.errors is None else {"object": "list", "data": batch.errors}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": batch.created,
        "in_progress_at": None if batch.errors else batch.created,
        "expires_at": batch.created + WINDOW_S,
        **at,
        "cancelling_at": None,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }
