"""The quantization recipe of an SDXL UNet and VAE decoder: which layers are quantized, how, and why each other layer is
not.

Follows the INT8 recipe of NVIDIA's MLPerf submissions (v4.0: SmoothQuant on linear layers, INT8 on convolutions).
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from core.quant.convert import Recipe, Rule
from unet_opt import ALPHA as ALPHA

CONV_ALPHA = 0.5  # least error for SDXL's widths, and a fifth of no smoothing's with heavy tails: docs/quantize.md


def unet(model: Any, *, alpha: float | None = ALPHA) -> Recipe:
    """Return the recipe for this UNet. `alpha` is of its linear layers; None is plain INT8, of convolutions too."""
    halves, smooth = _halves(model), None if alpha is None else CONV_ALPHA
    return Recipe(
        name="sdxl-unet-plain" if alpha is None else f"sdxl-unet-alpha{alpha:g}",
        rules=(
            Rule(r"conv_in", reason="4 channels: nothing to gain, and every error spreads through all that follows"),
            Rule(r"conv_out", reason="4 channels, and its errors are the picture's"),
            Rule(r"(time|add)_embedding\..*", reason="one row a picture: nothing to gain, and all layers read it"),
            Rule(r".*\.time_emb_proj", reason="one row a picture: nothing to gain"),
            Rule(r".*\.conv_shortcut", reason="reads what was never normalized: two halves of different range"),
            Rule(
                r".*\.attn2\.to_[kv]", reason="computed once a request; the first token's outlier is 50 times the rest"
            ),
            Rule(r".*\.(conv1|conv2)", alpha=smooth),
            Rule(r".*\.(up|down)samplers\.\d+\.conv", alpha=smooth),
            Rule(r".*\.proj_(in|out)", alpha=alpha),
            Rule(r".*\.attn[12]\.to_(q|k|v|out\.0)", alpha=alpha),
            Rule(r".*\.ff\.net\.(0\.proj|2)", alpha=alpha),
        ),
        shares=lambda name: re.sub(r"\.attn1\.to_[qkv]$", ".attn1.to_qkv", name),
        halves=halves.get,
    )


def control(model: Any, *, alpha: float | None = ALPHA) -> Recipe:
    """Return the recipe for a ControlNet: as for the UNet whose down path and mid block it has."""
    smooth = None if alpha is None else CONV_ALPHA
    return Recipe(
        name="sdxl-control-plain" if alpha is None else f"sdxl-control-alpha{alpha:g}",
        rules=(
            Rule(r"conv_in", reason="4 channels: nothing to gain, and every error spreads through all that follows"),
            Rule(r"controlnet_cond_embedding\..*", reason="computed once a picture"),
            Rule(
                r"transformer_layes\..*|spatial_ch_projs|control_add_embedding\..*",
                reason="of a Union: a few tokens a request",
                required=False,
            ),
            Rule(r"controlnet_(down_blocks\.\d+|mid_block)", reason="reads what was never normalized"),
            Rule(r"(time|add)_embedding\..*", reason="one row a picture: nothing to gain, and all layers read it"),
            Rule(r".*\.time_emb_proj", reason="one row a picture: nothing to gain"),
            Rule(r".*\.conv_shortcut", reason="reads what was never normalized", required=False),
            Rule(r".*\.attn2\.to_[kv]", reason="computed once a request"),
            Rule(r".*\.(conv1|conv2)", alpha=smooth),
            Rule(r".*\.downsamplers\.\d+\.conv", alpha=smooth, required=False),
            Rule(r".*\.proj_(in|out)", alpha=alpha),
            Rule(r".*\.attn[12]\.to_(q|k|v|out\.0)", alpha=alpha),
            Rule(r".*\.ff\.net\.(0\.proj|2)", alpha=alpha),
        ),
        shares=lambda name: re.sub(r"\.attn1\.to_[qkv]$", ".attn1.to_qkv", name),
    )


def decoder(model: nn.Module) -> Recipe:
    """Return the recipe for a VAE, of which only the decoder is used: convolutions behind the first up block."""
    first = r"decoder\.up_blocks\.0\..*"
    return Recipe(
        name="sdxl-vae-decoder",
        rules=(
            Rule(r"(encoder|quant_conv).*", reason="pictures are not encoded", required=False),
            Rule(r"post_quant_conv|decoder\.conv_in", reason="4 channels: nothing to gain", required=False),
            Rule(r"decoder\.mid_block\..*", reason="few pixels: nothing to gain, and all that follows reads it"),
            Rule(r"decoder\.conv_out", reason="3 channels, and its errors are the picture's"),
            Rule(r".*\.conv_shortcut", reason="reads what was never normalized", required=False),
            Rule(first, reason="few pixels: nothing to gain, and all that follows reads it"),
            Rule(r"decoder\.up_blocks\.\d+\.resnets\.\d+\.conv[12]"),
            Rule(r"decoder\.up_blocks\.\d+\.upsamplers\.0\.conv", required=False),
        ),
    )


def _halves(model: Any) -> dict[str, int]:
    """Return where the skip's channels begin in what the up blocks' first convolutions read."""
    offsets = {}
    width = model.mid_block.resnets[-1].out_channels
    for i, block in enumerate(model.up_blocks):
        for j, resnet in enumerate(block.resnets):
            offsets[f"up_blocks.{i}.resnets.{j}.conv1"] = width
            width = resnet.out_channels
    return offsets
