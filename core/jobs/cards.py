"""Cards of models and workers: what a worker serves, what it costs, and the worker's state, as plain data.

Imports no Redis, so that code which only builds a card does not need it; `core.jobs.registry` stores cards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from core.jobs.unreadable import TALLY, VERSION, Unreadable, check_version


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as a worker serves it.

    `limits`: max_prompt_characters, max_steps, max_guidance, max_seed, max_images. `costs`: encode_s, vae_s,
    solo_step_s and row_step_s; the step costs are dicts "WxH" → seconds: of one forward of two rows, and of one row at
    the most efficient batch width. They hold for deep steps; shallow_solo_step_s and shallow_row_step_s hold such a
    dict for each DeepCache depth that was measured. `capacity_per_s`: images per second at 20 deep steps with guidance
    at native size. `deepcache` is the default schedule for jobs, in the form of contract.plan. `loras` are the names of
    the LoRAs that a job may use. `graphs`: how many CUDA graphs are "recorded", out of how many "wanted"; empty without
    CUDA graphs. `kernels` names the kernels in use (avx512-vnni, avx2, hopper, triton or torch), `kernels_reason` says
    why no faster ones are; both are "" in cards of older workers. `live`: whether a ready worker serves it now; only
    `Registry.models` sets it.
    """

    name: str
    modality: str
    precision: str
    device: str
    native: int
    sizes: list[list[int]]
    schedulers: list[str]
    default_scheduler: str
    limits: dict[str, Any]
    costs: dict[str, Any]
    capacity_per_s: float
    deepcache: Any = "off"
    loras: list[str] = field(default_factory=list)
    graphs: dict[str, int] = field(default_factory=dict)
    kernels: str = ""
    kernels_reason: str = ""
    live: bool = False


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """A worker's last announcement.

    `state` is "starting", "ready" or "draining", `message` its current activity, `started` seconds since the epoch;
    `in_flight` and `limits` count jobs by queue.
    """

    id: str
    host: str
    pid: int
    state: str
    message: str
    started: float
    models: list[ModelCard] = field(default_factory=list)
    in_flight: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    version: str = ""


def written(card: ModelCard | WorkerCard) -> dict[str, Any]:
    """Serialize a card to its stored form, with the form's version."""
    return {"v": VERSION, **asdict(card)}


def worker_card(id: str, raw: Any) -> WorkerCard:
    """Parse a worker's card from its JSON; unreadable models in it are left out. Raises `Unreadable`."""
    known = _known("worker card", id, WorkerCard, raw, _WORKER)
    models: list[ModelCard] = []
    for model in known.pop("models", []):
        try:
            models.append(model_card(f"{id}/{len(models)}", model))
        except Unreadable as error:
            TALLY.note(error)
    return WorkerCard(**known, models=models)


def model_card(name: str, raw: Any) -> ModelCard:
    """Parse a model's card from its JSON. Raises `Unreadable`."""
    return ModelCard(**_known("model card", name, ModelCard, raw, _MODEL))


def _known(kind: str, id: str, card: type, raw: Any, forms: Mapping[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """Keep only the fields that this version defines, each of the right type: a newer worker may send more."""
    if not isinstance(raw, dict):
        raise Unreadable(kind, id, "it is no JSON object")
    check_version(kind, id, raw.get("v"))
    known = {f.name: raw[f.name] for f in fields(card) if f.name in raw}
    for name, fits in forms.items():
        if name in known and not fits(known[name]):
            raise Unreadable(kind, id, f"its field {name} is of another form")
    try:
        card(**known)
    except TypeError:
        raise Unreadable(kind, id, "a field is missing") from None
    return known


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


_text, _number, _object = _is(str), _is(int, float), _is(dict)


def _limits(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


def _costs(value: Any) -> bool:
    """Check that costs are seconds, tables of seconds, or tables of such tables."""
    return _number(value) or (isinstance(value, dict) and all(map(_costs, value.values())))


_MODEL: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("name", "modality", "precision", "device", "default_scheduler"), _text),
    **dict.fromkeys(("kernels", "kernels_reason"), _text),
    "native": _is(int),
    "sizes": _list_of(lambda size: _list_of(lambda side: _is(int)(side) and side > 0)(size) and len(size) == 2),
    "schedulers": _list_of(_text),
    "loras": _list_of(_text),
    "limits": _limits,
    "costs": lambda value: isinstance(value, dict) and _costs(value),
    "capacity_per_s": _number,
    "graphs": _object,
    "live": _is(bool),
}
_WORKER: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("id", "host", "state", "message", "version"), _text),
    "pid": _is(int),
    "started": _number,
    "models": _is(list),
    "in_flight": _object,
    "limits": _object,
}
