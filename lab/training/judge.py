"""Stage `judge`: measures the exported language models; writes `judge/figures.json`.

Uses only the exported folders and the data. Images are measured by `diptych evaluate scenes`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from lab.training import judge_text
from lab.training.run import TrainingRun, from_options, parser

EXPANSIONS = 200
MODELS: dict[str, Callable[[TrainingRun, int], dict[str, Any]]] = {
    "emoji-lm": judge_text.judge_lm,
    "emoji-lm-draft": judge_text.judge_draft,
}


def judge(run: TrainingRun, expansions: int = EXPANSIONS, only: list[str] | None = None) -> dict[str, Any]:
    """Measure every exported model that is there (or those named); returns and keeps the figures by model.

    Figures of models that are not measured now stay as they were. `expansions` is the number of chats of each kind.
    """
    path = run.folder("judge") / "figures.json"
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, measure in MODELS.items():
        if (only and name not in only) or not (run.models / name / "README.md").exists():
            continue
        figures[name] = measure(run, expansions)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(name, json.dumps(figures[name]), flush=True)
    return figures


def main() -> None:
    """`python -m lab.training.judge [--expansions N] [--only NAME ...]`."""
    options: argparse.ArgumentParser = parser(__doc__ or "")
    options.add_argument("--expansions", type=int, default=EXPANSIONS)
    options.add_argument("--only", nargs="+", choices=tuple(MODELS))
    arguments = options.parse_args()
    judge(from_options(arguments), arguments.expansions, arguments.only)


if __name__ == "__main__":
    main()
