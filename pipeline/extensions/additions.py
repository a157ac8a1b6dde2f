"""What control networks and image prompts add to the denoiser's deep forwards, for the requests that have any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.extensions.control import ControlFolder
from pipeline.extensions.control_rows import ControlRows, RowLimits
from pipeline.extensions.image_prompt_rows import ImagePromptRows
from pipeline.extensions.image_prompts import ImagePromptFolder

if TYPE_CHECKING:
    import torch

    from contract.image import ImageParameters
    from pipeline.backends.backend import BatchGroup, ImageBackend
    from pipeline.request_state import ImageState
    from unet_opt.inputs import DenoiserInputs


class Additions:
    """Makes a request's inputs once, with its prompts, and batches them in every deep step."""

    def __init__(
        self, backend: ImageBackend, padded: Mapping[str, int], controls: ControlFolder | None,
        image_prompts: ImagePromptFolder | None,
    ) -> None:  # fmt: skip
        """`backend` is that of all requests, `padded` as for `BatchGatherer`."""
        model = backend.model
        self._controls, self._image_prompts = controls, image_prompts
        self._control_rows = ControlRows(model.dtype, padded, model.latent_channels)
        self._image_rows = ImagePromptRows()

    def prepare(self, wanted: ImageParameters, work: ImageState, hidden: torch.Tensor) -> None:
        """A request's inputs, for its prompts' embeddings [R, T, D], unless it has them already. Raises `Invalid`."""
        if work.networks is not None and not work.controls.any:
            assert self._controls is not None
            size = (wanted.width, wanted.height)
            work.controls = self._controls.prepare(work.networks, wanted.control, size, hidden, work.acts)
        if wanted.image_prompts and not work.image_prompts:
            assert self._image_prompts is not None
            given = (wanted.image_prompts, work.most_rows, work.acts)
            work.image_prompts, work.image_adapters = self._image_prompts.prepare(*given), ()

    def evaluate(
        self, group: BatchGroup, backend: ImageBackend, works: Sequence[ImageState], inputs: DenoiserInputs, rows: int
    ) -> dict[str, Any]:
        """Options of a deep step of these requests, over so many rows; none if nothing acts in it."""
        limits = RowLimits(rows, backend.widths.deterministic_rows if group.mode else None)
        added = self._control_rows.evaluate(works, inputs, limits)
        images = self._image_rows.gather(works, rows, group.images)
        return {**({} if added is None else added._asdict()), **({"images": images} if images else {})}

    def clear_cache(self) -> None:
        """Release what is kept of the last batch."""
        self._control_rows.clear_cache()
        self._image_rows.clear_cache()
