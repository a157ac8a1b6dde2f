"""Stage `adopt`: fills the work folder with an exported emoji-xl, so that students can be distilled of it alone.

What the teacher draws is all that its students learn; of the data set they need the captions of scenes.
"""

from __future__ import annotations

import shutil

from training import checkpoint
from training.run import TrainingRun, from_options, parser

_TOKENIZERS = {"clip": "tokenizer", "clip_2": "tokenizer_2"}


def train(run: TrainingRun) -> None:
    """Writes what `tokens`, `latents` and `unet` leave behind, as far as distillation reads it."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    source = run.models / "emoji-xl"
    for trained, name in _TOKENIZERS.items():
        shutil.copytree(source / name, run.folder("tokens") / trained, dirs_exist_ok=True)
    classes = {"unet": UNet2DConditionModel, "text": CLIPTextModel, "text_2": CLIPTextModelWithProjection}
    folders = {"unet": "unet", "text": "text_encoder", "text_2": "text_encoder_2"}
    averaged = {
        name: cls.from_pretrained(source / folders[name], local_files_only=True).float().state_dict()
        for name, cls in classes.items()
    }
    checkpoint.save(run.folder("unet") / "state.pt", {"averaged": averaged})
    codec = AutoencoderKL.from_pretrained(source / "vae", local_files_only=True).float()
    state = {"scaling_factor": float(codec.config.scaling_factor), "vae": codec.state_dict()}
    checkpoint.save(run.folder("latents") / "latents.pt", state)


def main() -> None:
    """`python -m training.adopt`."""
    train(from_options(parser(__doc__ or "").parse_args()))


if __name__ == "__main__":
    main()
