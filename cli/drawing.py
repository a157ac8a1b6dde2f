"""Shared by the commands that generate prompt sets: the image request, and the engine or service that runs it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.arguments import (
    UsageError,
    create_cache_folder,
    model_errors,
    open_runtime,
    wrong_option,
)
from cli.request import FLAGS, SHARED, complete, read_request, size_of
from cli.scoring import scoring_errors
from contract.card import FULL
from contract.errors import Invalid
from contract.plan import GUIDANCE_FIELDS, to_field
from contract.printable import printable_message

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from contract.card import ImageDefaults
    from contract.image import ImageParameters
    from contract.tuned import Plans
    from core.config import Settings
    from evaluation.captions import Caption
    from evaluation.sources import ImageSource
    from workers.build import Runtime

_FLAGS = {"seed": "--seed-offset"}


def draft_of(options: argparse.Namespace, settings: Settings, caption: Caption) -> ImageParameters:
    """The request shared by all images, checked with the first caption; a width of 0 stands for the model's own
    size.
    """
    from contract.card import VAES, ImageOffer
    from pipeline.sampling.samplers import SAMPLERS

    size = size_of(options)
    values = {**read_request(options, SHARED), "seed": options.seed_offset}
    values |= {name: value for name in ("plan", "deepcache") if (value := getattr(options, name)) is not None}
    defaults, plans = _offered(options, settings)
    offer = ImageOffer([size], tuple(SAMPLERS), size, vaes=VAES, defaults=defaults, plans=plans)
    return complete(values, offer, caption.text, settings.deepcache, _FLAGS)


def _offered(options: argparse.Namespace, settings: Settings) -> tuple[ImageDefaults, Plans]:
    """The model's defaults, where the options leave a choice, and its tuned plans, where they name one."""
    from contract.card import ImageDefaults
    from pipeline import plans
    from pipeline.checkpoints.load import defaults_of, family_of

    if not options.server:
        with model_errors():
            defaults = defaults_of(settings.model_name, settings.variant, settings.lora)
            if options.plan is None:
                return defaults, {}
            from workers.build_images import precision
            from workers.devices import device_of

            folder = family_of(settings.model_name, settings.variant)[1]
            return defaults, plans.of_model(folder, settings.plans, precision(settings, device_of(settings)), "")
    if options.plan is None and None not in (options.steps, options.guidance):
        return ImageDefaults(), {}  # the service fills in what goes with them
    from evaluation.sources import RemoteService

    with scoring_errors(), contextlib.closing(RemoteService(options.server, options.model)) as remote:
        names = {item.name for item in dataclasses.fields(ImageDefaults)}
        defaults = ImageDefaults(**{k: v for k, v in remote.card.get("defaults", {}).items() if k in names})
        return defaults, remote.card.get("plans", {})


def asked(options: argparse.Namespace, settings: Settings, draft: ImageParameters) -> dict[str, Any]:
    """A run's request settings, which must stay the same when it is continued."""
    from contract.schedule import SCHEDULE_FIELDS

    size = f"{draft.width}x{draft.height}" if draft.width else "native"
    unet = str(Path(settings.unet).resolve()) if settings.unet else None
    where: dict[str, Any]
    if options.server:
        where = {"server": options.server.rstrip("/"), "model": options.model}
    else:
        name = settings.model_name
        short = Path(name).expanduser().resolve().name if Path(name).expanduser().is_dir() else name
        where = {"server": None, "model": short, "precision": settings.precision, "unet": unet}
    if options.plan is not None:
        where["plan"] = options.plan
    for name in (*GUIDANCE_FIELDS, *SCHEDULE_FIELDS):  # absent in runs of earlier versions
        if (value := getattr(draft, name)) is not None:
            where[name] = [*value] if isinstance(value, tuple) else value
    if draft.vae != FULL:
        where["vae"] = draft.vae
    return where | {
        "prompts": options.prompts.name,
        "protocol": options.protocol,
        "steps": draft.steps,
        "guidance_scale": draft.guidance_scale,
        "negative_prompt": draft.negative_prompt,
        "scheduler": draft.scheduler,
        "deepcache": settings.deepcache if options.plan is None else to_field(draft.deepcache),
        "size": size,
        "seed_offset": options.seed_offset,
        "deterministic": draft.deterministic,
    }


def open_source(
    options: argparse.Namespace,
    settings: Settings,
    draft: ImageParameters,
    captions: Sequence[Caption],
    latent: Tensor | None,
    stack: contextlib.ExitStack,
    console: Console,
) -> tuple[ImageSource, ImageParameters]:
    """The engine or the service that generates, open as long as the stack is, and the request with its size.

    The engine checks all captions that are to be drawn: a run with one that cannot be would have no scores. Raises
    `UsageError` for those, each of which is printed, and for options.
    """
    if options.server:
        from evaluation.sources import RemoteService

        remote = stack.enter_context(contextlib.closing(RemoteService(options.server, options.model)))
        width, height = (int(side) for side in remote.card["native_size"].split("x"))
        return remote, draft if draft.width else replace(draft, width=width, height=height)
    from evaluation.sources import LocalEngine

    create_cache_folder(settings)
    stack.enter_context(model_errors())
    runtime = stack.enter_context(open_runtime(settings, console))
    native = runtime.images.model.native
    draft = draft if draft.width else replace(draft, width=native, height=native)
    if latent is not None:
        _fix_noise(runtime, latent, draft, options)
    _check_captions(runtime, draft, captions, console)
    return LocalEngine(runtime), draft


def _check_captions(runtime: Runtime, draft: ImageParameters, captions: Sequence[Caption], console: Console) -> None:
    from core.batching.request import Request

    refused = 0
    for caption in captions:
        try:
            runtime.images.check(Request("check", "image", replace(draft, prompt=caption.text)))
        except Invalid as error:
            if error.field != "prompt":
                raise wrong_option(error, {**FLAGS, **_FLAGS}) from error
            refused += 1
            line = printable_message(f"caption {caption.index + 1} ({caption.id}): {error.message}")
            console.print(line, style="red", markup=False, emoji=False, highlight=False, soft_wrap=True)
    if refused:
        raise UsageError(f"--prompts: {refused} of {len(captions)} captions cannot be drawn, so that none is")


def follow_mlperf(options: argparse.Namespace) -> None:
    """Set the protocol's options, and reject contradicting ones."""
    from evaluation import mlperf

    for name, value in (
        ("steps", mlperf.STEPS),
        ("guidance", mlperf.GUIDANCE),
        ("negative", mlperf.NEGATIVE),
        ("scheduler", mlperf.SCHEDULER),
    ):
        if getattr(options, name) not in (None, value):
            raise UsageError(f"--{name}: MLPerf's protocol has {value!r}; leave it out")
        setattr(options, name, value)
    if options.latent is None:
        options.latent = str(options.prompts.with_name("latents.npy"))


def open_latent(options: argparse.Namespace) -> tuple[Tensor | None, str | None]:
    """The fixed latent and its digest, if there is one."""
    from evaluation import mlperf

    if options.latent in (None, "off"):
        return None, None
    if options.server:
        raise UsageError("--latent: a service begins from its own noise; give --latent off, or draw without --server")
    try:
        return mlperf.read_latent(Path(options.latent))
    except mlperf.ProtocolError as error:
        raise UsageError(f"--latent: {error}; --latent off begins each image from its seed") from error


def _fix_noise(runtime: Runtime, latent: Tensor, draft: ImageParameters, options: argparse.Namespace) -> None:
    model = runtime.images.model
    shape = [1, model.latent_channels, draft.height // model.vae_scale, draft.width // model.vae_scale]
    if list(latent.shape) != shape:
        raise UsageError(
            f"--latent: {options.latent} is {list(latent.shape)}, images of {model.name} begin from {shape}; "
            "--latent off begins each from its seed"
        )
    runtime.images.fix_noise(latent)
