"""The gates that `diptych tune` is given, and the plans that it stores and prints."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.arguments import UsageError, model_errors

if TYPE_CHECKING:
    from evaluation.scoring_networks import ScoringNetworks
    from evaluation.tuning import Bounds, Gate, Judged
    from pipeline.checkpoints.load import ImageModel

_LIKE = "must look like balanced=0.5:24 or balanced=0.5:24:ssim=0.9:fid=5"


def read_gates(options: argparse.Namespace) -> Mapping[str, Gate]:
    """The gates by the plans' names. Raises `UsageError`, also for figures that are not computed."""
    from evaluation import tuning

    if options.gates is None:
        return tuning.GATES
    computed = {tuning.SSIM, tuning.DISTANCE}
    computed |= set() if options.lpips is None else {tuning.LPIPS}
    if options.real is not None:  # statistics have no pictures
        computed |= {tuning.FID} if options.real.suffix.lower() == ".npz" else set(tuning.REAL)
    return dict(_gate(part.strip(), computed) for part in options.gates.split(","))


def _gate(text: str, computed: set[str]) -> tuple[str, Gate]:
    """A name with its gate, such as `balanced=0.5:24:ssim=0.9`."""
    from contract.errors import Invalid
    from contract.tuned import read
    from evaluation.tuning import LPIPS, PAIRED, REAL, Gate

    name, _, limits = text.partition("=")
    try:
        score, psnr, *more = limits.split(":")
        others = {figure: float(limit) for figure, limit in (part.split("=") for part in more)}
        gate = Gate(float(score), float(psnr), others)
        if not all(map(math.isfinite, (gate.score, gate.psnr, *others.values()))):
            raise ValueError(limits)
        read({name: {}})
    except ValueError as error:
        raise UsageError(f"--gates: {text!r}: {error if isinstance(error, Invalid) else _LIKE}") from None
    for figure in others:
        if figure not in (*PAIRED, *REAL):
            raise UsageError(f"--gates: {text!r}: {figure} must be one of {', '.join((*PAIRED, *REAL))}")
        if figure not in computed:
            needed = "--lpips" if figure == LPIPS else "--real, with pictures"
            raise UsageError(f"--gates: {text!r}: {figure} needs {needed}")
    return name, gate


def store(
    out: Path,
    judged: Sequence[Judged],
    gates: Mapping[str, Gate],
    networks: ScoringNetworks,
    model: ImageModel,
    prompts: int,
    target: Path,
) -> None:
    """Store the plans in `target`, and print what was found. The first of `judged` is the full plan."""
    from evaluation import compare, tuning
    from pipeline import plans

    full, *others = judged
    names = tuning.name_plans(others, full, gates)
    told = {one.candidate.name: one for one in (*tuning.best_pareto_front(others, full), *names.values(), full)}
    shown = sorted(told.values(), key=lambda one: -one.images_per_s)
    found = {
        "plans": {name: one.candidate.fields() for name, one in names.items()},
        "model": model.name,
        "weights": model.digest,
        "device": str(model.device),
        "prompts": prompts,
        "lens": networks.name,
        "gates": {name: asdict(gate) for name, gate in gates.items()},
        "front": [_said(one, full) for one in shown],
    }
    with model_errors():
        plans.write(target, model.precision, found)
    rows = [("plan", "names", "images/s", "full's", "PSNR", *_titles(full, networks), "score")]
    for one in reversed(shown):
        called = ", ".join(name for name, chosen in names.items() if chosen is one)
        speed, faster = f"{one.images_per_s:.2f}", f"{one.images_per_s / full.images_per_s:.2f}×"
        cells = ("", *("" for _ in full.bounds), "")
        if one is not full:
            beside = [_moved(value) if name in tuning.REAL else f"{value[0]:.4f}" for name, value in one.bounds.items()]
            cells = (f"{one.psnr:.1f} dB", *beside, _moved(one.score))
        rows.append((one.candidate.name, called, speed, faster, *cells))
    print(compare.aligned(rows))
    print(out / "report.html")
    print(target, flush=True)


def _titles(full: Judged, networks: ScoringNetworks) -> list[str]:
    """Of the columns of `Judged.others`."""
    called = {"ssim": "SSIM", "lpips": "LPIPS", "distance": networks.paired, "fid": networks.fid, "cmmd": networks.cmmd}
    return [called[name] for name in full.bounds]


def _moved(ratio: Bounds) -> str:
    return "{:+.2f}% ({:+.2f} … {:+.2f})".format(*(100 * (x - 1) for x in ratio))


def _said(one: Judged, full: Judged) -> dict[str, Any]:
    from evaluation.tuning import REAL

    others = {
        f"{name}_ratio" if name in REAL else name: [round(x, 5) for x in value] if name in REAL else round(value[0], 6)
        for name, value in one.bounds.items()
    }
    return {
        "name": one.candidate.name,
        "fields": one.candidate.fields(),
        "images_per_s": one.images_per_s,
        "speedup": round(one.images_per_s / full.images_per_s, 3),
        "score_ratio": [round(value, 5) for value in one.score],
        "psnr": round(one.psnr, 2),
        **others,
    }
