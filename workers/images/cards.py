"""Builds the model card of an image runner: name, sizes, limits, and whole-image costs from the measured curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from contract.card import FULL, TINY, ImageCard, ImageCosts, ImageLimits
from contract.control import CANNY, PREPROCESSORS
from contract.plan import OFF, DeepCache
from contract.upscale import LANCZOS
from core.kernels.device import KernelChoice, summary
from pipeline.backends.backend import BatchGroup
from pipeline.backends.phases import DECODES, DEEP, ENCODE, SHALLOW, VAE, VAE_ROWS
from pipeline.extensions.costs import WIDTHS
from pipeline.extensions.lora_extension import LoraExtension
from pipeline.families.diffusers import LOOP
from pipeline.families.diffusers.runner import DiffusersRunner
from pipeline.model_pool import Pooled
from pipeline.runner import ImageRunner

_Cost = Callable[[BatchGroup, int], float]
_NEVER = ("loras", "upscalers", "controls", "embeddings")  # of pipelines by diffusers' own loop


def image_card(
    runner: Pooled, deepcache: DeepCache | None = None, decisions: Sequence[KernelChoice] = (), plan: str = "",
    *, has_depth: bool = False,
) -> ImageCard:  # fmt: skip
    """Build the card of the runner's model, with its current cost estimates.

    `deepcache` is the default schedule, `plan` the default plan; `has_depth`: there is a depth model.
    `decisions` explain the choice of kernels. May be called while the engine runs; raises KeyError or RuntimeError if a
    cost curve changes during the call: then call again.
    """
    if isinstance(runner, DiffusersRunner):
        return _pipeline_card(runner)
    model = runner.model
    recorded, counts = runner.backend.graphs.counts
    native = (model.native, model.native)
    sizes = _known_sizes(runner, native)
    defaults, extensions = model.defaults, runner.extensions.values()
    names: dict[str, Any] = {extension.card_field: tuple(extension.asset_names()) for extension in extensions}
    refusals = {extension.card_field: extension.refusal for extension in extensions}
    folders = (extension.folder for extension in extensions if isinstance(extension, LoraExtension))
    lora_aliases = next((folder.aliases() for folder in folders if folder is not None), {})
    rows = defaults.steps * defaults.rows(defaults.guidance_scale)
    costs = _costs(runner, sizes, runner.cost)
    every = {phase: {native} for phase in SHALLOW.values()} | sizes  # what is missing counts as deep
    least_costs = _costs(runner, every, partial(_least_s, runner))
    added = {
        name: value for extension in extensions for name, value in extension.costs(runner.backend, sizes[DEEP]).items()
    }
    return _card(
        runner,
        replace(costs, **added),
        costs.encode_s + rows * costs.row_step_s[_named(native)] + costs.vae_s,
        least_costs=least_costs,
        scheduler_reason=model.scheduler_reason,
        plans={name: dict(fields) for name, fields in model.plans.items()},
        plan=plan,
        vaes=model.vaes,
        inpaint_only=model.inpaints,
        deepcache=OFF if deepcache is None else asdict(deepcache),
        kernels=runner.backend.kernels.name,
        kernels_reason=summary(decisions)[1] if decisions else "",
        **names,
        refusals={name: reason for name, reason in refusals.items() if reason},
        lora_aliases=lora_aliases,
        upscale_filters=(LANCZOS,),
        preprocessors=PREPROCESSORS if has_depth else (CANNY,),
        refiners=() if runner.refiner is None else (runner.refiner.model.name,),
        prompt_fields=tuple(model.family.prompt_fields),
        graphs={"recorded": recorded, "wanted": counts} if counts else {},
    )


def _costs(runner: ImageRunner, sizes: Mapping[str, set[tuple[int, int]]], cost: _Cost) -> ImageCosts:
    """Return the costs of an image by these costs of iterations, without what extensions add."""
    native, vaes = (runner.model.native, runner.model.native), runner.model.vaes
    solo_s, row_s = _steps(runner, DEEP, sizes[DEEP], cost)
    shallow = {depth: _steps(runner, phase, sizes[phase], cost) for depth, phase in SHALLOW.items() if phase in sizes}
    decode_s = {name: _best(runner, BatchGroup(DECODES[name], native), range(1, VAE_ROWS + 1), cost) for name in vaes}
    return ImageCosts(
        encode_s=cost(BatchGroup(ENCODE, (0, 0)), 2),  # two prompts, one image
        vae_s=decode_s[FULL],
        vae_tiny_s=decode_s.get(TINY, 0.0),
        solo_step_s=solo_s,
        row_step_s=row_s,
        shallow_solo_step_s={depth: solo for depth, (solo, _) in shallow.items()},
        shallow_row_step_s={depth: row for depth, (_, row) in shallow.items()},
    )


def _least_s(runner: Pooled, group: BatchGroup, rows: int) -> float:
    """Seconds that an iteration takes at least, by what iterations took; 0 before any ran."""
    if isinstance(runner, DiffusersRunner):
        return runner.costs.curve(group.phase, group.size, False).least(1)
    compiled = False
    if group.phase != ENCODE:  # which has no executable of its own
        plan = runner.backend.plan(group, rows)
        compiled, rows = plan.compiled, plan.rows
    return runner.backend.costs.curve(group.phase, group.size, compiled).least(rows)


def _pipeline_card(runner: DiffusersRunner) -> ImageCard:
    """Build the card of a pipeline that runs by diffusers' own loop, in which a picture is one row."""
    model, offer = runner.model, runner.model.offer
    native = (model.native, model.native)
    costs, least_costs = (_pipeline_costs(native, cost) for cost in (runner.cost, partial(_least_s, runner)))
    # What the offer has of the rest of the card; it has no LoRAs, networks, refiners or upscalers.
    offered: dict[str, Any] = {
        name: tuple(getattr(offer, name)) for name in ("prompt_fields", "image_prompts", "fields", "sources")
    }
    return _card(
        runner,
        costs,
        costs.encode_s + model.defaults.steps * costs.row_step_s[_named(native)] + costs.vae_s,
        least_costs=least_costs,
        preprocessors=(),
        kernels="torch",
        kernels_reason="by diffusers' own loop",
        options={name: dict(option) for name, option in (offer.options or {}).items()},
        refusals=dict.fromkeys(_NEVER, "pipelines by diffusers' own loop take none"),
        loop=LOOP,
        **offered,
    )


def _pipeline_costs(native: tuple[int, int], cost: _Cost) -> ImageCosts:
    encode_s, step_s, decode_s = (cost(BatchGroup(phase, native), 1) for phase in (ENCODE, DEEP, VAE))
    name = _named(native)
    return ImageCosts(
        encode_s=encode_s, vae_s=decode_s, solo_step_s={name: 2 * step_s}, row_step_s={name: step_s}
    )  # fmt: skip


def _card(runner: Pooled, costs: ImageCosts, picture_s: float, **fields: Any) -> ImageCard:
    """Build a card of what all runners say, and these fields. `picture_s` is what a picture takes of a full batch."""
    model = runner.model
    return ImageCard(
        name=model.name,
        precision=model.precision,
        device=str(model.device),
        native=model.native,
        sizes=tuple(runner.sizes),
        size_range=model.size_range,
        schedulers=tuple(runner.schedulers),
        default_scheduler=runner.default_scheduler,
        defaults=model.defaults,
        limits=ImageLimits(),
        costs=costs,
        capacity_per_s=1 / picture_s,
        **fields,
    )


def _known_sizes(runner: ImageRunner, native: tuple[int, int]) -> dict[str, set[tuple[int, int]]]:
    """Return by phase the measured sizes among those listed, and the native one: clients estimate others by area."""
    sizes = {DEEP: {native}}
    for phase, size, _ in runner.backend.costs.measured():
        if size in runner.sizes:
            sizes.setdefault(phase, set()).add(size)
    return sizes


def _steps(
    runner: ImageRunner, phase: str, sizes: Iterable[tuple[int, int]], cost: _Cost
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by size: of a forward of two rows, and of one row at the cheapest batch width."""
    groups = {_named(size): BatchGroup(phase, size) for size in sizes}
    solo_s = {size: cost(group, 2) for size, group in groups.items()}
    return solo_s, {size: _best(runner, group, WIDTHS, cost) for size, group in groups.items()}


def _named(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _best(runner: ImageRunner, group: BatchGroup, widths: Iterable[int], cost: _Cost) -> float:
    """Seconds per row at the cheapest batch width."""
    limit = runner.limit(group)
    return min(cost(group, rows) / rows for rows in {*widths, limit} if rows <= limit)
