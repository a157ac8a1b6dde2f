"""Runs control networks for the rows of a step batch, and adds up what they give to each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from contract.control import FIELD
from core.transfers import to_device
from pipeline.extensions.control import ControlNetwork, RequestControl, RequestControls
from pipeline.request_state import ImageState
from pipeline.sampling.denoise import BatchGatherer, gather
from unet_opt.control import Condition
from unet_opt.inputs import DenoiserInputs


class _Span(NamedTuple):
    """A request's rows of the denoiser's batch: so many from `first` on."""

    first: int
    rows: int


class _Rows(NamedTuple):
    """The rows of one network for a request, and the pictures that act."""

    control: RequestControl
    span: _Span
    conditions: Sequence[Condition]


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Rows of a control network's forward: at most `most`, and exactly `fixed` where bits depend on it."""

    most: int
    fixed: int | None


class Controlled(NamedTuple):
    """What is added in a deep step, [B, h, w, C] each for all rows, as `unet_opt.unet.deep` has it."""

    residuals: list[Tensor]
    adapters: list[Tensor]


class ControlRows:
    """Evaluates all controls of a deep step, each network once for all of its rows."""

    def __init__(self, dtype: torch.dtype, padded: Mapping[str, int], channels: int) -> None:
        """`padded` is as for `BatchGatherer`; `channels` are those of a sample that control networks read."""
        self._dtype, self._padded, self._channels = dtype, padded, channels
        self._gatherers: dict[ControlNetwork, list[BatchGatherer]] = {}

    def evaluate(self, works: Sequence[ImageState], inputs: DenoiserInputs, limits: RowLimits) -> Controlled | None:
        """What is added for these requests; None without any control that acts.

        Rows without a control get zeros, which change no bit.
        """
        entries: list[_Rows] = []
        features: list[tuple[_Span, list[Tensor]]] = []
        first = 0
        for work in works:
            span, step = _Span(first, work.rows), work.step
            controls = work.extensions[FIELD].controls if FIELD in work.extensions else RequestControls()
            for control in controls.networks:
                if conditions := control.conditions(step):
                    entries.append(_Rows(control, span, conditions))
            for adapter in controls.adapters:
                if adapter.acts[step]:
                    features.append((span, [part * adapter.strength for part in adapter.features]))
            first += work.rows
        if not entries and not features:
            return None
        count, made = len(inputs.sample), self._evaluated(entries, inputs, limits)
        return Controlled(_summed(count, [(entry.span, made[id(entry.control)]) for entry in entries]),
                          _summed(count, features))  # fmt: skip

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
                    end = start + entry.span.rows
                    factor = entry.control.branch.scale(entry.conditions)
                    made[id(entry.control)] = [part[start:end] * factor for part in found]
                    start = end
        return made

    def _forward(
        self, network: ControlNetwork, number: int, chunk: Sequence[_Rows], inputs: DenoiserInputs, fixed: int | None
    ) -> tuple[Tensor, ...]:
        gatherers = self._gatherers[network]
        if number == len(gatherers):
            gatherers.append(BatchGatherer(self._dtype, self._padded))
        index = [row for entry in chunk for row in range(entry.span.first, entry.span.first + entry.span.rows)]
        padding = 0 if fixed is None else fixed - len(index)
        rows = to_device(torch.tensor(index + index[:1] * padding), inputs.sample.device)
        texts = gatherers[number].conditioning([entry.control.texts[entry.span.rows] for entry in chunk], padding)
        sample = inputs.sample[:, : self._channels]
        moving = [
            entry.control.branch.moving(sample[entry.span.first :][: entry.span.rows], entry.conditions)
            for entry in chunk
        ]
        own = {name: gather([each[name] for each in moving], padding, None) for name in moving[0]}
        whole = inputs.conditioning
        added = {name: whole[name][rows] for name in ("pooled", "time_ids") if name in whole}
        return chunk[0].control.branch(DenoiserInputs(sample[rows], inputs.timestep[rows], {**added, **texts, **own}))


def _chunks(entries: Sequence[_Rows], most: int) -> list[list[_Rows]]:
    """So many of them together that no chunk has more rows than `most`."""
    found: list[list[_Rows]] = []
    count = most
    for entry in entries:
        if count + entry.span.rows > most:
            found.append([])
            count = 0
        found[-1].append(entry)
        count += entry.span.rows
    return found


def _summed(count: int, parts: Sequence[tuple[_Span, Sequence[Tensor]]]) -> list[Tensor]:
    """The sums over all rows; nothing without any part. Each row's are added in the order given, whatever the batch.

    Where some have fewer tensors than others, as T2I-Adapters of fewer maps, they add nothing to the rest.
    """
    total: list[Tensor] = []
    filled: set[tuple[int, int]] = set()
    for span, own in parts:
        total += [part.new_zeros((count, *part.shape[1:])) for part in own[len(total) :]]
        for number, part in enumerate(own):
            rows = total[number][span.first : span.first + span.rows]
            rows.add_(part) if (span.first, number) in filled else rows.copy_(part)
            filled.add((span.first, number))
    return total
