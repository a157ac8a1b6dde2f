"""Builds an engine from settings: the runners of its images and texts, and what serves beside them.

The only module that imports both kinds of runners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from core.batching.engine import Engine, Tick
from core.batching.runner import Lane, Runner
from core.config import Settings
from core.kernels.device import KernelChoice
from pipeline.backends.swapped import SharedBackends
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import short_name
from pipeline.extensions.depth import DepthEstimator
from pipeline.families import diffusers
from pipeline.families.diffusers.runner import DiffusersRunner
from pipeline.model_pool import ModelPool, Pooled
from pipeline.runner import ImageRunner
from workers import backends, build_images, build_text
from workers.devices import device_of
from workers.stages import registry
from workers.stages.stage import JobStage
from workers.variants import Count, Say

if TYPE_CHECKING:
    from llm.runner import TextRunner
    from workers.text.pool import TextPool

S = TypeVar("S", bound=JobStage)

_LEAST = 4  # of the memory for requests, this part stays theirs whatever other models take


@dataclass(eq=False)
class Runtime:
    """An engine and its runners. Closing it ends both."""

    settings: Settings
    engine: Engine
    image_runner: Pooled
    lane: Lane
    stages: tuple[JobStage, ...]
    texts: TextRunner | None = None
    text_lane: Lane | None = None  # if separate from the images' lane
    decisions: tuple[KernelChoice, ...] = ()  # which kernels run, and why
    depth: DepthEstimator | None = None
    pool: ModelPool[Pooled] | None = None  # the images' and those of other models, if there are several
    text_pool: TextPool | None = None  # the texts' and those of other models, if there are several

    @property
    def images(self) -> ImageRunner:
        """Return the runner of a native family. Raises `ModelError` for a pipeline by diffusers' own loop."""
        if isinstance(self.image_runner, DiffusersRunner):
            name = self.image_runner.model.name
            raise ModelError(f"{name}: {diffusers.NOTICE}; this needs a model of a native family")
        return self.image_runner

    def stage(self, kind: type[S]) -> S:
        """Return the stage of this kind."""
        return next(stage for stage in self.stages if isinstance(stage, kind))

    def close(self) -> None:
        self.engine.close()
        for stage in self.stages:
            stage.close()
        (self.pool or self.image_runner).close()
        texts = self.text_pool or self.texts
        if texts is not None:
            texts.close()
        for lane in (self.lane, self.text_lane):
            if lane is not None:
                lane.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build(
    settings: Settings,
    *,
    lane: Lane | None = None,
    measure_s: float = 0.0,
    text: bool = False,
    say: Say = lambda text: None,
    count: Count | None = None,
    on_tick: Callable[[Tick], None] | None = None,
) -> Runtime:
    """Load the model and start an engine. `measure_s` limits the time for measuring cost curves.

    `say` receives the current step; `count` receives the progress of countable steps, or `say` does if `count` is None.
    On a GPU, CUDA graphs are recorded within this time, and the remaining ones while serving. With `text` the settings'
    text model is served too, by the same engine on the same device. `on_tick` is called after every iteration.
    """
    backends.check(settings)
    text_settings = settings.text_catalogue if text else []
    names = _names(settings, text_settings)
    stages = registry.open_all(settings, device_of(settings))
    lane = lane or Lane("device")
    llm_lane = build_text.text_lane(settings) if text else None
    texts = build_text.text_runner(text_settings[0], llm_lane or lane, say) if text_settings else None
    text_pool: TextPool | None = None
    if texts is not None:
        if measure_s:  # before its size is asked for: graphs count
            say("measuring what tokens cost")
            texts.prepare(measure_s=min(1.0, measure_s))
        if len(text_settings) > 1:
            text_pool = build_text.text_pool(text_settings, texts, llm_lane or lane)
    first, *others = settings.catalogue
    depth = lane.call(lambda: DepthEstimator(Path(settings.depth_model))) if settings.depth_model else None
    # After all else: requests get most of the memory that is left.
    shared = SharedBackends(lane) if others else None
    images, decisions = lane.call(lambda: build_images.image_runner(first, lane, say, count, shared=shared))
    pool = None if shared is None else build_images.image_pool(settings, names, images, decisions, lane, shared)
    others_bytes = 0 if pool is None else build_images.others_bytes(settings, images)
    if texts is not None:
        others_bytes += build_text.others_bytes(text_settings, texts)
    if not settings.memory_mib:
        memory = images.capacity.memory
        memory.capacity = max(memory.capacity // _LEAST, memory.capacity - others_bytes)
    if measure_s or settings.compile:
        say("measuring what forwards cost")
        images.prepare(measure_s=measure_s)
    runners: list[Runner] = [pool or images, *([] if texts is None else [text_pool or texts])]
    engine = Engine(runners, starvation_s=settings.starvation_s, on_tick=on_tick)
    if pool is not None:
        pool.retry_admission = engine.retry_admission
    if text_pool is not None:
        text_pool.retry_admission = engine.retry_admission
    return Runtime(settings, engine, images, lane, stages, texts, llm_lane, decisions, depth, pool, text_pool)


def _names(settings: Settings, text_settings: Sequence[Settings]) -> list[str]:
    """The names of the settings' image models. Raises `ModelError` for two models of one name."""
    names = [short_name(each.model_name) for each in settings.catalogue]
    every = [*names, *(short_name(str(each.text_model_name)) for each in text_settings)]
    if max(len(names), len(text_settings)) > 1 and len({*every}) < len(every):
        raise ModelError(f"models of one worker must have different names, not {', '.join(every)}")
    return names
