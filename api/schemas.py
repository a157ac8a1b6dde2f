"""Pydantic models of requests and responses, as documented to clients.

Holds the limits common to all models; jobs/admission.py checks against a model's card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from api.errors import ApiError, invalid_field
from api.http.body import plain
from contract.bounds import FLAG, LIST, NOTHING, OBJECT, WORD, range_error
from contract.characters import too_long
from contract.errors import UNSUPPORTED
from contract.image import ImageFacts
from contract.image_prompt import MAX_IMAGE_PROMPTS
from contract.image_request import EditRequest, ImageRequest
from contract.picture_input import ImageReference as ImageReference
from contract.responses import ITEMS
from contract.strict import FIELD, UNKNOWN, StrictModel

_MAX_URL = 2048  # characters
MAX_PICTURES = 1 + MAX_IMAGE_PROMPTS  # of an edit: its source, and image prompts
_MOST_MEMBERS = 8  # of an object that an error names
MAX_UNKNOWN = 32  # fields that are left out of a body
_KINDS = (WORD, OBJECT, LIST, FLAG, NOTHING, *ITEMS)  # of values, in an error's location


def only_item(value: Any) -> Any:
    """Return the item of a list of one, as clients send a field beside one that is a list; else the value."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class _OfJob(StrictModel):
    """The fields of every job."""

    webhook_url: str | None = Field(
        default=None, max_length=_MAX_URL, description="an address that is told of the end, signed"
    )

    @field_validator("stream", check_fields=False)
    @classmethod
    def _not_offered(cls, value: bool | None) -> bool | None:
        if value:
            raise PydanticCustomError("not_offered", "not offered")
        return value


class JobFields(_OfJob, ImageRequest):
    """A job: its type, and the fields of that type."""

    model_config = ConfigDict(title="JobRequest")

    type: Literal["image"] = Field(description="what kind of job")


class EditBody(EditRequest):
    """The fields of an edit, as JSON."""

    model_config = ConfigDict(title="EditJSONRequest")

    images: list[ImageReference] = Field(
        max_length=MAX_PICTURES,
        fail_fast=True,
        description="the picture to begin with; further ones are image prompts, where the model has an IP-Adapter",
        json_schema_extra={"minItems": 1},
    )
    mask: Annotated[ImageReference | None, BeforeValidator(only_item)] = Field(
        default=None, description="of the same size: what is transparent in it is drawn anew, all else is kept"
    )


class EditJobFields(_OfJob, EditBody):
    """An edit as a job."""

    model_config = ConfigDict(title="EditJobRequest")

    type: Literal["edit"] = Field(description="what kind of job")


IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "1 to 255 printable characters; the same again is answered with the job that it made",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
}

F = TypeVar("F", bound=BaseModel)

_TYPES = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
}
_LIMITS = {
    "greater_than_equal": ("ge", "must be at least"),
    "less_than_equal": ("le", "must be at most"),
    "greater_than": ("gt", "must be greater than"),
    "less_than": ("lt", "must be less than"),
}


Rules = Mapping[str, str]
"""What to say of a kind of error that only some requests have."""


def read(
    kind: type[F],
    fields: dict[str, Any],
    rules: Rules | None = None,
    *,
    ignore_unknown: bool = False,
    ignored: Sequence[str] = (),
) -> F:
    """Validate the body as this model. Raises `ApiError` (400) naming the first invalid field, never its text.

    With `ignore_unknown` fields that are not known are left out, each with one of the model's `warnings`.
    `ignored` are the warnings of those that were left out before.
    """
    warnings = [*ignored]
    while True:
        try:
            model = kind.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
        else:
            return model.with_warnings(tuple(warnings)) if warnings and isinstance(model, StrictModel) else model
        unknown = first["type"] in ("extra_forbidden", UNKNOWN)
        if not unknown or not ignore_unknown or len(warnings) >= MAX_UNKNOWN:
            raise _invalid(kind, first, rules or {})
        path = (*first["loc"], *([first["ctx"]["name"]] if first["type"] == UNKNOWN else []))
        warnings.append(is_ignored(*_field(first)))
        fields = _without(fields, path)


def is_ignored(field: str, is_whole: bool) -> str:
    """The warning of an unknown field that is left out. `is_whole`: as `_field` returns it."""
    return f"{_not_known(field.removesuffix('.'), is_whole)}, and ignored"


def unknown_field(field: str, is_whole: bool) -> ApiError:
    """A 400 for a field that is not known; if it is not whole, for one in it whose name is no plain word."""
    field = field.removesuffix(".")
    words = f"{_not_known(field, is_whole).removeprefix(f'{field}: ')}; DIPTYCH_UNKNOWN_FIELDS=warn leaves it out"
    return invalid_field(field or None, words, "unknown_parameter")


def _not_known(field: str, is_whole: bool) -> str:
    if is_whole:
        return f"{field}: is not known"
    return f"{f'{field}: a' if field else 'A'} field whose name is no plain word is not known"


def _without(value: Any, path: Sequence[int | str]) -> Any:
    """Return a copy of a JSON value without the member at this path, of all items where the path has one of a list."""
    part, rest = path[0], path[1:]
    if isinstance(value, list) and isinstance(part, int):
        return [_without(item, rest) for item in value]
    if isinstance(value, dict) and part in value:
        members = {name: member for name, member in value.items() if name != part}
        return {**members, part: _without(value[part], rest)} if rest else members
    return _without(value, rest) if rest and part in _KINDS else value  # else another item has it


def _field(error: ErrorDetails) -> tuple[str, bool]:
    """The field of an error, and whether that is all of its path: a name that is no plain word ends it."""
    parts = [plain(part) for part in error["loc"] if part not in _KINDS and not isinstance(part, int)]
    if error["type"] == UNKNOWN:
        parts.append(plain(error["ctx"]["name"]))
    if error["type"] == FIELD and error["ctx"]["field"]:
        parts.append(error["ctx"]["field"])
    known = [part for part in takewhile(lambda part: part is not None, parts) if part is not None]
    return ".".join(known), len(known) == len(parts)


def _invalid(kind: type[BaseModel], first: ErrorDetails, rules: Rules) -> ApiError:
    """The answer to a body with this first error."""
    name, is_whole = _field(first)
    field = name or None
    if first["type"] in ("extra_forbidden", UNKNOWN):
        return unknown_field(name, is_whole)
    if not is_whole:
        return invalid_field(field, "a field in it is not valid" if field else "A field is not valid.")
    if first["type"] in rules:
        return invalid_field(field, rules[first["type"]])
    bounds = _bounds(kind, str(first["loc"][0])) if len(first["loc"]) == 1 else {}
    if first["type"] in ("greater_than_equal", "less_than_equal") and len(bounds) == 2:
        return invalid_field(field, range_error(bounds["ge"], bounds["le"], first["input"]))
    if first["type"] in ("too_long", "string_too_long"):
        return invalid_field(field, too_long(first["input"], first["ctx"]["max_length"]))
    return _complaint(first["type"], field, first.get("ctx", {}))


def _bounds(kind: type[BaseModel], field: str) -> dict[str, float]:
    """The inclusive bounds of a field: `ge` and `le`, where it has them."""
    metadata = kind.model_fields[field].metadata if field in kind.model_fields else []
    return {name: getattr(item, name) for item in metadata for name in ("ge", "le") if hasattr(item, name)}


def document(
    *kinds: type[BaseModel], form: Mapping[str, Any] | None = None, required: Sequence[str] = ()
) -> dict[str, Any]:
    """OpenAPI for a body that one of these models validates, to be used as `openapi_extra`.

    With `form` the first is a form with these additional files, of which some are required.
    """
    content: dict[str, Any] = {}
    if form is not None:
        schema = _schema(kinds[0])
        schema["properties"] |= form
        schema["required"] = [*schema.get("required", []), *required]
        content["multipart/form-data"] = {"schema": schema}
        kinds = kinds[1:]
    if kinds:
        schemas = [_schema(kind) for kind in kinds]
        content["application/json"] = {"schema": schemas[0] if len(schemas) == 1 else {"oneOf": schemas}}
    return {"requestBody": {"required": True, "content": content}}


def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    document: dict[str, Any] = _inline(schema, schema.pop("$defs", {}))
    return document


def _inline(schema: Any, parts: dict[str, Any]) -> Any:
    """The schema with its parts inlined: local references are invalid inside the whole document."""
    if isinstance(schema, list):
        return [_inline(inner, parts) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {name: _inline(inner, parts) for name, inner in schema.items() if name != "discriminator"}


def _members(name: str) -> str:
    """Name the fields of a nested object, by its class, where they are few."""
    kinds = [StrictModel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    fields = next((kind.model_fields for kind in kinds if kind.__name__ == name), {})
    names = [field.alias or name for name, field in fields.items()]
    return f" with {', '.join(names)}" if 0 < len(names) <= _MOST_MEMBERS else ""


def _complaint(kind: str, field: str | None, limits: dict[str, Any]) -> ApiError:
    if kind in ("model_type", "model_attributes_type"):
        return invalid_field(field, f"must be an object{_members(limits.get('class_name', ''))}", "invalid_type")
    if kind == FIELD:
        return invalid_field(field, limits["message"], limits["code"])
    if kind == "none_required":
        return invalid_field(field, "is not offered; only null is accepted", UNSUPPORTED)
    if kind == "missing":
        return invalid_field(field, "must be given", "missing_required_parameter")
    if kind == "literal_error":
        return invalid_field(field, f"must be {limits['expected']}")
    if kind == "not_offered":
        return invalid_field(field, "true is not offered here; GET /v1/jobs/{id}/events streams what happens to a job")
    if kind in _TYPES:
        return invalid_field(field, _TYPES[kind], "invalid_type")
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return invalid_field(field, f"{words} {limits[name]}")
    return invalid_field(field, "is not valid")


# -- responses: for the documentation only; jobs/presentation.py builds them ---------------------------------------


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail


class JobError(BaseModel):
    code: str
    message: str


class DrawnImage(ImageFacts):
    seed: int
    warnings: list[str]
    error: ErrorDetail | None = Field(default=None, description="of one that the checker refused: there is no file")


class JobImage(DrawnImage):
    url: str | None
    width: int
    height: int
    media_type: str | None
    size_bytes: int | None


class JobObject(BaseModel):
    id: str
    object: Literal["job"]
    status: Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
    model: str
    created_at: float
    started_at: float | None
    completed_at: float | None
    expires_at: float | None = Field(description="the deadline; seconds since 1970, as all times")
    position: int | None = Field(description="how many jobs are called before this one; null once it is called")
    estimated_start_s: float | None = Field(description="seconds from now, at a guess; null where there is none")
    estimated_end_s: float | None = Field(description="seconds from now, at a guess; null where there is none")
    priority: int
    attempt: int
    progress: dict[str, Any] | None
    error: JobError | None
    images: list[JobImage] | None


class RetrievedImage(JobImage):
    fingerprint: dict[str, Any] | None = Field(
        default=None, description="what else than the request its bits depend on"
    )


class RetrievedJob(JobObject):
    images: list[RetrievedImage] | None  # type: ignore[assignment]
    request: dict[str, Any] | None = Field(
        default=None, description="to be posted to /v1/jobs, to draw it again; once it succeeded, and not of edits"
    )


class GeneratedImage(DrawnImage):
    b64_json: str | None = None
    url: str | None = None


class Generated(BaseModel):
    created: int
    data: list[GeneratedImage]
    size: str
    output_format: Literal["png", "webp", "jpeg"]
    background: Literal["opaque"]
    model: str
    job_id: str


class JobList(BaseModel):
    object: Literal["list"]
    data: list[JobObject]
    first_id: str | None
    last_id: str | None = Field(description="to be given as `after`, for the next page")
    has_more: bool


class Deleted(BaseModel):
    id: str
    object: Literal["job"]
    deleted: Literal[True]


class Forgotten(BaseModel):
    id: str
    object: Literal["model"]
    deleted: Literal[True]
    cancelled: int = Field(description="jobs that waited for it, and were ended")


class QueueObject(BaseModel):
    name: str
    object: Literal["queue"]
    paused: bool
    queued: int
    queued_work_s: float
    running: int
    running_work_s: float
    workers: int = Field(description="ready ones that serve it")


class Emptied(QueueObject):
    cancelled: int = Field(description="jobs that waited, and were ended")


class QueueList(BaseModel):
    object: Literal["list"]
    data: list[QueueObject]
