"""`diptych generate`: images from prompts, in one process."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.arguments import (
    Commands,
    UsageError,
    add_model,
    add_out,
    add_plan,
    add_prompting,
    add_refining,
    add_sampling,
    add_upscaling,
    make_cache,
    model_errors,
    open_runtime,
    read_refining,
    read_sampling,
    read_settings,
    read_size,
    read_upscaling,
    wrong_option,
)
from cli.control import add_control, check_choices, read_controls
from cli.image_prompts import add_image_prompts, read_image_prompts

if TYPE_CHECKING:
    from contract.image import ImageParameters
    from core.config import Settings
    from pipeline.load import ImageModel
    from pipeline.prompts import Prompt
    from workers.build import Runtime

_FLAGS = {
    "negative_prompt": "--negative",
    "guidance_scale": "--guidance",
    "prompt": "PROMPT",
    "negative_prompt_2": "--negative-2",
    "prompt_weighting": "--syntax",
    "upscale.model": "--upscale",
    "upscale.scale": "--upscale",
    "refiner.model": "--refiner",
    "refiner.from": "--refine-from",
    "control": "--control",
    "control.image": "--control",
    "control.model": "--control-model",
    "control.strength": "--control-strength",
    "control.mode": "--control-mode",
    "image_prompts": "--image-prompt",
    "image_prompts.image": "--image-prompt",
    "image_prompts.model": "--image-prompt-model",
    "image_prompts.strength": "--image-prompt-strength",
}  # else --field
_EXAMPLES = """examples:
  diptych generate "a slice of pizza"
  diptych generate "a red panda" -n 4 --seed 7 --steps 30 --size 128x128 -o pandas
  diptych generate --prompts captions.tsv --limit 64 --negative "blurry, low quality"

Each picture's PNG holds its parameters in the text chunks "parameters" (as
AUTOMATIC1111's web UI has them), "diptych" and "fingerprint". Where a file of the same
name lies in DIR, from an earlier command with the same prompt and seed, it is replaced.

exit codes: 0 all is drawn; 1 some pictures failed; 2 the input cannot be used, and is named; 130 stopped with Ctrl-C
"""


def add(commands: Commands) -> None:
    generate = commands.add_parser(
        "generate",
        help="draw pictures",
        description="Draw a picture for each prompt. stdout gets the path of a single picture, or one line of summary.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to draw; quote each one")
    generate.add_argument(
        "--prompts",
        dest="file",
        type=Path,
        metavar="FILE",
        help="more prompts: one a line, or a .tsv/.csv with a column prompt or caption (and id: names the files)",
    )
    generate.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of FILE")
    add_out(generate)
    generate.add_argument(
        "-n", "--count", type=int, default=1, metavar="N", help="pictures a prompt, seeds counting up; default: 1"
    )
    generate.add_argument("--steps", type=int, metavar="N", help="of denoising; default: the model's, 20 for SDXL")
    generate.add_argument("--seed", type=int, metavar="N", help="of each prompt's first picture; default: a random one")
    generate.add_argument("--size", metavar="WxH", help="in pixels; default: the model's own")
    generate.add_argument(
        "--guidance", type=float, metavar="SCALE", help="default: the model's, 5.0 for SDXL; up to 1 (Z-Image: 0) off"
    )
    add_sampling(generate)
    generate.add_argument("--negative", metavar="TEXT", help="what the picture should not show")
    add_prompting(generate)
    generate.add_argument(
        "--lora", dest="loras", default="", metavar="NAMES",
        help="LoRAs of the folder to draw with: name, name:0.8, or several with commas; in 8 bits on a CPU only",
    )  # fmt: skip
    generate.add_argument("--lora-dir", metavar="DIR", help="where NAME.safetensors lies")
    add_control(generate)
    add_image_prompts(generate)
    generate.add_argument("--deterministic", action="store_true", help="equal seed and fingerprint give equal bytes")
    add_upscaling(generate)
    add_refining(generate)
    add_model(generate)
    add_plan(generate)
    generate.set_defaults(run=_generate, compile=None)


def _generate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from contract import plan
    from contract.bounds import next_seed
    from contract.image import ImageParameters
    from pipeline.samplers import SAMPLERS
    from workers.draw import draw, folder

    console = Console(stderr=True)
    # Everything that can be rejected without a model is rejected before one is loaded.
    prompts = _prompts(options)
    size = read_size(options.size)
    if not 1 <= options.count <= 10_000:
        raise UsageError(f"--count: must be between 1 and 10000, not {options.count}")
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    draft = ImageParameters(
        prompt="", seed=seed, width=size[0] if size else 0, height=size[1] if size else 0,
        negative_prompt=options.negative, deterministic=options.deterministic,
        prompt_weighting=options.syntax, lora=options.loras,
        prompt_2=options.prompt_2, negative_prompt_2=options.negative_2, clip_skip=options.clip_skip,
    )  # fmt: skip
    asked = {"steps": options.steps, "guidance_scale": options.guidance}
    given = (
        {name: value for name, value in asked.items() if value is not None}
        | read_sampling(options)
        | read_upscaling(options)
        | read_refining(options)
    )
    draft = replace(draft, **given, image_prompts=read_image_prompts(options))
    choices = check_choices(options)
    # Compiling takes longer than most commands, so it is on only if requested.
    settings = read_settings(options, compile=False)
    draft = replace(draft, deepcache=plan.parse(settings.deepcache))
    offered = () if options.scheduler is None else tuple(SAMPLERS)
    for prompt in prompts:
        _check(replace(draft, prompt=prompt.text), prompt, options, {(draft.width, draft.height)}, offered)
    make_cache(settings)
    with model_errors(), folder(options.out), open_runtime(settings, console) as works:
        if size is None:
            draft = replace(draft, width=works.images.model.native, height=works.images.model.native)
        draft = _completed(draft, given, options, settings, works.images.model)
        if draft.refiner is not None and works.images.refiner is not None:
            named = draft.refiner.model_copy(update={"model": works.images.refiner.model.name})
            draft = replace(draft, refiner=named)
        draft = replace(draft, control=read_controls(options, choices, (draft.width, draft.height), works.depth))
        first = replace(draft, prompt=prompts[0].text)
        _check(first, prompts[0], options, {(draft.width, draft.height)}, works.images.schedulers, works)
        jobs = (
            (replace(draft, prompt=prompt.text, seed=next_seed(seed, k)), prompt)
            for prompt in prompts
            for k in range(options.count)
        )
        return draw(works, jobs, len(prompts) * options.count, draft.steps, options.out, console)


def _completed(
    draft: ImageParameters, given: Mapping[str, Any], options: argparse.Namespace, settings: Settings, model: ImageModel
) -> ImageParameters:
    """The request with what its plan, or else the model, says where the options leave a choice."""
    from contract import students, tuned

    student = students.of_loras(draft.lora, model.samplers)
    usual = student or model.defaults
    by_default = options.plan is None
    if not settings.plan or (by_default and student is not None):  # for which the default plan was not made
        return draft.completed(given, {}, usual)
    own = given if options.deepcache is None else {**given, "deepcache": options.deepcache}
    return draft.completed(own, tuned.named(settings.plan, model.plans), usual)


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    from pipeline.prompts import Prompt, PromptsError, read

    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit: must be at least 1, not {options.limit}")
    if options.limit is not None and options.file is None:
        raise UsageError("--limit: counts prompts of a file, and there is no --prompts")
    typed = [Prompt(text, row, "") for row, text in enumerate(options.prompts, 1)]
    if options.file is None:
        if not typed:
            raise UsageError("PROMPT: give at least one, or a file with --prompts")
        return typed
    try:
        return typed + read(options.file, options.limit)
    except PromptsError as error:
        raise UsageError(f"--prompts: {error}") from error


def _check(
    whole: ImageParameters,
    prompt: Prompt,
    options: argparse.Namespace,
    sizes: Any,
    schedulers: Sequence[str],
    works: Runtime | None = None,
) -> None:
    """Reject an invalid request before anything is generated: names the wrong option, or the prompt's position."""
    from contract.card import VAES, ImageOffer
    from contract.errors import Invalid
    from contract.image import check
    from core.batching.request import Request

    try:
        check(whole, ImageOffer(sizes, schedulers, vaes=VAES))
        if works is not None:
            works.images.check(Request("check", "image", whole))
    except Invalid as error:
        flags = dict(_FLAGS)
        if prompt.name:
            flags["prompt"] = f"--prompts: {options.file}: row {prompt.row}"
        elif len(options.prompts) > 1:
            flags["prompt"] = f"PROMPT {prompt.row}"
        raise wrong_option(error, flags) from error
