"""Turns request fields into a job: checks them against the model card, fills in defaults, estimates the work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from api.cards import C, RegistrySnapshot
from api.errors import ApiError, invalid_as_api_error, invalid_field
from api.pictures.uploads import NO_PICTURES, PictureUploads, Upload
from contract import pipeline_call
from contract.bounds import PRIORITY
from contract.card import KINDS, ImageCard, ModelCard, TextCard
from contract.control import Control
from contract.errors import Invalid
from contract.estimates import least_s, work_s
from contract.image import ImageJob
from contract.image_prompt import ImagePrompt
from contract.image_request import ImageRequest, draft_of
from contract.model_names import is_openai_image
from contract.prompts import EXPANSION_TOKENS
from contract.text import TextJob
from core.jobs.broker import level
from core.jobs.record import JobDraft, QueueBacklog, new_id

ImageDraft = JobDraft[ImageJob]

_ENDPOINTS: dict[type[ModelCard], tuple[str, str]] = {
    ImageCard: ("an image", "/v1/images/generations"),
    TextCard: ("a text", "/v1/chat/completions"),
}


def image_draft(
    fields: ImageRequest, card: ImageCard, pictures: PictureUploads = NO_PICTURES, priority: int = PRIORITY
) -> ImageDraft:
    """Build the job for these fields on this model, without an owner. Its pictures are not stored yet. Where their
    sizes are unknown all else is checked, as if they had the model's native size. Where the request has no priority it
    has this one.

    Raises `ApiError` (400) naming the field that the model does not offer.
    """
    source, size, controls = pictures.source, None, pictures.inputs.get(Control.FIELD, ())
    fields = _served_as(fields, card)
    if pictures.further:
        fields = _with_image_prompts(fields, pictures.further, card)
    if source is not None:
        size = source.size or (card.native, card.native)
        if source.margins is not None and fields.size is None and card.offer.offers(size):
            fields = fields.model_copy(update={"size": "{}x{}".format(*size)})
    with invalid_as_api_error():
        size_hint = controls[0].size if controls else None
        job = fields.complete(card.offer, size, masked=source is not None and _masked(source, card), hint=size_hint)
    for upload in (*controls, *([] if source is None else [source])):
        upload.check_fit(job.picture.size)
    return JobDraft(
        id=new_id(),
        modality="image",
        model=card.name,
        request=job,
        priority=priority if fields.priority is None else fields.priority,
        deadline_s=fields.deadline_s,
        work_ms=round(1000 * work_s(card, job)),
    )


def offered_draft(
    fields: ImageRequest,
    card: ImageCard,
    now: RegistrySnapshot,
    pictures: PictureUploads = NO_PICTURES,
    priority: int = PRIORITY,
    *,
    may_write: bool,
) -> ImageDraft:
    """Build the job as `image_draft` does, for a caller that sees the models of `now` and may write texts or not.

    Raises `ApiError` also as `expansion` (403, 400), and for a cascade's draft that these models do not offer (400).
    """
    draft = with_expansion(image_draft(fields, card, pictures, priority), now, may_write=may_write)
    check_cascade(draft.request, now)
    return draft


def _masked(source: Upload, card: ImageCard) -> bool:
    """Whether the request is checked as one with a mask. Of a model without masks a source that may have transparent
    pixels counts as one that has none until that is known: most have none.
    """
    undecided = source.undecided and source.margins is None
    return source.masked and not (undecided and not card.offer.draws_from(pipeline_call.MASK))


def _with_image_prompts(fields: ImageRequest, further: Sequence[Upload], card: ImageCard) -> ImageRequest:
    """The request with the further images of an edit as image prompts, read by the first of the model's IP-Adapters.

    Raises `ApiError` (400) naming the images where the model has none, or not room for all.
    """
    field, own, count = further[0].image.field, list(fields.image_prompts or ()), len(further)
    if not card.image_prompts:
        words = f"must be one: this model draws from one, and has no image_prompts (IP-Adapters) to read {count} more"
        raise invalid_field(field, words, "too_many_images")
    if count + len(own) > ImagePrompt.MOST:
        room = 1 + ImagePrompt.MOST - len(own)
        raise invalid_field(field, f"must be at most {room}: one to begin with, and image prompts", "too_many_images")
    more = [ImagePrompt(model=card.image_prompts[0])] * count
    return fields.model_copy(update={ImagePrompt.FIELD: [*own, *more]})


def _served_as(fields: ImageRequest, card: ImageCard) -> ImageRequest:
    """Return the fields of a request for one of OpenAI's models as this one serves them, with warnings.

    Clients send the sizes of that model unasked: a size that is not offered becomes the nearest one.
    """
    if fields.model == card.name or not is_openai_image(fields.model):
        return fields
    warnings = [f"model: {fields.model} is served by {card.name}"]
    size = card.offer.read_size(fields.size)
    if size is not None and min(size) > 0 and not card.offer.offers(size):
        nearest = "{}x{}".format(*card.offer.closest(size))
        warnings.append(f"size: {fields.size} is not offered by {card.name}; the nearest is {nearest}")
        fields = fields.model_copy(update={"size": nearest})
    return fields.with_warnings((*fields.warnings, *warnings))


def check_deadline(
    draft: ImageDraft, card: ImageCard, backlog: QueueBacklog, ready: int, *, reliable_share: float
) -> None:
    """Reject a deadline that is shorter than the best case. Raises `ApiError` (400) with the estimate in seconds.

    `reliable_share` is the part of the queued work that counts. Without a ready worker, and before iterations have
    shown what a job takes, there is no estimate: the job is accepted, and expires if it is not done in time.
    """
    if draft.deadline_s is None or ready < 1:
        return
    best_s = least_s(card, draft.request)
    if level(draft.priority) > 0:  # the most urgent jobs overtake the queue
        best_s += reliable_share * backlog.queued_ms / 1000 / ready
    if draft.deadline_s < best_s:
        message = f"cannot be met: with what is queued it takes {_rounded(best_s)} s at best"
        raise invalid_field("deadline_s", message, "deadline_hopeless")


def with_expansion(draft: ImageDraft, now: RegistrySnapshot, *, may_write: bool) -> ImageDraft:
    """The draft with the tokens of its prompts' expansion, if it asks for that. Raises as `expansion`."""
    tokens, text_model = expansion(draft.request, draft.model, now, may_write=may_write)
    return replace(draft, tokens=tokens, text_model=text_model)


def may_write(now: RegistrySnapshot, owner: str) -> bool:
    """Return whether an owner, of a batch for example, may have texts written; who has no key may."""
    key = now.keys.get(owner)
    return not owner or (key is not None and not {"text", "admin"}.isdisjoint(key.scopes))


def expansion(job: ImageJob, model: str, now: RegistrySnapshot, *, may_write: bool) -> tuple[int, str]:
    """The tokens that expanding a job's prompts counts as, and the text model that writes them; 0 and "" without.

    Raises `ApiError`: 403 for an owner who may not write texts (`may_write`), 400 where not all workers expand prompts.
    """
    if not job.expand_prompt:
        return 0, ""
    if not may_write:
        message = "expand_prompt: has a text model write, and this key lacks the scope text."
        raise ApiError(403, message, param="expand_prompt", code="insufficient_scope")
    text_models = _expanders(now, model)
    if not text_models:
        raise invalid_field("expand_prompt", "no text model is served beside this model", "no_text_model")
    request = TextJob(messages=[{"role": "user", "content": job.picture.prompt}])
    for card in text_models:
        with invalid_as_api_error():
            try:
                request.check(card.limits)
            except Invalid as error:
                raise error.of("expand_prompt") from error
    read = TextJob(prompts=[job.picture.prompt]).tokens
    return job.n * math.ceil(read + EXPANSION_TOKENS), text_models[0].name


def _expanders(now: RegistrySnapshot, name: str) -> list[TextCard]:
    """The text models that expand prompts for this image model: the first one of each of its workers, if it answers and
    is not hidden. Without a worker, any text model. Empty: not all workers expand prompts.
    """
    drawing = [worker for worker in now.workers if any(model.name == name for model in worker.models)]
    if not drawing:
        others = (model for model in now.models if isinstance(model, TextCard) and model.limits.generates)
        return [*others][:1]
    hidden = {model.name for model in now.hidden}
    firsts = [next((model for model in worker.models if isinstance(model, TextCard)), None) for worker in drawing]
    usable = [text for text in firsts if text is not None and text.limits.generates and text.name not in hidden]
    return usable if len(usable) == len(drawing) else []


def loading_kind(now: RegistrySnapshot, name: str | None) -> type[ModelCard] | None:
    """The kind of the model of this name or alias, if it is being loaded and no worker has ever announced it."""
    served = now.served_name(name)
    known = served is None or any(model.name == served for model in now.models)
    return None if known else KINDS.get(now.loading.get(served or "", ""))


def check_cascade(job: ImageJob, now: RegistrySnapshot) -> None:
    """Reject a cascade whose draft model cannot draw the job's pictures. Raises `ApiError` (400)."""
    card = None if job.cascade is None else now.model(job.cascade.draft, ImageCard)
    if card is not None:
        with invalid_as_api_error():
            draft_of(job.picture, card.offer)


def retry_after_s(wait_s: float) -> int:
    """`Retry-After` for a full queue: the seconds until its work is done, clamped to 1 to 120."""
    return min(120, max(1, math.ceil(wait_s)))


def unknown_model(reason: str = "is not known") -> ApiError:
    return ApiError(404, f"model: {reason}; see GET /v1/models", param="model", code="model_not_found")


def no_such_model(now: RegistrySnapshot, name: str | None, kind: type[C]) -> ApiError | None:
    """The error for a name that no model of this kind has: another kind's, or unknown. None: no model of this kind was
    announced yet.
    """
    loading = loading_kind(now, name)
    if loading is kind:
        return model_loading(name)
    for other, (article, endpoint) in _ENDPOINTS.items():
        card = now.model(name, other) if name is not None and other is not kind else None
        if card is not None or loading is other:
            words = f"{name if card is None else card.name} is {article} model; use POST {endpoint}"
            return invalid_field("model", words, "wrong_modality")
    if now.model(None, kind) is None:
        hidden = any(isinstance(card, kind) for card in now.hidden)
        return unknown_model("this key may use none of this kind") if hidden else None
    model = now.served_name(name)
    if model != name:
        return unknown_model(f"{name} is an alias of {model}, which no worker has announced")
    if is_openai_image(name) and now.model(None, ImageCard) is not None:
        words = "is served by no model here; DIPTYCH_MODEL_ALIASES or DIPTYCH_OPENAI_NAMES=on names one"
        return unknown_model(f"{name} {words}")
    return unknown_model()


def missing_model(now: RegistrySnapshot, name: str) -> ApiError:
    """The error for a name that no model of any kind has: it is being loaded, or unknown."""
    return unknown_model() if loading_kind(now, name) is None else model_loading(name)


def model_loading(name: str | None) -> ApiError:
    message = f"model: {name} is being loaded by a worker; see GET /readyz."
    return ApiError(503, message, param="model", code="model_loading", headers={"Retry-After": "5"})


def no_model() -> ApiError:
    message = "No worker has announced a model yet; see GET /readyz."
    return ApiError(503, message, code="no_model", headers={"Retry-After": "10"})


def _rounded(seconds: float) -> str:
    """Rounded up to two digits, so that a deadline equal to the reported estimate is accepted."""
    digits = max(0, 1 - math.floor(math.log10(seconds)))
    return f"{math.ceil(seconds * 10**digits) / 10**digits:.{digits}f}"
