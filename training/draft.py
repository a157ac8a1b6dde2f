"""Stage `draft`: trains the language model's draft, for speculative decoding; see `lm`."""

from __future__ import annotations

from training import lm, loop
from training.run import TrainingRun, command


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the draft on the target's distributions."""
    return lm.train(run, draft=True)


if __name__ == "__main__":
    command(__doc__, train)
