"""Declares worker cards, and reads and writes worker and model cards as versioned JSON.

Does not import Redis, so that code which only builds a card does not need it; `core.jobs.registry` stores cards.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError

from contract.card import ModelCard, invalid_card, read_card, to_data
from contract.errors import Invalid
from core.jobs.unreadable import TALLY, VERSION, UnreadableRecord, check_version


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """The description that a worker last announced of itself.

    `state` is "starting", "ready" or "draining", `message` its current activity, `started` seconds since the epoch;
    `in_flight` and `limits` count jobs by queue; `threads` compute on the CPU, 0: not known. `loading` are the
    modalities of the configured models that are not in `models` yet, by name, in their order.
    """

    id: StrictStr
    host: StrictStr
    pid: StrictInt
    state: StrictStr
    message: StrictStr
    started: StrictFloat
    models: list[ModelCard] = field(default_factory=list)
    in_flight: dict[StrictStr, StrictInt] = field(default_factory=dict)
    limits: dict[StrictStr, StrictInt] = field(default_factory=dict)
    version: StrictStr = ""
    threads: StrictInt = 0
    loading: dict[StrictStr, StrictStr] = field(default_factory=dict)


_WORKER = TypeAdapter(WorkerCard)


def card_json(card: ModelCard | WorkerCard) -> dict[str, Any]:
    """The stored form of a card, with its format version."""
    if not isinstance(card, WorkerCard):
        return {"v": VERSION, **to_data(card)}
    return {"v": VERSION, **asdict(replace(card, models=[])), "models": list(map(to_data, card.models))}


def worker_card(id: str, raw: Any) -> WorkerCard:
    """Read a worker card. Unreadable models in it are left out and counted. Raises `UnreadableRecord`."""
    _check("worker card", id, raw)
    entries = raw.get("models", [])
    if not isinstance(entries, list):
        raise UnreadableRecord("worker card", id, "its field models has another form")
    models: list[ModelCard] = []
    for model in entries:
        try:
            models.append(model_card(f"{id}/{len(models)}", model))
        except UnreadableRecord as error:
            TALLY.note(error)
    try:
        return replace(_WORKER.validate_python({**raw, "models": []}), models=models)
    except ValidationError as error:
        raise _unreadable("worker card", id, invalid_card(error)) from None


def model_card(name: str, raw: Any) -> ModelCard:
    """Read a model card. Raises `UnreadableRecord`."""
    _check("model card", name, raw)
    try:
        return read_card(raw)
    except Invalid as error:
        raise _unreadable("model card", name, error) from None


def _check(kind: str, id: str, raw: Any) -> None:
    if not isinstance(raw, dict):
        raise UnreadableRecord(kind, id, "it is no JSON object")
    check_version(kind, id, raw.get("v"))


def _unreadable(kind: str, id: str, error: Invalid) -> UnreadableRecord:
    return UnreadableRecord(kind, id, f"its field {error.field} {error.message}")
