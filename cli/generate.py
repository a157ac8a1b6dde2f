"""`diptych generate`: images from prompts, in one process."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cli.arguments import (
    FOLDERS,
    CommandFailed,
    Commands,
    UsageError,
    add_command,
    add_model,
    add_out,
    add_plan,
    add_settings,
    check_range,
    create_cache_folder,
    model_errors,
    open_runtime,
    read_settings,
    wrong_option,
)
from cli.editing import Source, add_edit, read_edit
from cli.request import (
    FLAGS,
    add_inputs,
    add_pipeline_options,
    add_refining,
    add_request,
    add_upscaling,
    complete,
    opened,
    read_inputs,
    read_pipeline_options,
    read_refining,
    read_request,
    read_upscaling,
    size_of,
)
from contract.control import DEPTH, Control
from contract.image_prompt import ImagePrompt
from core.failures import NotFinite

if TYPE_CHECKING:
    from PIL.Image import Image

    from contract.image import ImageParameters
    from contract.picture_input import Fit
    from core.config import Settings
    from pipeline.extensions.depth import DepthEstimator
    from pipeline.text.prompts import PromptRow
    from workers.build import Runtime

_EXAMPLES = """examples:
  diptych generate "a slice of pizza"
  diptych generate "a red panda" -n 4 --seed 7 --steps 30 --size 128x128 -o pandas
  diptych generate --prompts captions.tsv --limit 64 --negative "blurry, low quality"

Each picture's PNG holds its parameters in the text chunks "parameters" (as
AUTOMATIC1111's web UI has them), "diptych" and "fingerprint". Where a file of the same
name lies in DIR, from an earlier command with the same prompt and seed, it is replaced.

exit codes: 0 all is drawn; 1 some pictures failed; 2 the input cannot be used, and is named;
130 stopped with Ctrl-C (143: by SIGTERM)
"""


def add(commands: Commands) -> None:
    generate = add_command(
        commands,
        "generate",
        "draw pictures",
        "Draw a picture for each prompt. stdout gets the path of a single picture, or one line of summary.",
        _EXAMPLES,
    )
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to draw; quote each one")
    generate.add_argument(
        "--prompts",
        dest="file",
        type=Path,
        metavar="FILE",
        help="more prompts: one a line, or a .tsv, .csv, .json, .jsonl with prompt or caption (and id: names files)",
    )
    generate.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of FILE")
    add_out(generate)
    generate.usage = "diptych generate PROMPT ... [options]"
    picture = generate.add_argument_group("picture")
    picture.add_argument(
        "-n", "--count", type=int, default=1, metavar="N", help="pictures a prompt, seeds counting up; default: 1"
    )
    picture.add_argument("--size", metavar="WxH", help="in pixels; default: the model's own")
    add_request(picture)
    add_upscaling(picture)
    add_refining(picture)
    add_pipeline_options(picture)
    inputs = generate.add_argument_group("inputs")
    add_edit(inputs)
    add_inputs(inputs, Control)
    add_inputs(inputs, ImagePrompt)
    model = generate.add_argument_group("model")
    add_settings(model, *FOLDERS)
    speed = generate.add_argument_group("speed")
    add_model(model, speed=speed)
    add_plan(speed)
    generate.set_defaults(run=_generate, compile=None)


def _generate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from contract.bounds import next_seed
    from workers.draw import draw, folder

    console = Console(stderr=True)
    # Everything that can be rejected without a model is rejected before one is loaded.
    prompts = _prompts(options)
    size_of(options)
    check_range(options, "count", 1, 10_000)
    values = read_request(options) | read_upscaling(options) | read_refining(options)
    values |= read_pipeline_options(options)
    controls = read_controls(options, size_of(options))
    values |= {"image_prompts": read_image_prompts(options), "control": tuple(control for control, _ in controls)}
    edit_fields, source = read_edit(options)
    check_range(options, "strength", 0, 1)
    values |= edit_fields
    values.setdefault("seed", secrets.randbelow(2**32))
    # Compiling takes longer than most commands, so it is on only if requested.
    settings = read_settings(options, compile=False)
    for prompt in prompts:
        _complete(options, settings, values, prompt)
    create_cache_folder(settings)
    with model_errors(), folder(options.out), open_runtime(settings, console) as runtime:
        if runtime.image_runner.refiner is not None:
            values |= read_refining(options, runtime.image_runner.refiner.model.name)
        pictures = [picture for _, picture in controls]
        alone = len(prompts) == 1
        draft = _complete(options, settings, values, prompts[0], runtime, pictures, source, alone=alone)
        jobs = (
            (replace(draft, prompt=prompt.text, seed=next_seed(draft.seed, k)), prompt)
            for prompt in prompts
            for k in range(options.count)
        )
        return draw(runtime, jobs, len(prompts) * options.count, draft.made, options.out, console)


def _complete(
    options: argparse.Namespace,
    settings: Settings,
    values: Mapping[str, Any],
    prompt: PromptRow,
    runtime: Runtime | None = None,
    control_pictures: Sequence[Image] = (),
    source: Source | None = None,
    *,
    alone: bool = True,
) -> ImageParameters:
    """The parameters of a prompt's first picture. Without the engine only what needs no model is checked.

    A prompt that is not `alone` and that the model does not take is left to fail by itself.

    Raises `UsageError`, naming the option, or the prompt's position.
    """
    from contract import tuned
    from contract.card import VAES, ImageOffer
    from contract.errors import Invalid
    from contract.plan import OFF
    from core.batching.request import Request

    flags = {}
    if prompt.name:
        flags["prompt"] = f"--prompts: {options.file}: row {prompt.row}"
    elif len(options.prompts) > 1:
        flags["prompt"] = f"PROMPT {prompt.row}"
    if runtime is None:
        offer = ImageOffer([size_of(options)], _samplers(options), size_of(options), vaes=VAES)
        return complete(values, offer, prompt.text, settings.deepcache, flags)
    from pipeline.families.diffusers.runner import DiffusersRunner

    runner = runtime.image_runner
    model = runner.model
    own = runner.model.offer if isinstance(runner, DiffusersRunner) else None
    if settings.plan:
        tuned.named(settings.plan, model.plans)  # a default plan that there is not is an error here
    plan_fields = {name: value for name in ("plan", "deepcache") if (value := getattr(options, name)) is not None}
    size = size_of(options, model.native)
    if source is not None and options.size is None:
        offered = ImageOffer(runner.sizes, runner.schedulers, size, size_range=model.size_range)
        whole = source.margins is not None and offered.offers(source.size)
        size = source.size if whole else offered.nearest(source.size)
    offer = ImageOffer(
        [size],
        runner.schedulers,
        size,
        vaes=VAES,
        defaults=model.defaults,
        plans=model.plans,
        plan=settings.plan if runner.shallow_steps else "",
        fields=None if own is None else own.fields,
        options=None if own is None else own.options,
    )
    deepcache = settings.deepcache if runner.shallow_steps else OFF
    edited, masked = (None, False) if source is None else (source.size, source.masked)
    completed = complete({**values, **plan_fields}, offer, prompt.text, deepcache, flags, edited=edited, masked=masked)
    if completed.edit is not None and source is not None:
        completed = replace(completed, edit=source.fill(completed.edit, size))
    completed = replace(completed, control=prepared(completed.control, control_pictures, size, runtime.depth))
    # The second check is of the options, which a prompt that fails by itself would hide; no prompt may be empty.
    for checked in (completed, replace(completed, prompt=".")):
        try:
            runner.check(Request("check", "image", checked))
            break
        except Invalid as error:
            if alone or error.field != "prompt":
                raise wrong_option(error, {**FLAGS, **flags}) from error
    return completed


def _samplers(options: argparse.Namespace) -> Sequence[str]:
    """The names to check --scheduler against; importing them takes a second."""
    if options.scheduler is None:
        return ()
    from pipeline.sampling.samplers import SAMPLERS

    return tuple(SAMPLERS)


def _prompts(options: argparse.Namespace) -> list[PromptRow]:
    from pipeline.text.prompts import PromptRow, PromptsError, read

    check_range(options, "limit", 1)
    if options.limit is not None and options.file is None:
        raise UsageError("--limit: counts prompts of a file, and there is no --prompts")
    typed = [PromptRow(text, row, "") for row, text in enumerate(options.prompts, 1)]
    if options.file is None:
        if not typed:
            raise UsageError("PROMPT: give at least one, or a file with --prompts")
        return typed
    try:
        return typed + read(options.file, options.limit)
    except PromptsError as error:
        raise UsageError(f"--prompts: {error}") from error


def read_controls(options: argparse.Namespace, size: tuple[int, int]) -> list[tuple[Control, Image]]:
    """The controls and their pictures; `size` is (0, 0) while it is not known. Raises `UsageError`, naming the file."""
    controls = []
    for control, path in zip(read_inputs(options, Control), options.control, strict=True):
        picture = opened("--control", path)
        if control.fit == "exact" and not any(size):
            raise UsageError("--control-fit: exact needs a --size")
        if control.fit == "exact" and picture.size != size:
            words = "is {}x{}, and the picture {}x{}; give one of that size, or another --control-fit"
            raise UsageError(f"--control: {path} {words.format(*picture.size, *size)}")
        controls.append((control, picture))
    return controls


def prepared(
    controls: Sequence[Control], images: Sequence[Image], size: tuple[int, int], depth: DepthEstimator | None
) -> tuple[Control, ...]:
    """The controls with their pictures at this size, as their networks read them. Raises `UsageError`, and
    `CommandFailed` for a depth model that returns NaN.
    """
    from core.pictures import fitted
    from workers.images.sources import prepare

    if depth is None and any(control.preprocessor == DEPTH for control in controls):
        raise UsageError("--control-preprocessor: depth needs a --depth-model")
    completed = []
    for control, image in zip(controls, images, strict=True):
        pixels = fitted(image, size, cast("Fit", control.fit or "crop")).tobytes()
        try:
            completed.append(replace(control, image=prepare(control, pixels, size, depth)))
        except NotFinite as error:
            raise CommandFailed(f"--control-preprocessor: {error}") from error
    return tuple(completed)


def read_image_prompts(options: argparse.Namespace) -> tuple[ImagePrompt, ...]:
    """The image prompts with their pictures. Raises `UsageError`, naming the option or the file."""
    from PIL.Image import Resampling

    completed = []
    for prompt, path in zip(read_inputs(options, ImagePrompt), options.image_prompt, strict=True):
        picture = opened("--image-prompt", path)
        size = prompt.kept_size(picture.size, picture.size)
        pixels = picture.resize(size, Resampling.LANCZOS).tobytes()
        completed.append(replace(prompt, image=pixels, width=size[0], height=size[1]))
    return tuple(completed)
