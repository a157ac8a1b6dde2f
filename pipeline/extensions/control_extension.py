"""Control networks and T2I-Adapters of requests: what they add to the denoiser's deep steps, and keep for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contract.control import FIELD, Control
from pipeline.backends.phases import DEEP
from pipeline.extensions import costs
from pipeline.extensions.control import ControlFolder, ControlLease
from pipeline.extensions.control_rows import ControlRows, RowLimits
from pipeline.extensions.extension import PictureExtension, StepBatch, invalid

if TYPE_CHECKING:
    from contract.image import ImageParameters
    from core.config import Settings
    from pipeline.backends.backend import BatchGroup, ImageBackend
    from pipeline.families.family import ImageModel
    from pipeline.request_state import ImageState


class ControlExtension(PictureExtension[ControlFolder]):
    field, card_field = FIELD, Control.OFFER
    unconfigured = "no folder of control networks is configured (DIPTYCH_CONTROL_DIR)"
    share, picture, supported = Control.SHARE, Control, "controls"

    def __init__(self, model: ImageModel, backend: ImageBackend, folder: ControlFolder | None = None) -> None:
        super().__init__(model, backend, folder)
        family = model.family
        lengths = family.longest if backend.fixed_shapes else family.padded
        self._rows = ControlRows(model.dtype, lengths, model.latent_channels)
        self._tokens = 0 if folder is None else family.text_encoder(model).tokens

    @classmethod
    def _folder_of(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> ControlFolder | None:
        if not settings.control_dir or not model.family.controls:
            return None
        capacity = settings.control_mib * 2**20
        return ControlFolder(Path(settings.control_dir), backend.model, backend.beside, capacity, release=True)

    def costs(self, backend: ImageBackend, sizes: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """The seconds of one row of a network at the cheapest batch width, by size; empty without any network."""
        rows_s = {
            f"{size[0]}x{size[1]}": min(costs.seconds(self, backend, DEEP, size, rows) / rows for rows in costs.WIDTHS)
            for size in (sizes if self.folder is not None else ())
        }
        return {"control_row_step_s": rows_s}

    def _check_files(self, request: ImageParameters) -> None:
        with invalid(f"{self.field}.model"):
            self._files.check(request.control, (request.width, request.height))

    def size_bytes(self, request: ImageParameters, checked: None, rows: int, chunks: int) -> int:
        size = (request.width, request.height)
        return self._files.request_bytes(request.control, size, rows, self._tokens * chunks)

    def prepare(self, request: ImageParameters, state: ImageState, hidden: torch.Tensor) -> None:
        lease: ControlLease = state.extensions[self.field]
        if lease.controls.any:
            return
        size = (request.width, request.height)
        with invalid(f"{self.field}.model"):
            lease.controls = self._files.prepare(lease.files, request.control, size, hidden, state.acts)

    def batch_rows(self, batch: Sequence[ImageState], backend: ImageBackend, group: BatchGroup, rows: int) -> int:
        if group.phase != DEEP:
            return 0
        return sum(
            state.rows * sum(bool(network.conditions(state.step)) for network in lease.controls.networks)
            for state, lease in self._leases(batch)
        )

    def relaunches(self, batch: Sequence[ImageState], group: BatchGroup) -> bool:
        return any(lease.residual is not None for _, lease in self._leases(batch))

    def evaluate(self, batch: StepBatch) -> Mapping[str, list[Any]]:
        added = self._rows.evaluate(batch.states, batch.inputs, RowLimits(batch.rows, batch.fixed))
        return {} if added is None else added._asdict()

    def keep(self, states: Sequence[ImageState], options: Mapping[str, Any]) -> None:
        """Copy each request's rows of the first residual to where its shallow steps read it, if one comes next. A retry
        writes the same again, and nothing reads it before.
        """
        residuals, start = options.get("residuals", ()), 0
        for state in states:
            end, following = start + state.rows, state.step + 1
            if (lease := state.extensions.get(self.field)) is not None:
                read = lease.controls.networks and following < len(state.plan) and not state.plan[following]
                lease.residual = residuals[0][start:end].clone() if residuals and read else None
            start = end

    def evaluate_shallow(self, states: Sequence[ImageState], rows: int) -> dict[str, Any]:
        """The first residual of each request's last deep step, [B, h, w, C]; zeros of those without."""
        residuals = [getattr(state.extensions.get(self.field), "residual", None) for state in states]
        first = next((residual for residual in residuals if residual is not None), None)
        if first is None:
            return {}
        whole, start = first.new_zeros((rows, *first.shape[1:])), 0
        for state, residual in zip(states, residuals, strict=True):
            if residual is not None:
                whole[start : start + state.rows].copy_(residual[-state.rows :])
            start += state.rows
        return {"residual": whole}

    def clear_cache(self) -> None:
        self._rows.clear_cache()

    def _lease_digests(self, lease: ControlLease) -> Mapping[str, str]:
        return {network.name: network.digest for network in lease.files}

    def _leases(self, states: Sequence[ImageState]) -> list[tuple[ImageState, ControlLease]]:
        return [(state, state.extensions[self.field]) for state in states if self.field in state.extensions]
