"""Handles image jobs: reads their pictures, and encodes and stores what was drawn.

Imports no torch at module level, because the worker imports it before torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from contract import plan as plans
from contract.card import ImageCard, ImageCosts, ImageOffer
from contract.errors import Invalid
from contract.image import ImageJob, ImageParameters
from contract.plan import DeepCache
from core.batching.request import Outcome
from workers.handlers import Output
from workers.images import sources
from workers.images.formats import ImageFormat, encode

if TYPE_CHECKING:
    from core.kernels.device import KernelChoice
    from pipeline.extensions.depth import DepthEstimator
    from pipeline.model_pool import Pooled
    from workers.artifact_writer import ArtifactWriter


class ImageJobHandler:
    """Images: a job asks for n of them with consecutive seeds."""

    modality = "image"

    def __init__(
        self,
        runner: Pooled,
        deepcache: DeepCache | None = None,
        fetch: Callable[[str], bytes] | None = None,
        decisions: Sequence[KernelChoice] = (),
        plan: str = "",
        *,
        depth: DepthEstimator | None = None,
        metadata: bool = True,
        resident: Callable[[], Pooled | None] | None = None,
        load_s: Callable[[], float] = lambda: 0.0,
        card_fields: Callable[[ImageJobHandler], Mapping[str, Any]] = lambda handler: {},
    ) -> None:
        """`deepcache` and `plan` are the defaults for jobs. `fetch` reads the source images of edits; without it edits
        are rejected.

        `decisions` say which kernels run. `depth` makes depth maps for controls. `metadata`: whether files tell how
        they were made. `resident` returns the runner while it is in memory; without it, it always is. `load_s` returns
        how long it took to load. `card_fields` returns what stages add to this handler's card.
        """
        self._resident = resident or (lambda: runner)
        self._evictable = resident is not None
        self._load_s = load_s
        self._deepcache = deepcache if runner.shallow_steps else None
        self._fetch = fetch
        self._decisions = decisions
        self._plan = plan
        self._depth = depth
        self._metadata = metadata
        self._card_fields = card_fields
        self.gates = runner.model.gates
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
        """The model's card; if it is not in memory the last one, without what iterations have shown."""
        runner = self._resident()
        if runner is None:
            assert self._card is not None
            card = replace(self._card, loaded=False, least_costs=ImageCosts())
            return replace(card, **self._card_fields(self))
        self._card = self._card_of(runner)
        return self._card

    def _card_of(self, runner: Pooled) -> ImageCard:
        from workers.images.cards import image_card

        has_depth = self._depth is not None
        card = image_card(runner, self._deepcache, self._decisions, self._plan, has_depth=has_depth)
        return replace(card, load_s=self._load_s(), **self._card_fields(self))

    @property
    def offer(self) -> ImageOffer:
        """The offer of the model's last card."""
        return (self._card or self.card()).offer

    def files(self, job: ImageJob) -> set[str]:
        return job.files()

    def held_files(self) -> Iterable[str]:
        runner = self._resident()
        return () if runner is None else runner.held_files()

    def read(self, parameters: Mapping[str, Any]) -> ImageJob:
        return ImageJob.read(parameters)

    def requests(self, job: ImageJob) -> list[ImageParameters]:
        return pictures(job, self._deepcache, self._fetch, self._depth)

    def tally(self, requests: Sequence[ImageParameters]) -> ImageJobProgress:
        return ImageJobProgress([request.made for request in requests])

    def build_result(self, job: ImageJob, outputs: Sequence[Output], artifact_writer: ArtifactWriter) -> dict[str, Any]:
        """Encode and store pictures. The result's schedule is the job's, whatever model drew."""
        form = ImageFormat(job.output_format, job.output_compression)
        schedule = job.pictures(self._deepcache)[0].deepcache
        images = [self._kept(output, form, artifact_writer) for output in outputs]
        return {"images": images, "deepcache": plans.to_field(schedule)}

    def _kept(self, output: Output, form: ImageFormat, artifact_writer: ArtifactWriter) -> dict[str, Any]:
        """An image of the result; a refused one has no key and no bytes."""
        picture = output.value
        image = {
            "seed": picture.parameters.seed,
            "width": picture.image.width,
            "height": picture.image.height,
            "warnings": list(picture.warnings),
            **output.facts,
        }
        if output.refused:
            return image
        data = encode(picture, form, metadata=self._metadata)
        stored = {"key": artifact_writer.put(data, form.media_type), "media_type": form.media_type}
        return {**image, **stored, "size_bytes": len(data), "fingerprint": picture.fingerprint}


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
