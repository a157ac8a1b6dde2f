"""How a job becomes requests of the engine, and what they made becomes the job's result: one panel per modality.

Knows jobs' parameters, progress and artifacts; knows nothing of queues, Redis or how anything is computed. Light to
import: it is there before torch is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from core import schedule
from core.batching.request import Outcome
from core.batching.runner import Refused
from core.jobs.cards import ModelCard
from core.schedule import DeepCache
from pipeline.parameters import MAX_IMAGES, MAX_SEED, ImageParameters
from workers import sources
from workers.checker import Checker, check
from workers.formats import encode
from workers.shelf import Shelf

if TYPE_CHECKING:
    from core.quant.kernels.device import Decision
    from pipeline.picture import Picture
    from pipeline.runner import ImageRunner
    from workers.written import Written


class Tally(Protocol):
    """One job's progress, and what its texts have come to, if it writes any."""

    @property
    def written(self) -> Written | None: ...

    def take(self, index: int, outcome: Outcome) -> dict[str, Any] | None:
        """What to tell after an iteration of the request of this index, on the engine's thread. None: nothing."""
        ...


class Panel(Protocol):
    """A modality of jobs. Thread-safe."""

    @property
    def name(self) -> str:
        """The model's, as jobs name it."""
        ...

    def card(self) -> ModelCard:
        """The model as it is offered, with its costs as known now.

        A KeyError or RuntimeError says that they changed this very moment: ask again.
        """
        ...

    def requests(self, parameters: Mapping[str, Any]) -> list[Any]:
        """The parameters of the requests that a job's mean. Raises `Refused`, naming the field."""
        ...

    def tally(self, requests: Sequence[Any]) -> Tally: ...

    def result(self, made: Sequence[Any], shelf: Shelf) -> dict[str, Any]:
        """The job's result, from what its requests came to; artifacts are on the shelf before it returns.

        Raises `ArtifactError`, and `Filtered` where it may not be shown.
        """
        ...


class ImagePanel:
    """Pictures: a job asks for n of them with seeds that count up."""

    def __init__(
        self,
        runner: ImageRunner,
        deepcache: DeepCache | None = None,
        fetch: Callable[[str], bytes] | None = None,
        checker: Checker | None = None,
        decisions: Sequence[Decision] = (),
    ) -> None:
        """`deepcache` is for jobs that do not say. `fetch` gets what edits begin with; without it there are none.

        `checker` may refuse pictures; with one nobody sees any before it did. `decisions` say which kernels draw.
        """
        self._runner = runner
        self._deepcache = deepcache
        self._fetch = fetch
        self._checker = checker
        self._decisions = decisions
        self.name = runner.model.name

    def card(self) -> ModelCard:
        from workers.cards import image_card

        return image_card(self._runner, self._deepcache, self._decisions)

    def requests(self, parameters: Mapping[str, Any]) -> list[ImageParameters]:
        if self._checker is not None:
            parameters = {**parameters, "preview_every": 0}
        return pictures(parameters, self._deepcache, self._fetch)

    def tally(self, requests: Sequence[ImageParameters]) -> PictureTally:
        return PictureTally([request.made for request in requests])

    def result(self, made: Sequence[Picture], shelf: Shelf) -> dict[str, Any]:
        check(self._checker, made)
        return {"images": [_kept(picture, shelf) for picture in made]}


def pictures(
    parameters: Mapping[str, Any],
    deepcache: DeepCache | None = None,
    fetch: Callable[[str], bytes] | None = None,
) -> list[ImageParameters]:
    """A job's parameters as those of its pictures. Raises `Refused`; what a picture may be, its runner checks.

    `deepcache` and `fetch` are as for the panel. Raises `ArtifactError` where `fetch` does.
    """
    n, seed = _whole(parameters, "n", 1, MAX_IMAGES), _whole(parameters, "seed", 0, MAX_SEED)
    if parameters.get("deepcache") is not None:
        try:
            deepcache = schedule.read(parameters["deepcache"])
        except ValueError as error:
            raise Refused(f"deepcache: {error}") from error
    if parameters.get("edit") is not None and fetch is None:
        raise Refused("image: cannot be fetched here")
    edit = None if fetch is None else sources.read(parameters, fetch)
    return [
        ImageParameters(
            prompt=_given(parameters, "prompt"),
            seed=(seed + k) % (MAX_SEED + 1),
            width=_given(parameters, "width"),
            height=_given(parameters, "height"),
            negative_prompt=parameters.get("negative_prompt"),
            steps=_given(parameters, "steps"),
            guidance_scale=_given(parameters, "guidance_scale"),
            scheduler=parameters.get("scheduler"),
            deterministic=parameters.get("deterministic", False),
            preview_every=parameters.get("preview_every", 0),
            deepcache=deepcache,
            edit=edit,
            prompt_weighting=parameters.get("prompt_weighting", False),
            lora=parameters.get("lora", ""),
        )
        for k in range(n)
    ]


def _given(parameters: Mapping[str, Any], field: str) -> Any:
    try:
        return parameters[field]
    except KeyError:
        raise Refused(f"{field}: is missing") from None


def _whole(parameters: Mapping[str, Any], field: str, low: int, high: int) -> int:
    value = _given(parameters, field)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise Refused(f"{field}: must be a whole number between {low} and {high}")
    return value


def _kept(picture: Picture, shelf: Shelf) -> dict[str, Any]:
    data = encode(picture, shelf.form)
    return {
        "key": shelf.put(data, shelf.form.media_type),
        "seed": picture.parameters.seed,
        "width": picture.image.width,
        "height": picture.image.height,
        "media_type": shelf.form.media_type,
        "size_bytes": len(data),
        "warnings": list(picture.warnings),
    }


class PictureTally:
    """Steps done over all pictures of a job. Never goes back."""

    written: None = None

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = sum(steps)
        self._done = [0] * len(steps)
        self._finished = [False] * len(steps)

    def take(self, index: int, outcome: Outcome) -> dict[str, Any] | None:
        if outcome.progress is None:
            return None
        self._done[index] = max(self._done[index], outcome.progress[0])
        self._finished[index] |= outcome.finished
        return {
            "steps_done": sum(self._done),
            "steps": self._steps,
            "image": index,
            "images_done": sum(self._finished),
        }
