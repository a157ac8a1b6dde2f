"""The cards of models and workers: what a worker offers, what it costs and what the worker is doing, as plain data.

Imports no Redis, so that code which only makes a card needs none; `core.jobs.registry` keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as a worker offers it.

    `limits`: max_prompt_characters, max_steps, max_guidance, max_seed, max_images. `costs`: encode_s, vae_s,
    solo_step_s and row_step_s, each step_s a dict "WxH" → seconds: of a forward of two rows; of one row at the best
    width. Those are of deep steps; shallow_solo_step_s and shallow_row_step_s hold such a dict for each depth of
    DeepCache that was measured. `capacity_per_s`: pictures a second at 20 deep steps with guidance at native size.
    `deepcache` is the schedule of jobs that do not say, as they would (core.schedule). `loras` are the names of those
    that a job may bring. `graphs`: how many of the GPU's graphs are "recorded", of how many "wanted"; empty where
    none are. `kernels` names the kernels that run it (avx512-vnni, avx2, hopper, triton or torch), `kernels_reason`
    says why no faster ones do; both are "" in cards of older workers. `live`: whether a worker that is ready offers it
    now; only `Registry.models` sets it.
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
    """A worker as it last announced itself.

    `state` is "starting", "ready" or "draining", `message` what it is at, `started` seconds since the epoch;
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


def worker_card(raw: Mapping[str, Any]) -> WorkerCard:
    """A worker's card from its JSON."""
    return WorkerCard(**{**_known(WorkerCard, raw), "models": [model_card(model) for model in raw["models"]]})


def model_card(raw: Mapping[str, Any]) -> ModelCard:
    """A model's card from its JSON."""
    return ModelCard(**_known(ModelCard, raw))


def _known(card: type[WorkerCard] | type[ModelCard], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Only the fields that this version knows: a newer worker may say more."""
    return {f.name: raw[f.name] for f in fields(card) if f.name in raw}
