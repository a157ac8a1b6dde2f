"""`diptych evaluate scenes`: the share of images that show what their captions of scenes say, by group."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cli.arguments import Commands, UsageError, check_range
from cli.scoring import scoring_errors

_PARTS = ("subject", "colour", "count", "place", "all", "clip_prefers_caption")


def add(commands: Commands) -> None:
    scenes = commands.add_parser(
        "scenes",
        help="check what runs of scenes' captions show",
        description="Check the images of finished runs against their captions: subject, colour, count and place. "
        "Writes scenes.json into each run.",
    )
    scenes.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="drawn of a table of lab.training.scene_prompts"
    )
    scenes.add_argument("--data", type=Path, required=True, metavar="DIR", help="that has emoji/")
    scenes.add_argument("--count", type=int, metavar="N", help="only the first N captions of each group")
    scenes.add_argument("--again", type=Path, metavar="RUN", help="the first one's captions with other seeds")
    scenes.add_argument(
        "--real", type=Path, metavar="DIR", help="with own/ and other/, two true images of each caption"
    )
    scenes.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: one per core")
    scenes.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Judge `options.runs`; a run that fails leaves those before it judged."""
    import torch

    from evaluation.clip import EMBEDDED
    from evaluation.inception import WeightsError
    from evaluation.lpips import ClipLayers
    from evaluation.run import EvaluationRun, write_json
    from lab.scenes.judge import SceneJudge

    check_range(options, "count", 1)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with scoring_errors():
        runs = [EvaluationRun.read(folder) for folder in options.runs]
        again = None if options.again is None else EvaluationRun.read(options.again)
        if again is not None and again.captions != runs[0].captions:
            raise UsageError(f"--again: {options.again}: has other captions than {options.runs[0]}")
        try:
            clip = ClipLayers(device=device) if (EMBEDDED / "config.json").is_file() else None
            judge = SceneJudge(options.data, clip, device=device)
        except (ValueError, WeightsError) as error:
            raise UsageError(f"--data: {error}") from error
        except OSError as error:
            raise UsageError(f"--data: {error.filename}: cannot be read ({error.strerror})") from error
        for number, entry in enumerate(runs):
            pair = (again, options.real) if number == 0 else (None, None)
            report = judge.run(entry, *pair, count=options.count)
            write_json(entry.folder / "scenes.json", report)
            print(entry.folder / "scenes.json")
            print(_table(report), flush=True)
    return 0


def _table(report: dict[str, Any]) -> str:
    from evaluation import compare

    groups = {name: figures for name, figures in report.items() if isinstance(figures, dict)}
    rows = [("% right", *(part.replace("_", " ") for part in _PARTS))]
    for name, figures in groups.items():
        shares = (figures.get(part) for part in _PARTS)
        cells = (
            "–" if share is None else f"{100 * share[0]:.1f} ({100 * share[1]:.1f} to {100 * share[2]:.1f})"
            for share in shares
        )
        rows.append((name.replace("_", " "), *cells))
    return compare.aligned(rows)
