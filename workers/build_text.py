"""Builds the runner of a text model, and the pool of several, from settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from contract.parallel import parse
from core.batching.runner import Lane
from core.config import Settings
from core.kernels.device import lacks
from core.transfers import beside
from llm.cache.pages import PAGE
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import short_name
from pipeline.extensions.asset_cache import ReadFile
from workers.devices import check_gpu, compile_kernels, describe, device_of, free_bytes, keep_compiled, set_threads
from workers.variants import Say

if TYPE_CHECKING:
    from llm.checkpoints.load import TextModel
    from llm.features.adapters import AdapterSource
    from llm.parallel.followers import Followers
    from llm.runner import TextRunner
    from workers.text.pool import TextPool

log = logging.getLogger(__name__)

_SHARE = 0.1  # of free memory, for the KV cache
_UNLIMITED = 2**63  # bytes


def text_lane(settings: Settings) -> Lane | None:
    """A separate lane for text if the device runs several streams at once; None if it alternates with images."""
    import torch

    from llm.lane import StreamLane

    device = torch.device(device_of(settings))
    return StreamLane("text", device) if device.type == "cuda" else None


def text_runner(
    settings: Settings, lane: Lane, say: Say, *, pages: int = 0, beside_lane: bool = False
) -> TextRunner | None:
    """The settings' text model, ready to serve; None if none is set or embedded.

    Raises `ModelError`. The KV cache's memory is reserved here, before images get the rest, and logged: so many
    `pages`; 0: as the settings say. It is loaded on the lane, or with `beside_lane` on this thread.
    """
    from core.kernels.cpu.library import KernelsUnavailable, library
    from llm.checkpoints.load import TextModelError
    from llm.drafts.load_draft import load as load_draft
    from llm.runner import TextRunner

    name = settings.text_model_name
    followers: list[Followers] = []
    if name is None:
        return None
    device = device_of(settings)
    if device == "cpu":
        compile_kernels(settings, say)
    say(f"loading {name}")
    kernel_library, refusal = None, None
    keep_compiled(settings, device)
    if device != "cpu":
        check_gpu(settings, device, settings.text_precision)
        refusal = lacks(describe(settings, device), "int8")
    elif not settings.kernels:
        refusal = "the native kernels are turned off"
    else:
        try:
            kernel_library = library(settings.compiled_kernels)
        except KernelsUnavailable as error:
            refusal = str(error)
            log.warning("text generation runs on torch: %s", error)

    def make() -> TextRunner:
        set_threads(settings, device)
        model = _load_text(settings, name, device, refusal, followers)
        draft = load_draft(settings.text_draft, model, lacks=refusal) if settings.text_draft else None
        return TextRunner(
            model, lane=lane, max_requests=settings.text_requests, pages=pages or _pages(settings, model),
            kv=settings.text_kv, kernels=kernel_library, draft=draft, patience_s=settings.text_first_s,
            pace_s=settings.text_token_s, followers=followers[0] if followers else None,
        )  # fmt: skip

    try:
        runner = make() if beside_lane else lane.call(make)
    except TextModelError as error:
        for each in followers:
            each.close()
        if settings.text_model or settings.text_parallel:
            raise ModelError(f"text: {error}") from error
        # Images are served all the same.
        log.warning("text generation is off: the embedded model does not load: %s", error)
        return None
    runner.release_weights()
    runner.adapters = _text_loras(settings, runner)
    cache = runner.execution.cache
    say(f"{runner.model.name}: {runner.pages.tokens} tokens of keys and values in {cache.size_bytes / 2**20:.0f} MiB")
    return runner


def _text_loras(settings: Settings, runner: TextRunner) -> AdapterSource | None:
    """The adapters that requests of this model may name: those of its own folder, if it has one."""
    from workers.text.loras import TextLoraFolder

    if not settings.text_loras:
        return None
    folder = Path(settings.text_loras).expanduser()
    own = folder / runner.model.name
    return TextLoraFolder(own if own.is_dir() else folder, runner.execution, settings.text_loras_mib * 2**20)


def _load_text(
    settings: Settings, name: str, device: str, lacks: str | None, followers: list[Followers]
) -> TextModel:  # fmt: skip
    """Load the text model; with `DIPTYCH_TEXT_PARALLEL` its part of rank 0, and `followers` receives the other ranks.

    Raises `TextModelError`.
    """
    import torch

    from llm.checkpoints.precision import load as load_text
    from llm.parallel.followers import Followers
    from llm.parallel.shards import Rank

    split, rank = parse(settings.text_parallel), None
    if split.ranks > 1:
        arguments = {"name": name, "requested": settings.text_precision, "lacks": lacks, "threads": settings.threads}
        followers.append(Followers(split, arguments, device=torch.device(device)))
        rank = Rank(0, split)
    model, reason = load_text(name, settings.text_precision, device=device, lacks=lacks, rank=rank)
    log.info("text: %s in %s: %s", model.name, model.precision, reason)
    for other in followers:
        other.loaded(model.digest)
    return model


def text_pool(text_settings: Sequence[Settings], first: TextRunner, lane: Lane) -> TextPool:
    """Return a pool of these settings' text models, of which the first is loaded. A model has a KV cache of the same
    size each time that it is loaded. Raises `ModelError`.
    """
    from workers.text.pool import TextPool, size_bytes

    settings = text_settings[0]
    settings_of = {short_name(str(each.text_model_name)): each for each in text_settings}
    pages: dict[str, int] = {}
    loaded = [first]

    def load(name: str) -> ReadFile[TextRunner]:
        if loaded:
            runner = loaded.pop()
        else:
            with beside(first.model.device):
                made = text_runner(settings_of[name], lane, log.info, pages=pages.get(name, 0), beside_lane=True)
                assert made is not None, "a model that is named is loaded, or refused"
                runner = made
                try:
                    runner.prepare(beside_lane=True)  # or its first steps would, and hold up the lane
                except BaseException:
                    runner.close()
                    raise
        pages[name] = runner.pages.capacity
        return ReadFile(runner, runner.model.digest, size_bytes(runner))

    pool = TextPool(
        [*settings_of], load, settings.text_models_mib * 2**20 or _UNLIMITED, patience_s=settings.text_first_s,
        idle_s=settings.model_idle_s,
    )  # fmt: skip
    pool.start()
    return pool


def _pages(settings: Settings, model: TextModel) -> int:
    """Pages for all answers at full length, as far as memory allows; at least for one answer."""
    pages_per_sequence = -(-model.context // PAGE)
    each = 2 * model.layers * model.kv_heads * model.head_dim * PAGE
    each_bytes = each if settings.text_kv != "float" else each * (4 if model.device.type == "cpu" else 2)
    allowed = settings.text_memory_mib * 2**20 or int(_SHARE * free_bytes(model.device))
    return max(pages_per_sequence, min(settings.text_requests * pages_per_sequence, allowed // each_bytes))


def others_bytes(text_settings: Sequence[Settings], first: TextRunner) -> int:
    """Return the memory that all may take later, and others than the first with their caches, as of images."""
    from llm.checkpoints.load import TextModelError, file_bytes
    from workers.text.pool import later_bytes, size_bytes

    files, own = [0] * len(text_settings), size_bytes(first)
    for at, each in enumerate(text_settings):
        with suppress(TextModelError):  # one that cannot be loaded takes nothing
            files[at] = file_bytes(str(each.text_model_name))
    weights = own - first.execution.cache.size_bytes
    most = int(sum(files[1:]) * min(1.0, weights / files[0] if files[0] else 1.0))
    most += len(files[1:]) * first.execution.cache.size_bytes
    allowed = text_settings[0].text_models_mib * 2**20
    most = min(most, max(0, allowed - own)) if allowed else most
    return most + len(files) * later_bytes(text_settings[0], first)
