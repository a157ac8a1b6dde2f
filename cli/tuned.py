"""The gates that `diptych tune` is given, and the plans that it stores and prints."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.arguments import UsageError, model_errors

if TYPE_CHECKING:
    from core.config import Settings
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
        bounds = {figure: float(limit) for figure, limit in (part.split("=") for part in more)}
        gate = Gate(float(score), float(psnr), bounds)
        if not all(map(math.isfinite, (gate.score, gate.psnr, *bounds.values()))):
            raise ValueError(limits)
        read({name: {}})
    except ValueError as error:
        raise UsageError(f"--gates: {text!r}: {error if isinstance(error, Invalid) else _LIKE}") from None
    for figure in bounds:
        if figure not in (*PAIRED, *REAL):
            raise UsageError(f"--gates: {text!r}: {figure} must be one of {', '.join((*PAIRED, *REAL))}")
        if figure not in computed:
            needed = "--lpips" if figure == LPIPS else "--real, with pictures"
            raise UsageError(f"--gates: {text!r}: {figure} needs {needed}")
    return name, gate


def target_of(settings: Settings) -> Path:
    """The file of plans and gates. Raises `UsageError` if there is no place for it."""
    from pipeline import plans
    from pipeline.checkpoints.load import family_of

    with model_errors():
        folder = family_of(settings.model_name, settings.variant)[1]
        if not settings.plans and folder is None:
            raise UsageError(f"--plans: must be given: {settings.model_name} has no folder")
        target = Path(settings.plans).expanduser() if folder is None or settings.plans else folder / plans.FILE
        plans.read_plans(target, "")  # a damaged one, before hours are spent
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UsageError(f"--plans: {target} cannot be written")
    return target


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

    full, *judged_others = judged
    names = tuning.name_plans(judged_others, full, gates)
    by_name = {
        entry.candidate.name: entry for entry in (*tuning.best_pareto_front(judged_others, full), *names.values(), full)
    }
    listed = sorted(by_name.values(), key=lambda entry: -entry.images_per_s)
    document = {
        "plans": {name: entry.candidate.fields() for name, entry in names.items()},
        "model": model.name,
        "weights": model.digest,
        "device": str(model.device),
        "prompts": prompts,
        "lens": networks.name,
        "gates": {name: asdict(gate) for name, gate in gates.items()},
        "front": [_said(entry, full) for entry in listed],
    }
    with model_errors():
        plans.write(target, model.precision, document)
    rows = [("plan", "names", "images/s", "full's", "PSNR", *_titles(full, networks), "score")]
    for entry in reversed(listed):
        called = ", ".join(name for name, named_entry in names.items() if named_entry is entry)
        speed, faster = f"{entry.images_per_s:.2f}", f"{entry.images_per_s / full.images_per_s:.2f}×"
        cells = ("", *("" for _ in full.bounds), "")
        if entry is not full:
            figures = [
                _moved(value) if name in tuning.REAL else f"{value[0]:.4f}" for name, value in entry.bounds.items()
            ]
            cells = (f"{entry.psnr:.1f} dB", *figures, _moved(entry.score))
        rows.append((entry.candidate.name, called, speed, faster, *cells))
    print(compare.aligned(rows))
    print(out / "report.html")
    print(target, flush=True)


def _titles(full: Judged, networks: ScoringNetworks) -> list[str]:
    """Return the titles of the columns of `Judged.bounds`."""
    called = {"ssim": "SSIM", "lpips": "LPIPS", "distance": networks.paired, "fid": networks.fid, "cmmd": networks.cmmd}
    return [called[name] for name in full.bounds]


def _moved(ratio: Bounds) -> str:
    return "{:+.2f}% ({:+.2f} … {:+.2f})".format(*(100 * (x - 1) for x in ratio))


def _said(entry: Judged, full: Judged) -> dict[str, Any]:
    from evaluation.tuning import REAL

    figures = {
        f"{name}_ratio" if name in REAL else name: [round(x, 5) for x in value] if name in REAL else round(value[0], 6)
        for name, value in entry.bounds.items()
    }
    return {
        "name": entry.candidate.name,
        "fields": entry.candidate.fields(),
        "images_per_s": entry.images_per_s,
        "speedup": round(entry.images_per_s / full.images_per_s, 3),
        "score_ratio": [round(value, 5) for value in entry.score],
        "psnr": round(entry.psnr, 2),
        **figures,
    }
