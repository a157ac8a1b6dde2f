"""Runs control networks for the rows of a step batch, and adds up what they give to each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from core.transfers import to_device
from pipeline.control import ControlNetwork, RequestControl
from pipeline.denoise import BatchGatherer, DenoiserInputs
from pipeline.request_state import ImageState


class _Rows(NamedTuple):
    """The rows of one control of a request: those from `first` on of the denoiser's batch."""

    control: RequestControl
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Rows of a control network's forward: at most `most`, and exactly `fixed` where bits depend on it."""

    most: int
    fixed: int | None


class ControlRows:
    """Evaluates all controls of a deep step, each network once for all of its rows."""

    def __init__(self, dtype: torch.dtype, padded: Mapping[str, int], channels: int) -> None:
        """`padded` is as for `BatchGatherer`; `channels` are those of a sample that control networks read."""
        self._dtype, self._padded, self._channels = dtype, padded, channels
        self._gatherers: dict[ControlNetwork, list[BatchGatherer]] = {}

    def residuals(self, works: Sequence[ImageState], inputs: DenoiserInputs, limits: RowLimits) -> list[Tensor]:
        """What is added to each skip and to the middle, [B, h, w, C] each for all rows; empty without any control.

        Rows without a control get zeros, which change no bit.
        """
        entries, first = [], 0
        for work in works:
            acting = [control for control in work.controls if control.acts[work.step]]
            entries += [_Rows(control, first, work.rows) for control in acting]
            first += work.rows
        if not entries:
            return []
        made = self._evaluated(entries, inputs, limits)
        total: list[Tensor] = []
        filled: set[int] = set()
        for entry in entries:  # in each request's own order, so that sums do not depend on the batch
            parts = made[id(entry.control)]
            total = total or [part.new_zeros((len(inputs.sample), *part.shape[1:])) for part in parts]
            for whole, part in zip(total, parts, strict=True):
                rows = whole[entry.first : entry.first + entry.rows]
                rows.add_(part) if entry.first in filled else rows.copy_(part)
            filled.add(entry.first)
        return total

    def clear_cache(self) -> None:
        """Release what is kept of the last batch."""
        self._gatherers.clear()

    def _evaluated(
        self, entries: Sequence[_Rows], inputs: DenoiserInputs, limits: RowLimits
    ) -> dict[int, list[Tensor]]:
        """Of each control its rows' residuals, times its strength."""
        networks: dict[ControlNetwork, list[_Rows]] = {}
        for entry in entries:
            networks.setdefault(entry.control.network, []).append(entry)
        self._gatherers = {network: self._gatherers.get(network, []) for network in networks}
        made: dict[int, list[Tensor]] = {}
        for network, own in networks.items():
            for number, chunk in enumerate(_chunks(own, limits.fixed or limits.most)):
                found = self._forward(network, number, chunk, inputs, limits.fixed)
                start = 0
                for entry in chunk:
                    end = start + entry.rows
                    made[id(entry.control)] = [part[start:end] * entry.control.strength for part in found]
                    start = end
        return made

    def _forward(
        self, network: ControlNetwork, number: int, chunk: Sequence[_Rows], inputs: DenoiserInputs, fixed: int | None
    ) -> tuple[Tensor, ...]:
        gatherers = self._gatherers[network]
        if number == len(gatherers):
            gatherers.append(BatchGatherer(self._dtype, self._padded))
        index = [row for entry in chunk for row in range(entry.first, entry.first + entry.rows)]
        padding = 0 if fixed is None else fixed - len(index)
        rows = to_device(torch.tensor(index + index[:1] * padding), inputs.sample.device)
        given = gatherers[number].conditioning([e.control.conditionings[e.rows] for e in chunk], padding)
        names = {"pooled": "text_embeds", "time_ids": "time_ids"}
        added = {new: inputs.conditioning[own] for own, new in names.items() if own in inputs.conditioning}
        assert network.branch is not None
        return network.branch(
            inputs.sample[rows, : self._channels],
            inputs.timestep[rows],
            {name: tensor[rows] for name, tensor in added.items()},
            given,
        )


def _chunks(entries: Sequence[_Rows], most: int) -> list[list[_Rows]]:
    """So many of them together that no chunk has more rows than `most`."""
    found: list[list[_Rows]] = []
    count = most
    for entry in entries:
        if count + entry.rows > most:
            found.append([])
            count = 0
        found[-1].append(entry)
        count += entry.rows
    return found
