"""Draws a job as a cascade: the draft model draws all its pictures, and its own model those below the gate anew.

Both parts belong to one job, with one record, lease and deadline: a worker that dies in between has both repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from contract import plan
from contract.cascade import FIELD, Cascade
from contract.errors import Invalid
from contract.image import ImageParameters
from core.batching.request import Outcome
from workers.handlers import ImageJobHandler

if TYPE_CHECKING:
    from pipeline.pixels.picture import Picture
    from workers.handlers import JobHandler


class Draft(NamedTuple):
    """A draft's picture, its score, and whether it is kept."""

    picture: Picture
    score: float
    kept: bool


def draft_requests(pictures: Sequence[ImageParameters], handler: JobHandler) -> list[ImageParameters]:
    """The parameters of the drafts of this handler's model, one for each picture. Raises `Invalid`."""
    if not isinstance(handler, ImageJobHandler):
        raise Invalid(f"{FIELD}.draft", "draws no images")
    return [handler.draft(picture) for picture in pictures]


def judge(handler: JobHandler, cascade: Cascade, drafts: Sequence[Picture], stopped: Callable[[], bool]) -> list[Draft]:
    """Score the drafts of a job of this handler; those of at least the cascade's gate are kept. Fewer once `stopped`.
    Raises `Invalid`.
    """
    gate = handler.gate if isinstance(handler, ImageJobHandler) else None
    if gate is None:
        raise Invalid(FIELD, "is not offered by this worker, which has no scorer")
    if cascade.gate is None:
        raise Invalid(f"{FIELD}.gate", "is missing")
    scores = gate.scores([(picture.image, picture.parameters.prompt) for picture in drafts], stopped)
    return [Draft(picture, score, score >= cascade.gate) for picture, score in zip(drafts, scores, strict=False)]


def add_drafts(
    result: dict[str, Any], drafts: Sequence[Draft], names: tuple[str, str], request: ImageParameters
) -> dict[str, Any]:
    """The job's result, which tells of each image the model that drew it and its draft's score.

    `names` are those of the draft model and of the job's, `request` is one of the latter's: its DeepCache schedule is
    the job's.
    """
    images = [
        {**image, "drawn_by": names[0] if draft.kept else names[1], "draft_score": draft.score}
        for image, draft in zip(result["images"], drafts, strict=True)
    ]
    return {**result, "images": images, "deepcache": plan.to_field(request.deepcache)}


class CascadeProgress:
    """Steps done over all images of a job and their drafts. Never decreases: a kept draft ends its image's steps."""

    written: None = None

    def __init__(self, drafts: Sequence[int], steps: Sequence[int]) -> None:
        """`drafts` and `steps` are those of each image's draft, and of the image itself."""
        self._drafts, self._steps = drafts, steps
        self._done = [0] * len(steps)
        self._finished = [False] * len(steps)

    def take_draft(self, index: int, outcome: Outcome) -> dict[str, Any] | None:
        """The progress to report after an iteration of an image's draft."""
        return None if outcome.progress is None else self._report(index, outcome.progress[0])

    def take(self, index: int, outcome: Outcome) -> dict[str, Any] | None:
        """The progress to report after an iteration of an image whose draft was rejected."""
        if outcome.progress is None:
            return None
        self._finished[index] |= outcome.finished
        return self._report(index, self._drafts[index] + outcome.progress[0])

    def keep(self, index: int) -> dict[str, Any]:
        """The progress to report after an image's draft was kept."""
        self._finished[index] = True
        return self._report(index, self._drafts[index] + self._steps[index])

    def _report(self, index: int, done: int) -> dict[str, Any]:
        self._done[index] = max(self._done[index], done)
        return {
            "steps_done": sum(self._done),
            "steps": sum(self._drafts) + sum(self._steps),
            "image": index,
            "images_done": sum(self._finished),
        }
