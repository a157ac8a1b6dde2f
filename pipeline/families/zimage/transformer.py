"""The transformer of Z-Image on any lowering: tokens of latents, positions, time, and `network` on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.ops.ops import Lowering, bind
from pipeline.families.zimage import network
from pipeline.families.zimage.network import MULTIPLE, PATCH
from unet_opt.inputs import DenoiserInputs

_TIME = 256  # channels of the time's sinusoids


class ZImageNetwork:
    """A `pipeline.families.family.Network` of a diffusers ZImageTransformer2DModel."""

    shallow_reads_text = True

    def __init__(self, lowering: Lowering, model: Any) -> None:
        """Build it on a lowering. Raises ValueError for a transformer of an unsupported layout or layer."""
        check(model, head_multiple=lowering.head_multiple)
        self.lowering, self.model = lowering, model
        self.text_width: int = model.dim
        self._axes = _tables(model)
        self._grids: dict[tuple[int, int, torch.device], Tensor] = {}
        self._walks: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
        self._prepare()

    def prepare_text(self, hidden: Tensor) -> Tensor:
        """Refine text tokens of one prompt's hidden states [1, n, D]: [1, T, C], T the next multiple of 32."""
        count = hidden.shape[1]
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, -count % MULTIPLE)).to(self.lowering.dtype)
        (x,) = self._lowered("embed_text", network.embed_text)(padded)
        pads = torch.arange(x.shape[1], device=x.device)[None, :, None] >= count
        x = torch.where(pads, self.model.cap_pad_token.detach().to(x.dtype), x)
        return self._lowered("refine_text", network.refine_text)(x, self._text_angles(1, x.shape[1], x.device))[0]

    def deep(self, inputs: DenoiserInputs) -> tuple[Tensor, ...]:
        """Compute the model's output [B, C, h, w], then what the blocks behind the first one added, [B, h·w / 4, C].

        The time is 1 - sigma; the conditioning is `text` [B, T, C] of `prepare_text`, and how many of its tokens are
        each row's own: `lengths` [B]. The second result lies in buffers that the next call may overwrite.
        """
        out, first, last = self._step("deep", network.deep, self._inputs(inputs))
        return self._latents(out, inputs.sample), last - first

    def shallow(self, depth: str, inputs: DenoiserInputs, features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute the model's output [B, C, h, w] on `features` of an earlier deep step; of any `depth` the same."""
        (out,) = self._step("shallow", network.shallow, (*self._inputs(inputs), features[0]))
        return (self._latents(out, inputs.sample),)

    def select_features(self, features: Sequence[Tensor], depth: str) -> tuple[Tensor, ...]:
        """Return all features: every `depth` is the same cut."""
        return tuple(features)

    def feature_shapes(self, depth: str, height: int, width: int) -> list[tuple[int, ...]]:
        """Return the shape of one row of the image's tokens."""
        return [((height // 2) * (width // 2), self.model.dim)]

    # -- inputs ------------------------------------------------------------------------------------------------------

    def _inputs(self, inputs: DenoiserInputs) -> tuple[Tensor | None, ...]:
        """Return what `network.deep` reads, in order."""
        sample, timestep, (text, lengths) = *inputs[:2], (inputs.conditioning[name] for name in ("text", "lengths"))
        rows, channels, height, width = sample.shape
        if channels != self.model.in_channels or height % 2 or width % 2:
            raise ValueError(
                f"sample {[*sample.shape]} does not fit: {self.model.in_channels} channels and even sides are wanted"
            )
        blocks, head = self._modulations(timestep)
        patches = sample.unfold(2, 2, 2).unfold(3, 2, 2)  # [B, C, h/2, w/2, 2, 2]
        patches = patches.permute(0, 2, 3, 4, 5, 1).reshape(rows, -1, 4 * channels).to(self.lowering.dtype)
        count = patches.shape[1]
        padding = -count % MULTIPLE
        pads = self.model.x_pad_token.detach().to(patches.dtype).expand(rows, padding, -1) if padding else None
        image = self._image_angles(height // 2, width // 2, lengths, padding)
        angles = torch.cat([image, self._text_angles(rows, text.shape[1], sample.device)], dim=1)
        token_counts = (lengths + (count + padding)).to(torch.int32)
        return patches, pads, blocks, head, angles, text.to(self.lowering.dtype), token_counts, image

    def _modulations(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Return `network.modulations` as the blocks multiply them: 1 + scales and tanh of gates, fp32."""
        time = self.model.t_embedder.timestep_embedding(timestep * self.model.t_scale, _TIME)
        blocks, head = self._lowered("time", network.modulations)(time.to(self.lowering.dtype))
        scale, gate, scale_2, gate_2 = blocks.float().unflatten(-1, (-1, 4, self.model.dim)).unbind(2)
        parts = (1 + scale, gate.tanh(), 1 + scale_2, gate_2.tanh())
        return torch.stack(parts, dim=2).flatten(1), 1 + head.float()

    def _image_angles(self, height: int, width: int, lengths: Tensor, padding: int) -> Tensor:
        """Return angles [B, S + P, d]: the first axis counts on from the text, then rows and columns; pads are at 0."""
        key = (height, width, lengths.device)
        if key not in self._grids:
            ys, xs = (torch.arange(side, device=lengths.device) for side in (height, width))
            y = self._axis(1, ys)[:, None].expand(-1, width, -1, -1)
            x = self._axis(2, xs)[None].expand(height, -1, -1, -1)
            self._grids[key] = torch.cat([y, x], dim=-1).flatten(0, 1)  # [S, 2, d]: cosines and sines
        grid, first = self._grids[key], self._axis(0, lengths.long() + 1)  # [B, 2, d]
        both = torch.cat(
            [first[:, None].expand(-1, len(grid), -1, -1), grid[None].expand(len(first), -1, -1, -1)], dim=-1
        )
        if padding:
            zero = torch.zeros(1, dtype=torch.long, device=lengths.device)
            pad = torch.cat([self._axis(axis, zero) for axis in range(3)], dim=-1)
            both = torch.cat([both, pad[None].expand(len(first), padding, -1, -1)], dim=1)
        return both.flatten(2)

    def _text_angles(self, rows: int, count: int, device: torch.device) -> Tensor:
        """Return angles [B, T, d]: text tokens count from 1 along the first axis."""
        positions = torch.arange(1, count + 1, device=device)
        parts = [self._axis(0, positions), *(self._axis(axis, torch.zeros_like(positions)) for axis in (1, 2))]
        return torch.cat(parts, dim=-1).flatten(1)[None].expand(rows, -1, -1)

    def _axis(self, axis: int, positions: Tensor) -> Tensor:
        """Return cosines and sines [n, 2, d / 2] of one axis at these places."""
        if self._axes[axis].device != positions.device:
            self._axes[axis] = self._axes[axis].to(positions.device)
        return self._axes[axis][positions]

    # -- walks -------------------------------------------------------------------------------------------------------

    def _step(self, name: str, walk: Callable[..., Any], inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        patches, pads, *rest = inputs
        if pads is not None:
            return self._lowered(name, walk)(patches, pads, *rest)

        def unpadded(ops: Any, model: Any, patches: Any, *rest: Any) -> Any:
            return walk(ops, model, patches, None, *rest)

        return self._lowered(f"{name}, no pads", unpadded)(patches, *rest)

    def _lowered(self, name: str, walk: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        if name not in self._walks:
            self._walks[name] = self.lowering.lower(bind(walk, self.model), name)
        return self._walks[name]

    def _latents(self, out: Tensor, sample: Tensor) -> Tensor:
        """Unpack patches [B, S, 4·C] to [B, C, h, w]."""
        rows, channels, height, width = sample.shape
        x = out.view(rows, height // 2, width // 2, 2, 2, channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(rows, channels, height, width)

    def _prepare(self) -> None:
        model, head = self.model, self.model.dim // self.model.n_heads
        count, text = MULTIPLE, MULTIPLE
        blocks = 4 * model.dim * len(network.modulated(model))
        self.lowering.prepare(bind(network.modulations, model), (1, _TIME))
        self.lowering.prepare(bind(network.embed_text, model), (1, text, model.config.cap_feat_dim))
        self.lowering.prepare(bind(network.refine_text, model), (1, text, model.dim), (1, text, head))
        self.lowering.prepare(
            bind(lambda ops, model, patches, *rest: network.deep(ops, model, patches, None, *rest), model),
            (1, count, 4 * model.in_channels), (1, blocks), (1, model.dim), (1, count + text, head),
            (1, text, model.dim), (1,), (1, count, head),
        )  # fmt: skip


def _tables(model: Any) -> list[Tensor]:
    """Return cosines and sines [places, 2, d / 2] of each rotary axis."""
    embedder = model.rope_embedder
    tables = embedder.precompute_freqs_cis(embedder.axes_dims, embedder.axes_lens, theta=embedder.theta)
    return [torch.stack([table.real, table.imag], dim=1).contiguous() for table in tables]


def check(model: Any, *, head_multiple: int = 1) -> None:
    """Raise ValueError for a transformer of another layout than Z-Image's, or heads of a width that is unsupported."""
    config = model.config
    if (model.dim // model.n_heads) % head_multiple:
        raise ValueError(f"transformer: heads of width {model.dim // model.n_heads} are no multiple of {head_multiple}")
    if PATCH not in model.all_x_embedder:
        raise ValueError(f"transformer: patches of {', '.join(model.all_x_embedder)}; supported is {PATCH}")
    if config.n_kv_heads != config.n_heads:
        raise ValueError(f"transformer: {config.n_kv_heads} heads of keys for {config.n_heads}; supported are as many")
    if getattr(model, "siglip_embedder", None) is not None:
        raise ValueError("transformer: reads SigLIP's features of images, which is not supported")
