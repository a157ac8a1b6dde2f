"""Stage `judge`: evaluates the exported models with stock diffusers and transformers, and writes `judge/figures.json`.

Uses only the exported folders and the data. The measurements are in `judge_pictures` and `judge_text`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from training import judge_pictures, judge_text
from training.judge_pictures import SampleSizes
from training.run import TrainingRun, from_options, parser


def judge(run: TrainingRun, extent: SampleSizes, only: list[str] | None = None) -> dict[str, Any]:
    """Measures every exported model that is there (or those named); returns and keeps the figures by model.

    Figures of models not measured now are kept as they were.
    """
    path = run.folder("judge") / "figures.json"
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "emoji-clip": lambda: judge_pictures.judge_clip(run),
        "emoji-xl": lambda: judge_pictures.judge_xl(run, extent),
        "emoji-xl-turbo": lambda: judge_pictures.judge_turbo(run, extent),
        "emoji-z": lambda: judge_pictures.judge_zimage(run, extent),
        "emoji-lm": lambda: judge_text.judge_lm(run, extent.expansions),
        "emoji-lm-draft": lambda: judge_text.judge_draft(run, extent.expansions),
    }
    for name, measure in parts.items():
        if (only and name not in only) or not (run.models / name / "README.md").exists():
            continue
        began = time.monotonic()
        figures[name] = measure()
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(f"{name} ({time.monotonic() - began:.0f} s)", json.dumps(figures[name]), flush=True)
    return figures


def main() -> None:
    """`python -m training.judge [--captions N] [--steps N] [--guidance G] [--only NAME ...]`."""
    options: argparse.ArgumentParser = parser(__doc__ or "")
    for field in dataclasses.fields(SampleSizes):
        options.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options.add_argument("--only", nargs="+", choices=judge_pictures.MODELS + judge_text.MODELS)
    found = options.parse_args()
    extent = SampleSizes(**{field.name: getattr(found, field.name) for field in dataclasses.fields(SampleSizes)})
    judge(from_options(found), extent, found.only)


if __name__ == "__main__":
    main()
