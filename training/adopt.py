"""Stage `adopt`: fills the work folder with an exported emoji-xl, so that students can be distilled of it alone.

What the teacher draws is all that its students learn; of the data set they need the captions of scenes.
"""

from __future__ import annotations

import shutil

from training import checkpoint
from training.run import TrainingRun, command
from training.start import read


def train(run: TrainingRun) -> None:
    """Write what `tokens`, `latents` and `unet` leave behind, as far as distillation reads it."""
    for trained, name in {"clip": "tokenizer", "clip_2": "tokenizer_2"}.items():
        shutil.copytree(run.models / "emoji-xl" / name, run.folder("tokens") / trained, dirs_exist_ok=True)
    parts = read(run, clip=False)
    averaged = {name: parts[name] for name in ("unet", "text", "text_2")}
    checkpoint.save(run.folder("unet") / "state.pt", {"averaged": averaged})
    checkpoint.save(run.folder("latents") / "latents.pt", {name: parts[name] for name in ("scaling_factor", "vae")})


if __name__ == "__main__":
    command(__doc__, train)
