"""Finds a model's plans: which steps are whole, guided, and how many, for the most images per second at little loss.

Candidates draw the same captions from the same noise as the full plan does. Successive halving (Jamieson and Talwalkar,
2016) spends the images: each round draws more captions of fewer candidates, those that no other beats in both estimated
speed and PSNR to the full plan. Finalists draw all captions, are timed in turns by the engine that serves, and are
judged by their captions' scores. Everything is kept in the folder of the search: a killed one goes on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from contract import plan as plans
from contract.card import ImageCard, ImageDefaults
from contract.estimates import work_s
from contract.image import ImageJob, ImageParameters
from contract.plan import AUTO, BLOCK, RESNET, DeepCache, GuidanceSchedule
from contract.tuned import BALANCED, BEST, FAST
from evaluation import pairs, pixels
from evaluation.captions import Caption
from evaluation.generate import stream
from evaluation.pairs import MOST_DB as MOST_DB
from evaluation.run import EvaluationRun
from evaluation.sources import ImageSource

if TYPE_CHECKING:
    from evaluation.scoring_networks import ScoringNetworks

FULL = "full"
FINALISTS = 8
_SHARES = (1.0, 0.75, 0.6, 0.5, 0.35)  # of the model's steps
_INTERVALS: tuple[tuple[float, float] | None, ...] = (None, (0.0, 0.75), (0.0, 0.5), (0.0, 0.35))
_CACHES: tuple[DeepCache | None, ...] = (
    None, AUTO, DeepCache(2, BLOCK, last=1), DeepCache(3, BLOCK, last=1), DeepCache(3, RESNET, last=1),
    DeepCache(4, BLOCK, last=1), DeepCache(5, BLOCK, last=1),
)  # fmt: skip
_MULTISTEP = ("dpm++2m", "karras")  # for few steps
_ROUNDS = ((8, 1 / 3), (24, 1 / 3), (64, 1 / 2))  # captions of each candidate, and the share of them that stays
_PAIRS = 3  # turns of each finalist, each right beside one of the full plan
_TIMED_S = 6.0  # about so long a turn, but at least and at most so many times what is in flight
_TIMED = (2, 6)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, by the request fields that it sets."""

    name: str
    steps: int
    cached: DeepCache | None = None
    interval: tuple[float, float] | None = None
    scheduler: str | None = None
    schedule_type: str | None = None

    def request(self, draft: ImageParameters) -> ImageParameters:
        """The request `draft` by this plan."""
        request = replace(draft, steps=self.steps, deepcache=self.cached, guidance_interval=self.interval)
        if self.steps != draft.steps:
            request = replace(request, timesteps=None)
        if self.scheduler is None:
            return request
        return replace(request, scheduler=self.scheduler, schedule_type=self.schedule_type, timesteps=None, eta=None)

    def fields(self) -> dict[str, Any]:
        """The plan as `contract.tuned` has it."""
        fields: dict[str, Any] = {
            "steps": self.steps,
            "deepcache": plans.to_field(self.cached),
            "guidance_interval": None if self.interval is None else [*self.interval],
            "scheduler": self.scheduler,
            "schedule_type": self.schedule_type,
        }
        return {name: value for name, value in fields.items() if value is not None}


SSIM, DISTANCE, LPIPS = PAIRED = ("ssim", "distance", "lpips")  # of each image and the full plan's
FID, CMMD = REAL = ("fid", "cmmd")  # to real images
Bounds = tuple[float, float, float]  # a figure, and its 95% interval


@dataclass(frozen=True, slots=True)
class Gate:
    """The limits of a named plan: per cent of the captions' score, either way, and the least mean PSNR in dB.

    `others` has limits by name: the least mean SSIM, the most of the other figures of `PAIRED`, and by how many per
    cent those of `REAL` may rise.
    """

    score: float
    psnr: float
    others: Mapping[str, float] = field(default_factory=dict)


GATES = {BEST: Gate(0.2, 30.0), BALANCED: Gate(0.5, 24.0), FAST: Gate(2.0, 18.0)}


def candidates(defaults: ImageDefaults, schedulers: Sequence[str]) -> list[Candidate]:
    """All plans that are tried, the full one first: fewer steps, with another sampler too, shallow steps and unguided
    ones, in every combination.
    """
    guided = defaults.rows(defaults.guidance_scale) == 2
    samplers: list[tuple[str | None, str | None]] = [(None, None)]
    full = Candidate(FULL, defaults.steps)
    candidates_by_meaning = {_meaning(full): full}
    for share in _SHARES:
        steps = max(1, round(share * defaults.steps))
        more = [_MULTISTEP] if _MULTISTEP[0] in schedulers and not defaults.student else []
        for scheduler, schedule_type in samplers + more:
            for cached in _CACHES:
                for interval in _INTERVALS if guided else (None,):
                    if not GuidanceSchedule(interval).fits(steps):
                        continue
                    candidate = Candidate("", steps, cached, interval, scheduler, schedule_type)
                    candidates_by_meaning.setdefault(_meaning(candidate), replace(candidate, name=_name(candidate)))
    return list(candidates_by_meaning.values())


def _meaning(candidate: Candidate) -> tuple[Any, ...]:
    """Equal for plans that draw the same."""
    steps = plans.rows_and_depths(candidate.cached, GuidanceSchedule(candidate.interval), candidate.steps, 2)
    depth = None if all(deep for _, deep in steps) or candidate.cached is None else candidate.cached.depth
    return candidate.scheduler, depth, steps


def _name(candidate: Candidate) -> str:
    """A name such as `12-dpm++2m-2resnet-0.5`: steps, sampler, DeepCache, and where guidance ends."""
    parts = [str(candidate.steps)]
    parts += [] if candidate.scheduler is None else [candidate.scheduler]
    parts += [] if candidate.cached is None else [f"{candidate.cached.interval}{candidate.cached.depth}"]
    parts += [] if candidate.interval is None else [f"{candidate.interval[1]:g}"]
    return "-".join(parts)


def estimate_s(card: ImageCard, parameters: ImageParameters) -> float:
    """Seconds of an image of this request, where batches are full, by the engine's measured costs."""
    return work_s(card, ImageJob(replace(parameters, deepcache=None), deepcache=plans.to_field(parameters.deepcache)))


class Rated(NamedTuple):
    """A candidate with what is known of it: the estimated or measured seconds of an image, and the mean PSNR."""

    candidate: Candidate
    seconds: float
    psnr: float


def pareto_front(rated: Iterable[Rated]) -> list[Rated]:
    """The plans that no other beats in both, the fastest first."""
    frontier: list[Rated] = []
    for entry in sorted(rated, key=lambda entry: (entry.seconds, -entry.psnr, entry.candidate.name)):
        if not frontier or entry.psnr > frontier[-1].psnr:
            frontier.append(entry)
    return frontier


def keep(rated: Sequence[Rated], count: int) -> list[Rated]:
    """The best `count` in order: front by front, and of a front that does not fit those spread evenly over it."""
    left, selected = list(rated), list[Rated]()
    while left and len(selected) < count:
        first, room = pareto_front(left), count - len(selected)
        if len(first) > room:
            selected += [first[k * (len(first) - 1) // max(1, room - 1)] for k in range(room)]
            break
        selected += first
        left = [entry for entry in left if entry not in first]
    return selected


def shuffled(captions: Sequence[Caption], limit: int) -> list[Caption]:
    """`limit` captions in an order of their own, that files' neighbours are not alike; the same in every search."""
    order = sorted(captions, key=lambda caption: hashlib.sha256(caption.text.encode()).digest())[:limit]
    return [replace(caption, index=index) for index, caption in enumerate(order)]


Draw = Callable[[Sequence[Candidate], int, str], list[Candidate]]
"""Draws so many captions, the first of them, by each of these plans; told what for. Returns those that are drawn."""


@dataclass
class Search:
    """A search in a folder, which has a run for each candidate. `card` has the costs that estimates are made from."""

    folder: Path
    card: ImageCard
    draft: ImageParameters
    captions: int
    draw: Draw
    _psnr: dict[tuple[str, int], float] = field(default_factory=dict)
    _runs: dict[str, EvaluationRun] = field(default_factory=dict)

    def finalists(self, every: Sequence[Candidate], count: int = FINALISTS) -> list[Candidate]:
        """The candidates left after all rounds, which have drawn all captions, the fastest first."""
        full, remaining = every[0], list(every[1:])
        whole_s = self.seconds(full)
        remaining = [candidate for candidate in remaining if self.seconds(candidate) < whole_s]
        for number, (captions, share) in enumerate(_ROUNDS, 1):
            captions = min(captions, self.captions)
            remaining = self.draw([full, *remaining], captions, f"round {number}, {len(remaining)} plans")[1:]
            room = max(count, round(share * len(remaining)))
            remaining = [
                candidate.candidate
                for candidate in keep([self.rated(candidate, captions) for candidate in remaining], room)
            ]
            if captions == self.captions:
                break
        remaining = [
            candidate.candidate
            for candidate in keep([self.rated(candidate, captions) for candidate in remaining], count)
        ]
        remaining = self.draw([full, *remaining], self.captions, f"the last {len(remaining)} plans")[1:]
        return sorted(remaining, key=self.seconds)

    def rated(self, candidate: Candidate, captions: int) -> Rated:
        """The candidate by its first captions."""
        return Rated(
            candidate, self.seconds(candidate), fmean(self.psnr(candidate, index) for index in range(captions))
        )

    def psnr(self, candidate: Candidate, index: int) -> float:
        """The PSNR of a caption's image to the full plan's."""
        key = (candidate.name, index)
        if key not in self._psnr:
            picture, reference = (self._picture(name, index) for name in (candidate.name, FULL))
            self._psnr[key] = pairs.psnr(pixels.read(picture), pixels.read(reference))
        return self._psnr[key]

    def _picture(self, name: str, index: int) -> Path:
        run = self._runs.get(name)
        if run is None or index not in run.records:  # loading reads and checks every picture
            run = self._runs[name] = EvaluationRun.load(self.folder / name)
        return run.pictures / run.records[index].file

    def seconds(self, candidate: Candidate) -> float:
        """Estimated, of an image."""
        return estimate_s(self.card, candidate.request(self.draft))


def measure(
    plans_of: Mapping[str, tuple[ImageParameters, float]],
    source: ImageSource,
    prompts: Sequence[str],
    measured: dict[str, list[list[float]]],
    keep_known: Callable[[], None],
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Images per second of each plan, with the engine full.

    Every turn of a plan has one of the full plan right before or after it, in the same process, and the speed-up is the
    median of these pairs' ratios: a machine that gets slower, or other work on it, meets both alike. `plans_of` has
    each plan's request and its estimated seconds, the full plan's first. `measured` has the pairs of rates that were
    measured before, the full plan's first, and gets those that are now; `keep_known` stores it.
    """
    full, *alternatives = plans_of
    warm: set[str] = set()

    def rate(name: str) -> float:
        draft, estimated_s = plans_of[name]
        if name not in warm:  # embeddings, widths of batches and buffers, which its first images make
            _per_second(source, draft, prompts, 0.0, clock, limit=1)
            warm.add(name)
        return _per_second(source, draft, prompts, estimated_s, clock)

    for turn in range(_PAIRS):
        for name in alternatives or [full]:
            if len(measured.setdefault(name, [])) > turn:
                continue
            tell(f"timing {name}, turn {turn + 1} of {_PAIRS}")
            order = (full, name) if turn % 2 == 0 else (name, full)
            rates = {name: rate(name) for name in order}
            measured[name].append([rates[full], rates[name]])
            keep_known()
    baseline = median(full_rate for pairs_of in measured.values() for full_rate, _ in pairs_of)
    speedups = {name: median(rate / full_rate for full_rate, rate in measured[name]) for name in alternatives}
    return {name: round(baseline * speedups.get(name, 1.0), 4) for name in plans_of}


def _per_second(
    source: ImageSource, draft: ImageParameters, prompts: Sequence[str], estimated_s: float,
    clock: Callable[[], float], limit: int | None = None,
) -> float:  # fmt: skip
    """The rate of a closed loop that keeps the engine full, from its first to its last image.

    `limit` limits the images to so many times those in flight.
    """
    width = max(1, source.width // 2)  # twice of which keep it full and waiting
    count = round(min((limit or _TIMED[1]) * width, max(_TIMED[0] * width, _TIMED_S / max(estimated_s, 1e-6))))
    requests = [replace(draft, prompt=prompts[k % len(prompts)], seed=k) for k in range(count)]
    started = clock()
    for _, future in stream(source, ((request.seed, request) for request in requests), width):
        source.take(future.result())
    return round(count / (clock() - started), 4)


class Judged(NamedTuple):
    """A finalist's figures: images per second, its score's ratio to the full plan's, and PSNR; where they are known, by
    name those of `PAIRED` and the ratios of those of `REAL`.
    """

    candidate: Candidate
    images_per_s: float
    score: Bounds
    psnr: float
    bounds: Mapping[str, Bounds] = MappingProxyType({})

    def passes(self, gate: Gate) -> bool:
        """Return whether it costs no more than the gate allows. A figure that is not known passes no limit."""
        usual = abs(self.score[0] - 1) <= gate.score / 100 and self.psnr >= gate.psnr
        return usual and all(self._keeps(name, limit) for name, limit in gate.others.items())

    def _keeps(self, name: str, limit: float) -> bool:
        if name not in self.bounds:
            return False
        value = self.bounds[name][0]
        if name == SSIM:
            return value >= limit
        return value <= (1 + limit / 100 if name in REAL else limit)


def judge(
    finalists: Sequence[Candidate], entries: Sequence[Mapping[str, Any]], networks: ScoringNetworks
) -> list[Judged]:
    """Figures of these plans from their runs' entries in `compare.runs`; the first is the full plan, and the base."""
    names = {SSIM: SSIM, LPIPS: LPIPS, DISTANCE: networks.paired, FID: networks.fid, CMMD: networks.cmmd}

    def bounds(figure: Mapping[str, float]) -> Bounds:
        return figure["value"], figure["low"], figure["high"]

    rows = []
    for candidate, entry in zip(finalists[1:], entries[1:], strict=True):
        figures = entry["pairs"] | entry["ratios"]
        bounds_by_name = {name: bounds(figures[figure]) for name, figure in names.items() if figure in figures}
        score, psnr = bounds(entry["ratios"][networks.score]), entry["pairs"]["psnr"]["value"]
        rows.append(Judged(candidate, entry["pictures_per_second"], score, psnr, bounds_by_name))
    same = {name: 0.0 if name in (DISTANCE, LPIPS) else 1.0 for candidate in rows[:1] for name in candidate.bounds}
    full = {name: (value, value, value) for name, value in same.items()}
    return [Judged(finalists[0], entries[0]["pictures_per_second"], (1.0, 1.0, 1.0), MOST_DB, full), *rows]


def name_plans(judged: Sequence[Judged], full: Judged, gates: Mapping[str, Gate]) -> dict[str, Judged]:
    """The fastest plan that passes each gate; the full one where none does."""
    names = {}
    for name, gate in gates.items():
        passing = [entry for entry in judged if entry.passes(gate) and entry.images_per_s > full.images_per_s]
        names[name] = max(passing, key=lambda entry: entry.images_per_s, default=full)
    return names


def best_pareto_front(judged: Sequence[Judged], full: Judged) -> list[Judged]:
    """The finalists and the full plan that no other beats in measured speed and PSNR, the fastest first."""
    by_name = {entry.candidate.name: entry for entry in (*judged, full)}
    rated = [Rated(entry.candidate, 1 / entry.images_per_s, entry.psnr) for entry in by_name.values()]
    return [by_name[entry.candidate.name] for entry in pareto_front(rated)]
