"""Resolves the limits of an API key by model: its own before the service's defaults, aliases as what they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contract.limits import ALL, KEY_LIMITS, read_limits
from core.config import Settings
from core.jobs.creation import OwnerLimits
from core.jobs.keyring import ApiKey, most_queued
from core.jobs.rates import RateLimitCost

Limits = Mapping[str, str]  # by model; of all together under ALL


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key. Callers without one have none.

    `rate` (requests), `quota` (images) and `tokens` are per time; `jobs` are queued or running ones of a queue at once;
    `running` limits those of each model that are at workers. `waiting`: how many of its jobs may wait in a queue.
    """

    owner: str = ""
    rate: Limits = field(default_factory=dict)
    quota: Limits = field(default_factory=dict)
    tokens: Limits = field(default_factory=dict)
    jobs: Limits = field(default_factory=dict)
    running: Limits = field(default_factory=dict)
    waiting: int | None = None

    @classmethod
    def of(cls, owner: str, key: ApiKey | None, settings: Settings) -> KeyLimits:
        """The limits of an owner; of one whose key was revoked, the defaults."""
        if not owner:
            return cls()

        def limits(name: str, default: str) -> Limits:
            own = "" if key is None else getattr(key, name)
            return {
                settings.aliases.get(model, model): limit
                for text in (default, own)  # the key's own come last
                for model, limit in read_limits(text, KEY_LIMITS[name]).items()
            }

        return cls(
            owner,
            limits("rate", settings.rate),
            limits("quota", settings.quota),
            limits("tokens", settings.tokens),
            limits("jobs", settings.key_jobs),
            limits("running", settings.key_running),
            most_queued((key.queued if key else "") or settings.key_queued, settings.max_queued),
        )

    def request_costs(self) -> list[RateLimitCost]:
        """The costs of a request, whatever it is for."""
        return self._costs("requests", self.rate, ALL)

    def job_costs(self, model: str, pictures: int = 0, tokens: int = 0, text_model: str = "") -> list[RateLimitCost]:
        """The costs of a job of this model besides: a request of the model, its images, its tokens, which are of
        `text_model` if that is another.
        """
        return [
            *self._costs("requests", self.rate, model),
            *self.picture_costs({model: pictures}),
            *(self._costs("tokens", self.tokens, ALL, text_model or model, n=tokens) if tokens else ()),
        ]

    def picture_costs(self, counts: Mapping[str, int]) -> list[RateLimitCost]:
        """The costs of so many images of each model; under "" those of unknown ones."""
        costs = self._costs("pictures", self.quota, ALL, n=sum(counts.values()))
        for model in counts.keys() - {ALL}:
            costs += self._costs("pictures", self.quota, model, n=counts[model])
        return [cost for cost in costs if cost.cost]

    def _costs(self, unit: str, limits: Limits, *models: str, n: int = 1) -> list[RateLimitCost]:
        return [RateLimitCost(limits[m], self.owner, unit, n, m) for m in dict.fromkeys(models) if m in limits]

    def of_jobs(self, model: str) -> OwnerLimits:
        """The limits of jobs at once, for a job of this model."""
        of_model, live = (self.jobs.get(name) for name in (model, ALL))
        return OwnerLimits(
            self.waiting,
            None if of_model is None else int(of_model),
            None if live is None else int(live),
            self.running.get(model) or self.running.get(ALL, ""),
        )

    def of_batches(self, model: str) -> OwnerLimits:
        """The limits for lines of batches, which wait: they leave one job to other requests, and may fill the queue."""
        limits = self.of_jobs(model)
        return OwnerLimits(None, _one_less(limits.of_model), _one_less(limits.live), limits.running)

    def of_model(self, model: str) -> dict[str, str]:
        """The limits that hold for this model alone, by their names."""
        named = {name: getattr(self, name) for name in KEY_LIMITS}
        named["running"] = {model: self.of_jobs(model).running}
        return {name: limits[model] for name, limits in named.items() if limits.get(model)}


def _one_less(most: int | None) -> int | None:
    return None if most is None else max(1, most - 1)


UNLIMITED = KeyLimits()
