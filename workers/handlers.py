"""Job handlers, one per modality: turn a job into engine requests, and their outputs into the job's result.

Imports no torch at module level, because the worker imports it before torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from contract import plan as plans
from contract.card import ImageCard, ModelCard
from contract.cascade import Gates
from contract.content import HIDING, action_of
from contract.errors import Invalid
from contract.image import ImageJob, ImageParameters
from contract.image_request import draft_of
from contract.plan import DeepCache
from contract.text import TextJob
from core.batching.request import Outcome
from workers import sources
from workers.artifact_writer import ArtifactWriter
from workers.checker import Checked, Checker, check, require
from workers.formats import ImageFormat, encode

if TYPE_CHECKING:
    from core.kernels.device import KernelChoice
    from pipeline.extensions.depth import DepthEstimator
    from pipeline.model_pool import Pooled
    from pipeline.pixels.picture import Picture
    from pipeline.pixels.provenance import Provenance
    from workers.gate import Gate
    from workers.stream_buffer import StreamBuffer


class JobProgress(Protocol):
    """One job's progress, and its texts so far, if it generates text."""

    @property
    def written(self) -> StreamBuffer | None: ...

    def take(self, index: int, outcome: Outcome) -> dict[str, Any] | None:
        """The progress to report after an iteration of the request with this index, on the engine's thread. None:
        nothing.
        """
        ...


class JobHandler(Protocol):
    """A modality of jobs. Thread-safe."""

    @property
    def modality(self) -> str:
        """The queue of its jobs."""
        ...

    @property
    def name(self) -> str:
        """The model's name, as jobs name it."""
        ...

    @property
    def load_s(self) -> float:
        """Seconds that the model would take to load; 0: it is in memory."""
        ...

    @property
    def expansion_instruction(self) -> str:
        """The system message that the model was trained to expand prompts by; "" where it was not."""
        ...

    def card(self) -> ModelCard:
        """The model's card, with the costs measured so far.

        Raises KeyError or RuntimeError if they change during the call: call again.
        """
        ...

    @property
    def reads_files(self) -> bool:
        """Whether jobs may name files that are read for them."""
        ...

    def files(self, job: Any) -> set[str]:
        """The files that a job needs in memory. Raises `Invalid` for one that cannot be named."""
        ...

    def held_files(self) -> Iterable[str]:
        """The files in memory, each as `files` names it."""
        ...

    def read(self, parameters: Mapping[str, Any], key_action: str = "") -> ImageJob | TextJob:
        """Parse a job's parameters from its record; `key_action` is what its key has flagged pictures done to
        (`contract.content`), "" the service's. Raises `Invalid`.
        """
        ...

    def requests(self, job: Any) -> list[Any]:
        """The parameters of the job's engine requests. Raises `Invalid`."""
        ...

    def tally(self, requests: Sequence[Any]) -> JobProgress: ...

    def build_result(
        self, job: Any, outputs: Sequence[Any], artifact_writer: ArtifactWriter,
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:  # fmt: skip
        """The job's result, from its requests' outputs; artifacts are stored before it returns.

        Raises `ArtifactError`, `UnsafeImage` where all images are refused, `CheckFailed`, and `Aborted` once `stopped`.
        """
        ...


class ImageJobHandler:
    """Images: a job asks for n of them with consecutive seeds."""

    modality = "image"

    def __init__(
        self,
        runner: Pooled,
        deepcache: DeepCache | None = None,
        fetch: Callable[[str], bytes] | None = None,
        checker: Checker | None = None,
        action: str = "off",
        decisions: Sequence[KernelChoice] = (),
        plan: str = "",
        *,
        depth: DepthEstimator | None = None,
        metadata: bool = True,
        provenance: Provenance | None = None,
        resident: Callable[[], Pooled | None] | None = None,
        load_s: Callable[[], float] = lambda: 0.0,
        cascades: Callable[[], Gates] = dict,
        gate: Gate | None = None,
    ) -> None:
        """`deepcache` and `plan` are the defaults for jobs. `fetch` reads the source images of edits; without it edits
        are rejected.

        `checker` looks at finished images, and `action` is done to those that it flags where neither key nor request
        says otherwise; nothing that may be hidden is shown before it has run. `decisions` say which kernels run.
        `depth` makes depth maps for controls. `metadata`: whether files tell how they were made. `provenance` marks
        them as generated. `resident` returns the runner while it is in memory; without it, it always is. `load_s`
        returns how long it took to load. `cascades` returns the models that may draw first, whose drafts `gate` scores.
        """
        self._resident = resident or (lambda: runner)
        self._evictable = resident is not None
        self._load_s = load_s
        self._deepcache = deepcache if runner.shallow_steps else None
        self._fetch = fetch
        self._checker, self._action = checker, "off" if checker is None else action
        self._decisions = decisions
        self._plan = plan
        self._depth = depth
        self._encode = partial(encode, metadata=metadata, provenance=provenance)
        self._cascades = cascades
        self.gate = gate
        self.name, self.digest = runner.model.name, runner.model.digest
        self.reads_files = runner.reads_files
        self._card: ImageCard | None = None
        if self._evictable:
            self._card = self._card_of(runner)

    @property
    def load_s(self) -> float:
        return 0.0 if self._resident() is not None else self._load_s()

    @property
    def expansion_instruction(self) -> str:
        return ""

    def card(self) -> ImageCard:
        """The model's card; the last one if it is not in memory."""
        runner = self._resident()
        if runner is None:
            assert self._card is not None
            return replace(self._card, loaded=False, cascades=dict(self._cascades()))
        self._card = self._card_of(runner)
        return self._card

    def _card_of(self, runner: Pooled) -> ImageCard:
        from workers.cards import image_card

        has_depth = self._depth is not None
        card = image_card(runner, self._deepcache, self._decisions, self._plan, has_depth=has_depth)
        action = "" if self._checker is None else self._action
        return replace(card, load_s=self._load_s(), cascades=dict(self._cascades()), checker=action)

    def files(self, job: ImageJob) -> set[str]:
        return job.files()

    def held_files(self) -> Iterable[str]:
        runner = self._resident()
        return () if runner is None else runner.held_files()

    def read(self, parameters: Mapping[str, Any], key_action: str = "") -> ImageJob:
        """Parse it; `checker` of the result is what is done, and it has no previews of what may be hidden. Raises
        `CheckFailed` for what needs a checker where there is none.
        """
        job = ImageJob.read(parameters)
        action = action_of(self._action, key_action, job.checker)
        require(self._checker, action)
        picture = replace(job.picture, preview_every=0) if action in HIDING else job.picture
        return replace(job, picture=picture, checker=action)

    def requests(self, job: ImageJob) -> list[ImageParameters]:
        return pictures(job, self._deepcache, self._fetch, self._depth)

    def draft(self, picture: ImageParameters) -> ImageParameters:
        """The parameters of a cascade's draft of this picture, by this model. Raises `Invalid`."""
        (parameters,) = self.requests(draft_of(picture, (self._card or self.card()).offer))
        return parameters

    def tally(self, requests: Sequence[ImageParameters]) -> ImageJobProgress:
        return ImageJobProgress([request.made for request in requests])

    def build_result(
        self, job: ImageJob, outputs: Sequence[Picture], artifact_writer: ArtifactWriter,
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:  # fmt: skip
        form, outputs = ImageFormat(job.output_format, job.output_compression), [one.enlarged() for one in outputs]
        checked = check(self._checker, job.checker or self._action, outputs, stopped)
        images = [
            self._kept(picture, each, form, artifact_writer) for picture, each in zip(outputs, checked, strict=True)
        ]
        return {"images": images, "deepcache": plans.to_field(outputs[0].parameters.deepcache)}

    def _kept(
        self, picture: Picture, checked: Checked, form: ImageFormat, artifact_writer: ArtifactWriter
    ) -> dict[str, Any]:
        """An image of the result; a refused one has no key and no bytes."""
        image = {
            "seed": picture.parameters.seed,
            "width": picture.image.width,
            "height": picture.image.height,
            "warnings": list(checked.warnings),
            **({} if checked.content is None else {"content": checked.content}),
        }
        if checked.picture is None:
            return image
        data = self._encode(checked.picture, form)
        stored = {"key": artifact_writer.put(data, form.media_type), "media_type": form.media_type}
        return {**image, **stored, "size_bytes": len(data), "fingerprint": checked.picture.fingerprint}


def pictures(
    job: ImageJob, deepcache: DeepCache | None = None, fetch: Callable[[str], bytes] | None = None,
    depth: DepthEstimator | None = None,
) -> list[ImageParameters]:  # fmt: skip
    """The parameters of a job's images. Raises `Invalid`; the image runner checks their values.

    `deepcache`, `fetch` and `depth` are as for the handler. Raises `ArtifactError` if `fetch` does.
    """
    if job.picture.edit is None and not job.picture.pictures:
        return job.pictures(deepcache)
    if fetch is None:
        raise Invalid("image", "cannot be fetched here")
    return replace(job, picture=sources.read(job.picture, fetch, depth)).pictures(deepcache)


class ImageJobProgress:
    """Steps done over all images of a job. Never decreases."""

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
