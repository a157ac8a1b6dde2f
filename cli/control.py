"""Options of `diptych generate` for pictures that images follow, and the files that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cli.arguments import UsageError
from contract.control import MAX_CONTROLS, PREPROCESSORS

if TYPE_CHECKING:
    from PIL.Image import Image

    from contract.control import Control, ControlChoice
    from pipeline.depth import DepthEstimator


def add_control(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--control", action="append", default=[], type=Path, metavar="IMAGE",
        help=f"a picture of edges, a pose, … that the pictures follow; up to {MAX_CONTROLS} times",
    )  # fmt: skip
    parser.add_argument(
        "--control-model", dest="control_models", action="append", default=[], metavar="NAME",
        help="the network that reads it, of the folder; one for each --control, or one for all",
    )  # fmt: skip
    parser.add_argument(
        "--control-strength", dest="control_strengths", action="append", default=[], type=float, metavar="FACTOR",
        help="of what it adds; one for each --control, or one for all; default: 1.0",
    )  # fmt: skip
    parser.add_argument(
        "--control-mode", dest="control_modes", action="append", default=[], type=int, metavar="N",
        help="the kind of picture that it is, for a ControlNet-Union; one for each --control, or one for all",
    )  # fmt: skip
    parser.add_argument(
        "--control-preprocessor", choices=PREPROCESSORS,
        help="canny: IMAGE is a picture, of which the edges are taken; depth: its depth map, by --depth-model",
    )  # fmt: skip
    parser.add_argument("--control-dir", metavar="DIR", help="where the networks lie, as folders or NAME.safetensors")
    parser.add_argument(
        "--depth-model", metavar="DIR", help="a depth model's folder, such as Depth Anything's or DPT's"
    )


def check_choices(options: argparse.Namespace) -> tuple[ControlChoice, ...]:
    """What the options say of each control. Raises `UsageError`."""
    from contract import control
    from contract.errors import Invalid

    count = len(options.control)
    given = {
        "--control-model": options.control_models, "--control-strength": options.control_strengths,
        "--control-mode": options.control_modes,
    }  # fmt: skip
    for flag, values in given.items():
        if values and not count:
            raise UsageError(f"{flag}: is of a --control, and there is none")
        if len(values) not in (0, 1, count):
            raise UsageError(f"{flag}: is given {len(values)} times, for {count} of --control")
    if count and not options.control_models:
        raise UsageError("--control-model: must name the network that reads --control")
    models, strengths, modes = ([*values] * (count if len(values) == 1 else 1) for values in given.values())
    choices = tuple(
        control.ControlChoice(
            model=models[n],
            strength=strengths[n] if strengths else 1.0,
            mode=modes[n] if modes else None,
            preprocessor=options.control_preprocessor or "",
        )
        for n in range(count)
    )
    try:
        control.check(choices, None)
    except Invalid as error:
        flag = f"--{(error.field or 'control').replace('.', '-')}"
        raise UsageError(f"{flag}: {error.message}") from error
    return choices


def read_controls(
    options: argparse.Namespace, choices: tuple[ControlChoice, ...], size: tuple[int, int],
    depth: DepthEstimator | None,
) -> tuple[Control, ...]:  # fmt: skip
    """The controls, with their pictures at this size. Raises `UsageError`, naming the file."""
    from contract.control import DEPTH, Control
    from workers.sources import prepare

    if depth is None and any(choice.preprocessor == DEPTH for choice in choices):
        raise UsageError("--control-preprocessor: depth needs a --depth-model")
    return tuple(
        Control.of(choice, prepare(choice, _pixels(path, size), size, depth))
        for choice, path in zip(choices, options.control, strict=True)
    )


def opened(flag: str, path: Path) -> Image:
    """The picture of a file in RGB. Raises `UsageError`, naming the option and the file."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            return ImageOps.exif_transpose(file).convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UsageError(f"{flag}: {path} cannot be read as a picture ({error})") from error


def _pixels(path: Path, size: tuple[int, int]) -> bytes:
    from PIL.Image import Resampling

    picture = opened("--control", path)
    (width, height), (w, h) = picture.size, size
    if abs(width * h - height * w) > 0.1 * min(width * h, height * w):
        raise UsageError(f"--control: {path} is {width}x{height}, and the picture {w}x{h}; give one of that shape")
    return picture.resize(size, Resampling.LANCZOS).tobytes()
