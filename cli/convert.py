"""`diptych convert`: makes a model's folder of a checkpoint in one file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cli.arguments import Commands, StartupProgress, UsageError, add_command, model_errors

if TYPE_CHECKING:
    from pipeline.checkpoints.single_file import CheckpointOptions

_BASES = "stabilityai/stable-diffusion-xl-base-1.0 or stable-diffusion-v1-5/stable-diffusion-v1-5"  # of single_file
_ABOUT = """FILE is a checkpoint of SDXL or Stable Diffusion 1 as fine-tunes are shared (.safetensors). Configs and
tokenizers, which such a file lacks, come from the base. The folder is a model for every other command:

  diptych convert juggernautXL.safetensors -o models/juggernaut
  diptych serve --model models/juggernaut --precision int8
"""


def add(commands: Commands) -> None:
    convert = add_command(
        commands,
        "convert",
        "make a model's folder of a checkpoint in one file",
        "Write a checkpoint of one file as a folder in diffusers' format.",
        _ABOUT,
    )
    convert.add_argument("file", type=Path, metavar="FILE", help="the checkpoint, a .safetensors file")
    convert.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="the folder, which is new")
    add_checkpoint(convert)
    convert.set_defaults(run=_convert)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the options of what a checkpoint in one file lacks."""
    parser.add_argument(
        "--base",
        default="",
        metavar="NAME",
        help=f"a folder or hub id of its family, for the configs and tokenizers that a file lacks; default: {_BASES}",
    )
    parser.add_argument(
        "--vae", default="", metavar="PATH", help="a VAE's folder or file, in place of the checkpoint's own"
    )
    parser.add_argument(
        "--prediction-type", choices=("epsilon", "v_prediction", "edm_v_prediction"),
        help="what the checkpoint predicts; default: as the file says, else the base's",
    )  # fmt: skip
    parser.add_argument(
        "--zero-snr", action=argparse.BooleanOptionalAction,
        help="whether its schedule ends in noise alone; default: as the file says",
    )  # fmt: skip


def checkpoint_options(options: argparse.Namespace) -> CheckpointOptions:
    """Return the options that `add_checkpoint` added."""
    from pipeline.checkpoints.single_file import CheckpointOptions

    return CheckpointOptions(options.base, options.prediction_type, options.zero_snr, options.vae)


def _convert(options: argparse.Namespace) -> int:
    from rich.console import Console

    from pipeline.checkpoints import single_file

    console = Console(stderr=True)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {error.filename} cannot be made ({error.strerror})") from error
    with model_errors(), StartupProgress(console) as starting:
        single_file.convert(options.file, options.out, checkpoint_options(options), say=starting.say)
    print(options.out, flush=True)
    return 0
