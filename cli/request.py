"""The image request on the command line: options generated from its fields, and its completion for a model.

Fields, types and descriptions are those of `contract.image`; here is only what options have otherwise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from cli.arguments import Options, UsageError, read_size, wrong_option
from contract.bodies import declarations
from contract.control import Control
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.image_prompt import ImagePrompt
from contract.picture_input import PictureInput
from contract.plan import FIELD as DEEPCACHE

if TYPE_CHECKING:
    from PIL import Image

    from contract.card import ImageOffer, Size

P = TypeVar("P", bound=PictureInput)

FLAGS = {
    "guidance_scale": "--guidance", "negative_prompt": "--negative", "negative_prompt_2": "--negative-2",
    "prompt_weighting": "--syntax", "prompt": "PROMPT", "upscale.model": "--upscale", "upscale.scale": "--upscale",
    "refiner.model": "--refiner", "refiner.from": "--refine-from", "image_prompts": "--image-prompt",
    "pipeline_options": "--pipeline-option",
}  # fmt: skip
"""Options by the field that they give, where they are not called after it."""
_KINDS: dict[type[PictureInput], str] = {Control: "--control", ImagePrompt: "--image-prompt"}
FLAGS |= {
    f"{kind.FIELD}.{name}": flag if name == "image" else f"{flag}-{name}"
    for kind, flag in _KINDS.items()
    for name in declarations(kind)
}
_READERS: dict[type[PictureInput], str] = {Control: "network", ImagePrompt: "IP-Adapter"}
_DESTINATIONS = {"lora": "loras"}  # `lora` is a setting
_LISTS = {
    "guidance_interval": (":", "0:0.5"), "guided_steps": (",", "0,2,4"), "timesteps": (",", "999,749,499,249"),
    "sigmas": (",", "14.6,3.8,0.9,0.2"),
}  # fmt: skip
"""How lists of numbers are written, and an example."""
_CHECKED_LATER = ("schedule_type",)  # with an error of its own
_ELSEWHERE = (DEEPCACHE, "upscale", "refiner", "control", "image_prompts", "preview_every", "pipeline_options")
FIELDS = tuple(name for name in declarations(ImageParameters) if name not in _ELSEWHERE)
"""The fields with a generated option."""
SHARED = (
    "steps", "guidance_scale", "guidance_interval", "guided_steps", "scheduler", "schedule_type", "timesteps", "sigmas",
    "vae", "eta", "negative_prompt", "deterministic",
)  # fmt: skip
"""Those that all pictures of a set have in common."""


def add_request(parser: Options, fields: Sequence[str] = FIELDS) -> None:
    """Add an option for each of these fields of `ImageParameters`."""
    for name in fields:
        kind, _, text, _ = declarations(ImageParameters)[name]
        if name == "prompt_weighting":
            kind, text = Literal["compel", "a1111"], text.replace("compel or true", "compel")
        add_field(parser, name, kind, text)
    if "prompt_weighting" in fields:
        parser.add_argument(
            "--weighting", dest="syntax", action="store_const", const=True, help="the same as --syntax compel"
        )


def add_field(parser: Options, name: str, kind: Any, text: str) -> None:
    """Add the option of a field of this type and description."""
    _add(parser, flag_of(name), kind, text, name, dest=destination(name))


def _add(parser: Options, flag: str, kind: Any, text: str, name: str, **more: Any) -> None:
    text = text.replace("%", "%%")
    if kind is bool:
        parser.add_argument(flag, action="store_true", help=text, **more)
    elif get_origin(kind) is Literal and name not in _CHECKED_LATER:
        parser.add_argument(flag, choices=get_args(kind), help=text, **more)
    else:
        metavar = _LISTS[name][1] if name in _LISTS else {int: "N", float: "X"}.get(kind, "TEXT")
        parser.add_argument(flag, type=kind if kind in (int, float) else str, metavar=metavar, help=text, **more)


def flag_of(name: str) -> str:
    """The option that gives this field."""
    return FLAGS.get(name) or f"--{_dashed(name)}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def destination(name: str) -> str:
    """The attribute of the parsed options that has this field."""
    return _DESTINATIONS.get(name) or flag_of(name).removeprefix("--").replace("-", "_")


def read_request(options: argparse.Namespace, fields: Sequence[str] = FIELDS) -> dict[str, Any]:
    """The fields that are given, by name; `steps` where lists of steps are. Raises `UsageError` for a malformed one."""
    from contract.schedule import schedule_of

    values = {name: getattr(options, destination(name)) for name in fields}
    values = {name: value for name, value in values.items() if value is not None and value is not False}
    for name in _LISTS.keys() & values.keys():
        values[name] = _numbers(name, values[name])
    if "steps" not in values and (steps := schedule_of(values).steps):
        values["steps"] = steps
    return values


def _numbers(name: str, text: str) -> tuple[Any, ...]:
    between, example = _LISTS[name]
    (kind,) = get_args(declarations(ImageParameters)[name].kind)
    try:
        numbers = tuple(map(kind, text.split(between)))
    except ValueError:
        raise UsageError(f"{flag_of(name)}: must be numbers such as {example}, not {text!r}") from None
    if name == "guidance_interval" and len(numbers) != 2:
        raise UsageError(f"{flag_of(name)}: must be two numbers, not {text!r}")
    return numbers


def complete(
    values: Mapping[str, Any],
    offer: ImageOffer,
    prompt: str,
    deepcache: str,
    flags: Mapping[str, str] = {},
    *,
    edited: Size | None = None,
    masked: bool = False,
) -> ImageParameters:
    """The parameters of a picture with these fields, by the plan and the defaults of `offer`; checked as in the API.

    `deepcache` is the setting, `edited` and `masked` are as in `ImageRequest.complete`. Raises `UsageError`, naming the
    option; `flags` are in place of `FLAGS`.
    """
    from contract import plan
    from contract.image_request import EditRequest, ImageRequest

    request = (ImageRequest if edited is None else EditRequest).model_construct(prompt=prompt, **values)
    try:
        return request.complete(offer, edited, masked=masked).pictures(plan.parse(deepcache))[0]
    except Invalid as error:
        raise wrong_option(error, {**FLAGS, **flags}) from error


def size_of(options: argparse.Namespace, native: int = 0) -> tuple[int, int]:
    """The size of `--size`, by default the model's; 0 until that is known."""
    return read_size(options.size) or (native, native)


# -- fields that are objects -------------------------------------------------------------------------------------------


def add_upscaling(parser: Options) -> None:
    parser.add_argument(
        "--upscale", metavar="NAME[:SCALE]", help="enlarge finished pictures by this network, such as realesrgan-x4:2"
    )


def read_upscaling(options: argparse.Namespace) -> dict[str, Any]:
    """The field `upscale`, if it is given. Raises `UsageError`."""
    from contract.upscale import FIELD, Upscale

    if options.upscale is None:
        return {}
    name, colon, scale = options.upscale.partition(":")
    try:
        return {FIELD: Upscale.read(FIELD, {"model": name, **({"scale": float(scale)} if colon else {})})}
    except ValueError:
        raise UsageError(f"--upscale: must look like NAME or NAME:2, not {options.upscale!r}") from None


def add_refining(parser: Options) -> None:
    parser.add_argument("--refiner", metavar="NAME", help="an SDXL refiner's folder or hub id, for the last steps")
    parser.add_argument(
        "--refine-from", type=float, metavar="SHARE", help="of the noise schedule before the refiner; default: 0.8"
    )


def read_refining(options: argparse.Namespace, name: str = "refiner") -> dict[str, Any]:
    """The field `refiner`, if a refiner is named, which goes by this name. Raises `UsageError`."""
    from contract.refining import FIELD, Refining

    if options.refiner is None:
        if options.refine_from is not None:
            raise UsageError("--refine-from: needs a --refiner")
        return {}
    start = {} if options.refine_from is None else {"from": options.refine_from}
    try:
        return {FIELD: Refining.read(FIELD, {"model": name, **start})}
    except Invalid:
        raise UsageError(f"--refine-from: must be more than 0 and less than 1, not {options.refine_from:g}") from None


def add_pipeline_options(parser: Options) -> None:
    text = f"{declarations(ImageParameters)['pipeline_options'].text}; once for each"
    parser.add_argument("--pipeline-option", action="append", default=[], metavar="NAME=VALUE", help=text)


def read_pipeline_options(options: argparse.Namespace) -> dict[str, Any]:
    """The field `pipeline_options`, if it is given. A value is JSON, or else a text. Raises `UsageError`."""
    values: dict[str, Any] = {}
    for entry in options.pipeline_option:
        name, equals, text = entry.partition("=")
        if not equals or name in values:
            raise UsageError(f"--pipeline-option: must look like true_cfg_scale=4.0, once for each, not {entry!r}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return {"pipeline_options": values} if values else {}


def add_inputs(parser: Options, kind: type[PictureInput]) -> None:
    """Add the options of a field of pictures: a file, and for each of its own fields one, to be given as often."""
    flag = _KINDS[kind]
    text = f"{(kind.__doc__ or '').partition('.')[0]}; up to {kind.MOST} times"
    parser.add_argument(flag, action="append", default=[], type=Path, metavar="IMAGE", help=text)
    for name, (declaration, _, description, _) in declarations(kind).items():
        if name != "image":
            text = f"{description}; one for each {flag}, or one for all"
            _add(parser, f"{flag}-{_dashed(name)}", declaration, text, name, action="append", default=[])


def read_inputs(options: argparse.Namespace, kind: type[P]) -> tuple[P, ...]:
    """Return what the options say of each picture of a field, without the pictures. Raises `UsageError`."""
    flag = _KINDS[kind]
    prefix = flag.removeprefix("--").replace("-", "_")
    count = len(getattr(options, prefix))
    set_values = {name: getattr(options, f"{prefix}_{name}") for name in declarations(kind) if name != "image"}
    for name, values in set_values.items():
        if values and not count:
            raise UsageError(f"{flag}-{_dashed(name)}: is of {'a ' * (kind is Control)}{flag}, and there is none")
        if len(values) not in (0, 1, count):
            raise UsageError(f"{flag}-{_dashed(name)}: is given {len(values)} times, for {count} of {flag}")
    if count and not set_values["model"]:
        raise UsageError(f"{flag}-model: must name the {_READERS[kind]} that reads {flag}")
    entries = [{name: values[n % len(values)] for name, values in set_values.items() if values} for n in range(count)]
    return tuple(kind(**entry) for entry in entries)


def opened(flag: str, path: Path) -> Image.Image:
    """The picture of a file in RGB, as `decoded`."""
    from core import pictures

    return pictures.on_white(decoded(flag, path))


def decoded(flag: str, path: Path) -> Image.Image:
    """The picture of a file, by the rules of `core.pictures`. Raises `UsageError`, naming the option and the file."""
    from core import pictures

    try:
        return pictures.decode(path)
    except pictures.UnreadablePicture as error:
        raise UsageError(f"{flag}: {path} cannot be read as a picture ({error})") from error
