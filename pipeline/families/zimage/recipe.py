"""The quantization recipe of Z-Image's transformer: which layers are quantized, how, and why each other layer is not.

SmoothQuant (Xiao et al., 2023) on the linear layers of the blocks that run at every step.
"""

from __future__ import annotations

import re
from typing import Any

from core.quant.convert import Recipe, Rule
from pipeline.families.zimage.parts import ALPHA


def transformer(model: Any, *, alpha: float | None = ALPHA) -> Recipe:
    """Return the recipe for any Z-Image transformer. `alpha` None is plain INT8.

    Queries, keys and values read one input and get equal scales, and so do gate and hidden half of the feed-forward.
    """
    return Recipe(
        name="zimage-plain" if alpha is None else f"zimage-alpha{alpha:g}",
        rules=(
            Rule(
                r"all_x_embedder\..*",
                reason="16 channels of 2×2 latents: little to gain, and all that follows reads it",
            ),
            Rule(r"all_final_layer\..*", reason="few columns, and its errors are the picture's"),
            Rule(r"(t_embedder|cap_embedder)\..*", reason="one row a picture, or once a prompt: nothing to gain"),
            Rule(r".*\.adaLN_modulation\..*", reason="one row a picture: nothing to gain, and it scales whole blocks"),
            Rule(r"context_refiner\..*", reason="once a prompt: nothing to gain, and all blocks read it"),
            Rule(r"(noise_refiner|layers)\.\d+\.attention\.(to_[qkv]|to_out\.0)", alpha=alpha),
            Rule(r"(noise_refiner|layers)\.\d+\.feed_forward\.w[123]", alpha=alpha),
        ),
        shares=_shares,
    )


def _shares(name: str) -> str:
    name = re.sub(r"\.to_[qkv]$", ".to_qkv", name)
    return re.sub(r"\.w[13]$", ".w13", name)
