"""One UNet forward for rows of different requests, and one step of each request with its own sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from pipeline import sigmas


@dataclass(slots=True, eq=False)
class Conditioning:
    """A request's constant UNet inputs; R is 2 with classifier-free guidance (negative, then positive), else 1."""

    kv: torch.Tensor  # [R, T, width]
    pooled: torch.Tensor  # [R, P]
    time_ids: torch.Tensor  # [R, 6]: original size, crop, target size (SDXL's micro-conditioning)
    time_cond: torch.Tensor | None  # [R, G]: the guidance embedding of distilled models (LCM)

    @property
    def rows(self) -> int:
        return self.kv.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class InpaintMask:
    """The region of an image that is kept, for a UNet that was not trained to inpaint.

    After every step it is restored at the next step's noise level (diffusers' inpainting with four channels; Lugmayr et
    al., 2022, section 4.1).
    """

    mask: torch.Tensor  # [1, 1, h, w] fp32: 1 where it is repainted, else 0
    latents: torch.Tensor  # [1, C, h, w] fp32: of the source image
    noise: torch.Tensor  # [1, C, h, w] fp32: the starting noise

    def put_back(self, x: torch.Tensor, signal: float, noise: float) -> torch.Tensor:
        """The sample [1, C, h, w] with the kept region restored at this level of signal and noise."""
        return (1 - self.mask) * (signal * self.latents + noise * self.noise) + self.mask * x


@dataclass(slots=True, eq=False)
class DenoisingState:
    """A request's state between noise and image. Immutable: a step returns a new one."""

    table: sigmas.SamplerTable
    step: int
    x: torch.Tensor  # [1, C, h, w] fp32
    x0: torch.Tensor  # [1, C, h, w] fp32: the sampler's previous estimate, zeros before the first
    guidance_scale: float
    conditioning: Conditioning
    kept: InpaintMask | None = None

    @property
    def left(self) -> int:
        return self.table.steps - self.step


Forward = Callable[..., tuple[torch.Tensor, ...]]
"""The UNet: (sample, timestep [B], encoder_hidden_states, timestep_cond, added_cond_kwargs, return_dict). What it
returns begins with the model output, [B, C, h, w]."""


@dataclass(frozen=True, slots=True, eq=False)
class UNetInputs:
    """A UNet's arguments for `rows` rows; rows beyond the requests' own are padding."""

    sample: torch.Tensor  # [B, C, h, w]
    timestep: torch.Tensor  # [B]
    kv: torch.Tensor  # [B, T, width]
    pooled: torch.Tensor  # [B, P]
    time_ids: torch.Tensor  # [B, 6]
    time_cond: torch.Tensor | None  # [B, G]

    def run(self, unet: Forward, *before: Any) -> tuple[torch.Tensor, ...]:
        """The model output, [B, C, h, w], and any further outputs. `before` are arguments that come first."""
        return unet(
            *before,
            self.sample,
            self.timestep,
            encoder_hidden_states=self.kv,
            timestep_cond=self.time_cond,
            added_cond_kwargs={"text_embeds": self.pooled, "time_ids": self.time_ids},
            return_dict=False,
        )


class _GatheredConditioning(NamedTuple):
    """The batched conditioning of these requests, and which request each row belongs to."""

    kv: torch.Tensor
    pooled: torch.Tensor
    time_ids: torch.Tensor
    time_cond: torch.Tensor | None
    rider: torch.Tensor  # [B]: the request's index


class BatchGatherer:
    """Batches the rows of many requests, and caches the last batched conditioning.

    Consecutive steps usually have the same requests, and only latents and timesteps are new.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._last: tuple[tuple[int, ...], list[Conditioning], _GatheredConditioning] | None = None

    def inputs(self, riders: Sequence[DenoisingState], rows: int) -> UNetInputs:
        """Arguments of `rows` rows; padding repeats the first request's row, which keeps it finite."""
        made = self._conditioning([r.conditioning for r in riders], rows - sum(r.conditioning.rows for r in riders))
        scaled = sigmas.model_input(torch.cat([rider.x for rider in riders]), _coefficients(riders))
        times = torch.stack([rider.table.timesteps[rider.step] for rider in riders]).to(scaled.device)
        return UNetInputs(
            scaled.to(self._dtype)[made.rider], times[made.rider], made.kv, made.pooled, made.time_ids, made.time_cond
        )

    def _conditioning(self, riders: list[Conditioning], padding: int) -> _GatheredConditioning:
        key = (*(id(rider) for rider in riders), -padding)
        if self._last is None or self._last[0] != key:

            def gather(name: str) -> torch.Tensor | None:
                parts = [getattr(rider, name) for rider in riders]
                if parts[0] is None:
                    return None
                return torch.cat(parts + [parts[0][:1]] * padding)

            kv, pooled, time_ids = gather("kv"), gather("pooled"), gather("time_ids")
            assert kv is not None and pooled is not None and time_ids is not None
            own = [number for number, rider in enumerate(riders) for _ in range(rider.rows)]
            rider = torch.tensor(own + [0] * padding, device=kv.device)
            # The requests are kept with the result, so that no other object can take over their identity.
            self._last = (key, riders, _GatheredConditioning(kv, pooled, time_ids, gather("time_cond"), rider))
        return self._last[2]

    def clear_cache(self) -> None:
        self._last = None


def guide(output: torch.Tensor, riders: Sequence[DenoisingState]) -> torch.Tensor:
    """Classifier-free guidance (Ho and Salimans, 2022) for requests with two rows: to fp32 [requests, …]."""
    count = len(riders)
    if all(rider.conditioning.rows == 2 for rider in riders):
        pairs = output[: 2 * count].float().unflatten(0, (count, 2))
        scales = torch.tensor([rider.guidance_scale for rider in riders], device=output.device).view(-1, 1, 1, 1)
        mixed: torch.Tensor = pairs[:, 0] + scales * (pairs[:, 1] - pairs[:, 0])
        return mixed
    output = output.float()
    guided, row = [], 0
    for rider in riders:
        if rider.conditioning.rows == 2:
            negative, positive = output[row : row + 1], output[row + 1 : row + 2]
            guided.append(negative + rider.guidance_scale * (positive - negative))
        else:
            guided.append(output[row : row + 1])
        row += rider.conditioning.rows
    return torch.cat(guided)


def advance(
    riders: Sequence[DenoisingState], output: torch.Tensor, noise: Sequence[torch.Tensor | None]
) -> list[DenoisingState]:
    """Each request's next trajectory, from the UNet's output for all rows. The inputs are unchanged."""
    m = guide(output, riders)
    x = torch.cat([rider.x for rider in riders])
    x0 = torch.cat([rider.x0 for rider in riders])
    if any(drawn is not None for drawn in noise):
        parts = [torch.zeros_like(r.x) if n is None else n for r, n in zip(riders, noise, strict=True)]
        drawn = torch.cat(parts)
    else:
        drawn = torch.zeros_like(x)
    x, x0 = sigmas.step(x, m, x0, drawn, _coefficients(riders))
    # Views of the whole batch: a waiting latent keeps its companions' of that step alive, which is little.
    return [
        replace(rider, step=rider.step + 1, x=_put_back(rider, own), x0=own_x0)
        for rider, own, own_x0 in zip(riders, torch.split(x, 1), torch.split(x0, 1), strict=True)
    ]


def _coefficients(riders: Sequence[DenoisingState]) -> torch.Tensor:
    """Of each request's next step, fp32 [requests, 7]."""
    return torch.stack([rider.table.coefficients[rider.step] for rider in riders]).to(riders[0].x.device)


def _put_back(rider: DenoisingState, moved: torch.Tensor) -> torch.Tensor:
    if rider.kept is None:
        return moved
    signal, noise = rider.table.levels[rider.step + 1].tolist()
    return rider.kept.put_back(moved, signal, noise)


def time_ids(width: int, height: int, rows: int, like: torch.Tensor) -> torch.Tensor:
    """SDXL's size and crop conditioning for an uncropped picture, [rows, 6] (Podell et al., 2023, section 2.2)."""
    ids = torch.tensor([[height, width, 0, 0, height, width]], dtype=like.dtype, device=like.device)
    return ids.repeat(rows, 1)


def guidance_embedding(scale: float, width: int, like: torch.Tensor) -> torch.Tensor:
    """The sinusoidal embedding of the guidance scale that distilled models read, [1, width].

    As diffusers' `get_guidance_scale_embedding` for w = scale - 1 (Meng et al., 2023; Luo et al., 2023).
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half) * -(torch.log(torch.tensor(10000.0)) / (half - 1)))
    angles = torch.tensor([(scale - 1) * 1000.0])[:, None] * frequencies[None, :]
    embedding = torch.cat([angles.sin(), angles.cos()], dim=1)
    return F.pad(embedding, (0, width % 2)).to(like.device, like.dtype)
