"""Runs every stage in order, each for its share of `--minutes`, then export, judge and cards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lab.training import clip, draft, export, latents, lm, tokens, unet, vae
from lab.training.run import TrainingRun, from_options, parser

STAGES: dict[str, tuple[Callable[[TrainingRun], object], float, str]] = {
    "tokens": (tokens.train, 0.0, "lm"),
    "vae": (vae.train, 0.24, ""),
    "latents": (latents.train, 0.0, "latents.pt"),
    "clip": (clip.train, 0.11, ""),
    "unet": (unet.train, 0.5, ""),
    "lm": (lm.train, 0.1, ""),
    "draft": (draft.train, 0.05, ""),
}
"""What trains each, its share of the budget, and of one without a budget the output that marks it as done."""


def train(run: TrainingRun, only: list[str] | None = None) -> None:
    """Run the stages (or those named); finished ones are skipped.

    `minutes` is shared out among the stages; `iterations` and `batch` apply to each.
    """
    for name, (stage, share, output) in STAGES.items():
        if (only and name not in only) or (output and (run.work / name / output).exists()):
            continue
        minutes = run.minutes * share if share and run.minutes is not None else run.minutes
        print(f"stage {name}", stage(dataclasses.replace(run, minutes=minutes)) or "", flush=True)


def main() -> None:
    """`python -m lab.training.all [--only STAGE ...] [--no-judge]`."""
    options = parser(__doc__ or "")
    options.add_argument("--only", nargs="+", choices=tuple(STAGES))
    options.add_argument("--no-judge", action="store_true", help="export without measuring")
    arguments = options.parse_args()
    run = from_options(arguments)
    train(run, arguments.only)
    if arguments.only:
        return
    export.export(run)
    if not arguments.no_judge:
        from lab.training import judge

        judge.judge(run)
        export.rewrite_cards(run)


if __name__ == "__main__":
    main()
