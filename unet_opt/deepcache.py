"""The UNet on any lowering as two callables: `deep` runs all of it, `shallow` only its end, on features of `deep`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from contract.plan import BLOCK
from core.ops.ops import Lowering, Ops, bind
from core.ops.trace import trace
from unet_opt import unet as network
from unet_opt.inputs import TEXT, DenoiserInputs
from unet_opt.layout import check_unet
from unet_opt.modules import DownPath, UNet

A = TypeVar("A")
Features = tuple[Tensor, ...]
"""Maps with a row for each of the forward's: what shallow steps of every depth read (see `select_features`)."""


def select_features(features: Sequence[A], depth: str) -> tuple[A, ...]:
    """Select from all features that `deep` returns those that a shallow step of this depth reads."""
    return tuple(features[:-1]) if depth == BLOCK else (features[-1],)


def shapes(unet: UNet, depth: str, height: int, width: int) -> list[tuple[int, ...]]:
    """Return (height, width, channels) of each map that a shallow step of this depth reads, by latents' sides."""
    _, *features = trace(bind(network.deep, unet), *input_shapes(unet, height, width)).outputs
    return [
        (map_height, map_width, channels) for _, map_height, map_width, channels in select_features(features, depth)
    ]


def input_shapes(unet: DownPath, height: int, width: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of one row of what `unet.deep` reads."""
    kv = sum(2 * attn.inner_dim for attn in network.cross_attentions(unet))
    added = getattr(unet, "add_embedding", None)
    vector = (1, added.linear_1.in_features if added else 1)  # else one number that nothing reads
    return (
        (1, height, width, unet.conv_in.in_channels),
        (1, unet.time_embedding.linear_1.in_features),
        vector,
        (1, 1, kv),
    )


class SplitUNet:
    """A UNet on a lowering, by its two callables.

    Keys and values of cross-attention are packed once for each prompt, by `prepare_text`.
    """

    def __init__(self, lowering: Lowering, unet: UNet) -> None:
        """Build it on a lowering. Raises ValueError for a UNet of an unsupported layout or layer."""
        check_unet(unet, head_multiple=lowering.head_multiple)
        self.unet, self.lowering = unet, lowering
        attentions = network.cross_attentions(unet)
        self.text_width: int = sum(2 * attn.inner_dim for attn in attentions)
        self.shallow_reads_text = bool(getattr(unet.up_blocks[-1], "attentions", None))
        deep, keys = bind(network.deep, unet), bind(network.text_keys, attentions)
        smallest = 2 ** (len(unet.config.block_out_channels) - 1)
        lowering.prepare(deep, *input_shapes(unet, smallest, smallest), bound=3)
        lowering.prepare(keys, (1, 1, attentions[0].to_k.in_features))
        self._keys = lowering.lower(keys, "keys")
        self._deep = lowering.lower(deep, "deep", bound=3)
        # Deep steps by how many residuals and image prompts they have, shallow ones by depth and whether a residual.
        self._controlled: dict[tuple[int, int], Callable[..., tuple[Tensor, ...]]] = {}
        self._shallow: dict[tuple[str, bool], Callable[..., tuple[Tensor, ...]]] = {}
        # Every admission asks, and following the walk takes SDXL's UNet 10 ms.
        self._shapes = lru_cache(maxsize=256)(partial(shapes, unet))

    def deep(
        self, inputs: DenoiserInputs, residuals: Sequence[Tensor] = (), adapters: Sequence[Tensor] = (),
        images: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Compute the output [B, C, h, w], then features [B, h, w, channels], which the next call may overwrite.

        The text is of `prepare_text`. `residuals` and `adapters` [B, h, w, channels] are as for `unet.deep`, and so are
        `images`: keys and values [B, T', width], with lengths int32 [B], 0 for rows without one. Raises ValueError for
        shapes that do not fit.
        """
        text = inputs.conditioning[TEXT]
        for kv in (text, *(kv for kv, _ in images)):
            self._check_keys(inputs.sample, kv)
        plain = not (residuals or adapters or images)
        run = self._deep if plain else self._lower_controlled(len(residuals), len(images))
        more = [part for image in images for part in image]
        if images:
            more.append(torch.stack([lengths for _, lengths in images]).amax(dim=0))
        out, *features = run(*self._embedded(inputs), text, *more, *residuals, *adapters, **inputs.lengths())
        return (out.permute(0, 3, 1, 2).contiguous(), *features)

    def shallow(
        self, depth: str, inputs: DenoiserInputs, features: Features, residual: Tensor | None = None
    ) -> tuple[Tensor]:
        """Compute the model's output [B, C, h, w] from `select_features` of an earlier deep step.

        `residual` is the first of that step's `residuals`, if it had any.
        """
        key = (depth, residual is not None)
        if key not in self._shallow:
            self._shallow[key] = self._lower_shallow(*key)
        more = features if residual is None else (*features, residual)
        lengths = {}
        if self.shallow_reads_text:
            text = inputs.conditioning[TEXT]
            self._check_keys(inputs.sample, text)
            more, lengths = (text, *more), inputs.lengths()
        (out,) = self._shallow[key](*self._embedded(inputs), *more, **lengths)
        return (out.permute(0, 3, 1, 2).contiguous(),)

    def prepare_text(self, hidden: Tensor) -> Tensor:
        """Compute keys and values of all cross-attention layers: [B, T, D] to [B, T, width], once for each prompt."""
        return self._keys(hidden)[0]

    def select_features(self, features: Sequence[Tensor], depth: str) -> tuple[Tensor, ...]:
        """Select from all features that `deep` returns those that a shallow step of this depth reads."""
        return select_features(features, depth)

    def feature_shapes(self, depth: str, height: int, width: int) -> list[tuple[int, ...]]:
        """Return the `shapes` of this UNet."""
        return self._shapes(depth, height, width)

    def _check_keys(self, sample: Tensor, kv: Tensor) -> None:
        rows, width = sample.shape[0], self.text_width
        if kv.dim() != 3 or (kv.shape[0], kv.shape[2]) != (rows, width):
            raise ValueError(f"keys and values must be [{rows}, tokens, {width}], not {[*kv.shape]}")

    def _lower_controlled(self, residuals: int, images: int) -> Callable[..., tuple[Tensor, ...]]:
        """Lower `deep` with so many image prompts, then residuals, and as adapters what follows them."""
        unet, count, key = self.unet, 2 * images, (residuals, images)

        def walk(ops: Ops[A], sample: A, time: A, added: A, kv: A, *more: A) -> tuple[A, ...]:
            pairs, prompted = list(zip(more[:count:2], more[1:count:2], strict=True)), more[count] if images else None
            rest = more[count + bool(images) :]
            maps = rest[:residuals], rest[residuals:]
            return network.deep(ops, unet, sample, time, added, kv, *maps, pairs, prompted)

        if key not in self._controlled:
            name = "deep, controlled" if residuals else "deep, adapted"
            name = f"{name}, {images} image prompts" if images else name
            self._controlled[key] = self.lowering.lower(walk, name, bound=3)
        return self._controlled[key]

    def _lower_shallow(self, depth: str, controlled: bool) -> Callable[..., tuple[Tensor, ...]]:
        unet, reads_text = self.unet, self.shallow_reads_text

        def walk(ops: Ops[A], sample: A, time: A, added: A, *more: A) -> tuple[A]:
            kv, features = (more[0], more[1:]) if reads_text else (None, more)
            if not controlled:
                return network.shallow(ops, unet, sample, time, added, kv, *features)
            return network.shallow(ops, unet, sample, time, added, kv, *features[:-1], residual=features[-1])

        name = f"{depth}, controlled" if controlled else depth
        return self.lowering.lower(walk, name, bound=3 if reads_text else None)

    def _embedded(self, inputs: DenoiserInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sample as a map, and the inputs of the embeddings of time [B, T] and of size and text [B, P]."""
        unet, sample, cond = self.unet, inputs.sample, inputs.conditioning.get("time_cond")
        if sample.shape[1] != unet.config.in_channels:
            raise ValueError(f"sample {[*sample.shape]} does not fit: {unet.config.in_channels} channels are wanted")
        time = unet.get_time_embed(sample, inputs.timestep)
        if cond is not None:
            time = time + unet.time_embedding.cond_proj(cond)
        return inputs.as_map(self.lowering), time.to(self.lowering.dtype), inputs.added(self.lowering, unet)
