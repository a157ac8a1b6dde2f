"""The parts that a worker runs: an engine, and for each model a job handler, which turns jobs into engine requests.

Imports no torch at module level, because the worker imports it and the handlers before torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Protocol

from contract import plan
from core.artifacts import Artifacts
from core.batching.engine import Engine
from workers.handlers import JobHandler
from workers.images.handler import ImageJobHandler
from workers.metrics import METER
from workers.stages import stage
from workers.stages.stage import JobStage
from workers.text.handler import TextJobHandler

if TYPE_CHECKING:
    from core.kernels.device import KernelChoice
    from llm.runner import TextRunner
    from pipeline.model_pool import ModelPool, Pooled
    from workers.build import Runtime
    from workers.text.pool import TextPool

log = logging.getLogger(__name__)


class ServingRuntime(Protocol):
    @property
    def engine(self) -> Engine: ...

    @property
    def handlers(self) -> Mapping[str, JobHandler]: ...

    @property
    def stages(self) -> Sequence[JobStage]:
        """What surrounds the engine, in order."""
        ...

    @property
    def failed(self) -> Collection[str]:
        """The models that are not served, because they do not load."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False)
class ModelRuntime:
    """The engine that the settings configure, with its job handlers. Closing it ends the engine."""

    runtime: Runtime
    handlers: dict[str, JobHandler]
    failed: set[str] = field(default_factory=set)

    @property
    def engine(self) -> Engine:
        return self.runtime.engine

    @property
    def stages(self) -> Sequence[JobStage]:
        return self.runtime.stages

    def close(self) -> None:
        self.runtime.close()


def build_serving_runtime(runtime: Runtime, say: Callable[[str], None] = log.info) -> ModelRuntime:
    """Add a handler for each model. Those of the pools beside their first are loaded in the background, one after the
    other, and then served; `say` is told of each.
    """
    model_runtime = ModelRuntime(runtime, handlers_of(runtime))
    if runtime.pool is not None or runtime.text_pool is not None:
        Thread(target=_load_others, args=(model_runtime, say), name="models", daemon=True).start()
    return model_runtime


def handlers_of(runtime: Runtime) -> dict[str, JobHandler]:
    """A handler for each model that is loaded first, by its name."""
    first, pool = runtime.image_runner, runtime.pool
    handlers: dict[str, JobHandler] = {}
    images = _image_handler(runtime, first, runtime.decisions, runtime.settings.plan, handlers, pool)
    handlers[images.name] = images
    if runtime.texts is not None:
        texts = _text_handler(runtime.texts, runtime.text_pool)
        handlers[texts.name] = texts
    return handlers


def _load_others(model_runtime: ModelRuntime, say: Callable[[str], None]) -> None:
    runtime, handlers = model_runtime.runtime, model_runtime.handlers
    images, texts = runtime.pool, runtime.text_pool

    def image(name: str, plan_name: str) -> JobHandler:
        assert images is not None
        return _image_handler(runtime, *images.load(name), plan_name, handlers, images)

    def text(name: str) -> JobHandler:
        assert texts is not None
        return _text_handler(texts.load(name)[0], texts)

    loads: list[tuple[str, Callable[[], JobHandler]]] = []
    if texts is not None:  # first: most are smaller
        loads += [(name, partial(text, name)) for name in texts.names[1:]]
    if images is not None:
        plans = [each.plan for each in runtime.settings.catalogue[1:]]
        loads += [(name, partial(image, name, own)) for name, own in zip(images.names[1:], plans, strict=True)]
    for name, load in loads:
        if any(pool is not None and pool.closed for pool in (images, texts)):
            return
        try:
            handlers[name] = load()
            say(f"{name} is served, too")
        except Exception as error:
            model_runtime.failed.add(name)
            log.error("%s is not served: %s", name, error)


def _image_handler(
    runtime: Runtime,
    runner: Pooled,
    decisions: Sequence[KernelChoice],
    plan_name: str,
    handlers: Mapping[str, JobHandler],
    pool: ModelPool[Pooled] | None,
) -> ImageJobHandler:
    settings, name = runtime.settings, runner.model.name

    def fetch(key: str) -> bytes:
        # Opened on first use: most engines serve no edits.
        return Artifacts(settings.artifacts, settings.storage_s).get(key)

    return ImageJobHandler(
        runner, plan.parse(settings.deepcache), fetch, decisions, plan_name,
        depth=runtime.depth, metadata=settings.image_metadata,
        resident=None if pool is None else partial(pool.resident, name),
        load_s=(lambda: 0.0) if pool is None else partial(pool.load_s, name),
        card_fields=lambda handler: stage.card_fields(runtime.stages, handler, handlers),
    )  # fmt: skip


def _text_handler(runner: TextRunner, pool: TextPool | None) -> TextJobHandler:
    if pool is None:
        handler, usage = TextJobHandler(runner), runner.pages.usage
    else:
        resident = partial(pool.resident, runner.model.name)
        handler = TextJobHandler(runner, resident=resident, load_s=partial(pool.load_s, runner.model.name))

        def usage() -> float:
            resident_runner = resident()
            return 0.0 if resident_runner is None else resident_runner.pages.usage()

    METER.show_kv_cache(handler.name, usage)
    return handler
