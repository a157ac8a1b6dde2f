"""The denoiser's forward for rows of different requests, and one step of each request with its own sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from core.transfers import to_device
from pipeline.sampling import sigmas
from unet_opt.inputs import DenoiserInputs


@dataclass(slots=True, eq=False)
class Conditioning:
    """The constant inputs of a request; R is 2 with classifier-free guidance (negative, then positive), else 1."""

    tensors: Mapping[str, torch.Tensor]  # by the family's names, [R, …] each
    guidance_scale: float  # of negative + scale · (positive - negative)

    @property
    def rows(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def unguided(self) -> Conditioning:
        """Return the conditioning of the positive prompt alone, on the same memory."""
        return Conditioning({name: tensor[-1:] for name, tensor in self.tensors.items()}, self.guidance_scale)


@dataclass(frozen=True, slots=True, eq=False)
class InpaintMask:
    """The region of an image that is kept, for a UNet that was not trained to inpaint.

    After every step it is restored at the next step's noise level (diffusers' inpainting with four channels; Lugmayr et
    al., 2022, section 4.1). Of a soft mask the region shrinks from step to step (Differential Diffusion, Levin and
    Fried, 2023): before step i of n, where 1 - mask > i / n, and not after the last one.
    """

    mask: torch.Tensor  # [1, 1, h, w] fp32: 1 where it is repainted, else 0; of a soft mask from 0 to 1
    latents: torch.Tensor  # [1, C, h, w] fp32: of the source image
    noise: torch.Tensor  # [1, C, h, w] fp32: the starting noise
    steps: int = 0  # n, of a soft mask; 0: it is none

    def put_back(self, x: torch.Tensor, step: int, signal: float, noise: float) -> torch.Tensor:
        """Return the sample [1, C, h, w] before this step, with the kept region at its level of signal and noise."""
        mask = self.mask
        if self.steps:
            if step == self.steps:
                return x
            mask = (1 - mask <= step / self.steps).to(mask.dtype)
        return (1 - mask) * (signal * self.latents + noise * self.noise) + mask * x


@dataclass(slots=True, eq=False)
class DenoisingState:
    """The state of a request between noise and image. Immutable: a step returns a new one."""

    table: sigmas.SamplerTable
    step: int
    x: torch.Tensor  # [1, C, h, w] fp32
    x0: torch.Tensor  # [1, C, h, w] fp32: the sampler's previous estimate, zeros before the first
    conditioning: Conditioning
    kept: InpaintMask | None = None
    masked: torch.Tensor | None = None  # [1, 1 + C, h, w] fp32: mask and masked image, for a denoiser that inpaints

    @property
    def left(self) -> int:
        return self.table.steps - self.step


class _GatheredConditioning(NamedTuple):
    """The batched conditioning of these requests, and which request each row belongs to."""

    tensors: Mapping[str, torch.Tensor]
    request_index: torch.Tensor  # [B]: the request's index


class BatchGatherer:
    """Batches the rows of many requests, and caches the last batched conditioning.

    Consecutive steps usually have the same requests, and only latents and timesteps are new. Where the lengths of a
    tensor NAME that is not `padded` differ, zeros extend it to the longest, and `NAME_lengths` says them: int32 [B].
    """

    def __init__(self, dtype: torch.dtype, padded: Mapping[str, int]) -> None:
        """`padded` is as in `Family`: the tensors of variable length, and of what their length is a multiple."""
        self._dtype = dtype
        self._padded = padded
        self._last: tuple[tuple[int, ...], list[Conditioning], _GatheredConditioning] | None = None

    def inputs(self, states: Sequence[DenoisingState], rows: int) -> DenoiserInputs:
        """Return arguments of `rows` rows; padding repeats the first request's row, which keeps it finite."""
        gathered = self._conditioning([r.conditioning for r in states], rows - sum(r.conditioning.rows for r in states))
        scaled = sigmas.model_input(torch.cat([state.x for state in states]), _coefficients(states))
        masked = [state.masked for state in states if state.masked is not None]
        if masked:  # then every request of the model has one
            scaled = torch.cat([scaled, torch.cat(masked)], dim=1)
        times = to_device(torch.stack([state.table.timesteps[state.step] for state in states]), scaled.device)
        return DenoiserInputs(
            scaled.to(self._dtype)[gathered.request_index], times[gathered.request_index], gathered.tensors
        )

    def conditioning(self, conditionings: list[Conditioning], padding: int) -> Mapping[str, torch.Tensor]:
        """Return the requests' conditioning in one batch, and `padding` times the first row."""
        return self._conditioning(conditionings, padding).tensors

    def _conditioning(self, conditionings: list[Conditioning], padding: int) -> _GatheredConditioning:
        key = (*(id(conditioning) for conditioning in conditionings), -padding)
        if self._last is None or self._last[0] != key:
            tensors: dict[str, torch.Tensor] = {}
            for name in conditionings[0].tensors:
                parts, multiple = [conditioning.tensors[name] for conditioning in conditionings], self._padded.get(name)
                if multiple is None and len({part.shape[1:] for part in parts}) > 1:
                    multiple = 1
                    tensors[f"{name}_lengths"] = _lengths(parts, padding)
                tensors[name] = gather(parts, padding, multiple)
            indices = [number for number, conditioning in enumerate(conditionings) for _ in range(conditioning.rows)]
            request_index = to_device(torch.tensor(indices + [0] * padding), next(iter(tensors.values())).device)
            # The requests are kept with the result, so that no other object can take over their identity.
            self._last = (key, conditionings, _GatheredConditioning(tensors, request_index))
        return self._last[2]

    def clear_cache(self) -> None:
        self._last = None


def gather(parts: Sequence[torch.Tensor], padding: int, multiple: int | None) -> torch.Tensor:
    """Concatenate rows [R, …] of many requests, and `padding` times the first row.

    With `multiple` their lengths [R, T, …] may differ: zeros extend them to a multiple of it.
    """
    if multiple is not None:
        longest = -(-max(part.shape[1] for part in parts) // multiple) * multiple
        parts = [F.pad(part, (*[0, 0] * (part.dim() - 2), 0, longest - part.shape[1])) for part in parts]
    return torch.cat([*parts, *[parts[0][:1]] * padding])


def _lengths(parts: Sequence[torch.Tensor], padding: int) -> torch.Tensor:
    """Return the length of each row of `gather`, int32."""
    lengths = [part.shape[1] for part in parts for _ in range(part.shape[0])]
    return torch.tensor(lengths + [parts[0].shape[1]] * padding, dtype=torch.int32, device=parts[0].device)


def guide(output: torch.Tensor, states: Sequence[DenoisingState]) -> torch.Tensor:
    """Apply classifier-free guidance (Ho and Salimans, 2022) for requests with two rows: to fp32 [requests, …]."""
    count = len(states)
    if all(state.conditioning.rows == 2 for state in states):
        pairs = output[: 2 * count].float().unflatten(0, (count, 2))
        scales = torch.tensor([state.conditioning.guidance_scale for state in states]).view(-1, 1, 1, 1)
        scales = to_device(scales, output.device)
        mixed: torch.Tensor = pairs[:, 0] + scales * (pairs[:, 1] - pairs[:, 0])
        return mixed
    output = output.float()
    if all(state.conditioning.rows == 1 for state in states):
        return output[:count]
    guided, row = [], 0
    for state in states:
        if state.conditioning.rows == 2:
            negative, positive = output[row : row + 1], output[row + 1 : row + 2]
            guided.append(negative + state.conditioning.guidance_scale * (positive - negative))
        else:
            guided.append(output[row : row + 1])
        row += state.conditioning.rows
    return torch.cat(guided)


def advance(
    states: Sequence[DenoisingState], output: torch.Tensor, noise: Sequence[torch.Tensor | None]
) -> list[DenoisingState]:
    """Return each request's next trajectory, from the denoiser's output for all rows. The inputs are unchanged."""
    m = guide(output, states)
    x = torch.cat([state.x for state in states])
    x0 = torch.cat([state.x0 for state in states])
    if any(part is not None for part in noise):
        parts = [torch.zeros_like(r.x) if n is None else n for r, n in zip(states, noise, strict=True)]
        sampled_noise = torch.cat(parts)
    else:
        sampled_noise = torch.zeros_like(x)
    x, x0 = sigmas.step(x, m, x0, sampled_noise, _coefficients(states))
    # Views of the whole batch: a waiting latent keeps its companions' of that step alive, which is little.
    return [
        replace(state, step=state.step + 1, x=_put_back(state, sample), x0=sample_x0)
        for state, sample, sample_x0 in zip(states, torch.split(x, 1), torch.split(x0, 1), strict=True)
    ]


def _coefficients(states: Sequence[DenoisingState]) -> torch.Tensor:
    """Return the coefficients of each request's next step, fp32 [requests, 7]."""
    rows = torch.stack([state.table.coefficients[state.step] for state in states])
    return to_device(rows, states[0].x.device)


def _put_back(state: DenoisingState, sample: torch.Tensor) -> torch.Tensor:
    if state.kept is None:
        return sample
    signal, noise = state.table.levels[state.step + 1].tolist()
    return state.kept.put_back(sample, state.step + 1, signal, noise)
