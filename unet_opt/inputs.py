"""The inputs of a denoiser's forward, and their conversion to what the walks of `unet_opt` read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.ops.ops import Lowering

TEXT, TEXT_LENGTHS = "kv", "kv_lengths"  # a UNet's packed keys and values [B, T, width], and how many of T count [B]


class DenoiserInputs(NamedTuple):
    """The inputs of `rows` rows; rows beyond the requests' own are padding.

    A UNet's `conditioning` is `kv` and, where the rows' texts differ in length, `kv_lengths`; of SDXL `pooled` [B, P]
    and `time_ids` [B, 6] too, and of a distilled one `time_cond` [B, G].
    """

    sample: Tensor  # [B, C, h, w]; of a denoiser that inpaints [B, C + 1 + C, h, w]
    timestep: Tensor  # [B]
    conditioning: Mapping[str, Tensor]  # by the family's names, [B, …] each

    def without_text(self) -> DenoiserInputs:
        """Return the same inputs but for a UNet's text."""
        rest = {name: part for name, part in self.conditioning.items() if name not in (TEXT, TEXT_LENGTHS)}
        return self._replace(conditioning=rest)

    def lengths(self) -> dict[str, Tensor]:
        """Return the option `lengths` of a lowered walk; none where all text counts, which all lowerings take."""
        return {"lengths": self.conditioning[TEXT_LENGTHS]} if TEXT_LENGTHS in self.conditioning else {}

    def as_map(self, lowering: Lowering) -> Tensor:
        """Return the sample [B, h, w, C] in the lowering's type."""
        return map_of(lowering, self.sample)

    def added(self, lowering: Lowering, network: Any) -> Tensor:
        """Return what a network's embedding of size and pooled text reads, [B, P]; zeros where it has none."""
        rows = len(self.sample)
        if getattr(network, "add_embedding", None) is None:
            return self.sample.new_zeros((rows, 1), dtype=lowering.dtype)
        sizes = network.add_time_proj(self.conditioning["time_ids"].flatten()).reshape(rows, -1)
        return torch.cat([self.conditioning["pooled"].float(), sizes], dim=-1).to(lowering.dtype)


def map_of(lowering: Lowering, sample: Tensor) -> Tensor:
    """Convert a map [B, C, h, w] to [B, h, w, C] in the lowering's type."""
    return sample.to(lowering.dtype).permute(0, 2, 3, 1).contiguous()
