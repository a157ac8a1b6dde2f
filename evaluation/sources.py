"""Image sources: an engine in this process, or a running service."""

from __future__ import annotations

import base64
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from contract.card import FULL
from contract.plan import GUIDANCE_FIELDS, to_field
from contract.schedule import SCHEDULE_FIELDS
from core import pictures
from evaluation.pixels import Pixels
from evaluation.service import ServiceClient
from evaluation.service import SourceError as SourceError

if TYPE_CHECKING:
    from contract.image import ImageParameters
    from workers.build import Runtime


class SourceImage(NamedTuple):
    """An image's PNG, and notes for its user."""

    png: bytes
    warnings: tuple[str, ...]


class ImageSource(Protocol):
    """Used from one thread. `width` requests keep it full."""

    width: int

    def submit(self, parameters: ImageParameters, tick: Callable[[], None]) -> Future[Any]:
        """Start an image; `tick` is called from any thread for each step, if steps are reported.

        A rejected request fails its future.
        """
        ...

    def take(self, result: Any) -> SourceImage:
        """The image from a future's result."""
        ...

    def pixels(self, result: Any) -> Pixels:
        """The pixels of an image, uint8 [H, W, 3]."""
        ...


class LocalEngine:
    """The engine of this process."""

    def __init__(self, runtime: Runtime, model: str = "") -> None:
        """`model` is one of the engine's, if it has several."""
        self.width = 2 * runtime.settings.max_requests  # as many wait as are running
        self._engine, self._model = runtime.engine, model

    def submit(self, parameters: ImageParameters, tick: Callable[[], None]) -> Future[Any]:
        from workers.draw import submit

        return submit(self._engine, parameters, tick, self._model)

    def take(self, result: Any) -> SourceImage:
        return SourceImage(result.png(), result.warnings)

    def pixels(self, result: Any) -> Pixels:
        return np.asarray(result.image)


class RemoteService:
    """A service, through its `POST /v1/images/generations`. Each request waits on its own thread."""

    def __init__(self, url: str, model: str | None = None, *, width: int = 64) -> None:
        """Raises `SourceError` if no service answers, or none has the model."""
        self._service = ServiceClient(url, width=width)
        self.width = width
        self.model, self.card = self._service.model("image", model)

    def submit(self, parameters: ImageParameters, tick: Callable[[], None]) -> Future[Any]:
        fields = {
            "prompt": parameters.prompt, "model": self.model, "size": f"{parameters.width}x{parameters.height}",
            "seed": parameters.seed, "steps": parameters.steps, "guidance_scale": parameters.guidance_scale,
            "negative_prompt": parameters.negative_prompt, "scheduler": parameters.scheduler,
            "deterministic": parameters.deterministic, "deepcache": to_field(parameters.deepcache),
            "plan": "off" if self.card.get("plan") else None,  # which a service may have for what is left open
            **{name: getattr(parameters, name) for name in (*GUIDANCE_FIELDS, *SCHEDULE_FIELDS)},
            "vae": None if parameters.vae == FULL else parameters.vae,  # which older services do not know
        }  # fmt: skip
        body = {name: value for name, value in fields.items() if value is not None}
        return self._service.submit(self._draw, body, parameters.steps, tick)

    def take(self, result: Any) -> SourceImage:
        return SourceImage(base64.b64decode(result["b64_json"], validate=True), tuple(result.get("warnings", ())))

    def pixels(self, result: Any) -> Pixels:
        return np.asarray(pictures.read(self.take(result).png))

    def _draw(self, fields: dict[str, Any], steps: int, tick: Callable[[], None]) -> Any:
        """One image. A retry is safe: a seed gives one image."""
        answer = self._service.post("/v1/images/generations", fields)
        for _ in range(steps):
            tick()
        return answer["data"][0]

    def close(self) -> None:
        self._service.close()
