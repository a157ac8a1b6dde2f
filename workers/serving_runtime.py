"""The parts that a worker runs: an engine, and for each queue a job handler, which turns jobs into engine requests.

Imports no torch at module level, because the worker imports it and the handlers before torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from contract import plan
from core.artifacts import Artifacts
from core.batching.engine import Engine
from workers.handlers import ImageJobHandler, JobHandler
from workers.text_handler import TextJobHandler

if TYPE_CHECKING:
    from workers.build import Runtime


class ServingRuntime(Protocol):
    @property
    def engine(self) -> Engine: ...

    @property
    def handlers(self) -> Mapping[str, JobHandler]: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class ModelRuntime:
    """The engine that the settings configure, with its job handlers. Closing it ends the engine."""

    runtime: Runtime
    handlers: dict[str, JobHandler]

    @property
    def engine(self) -> Engine:
        return self.runtime.engine

    def close(self) -> None:
        self.runtime.close()


def build_serving_runtime(runtime: Runtime) -> ModelRuntime:
    """Add a handler for each modality that has a runner."""
    return ModelRuntime(runtime, handlers_of(runtime))


def handlers_of(runtime: Runtime) -> dict[str, JobHandler]:
    """A handler for each runner, by queue."""
    settings = runtime.settings

    def fetch(key: str) -> bytes:
        return Artifacts(settings.artifacts, settings.storage_s).get(
            key
        )  # opened on first use: most engines serve no edits

    deepcache = plan.parse(settings.deepcache)
    images = ImageJobHandler(
        runtime.images, deepcache, fetch, runtime.checker, runtime.decisions, settings.plan, depth=runtime.depth,
        metadata=settings.image_metadata,
    )  # fmt: skip
    handlers: dict[str, JobHandler] = {runtime.images.modality: images}
    if runtime.texts is not None:
        handlers[runtime.texts.modality] = TextJobHandler(runtime.texts)
    return handlers
