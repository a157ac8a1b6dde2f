"""Finds a cascade's gate: the score from which drafts are kept, for the least device time at little loss.

All captions are drawn by both models, from the same seeds. A gate then costs no more pictures: its cascade is the draft
where that scores enough, and else the other picture. Each is held against the model's own pictures by the captions'
scores and those of further judges, by paired bootstrap, and beside a split at random that keeps as many drafts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from contract.image import ImageParameters
from evaluation import bootstrap
from evaluation.bootstrap import Interval
from evaluation.generate import stream
from evaluation.sources import ImageSource

_DIGITS, _LEAST = 4, 1e-4  # of scores
SHARES = tuple(k / 10 for k in range(11))  # of drafts that are kept, in reports


class Seconds(NamedTuple):
    """Device seconds of a picture: by the model's full plan, by the plan of redrawing, of a draft, and of its score."""

    full: float
    redrawn: float
    draft: float
    score: float

    def speedup(self, kept: float) -> float:
        """The cascade's pictures per device second, as a multiple of the full plan's, where this share is kept."""
        return self.full / (self.draft + self.score + (1 - kept) * self.redrawn)


class PlanFigures(NamedTuple):
    """Pictures per device second as a multiple of the full plan's, and the ratios of scores to its, by figure."""

    speedup: float
    ratios: Mapping[str, Interval]


class GateFigures(NamedTuple):
    """A gate's figures as those of a plan; `random` are the ratios of a random split that keeps as many drafts."""

    gate: float
    kept: float
    speedup: float
    ratios: Mapping[str, Interval]
    random: Mapping[str, float]


@dataclass(frozen=True)
class Drawn:
    """Scores of the same captions' pictures [N], by figure: of the full plan, of the plan of redrawing, and of drafts.

    `drafts_scores` [N] are those that the gate reads, rounded as it rounds them.
    """

    full: Mapping[str, Tensor]
    redrawn: Mapping[str, Tensor]
    drafts: Mapping[str, Tensor]
    draft_scores: Tensor

    def of(self, rows: Tensor) -> Drawn:
        """These captions alone."""
        full, redrawn, drafts = (
            {name: values[rows] for name, values in part.items()} for part in (self.full, self.redrawn, self.drafts)
        )
        return Drawn(full, redrawn, drafts, self.draft_scores[rows])


def figures(drawn: Drawn, gate: float, seconds: Seconds, resamples: int = bootstrap.RESAMPLES) -> GateFigures:
    """The figures of a gate over these captions."""
    keep = drawn.draft_scores >= gate
    kept = float(keep.double().mean())
    cascade = {name: torch.where(keep, drafts, drawn.redrawn[name]) for name, drafts in drawn.drafts.items()}
    random = {}
    for name, full in drawn.full.items():
        base, draft, redrawn = (float(each.double().mean()) for each in (full, drawn.drafts[name], drawn.redrawn[name]))
        random[name] = (kept * draft + (1 - kept) * redrawn) / base
    return GateFigures(gate, kept, seconds.speedup(kept), _ratios(cascade, drawn.full, resamples), random)


def alone(drawn: Drawn, seconds: Seconds, resamples: int = bootstrap.RESAMPLES) -> dict[str, PlanFigures]:
    """The figures of the plan of redrawing for all captions, and of all drafts, unscored."""
    return {
        "redrawn": PlanFigures(seconds.full / seconds.redrawn, _ratios(drawn.redrawn, drawn.full, resamples)),
        "draft": PlanFigures(seconds.full / seconds.draft, _ratios(drawn.drafts, drawn.full, resamples)),
    }


def _ratios(scores: Mapping[str, Tensor], full: Mapping[str, Tensor], resamples: int) -> dict[str, Interval]:
    """The ratio of each figure's mean to the full plan's."""
    ratios = {}
    for name, base in full.items():
        counts = bootstrap.resamples(len(base), resamples)
        ratios[name] = bootstrap.mean(scores[name], counts).over(bootstrap.mean(base, counts)).interval
    return ratios


def gate_of(draft_scores: Tensor, share: float) -> float:
    """The gate that keeps about this share of drafts with these scores; above all of them for 0."""
    ordered = draft_scores.sort(descending=True).values
    count = round(share * len(ordered))
    return float(ordered[count - 1]) if count else round(float(ordered[0]) + _LEAST, _DIGITS)


def choose(drawn: Drawn, figure: str, loss: float, resamples: int = bootstrap.RESAMPLES) -> float:
    """The lowest gate whose cascade's figure is, with its whole interval, at most this share below the full plan's; one
    above all scores, so that nothing is kept, where there is none.
    """
    full = {figure: drawn.full[figure]}
    for gate in drawn.draft_scores.unique():  # ascending
        cascade = torch.where(drawn.draft_scores >= gate, drawn.drafts[figure], drawn.redrawn[figure])
        if _ratios({figure: cascade}, full, resamples)[figure].low >= 1 - loss:
            return float(gate)
    return gate_of(drawn.draft_scores, 0.0)


def device_seconds(
    sources: Sequence[tuple[ImageSource, Sequence[ImageParameters]]], *, on_cpu: bool, turns: int = 3
) -> list[float]:
    """Device seconds of a picture of each source, drawn alone by an engine that is kept full: the median of its turns,
    which alternate with the others'.

    On a CPU these are the process's CPU seconds, which other processes' work does not count in; else seconds.
    """
    clock = time.process_time if on_cpu else time.perf_counter
    rates: list[list[float]] = [[] for _ in sources]
    for turn in range(turns + 1):
        for (source, requests), measured in zip(sources, rates, strict=True):
            started = clock()
            for _, future in stream(source, ((None, request) for request in requests), source.width):
                future.result()
            if turn:  # the first one makes embeddings, widths of batches and buffers
                measured.append((clock() - started) / len(requests))
    return [sorted(measured)[len(measured) // 2] for measured in rates]
