"""`diptych convert`: makes a model's folder of a checkpoint in one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.arguments import Commands, StartupProgress, UsageError, model_errors

BASE = "stabilityai/stable-diffusion-xl-base-1.0"
_ABOUT = """FILE is an SDXL checkpoint as fine-tunes are shared (.safetensors). Configs and tokenizers, which such a
file lacks, come from the base. The folder is a model for every other command:

  diptych convert juggernautXL.safetensors -o models/juggernaut
  diptych serve --model models/juggernaut --precision int8
"""


def add(commands: Commands) -> None:
    convert = commands.add_parser(
        "convert",
        help="make a model's folder of a checkpoint in one file",
        description="Write an SDXL checkpoint of one file as a folder in diffusers' format.",
        epilog=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    convert.add_argument("file", type=Path, metavar="FILE", help="the checkpoint, a .safetensors file")
    convert.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="the folder, which is new")
    convert.add_argument("--base", default=BASE, metavar="NAME", help="an SDXL folder or hub id; default: %(default)s")
    convert.add_argument(
        "--v-prediction", action=argparse.BooleanOptionalAction, help="whether it predicts v; default: as the file says"
    )
    convert.add_argument(
        "--zero-snr", action=argparse.BooleanOptionalAction,
        help="whether its schedule ends in noise alone; default: as the file says",
    )  # fmt: skip
    convert.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
    from rich.console import Console

    from pipeline import single_file

    console = Console(stderr=True)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {error.filename} cannot be made ({error.strerror})") from error
    with model_errors(), StartupProgress(console) as starting:
        single_file.convert(
            options.file, options.base, options.out,
            v_prediction=options.v_prediction, zero_snr=options.zero_snr, say=starting.say,
        )  # fmt: skip
    print(options.out, flush=True)
    return 0
