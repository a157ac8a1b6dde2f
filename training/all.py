"""Runs every stage in order, each for its share of `--minutes`, then export, judge and cards."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from training import (
    clip,
    export,
    judge,
    judge_pictures,
    latents,
    lm,
    tokens,
    unet,
    vae,
    zimage,
    zimage_tokens,
    zimage_vae,
)
from training.run import TrainingRun, from_options, parser

SHARES = {"vae": 0.17, "clip": 0.08, "unet": 0.36, "zimage_vae": 0.06, "zimage": 0.23, "lm": 0.07, "draft": 0.03}
STAGES: dict[str, Callable[[TrainingRun], object]] = {
    "tokens": tokens.train,
    "vae": vae.train,
    "latents": latents.train,
    "clip": clip.train,
    "unet": unet.train,
    "zimage_tokens": zimage_tokens.train,
    "zimage_vae": zimage_vae.train,
    "zimage": zimage.train,
    "lm": lm.train,
    "draft": lambda run: lm.train(run, draft=True),
}
FILES = {
    "tokens": "lm",
    "latents": "latents.pt",
    "zimage_tokens": "tokenizer",
}  # outputs that mark an unbudgeted stage as done


def train(run: TrainingRun, only: list[str] | None = None) -> None:
    """Run the stages (or those named); finished ones are skipped.

    `minutes` is shared out among the stages by `SHARES`; `iterations` and `batch` apply to each.
    """
    for name, stage in STAGES.items():
        if only and name not in only:
            continue
        done = name in FILES and (run.work / name / FILES[name]).exists()
        if done:
            continue
        part = run
        if run.minutes is not None and name in SHARES:
            part = dataclasses.replace(run, minutes=run.minutes * SHARES[name])
        print(f"stage {name}", stage(part) or "", flush=True)


def main() -> None:
    """`python -m training.all [--only STAGE ...] [--no-judge]`."""
    options: argparse.ArgumentParser = parser(__doc__ or "")
    options.add_argument("--only", nargs="+", choices=tuple(STAGES))
    options.add_argument("--no-judge", action="store_true", help="export without measuring")
    found = options.parse_args()
    run = from_options(found)
    train(run, found.only)
    if found.only:
        return
    export.export(run)
    if not found.no_judge:
        judge.judge(run, judge_pictures.SampleSizes())
        export.rewrite_cards(run)


if __name__ == "__main__":
    main()
