"""The ControlNet of SDXL, written down once, on any lowering: what it adds to a UNet's skips and middle.

The layout is that of diffusers' ControlNetModel (Zhang et al., 2023), whose modules hold the weights: the UNet's down
path and mid block, which read a picture's embedding beside the sample and end in 1×1 convolutions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from core.ops.ops import Lowering, Ops, bind
from unet_opt import unet as network
from unet_opt.deepcache import input_shapes
from unet_opt.inputs import TEXT, DenoiserInputs, map_of
from unet_opt.layout import check_control
from unet_opt.modules import ControlNet, UNet

A = TypeVar("A")


def residuals(
    ops: Ops[A], net: ControlNet, sample: A, time: A, added: A, kv: A, hint: A, kind: A | None = None
) -> tuple[A, ...]:  # fmt: skip
    """Compute what is added to each skip, in the order of the down path, and then to the mid block's output.

    `hint` [B, h, w, C] is added to what `conv_in` makes of the sample, `kind` [B, C'] of a Union to the time's
    embedding; the others are as for `unet.deep`.
    """
    times, text = network.embed_times(ops, net, time, added, kind), network.read_text(ops, net, kv)
    skips = network.down(ops, net, ops.conv(sample, net.conv_in, residual=hint), times, text)
    h = network.middle(ops, net, skips[-1], times, text)
    pairs = zip(skips, net.controlnet_down_blocks, strict=True)
    return (*(ops.linear(skip, layer) for skip, layer in pairs), ops.linear(h, net.controlnet_mid_block))


class Condition(NamedTuple):
    """A picture that a network follows: its embedding [1, h, w, C], its strength, and of a Union its kind."""

    hint: Tensor
    strength: float
    kind: int = 0


class ControlBranch:
    """A ControlNet on a lowering. Keys and values of cross-attention are packed once for each prompt, as the UNet's.

    `kinds` is how many kinds of pictures it tells apart; 0: it does not.
    """

    kinds = 0

    def __init__(self, lowering: Lowering, net: Any, unet: UNet, scale: int) -> None:
        """Build it for a UNet whose latents stand for `scale` pixels a side. Raises ValueError for a misfit."""
        check_control(net, unet, scale, head_multiple=lowering.head_multiple)
        self.net, self.lowering = net, lowering
        attentions = network.cross_attentions(net)
        self.text_width: int = sum(2 * attn.inner_dim for attn in attentions)
        walk, keys = bind(residuals, net), bind(network.text_keys, attentions)
        side = 2 ** (len(net.config.block_out_channels) - 1)
        hint = (1, side, side, net.conv_in.out_channels)
        lowering.prepare(walk, *input_shapes(net, side, side), hint, *self._more_shapes(), bound=3)
        lowering.prepare(keys, (1, 1, attentions[0].to_k.in_features))
        self._run = lowering.lower(walk, "control", bound=3)
        self._keys = lowering.lower(keys, "control, keys")

    @property
    def maps(self) -> list[tuple[int, int]]:
        """Return the channels of each tensor that a picture becomes, and how often the latents' sides are halved."""
        return [(self.net.conv_in.out_channels, 0)]

    def prepare_text(self, hidden: Tensor) -> Tensor:
        """Compute keys and values of all cross-attention layers: [B, T, D] to [B, T, width]."""
        return self._keys(hidden)[0]

    @torch.inference_mode()
    def hint(self, pixels: Tensor) -> Tensor:
        """Compute the embedding of a picture [1, H, W, 3] in bytes: [1, h, w, C]. By torch, once for each picture."""
        first = self.net.controlnet_cond_embedding.conv_in.weight
        image = pixels.to(first.device, first.dtype).permute(0, 3, 1, 2) / 255
        if self.net.config.controlnet_conditioning_channel_order == "bgr":
            image = image.flip(1)
        embedding: Tensor = self.net.controlnet_cond_embedding(image)
        return map_of(self.lowering, embedding)

    def step_inputs(self, sample: Tensor, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        """Return the inputs of one request's rows at this step, beside its keys and values: `hint` [R, h, w, C].

        `sample` [R, C, h, w] are the rows.
        """
        (condition,) = conditions
        return {"hint": condition.hint.expand(len(sample), -1, -1, -1)}

    def scale(self, conditions: Sequence[Condition]) -> float:
        """Return the factor of a request's residuals."""
        return conditions[0].strength

    def _more_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of inputs behind the hint, for one row."""
        return []

    def __call__(self, inputs: DenoiserInputs) -> tuple[Tensor, ...]:
        """Compute `residuals` for rows of a UNet's step, [B, h, w, channels] each, which the next call may overwrite.

        The conditioning is as the UNet's, with this network's text, and what `moving` makes.
        """
        time = self.net.time_proj(inputs.timestep).to(self.lowering.dtype)
        conditioning = inputs.conditioning
        more = [conditioning[name] for name in ("hint", "kind") if name in conditioning]
        added = inputs.added(self.lowering, self.net)
        return self._run(inputs.as_map(self.lowering), time, added, conditioning[TEXT], *more, **inputs.lengths())


class UnionBranch(ControlBranch):
    """A ControlNet-Union (diffusers' ControlNetUnionModel), which reads several kinds of pictures, also at once.

    Its picture's embedding depends on the sample: by torch, for the rows of one request at a time, since rows attend to
    one another there.
    """

    def __init__(self, lowering: Lowering, net: Any, unet: UNet, scale: int) -> None:
        # Layers that are packed may lose their own weights.
        self._conv_in = copy.deepcopy(net.conv_in)
        self.kinds = int(net.config.num_control_type)
        super().__init__(lowering, net, unet, scale)

    @torch.inference_mode()
    def step_inputs(self, sample: Tensor, conditions: Sequence[Condition]) -> dict[str, Tensor]:
        net, rows = self.net, len(sample)
        x = self._conv_in(sample.to(self._conv_in.weight.dtype))  # [R, C, h, w]
        scales = [condition.strength if len(conditions) > 1 else 1.0 for condition in conditions]
        maps = [condition.hint.permute(0, 3, 1, 2) for condition in conditions]
        means = [
            (feature.mean((2, 3)) + net.task_embedding[condition.kind]) * factor
            for feature, condition, factor in zip(maps, conditions, scales, strict=True)
        ]
        tokens = torch.stack([*(mean.expand(rows, -1) for mean in means), x.mean((2, 3))], dim=1)
        for layer in net.transformer_layes:
            tokens = layer(tokens)
        hint = torch.zeros_like(x)
        for index, (feature, factor) in enumerate(zip(maps, scales, strict=True)):
            hint += feature * factor + net.spatial_ch_projs(tokens[:, index])[:, :, None, None] * factor
        control_type = torch.zeros(1, self.kinds, device=x.device)
        control_type[:, [condition.kind for condition in conditions]] = 1
        shares = net.control_type_proj(control_type.flatten()).reshape(1, -1).to(x.dtype)
        kind = net.control_add_embedding(shares).to(self.lowering.dtype)
        return {"hint": map_of(self.lowering, hint), "kind": kind.expand(rows, -1).contiguous()}

    def scale(self, conditions: Sequence[Condition]) -> float:
        return conditions[0].strength if len(conditions) == 1 else 1.0

    def _more_shapes(self) -> list[tuple[int, ...]]:
        return [(1, self.net.control_add_embedding.linear_2.out_features)]
