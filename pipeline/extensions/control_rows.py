"""Control networks in the denoiser's steps: what they add to each row of a deep one, and keep for shallow ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from contract.control import FIELD, Control
from core.transfers import to_device
from pipeline.extensions.asset_cache import Asset
from pipeline.extensions.extension import StepBatch, Steps
from pipeline.finite import all_finite
from pipeline.sampling.denoise import BatchGatherer, Conditioning, gather
from unet_opt.adapter import AdapterBranch
from unet_opt.control import Condition, ControlBranch
from unet_opt.inputs import DenoiserInputs

if TYPE_CHECKING:
    from pipeline.backends.backend import BatchGroup, ImageBackend
    from pipeline.request_state import ImageState


Branch = ControlBranch | AdapterBranch
ControlNetwork = Asset[Branch]
"""A network of the folder as last read."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestControl:
    """The inputs of a ControlNet for a request: its pictures, one or for a Union several, each with the steps in which
    it acts, and keys and values of the text by the request's rows.
    """

    network: ControlNetwork
    pictures: tuple[tuple[Condition, tuple[bool, ...]], ...]
    texts: Mapping[int, Conditioning]  # `kv` [R, T, width]

    def conditions(self, step: int) -> list[Condition]:
        """Return those that act in this step."""
        return [condition for condition, acts in self.pictures if acts[step]]

    @property
    def branch(self) -> ControlBranch:
        assert isinstance(self.network.content, ControlBranch)
        return self.network.content


class RequestAdapter(NamedTuple):
    """The features of a request's picture by a T2I-Adapter, [1, h, w, C] each, and in which steps it is added."""

    features: Sequence[torch.Tensor]
    strength: float
    acts: tuple[bool, ...]


class RequestControls(NamedTuple):
    """A request's controls by kind."""

    networks: tuple[RequestControl, ...] = ()
    adapters: tuple[RequestAdapter, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.networks or self.adapters)


@dataclass(slots=True, eq=False)
class ControlLease:
    """A request's networks, what they read once its prompts are encoded, and for shallow steps the first residual
    [rows, h, w, C] of the last deep one.
    """

    files: list[ControlNetwork]
    controls: RequestControls = RequestControls()  # noqa: RUF009
    residual: torch.Tensor | None = None
    finite: torch.Tensor | None = None  # bool []: whether all residuals so far were


class _Span(NamedTuple):
    """A request's rows of the denoiser's batch: so many from `first` on."""

    first: int
    rows: int


class _Rows(NamedTuple):
    """The rows of one network for a request, and the pictures that act."""

    control: RequestControl
    span: _Span
    conditions: Sequence[Condition]


class ControlSteps(Steps):
    """Evaluates all controls of a deep step, each network once for all of its rows."""

    def __init__(self, dtype: torch.dtype, padded: Mapping[str, int], channels: int) -> None:
        """`padded` is as for `BatchGatherer`; `channels` are those of a sample that control networks read."""
        super().__init__(FIELD, Control.SHARE)
        self._dtype, self._padded, self._channels = dtype, padded, channels
        self._gatherers: dict[ControlNetwork, list[BatchGatherer]] = {}

    def charged_rows(self, states: Sequence[ImageState], backend: ImageBackend, total: int, ahead: int = 0) -> int:
        steps = [(state, lease, state.step + ahead) for state, lease in self._leases(states)]
        return sum(
            state.widths[step] * bool(network.conditions(step))
            for state, lease, step in steps if state.plan[step] for network in lease.controls.networks
        )  # fmt: skip

    def relaunches(self, states: Sequence[ImageState], group: BatchGroup) -> bool:
        return any(lease.residual is not None for _, lease in self._leases(states))

    def evaluate(self, batch: StepBatch) -> Mapping[str, list[Any]]:
        """Compute what is added in a deep step, [B, h, w, C] each for all rows, as `unet_opt.unet.deep` has it.

        Rows without a control get zeros, which change no bit.
        """
        entries: list[_Rows] = []
        features: list[tuple[_Span, list[Tensor]]] = []
        leases: list[tuple[ControlLease, _Span]] = []
        first = 0
        for state in batch.states:
            span, step = _Span(first, state.rows), state.step
            controls = RequestControls()
            if FIELD in state.extensions:
                leases.append((state.extensions[FIELD], span))
                controls = state.extensions[FIELD].controls
            for control in controls.networks:
                if conditions := control.conditions(step):
                    entries.append(_Rows(control, span, conditions))
            for adapter in controls.adapters:
                if adapter.acts[step]:
                    features.append((span, [part * adapter.strength for part in adapter.features]))
            first += state.rows
        if not entries and not features:
            return {}
        count, outputs = len(batch.inputs.sample), self._evaluated(entries, batch)
        for lease, span in leases:
            own = [part for network in lease.controls.networks for part in outputs.get(id(network), ())]
            if own:
                # Of a sample that is not finite they cannot be.
                sample = batch.inputs.sample[span.first : span.first + span.rows]
                flag = all_finite(own) | ~all_finite([sample])
                lease.finite = flag if lease.finite is None else lease.finite & flag
        residuals = _summed(count, [(entry.span, outputs[id(entry.control)]) for entry in entries])
        return {"residuals": residuals, "adapters": _summed(count, features)}

    def keep(self, states: Sequence[ImageState], options: Mapping[str, Any]) -> None:
        """Copy each request's rows of the first residual to where its shallow steps read it, if one comes next. A retry
        writes the same again, and nothing reads it before.
        """
        residuals, start = options.get("residuals", ()), 0
        for state in states:
            end, following = start + state.rows, state.step + 1
            if (lease := state.extensions.get(FIELD)) is not None:
                read = lease.controls.networks and following < len(state.plan) and not state.plan[following]
                lease.residual = residuals[0][start:end].clone() if residuals and read else None
            start = end

    def evaluate_shallow(self, states: Sequence[ImageState], rows: int) -> dict[str, Any]:
        """Gather the first residual of each request's last deep step, [B, h, w, C]; zeros of those without."""
        residuals = [getattr(state.extensions.get(FIELD), "residual", None) for state in states]
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
        """Release what is kept of the last batch."""
        self._gatherers.clear()

    def _evaluated(self, entries: Sequence[_Rows], batch: StepBatch) -> dict[int, list[Tensor]]:
        """Compute the residuals of each control's rows, times its strength."""
        networks: dict[ControlNetwork, list[_Rows]] = {}
        for entry in entries:
            networks.setdefault(entry.control.network, []).append(entry)
        self._gatherers = {network: self._gatherers.get(network, []) for network in networks}
        residuals: dict[int, list[Tensor]] = {}
        for network, own in networks.items():
            for number, chunk in enumerate(_chunks(own, batch.fixed or batch.rows)):
                outputs = self._forward(network, number, chunk, batch.inputs, batch.fixed)
                start = 0
                for entry in chunk:
                    end = start + entry.span.rows
                    factor = entry.control.branch.scale(entry.conditions)
                    residuals[id(entry.control)] = [part[start:end] * factor for part in outputs]
                    start = end
        return residuals

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
            entry.control.branch.step_inputs(sample[entry.span.first :][: entry.span.rows], entry.conditions)
            for entry in chunk
        ]
        own = {name: gather([each[name] for each in moving], padding, None) for name in moving[0]}
        whole = inputs.conditioning
        added = {name: whole[name][rows] for name in ("pooled", "time_ids") if name in whole}
        return chunk[0].control.branch(DenoiserInputs(sample[rows], inputs.timestep[rows], {**added, **texts, **own}))


def _chunks(entries: Sequence[_Rows], most: int) -> list[list[_Rows]]:
    """Split them so that no chunk has more rows than `most`."""
    chunks: list[list[_Rows]] = []
    count = most
    for entry in entries:
        if count + entry.span.rows > most:
            chunks.append([])
            count = 0
        chunks[-1].append(entry)
        count += entry.span.rows
    return chunks


def _summed(count: int, parts: Sequence[tuple[_Span, Sequence[Tensor]]]) -> list[Tensor]:
    """Return the sums over all rows; nothing without any part. Each row adds in the order given, whatever the batch.

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
