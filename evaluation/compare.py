"""Compares runs over the same captions with the first of them: ratios, pairs, and the gates that they must pass."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

from torch import Tensor

from evaluation import bootstrap, paired, references, scores
from evaluation.bootstrap import Estimate, Interval, interval_fields
from evaluation.features import Look
from evaluation.references import Features, ReferenceImages
from evaluation.run import SAME, EvaluationRun, RunError
from evaluation.scoring_networks import ScoringNetworks

# Per cent, by what a run was drawn with: (how much FID may rise, how much the captions' score may change).
_INT8, _DEEPCACHE = (2.0, 0.2), (4.0, 0.5)
HOLDS, OPEN, FAILS, TOO_FEW = "holds", "open", "fails", "too few captions"


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates: how far figures may differ from the base run's, in per cent. None: the gate of the run's precision."""

    fid_rise: float | None = None
    clip_change: float | None = None

    def of(self, settings: Mapping[str, Any]) -> tuple[float, float]:
        usual = _DEEPCACHE if settings.get("deepcache") not in (None, "off") else _INT8
        rise = usual[0] if self.fid_rise is None else self.fid_rise
        return rise, usual[1] if self.clip_change is None else self.clip_change


class _ScoredRun(NamedTuple):
    """One run's figures, over the captions that all runs have."""

    run: EvaluationRun
    indices: list[int]
    features: Features  # of their images
    captions: dict[str, Tensor]  # by figure the score of each [N]
    figures: dict[str, Estimate]


def runs(
    evaluated: Sequence[EvaluationRun],
    networks: ScoringNetworks,
    real: ReferenceImages | None,
    *,
    gates: Gates,
    resamples: int,
    look: Look,
) -> dict[str, Any]:
    """The content of `report.json`: every run's figures, and their ratios to the first run's by paired bootstrap.

    Ratios are taken over captions that all runs have, by one resampling. Raises `RunError` for runs of one name or with
    no two captions in common, and as the figures' own modules do.
    """
    names = [run.name for run in evaluated]
    for name in names:
        if names.count(name) > 1:
            raise RunError(f"two runs have the name {name!r}")
    common = _common(evaluated)
    counts = bootstrap.resamples(len(common[0]), resamples)
    seen = [_see(run, indices, networks, real, counts, look) for run, indices in zip(evaluated, common, strict=True)]
    base, rest = seen[0], seen[1:]
    notes = _notes(seen, real, networks)
    spread, siblings = _spread(base, rest, networks)
    entries = []
    for item in seen:
        entry: dict[str, Any] = {
            "name": item.run.name,
            "settings": item.run.settings,
            "drawn_by": item.run.drawn_by,
            "pictures_per_second": item.run.speed(),
            "scores": {name: interval_fields(figure) for name, figure in item.figures.items()},
        }
        if item is not base:
            ratios = {
                name: figure.over(base.figures[name])
                for name, figure in item.figures.items()
                if name != networks.kid and base.figures[name].value != 0  # KID may be below 0
            }
            entry["ratios"] = {name: interval_fields(ratio) for name, ratio in ratios.items()}
            entry |= _beside(item, base, networks, counts, notes, look)
            if item.run.name in siblings:
                entry["gates"] = []
            else:
                entry["gates"] = check_gates(ratios, networks, gates.of(item.run.settings), spread)
        entries.append(entry)
    return {
        "captions": len(common[0]),
        "lens": _told(networks),
        "real": None if real is None else {"name": real.name, "kind": real.kind, "pictures": real.count},
        "base": base.run.name,
        "resamples": resamples,
        "seed_spread": None if spread is None else {"fid": spread, "runs": [base.run.name, *siblings]},
        "runs": entries,
        "notes": notes,
        "environment": _environment(),
    }


def of_one(run: EvaluationRun, networks: ScoringNetworks, result: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a page about a single run, in the form of `runs`; `result` is its `scores.json`.

    Figures against the only reference keep their names; with several, each names its reference.
    """
    against = result["against"]
    figures = dict(result["scores"])
    pairs = {}
    for reference, values in against.items():
        for name, figure in values["scores"].items():
            if len(against) > 1:
                figures[f"{name}, {reference}"] = figure
            elif name in paired.names(networks):
                pairs[name] = figure
            else:
                figures[name] = figure
    entry = {
        "name": run.name,
        "settings": run.settings,
        "drawn_by": run.drawn_by,
        "pictures_per_second": result["pictures_per_second"],
        "scores": figures,
    }
    return {
        "captions": len(run.captions),
        "lens": _told(networks),
        "real": {"name": " and ".join(against)} if against else None,
        "base": run.name,
        "resamples": result["resamples"],
        "seed_spread": None,
        "runs": [entry | ({"pairs": pairs} if pairs else {})],
        "notes": result["notes"],
        "environment": _environment(),
    }


def _told(networks: ScoringNetworks) -> dict[str, Any]:
    return {"name": networks.name, "fid": networks.fid, "score": networks.score, "features": networks.distance.width}


def _environment() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def check_gates(
    ratios: Mapping[str, Estimate], networks: ScoringNetworks, limits: tuple[float, float], spread: float | None
) -> list[dict[str, Any]]:
    """The gates: FID at most so much above the base run's, or the spread between seeds where that is more; the
    captions' score within so much of it.

    A gate holds where the whole interval lies within, and is open where only the figure does. Otherwise it fails, or
    there are too few captions to say, where the interval includes no change at all.
    """
    rise, change = limits[0] / 100, limits[1] / 100
    rows = []
    if networks.fid in ratios:
        high = 1 + max(rise, spread or 0.0)
        rows.append(
            {"figure": networks.fid, "low": None, "high": high} | _verdict(ratios[networks.fid].interval, None, high)
        )
    low, high = 1 - change, 1 + change
    rows.append(
        {"figure": networks.score, "low": low, "high": high} | _verdict(ratios[networks.score].interval, low, high)
    )
    return rows


def _verdict(ratio: Interval, low: float | None, high: float) -> dict[str, Any]:
    def within(value: float) -> bool:
        return value <= high and (low is None or value >= low)

    if within(ratio.value):
        verdict = HOLDS if within(ratio.low) and within(ratio.high) else OPEN
    else:
        verdict = TOO_FEW if ratio.low <= 1 <= ratio.high else FAILS
    return {"ratio": dict(ratio._asdict()), "verdict": verdict}


def table(result: Mapping[str, Any]) -> str:
    """The comparison as text, one row per run."""
    fid, score = result["lens"]["fid"], result["lens"]["score"]
    paired = paired_names(result)
    rows = [("run", fid, score, *paired, "images/s", "gates")]
    for run in result["runs"]:
        cells = [run["name"]]
        for name in (fid, score):
            value = run["scores"].get(name, {}).get("value")
            ratio = run.get("ratios", {}).get(name)
            moved = "" if ratio is None else f" ({100 * (ratio['value'] - 1):+.2f}%)"
            cells.append("–" if value is None else f"{value:.5g}{moved}")
        pairs = run.get("pairs", {})
        cells += [f"{pairs[name]['value']:.4g}" if name in pairs else "–" for name in paired]
        cells.append("–" if run["pictures_per_second"] is None else f"{run['pictures_per_second']:.2f}")
        cells.append(", ".join(gate["verdict"] for gate in run.get("gates", [])) or "–")
        rows.append(tuple(cells))
    return aligned(rows)


def paired_names(result: Mapping[str, Any]) -> list[str]:
    """The figures of pairs of images that any run has."""
    return list(dict.fromkeys(name for run in result["runs"] for name in run.get("pairs", {})))


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells as text, in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


# -- parts -------------------------------------------------------------------------------------------------------------


def _common(evaluated: Sequence[EvaluationRun]) -> list[list[int]]:
    """The positions of the shared captions for each run, in the first run's order."""
    places = [{(caption.id, caption.text): caption.index for caption in run.captions} for run in evaluated]
    keys = [key for key in places[0] if all(key in place for place in places)]
    if len(keys) < 2:
        raise RunError(f"{', '.join(run.name for run in evaluated)}: have {len(keys)} captions in common, 2 are needed")
    return [[place[key] for key in keys] for place in places]


def _see(
    run: EvaluationRun,
    indices: list[int],
    networks: ScoringNetworks,
    real: ReferenceImages | None,
    counts: Tensor,
    look: Look,
) -> _ScoredRun:
    features = references.run_features(run, networks, lambda done, total: look(f"looking at {run.name}", done, total))
    log: Look = lambda label, done, total: look(f"{run.name}: {label}", done, total)  # noqa: E731
    captions = {name: values[indices] for name, values in scores.score_captions(run, networks, features).items()}
    figures = {name: bootstrap.mean(values, counts) for name, values in captions.items()}
    features = features.of(indices)
    if real is not None:
        figures |= scores.distances(features, networks, real, counts, look=log)
    return _ScoredRun(run, indices, features, captions, figures)


def _beside(
    item: _ScoredRun, base: _ScoredRun, networks: ScoringNetworks, counts: Tensor, notes: list[str], look: Look
) -> dict[str, Any]:
    """The paired tests, if the runs share their noise."""
    seeds = zip(item.indices, base.indices, strict=True)
    if any(item.run.records[a].seed != base.run.records[b].seed for a, b in seeds):
        return {}
    if item.indices != base.indices:
        notes.append(f"{item.run.name}: no PSNR and SSIM, since its captions stand in another order than the base's")
        return {}
    every = paired.images(item.run, base.run, networks, look, item.indices)
    ids = [item.run.captions[index].id for index in item.indices]
    return {
        "pairs": paired.distances(every, item.features, base.features, networks, ids, counts),
        "changes": paired.changes(item.captions, base.captions, ids, counts),
        "differences": [[one_pair.place, round(one_pair.psnr, 3), round(one_pair.ssim, 5)] for one_pair in every],
    }


def _spread(
    base: _ScoredRun, siblings_seen: Sequence[_ScoredRun], networks: ScoringNetworks
) -> tuple[float | None, list[str]]:
    """The FID spread of runs that differ from the base only in their seeds, as a share of the base's."""
    siblings = [item for item in siblings_seen if _differs_in_seeds_alone(base.run, item.run)]
    if not siblings or networks.fid not in base.figures:
        return None, [item.run.name for item in siblings]
    ratios = [1.0, *(item.figures[networks.fid].value / base.figures[networks.fid].value for item in siblings)]
    return max(ratios) - min(ratios), [item.run.name for item in siblings]


def _differs_in_seeds_alone(a: EvaluationRun, b: EvaluationRun) -> bool:
    """Decided by the recorded generator, not by the options: `auto` may resolve to what another run names."""
    ignored = {"seed_offset", "captions", "captions_sha256", "prompts", "server", "model", "precision", "unet"}

    def rest(run: EvaluationRun) -> dict[str, Any]:
        settings = {name: value for name, value in run.settings.items() if name not in ignored}
        return settings | {name: run.drawn_by.get(name) for name in SAME}

    return a.settings["seed_offset"] != b.settings["seed_offset"] and rest(a) == rest(b)


def _notes(seen: Sequence[_ScoredRun], real: ReferenceImages | None, networks: ScoringNetworks) -> list[str]:
    notes = [
        f"{item.run.name}: {len(item.indices)} of {len(item.run.captions)} captions, those that all runs have"
        for item in seen
        if len(item.indices) < len(item.run.captions)
    ]
    if networks.fid in seen[0].figures and seen[0].figures[networks.fid].interval.low <= 0:
        notes.append(
            f"{seen[0].run.name}: {networks.fid} is not told from 0 by so few captions: ratios to it mean little"
        )
    if real is not None:
        notes += scores.few("each run", len(seen[0].indices), networks)
        notes += scores.few(real.name, real.count, networks)
        if real.count not in (None, len(seen[0].indices)):
            notes.append(f"{real.name}: holds {real.count} pictures, the runs {len(seen[0].indices)}")
    return notes
