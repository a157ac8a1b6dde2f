"""The quantization recipe for Llamas: which layers are quantized, how, and why each other layer is not.

SmoothQuant (Xiao et al., 2023) on every linear layer of the blocks.
"""

from __future__ import annotations

import re

from core.quant.convert import Recipe, Rule
from core.quant.schemes import SCHEMES

ALPHA = 0.5


def llama(alpha: float | None = ALPHA) -> Recipe:
    """The recipe for models of the Llama family, with or without a head. `alpha` None is plain INT8.

    Queries, keys and values read one input and get equal scales, and so do gate and up, and all experts of a layer:
    each is one product. Routers are no linear layers to torch, and stay as they are.
    """
    return Recipe(
        name="llama-plain" if alpha is None else f"llama-alpha{alpha:g}",
        rules=(
            Rule(r"lm_head", reason="its errors are the answer's", required=False),
            Rule(r"(model\.)?layers\.\d+\.self_attn\.[qkvo]_proj", alpha=alpha),
            Rule(r"(model\.)?layers\.\d+\.mlp\.((gate|up|down)_proj|experts\.(gate_up|down))", alpha=alpha),
        ),
        shares=_shares,
    )


def default(scheme: str) -> Recipe:
    """The recipe where none is given: smoothing is for schemes that round inputs, and costs weights some accuracy."""
    return llama(ALPHA if SCHEMES[scheme].linear.STATIC and SCHEMES[scheme].linear.ROUNDS else None)


def _shares(name: str) -> str:
    name = re.sub(r"\.[qkv]_proj$", ".qkv", name)
    return re.sub(r"\.(gate|up)_proj$", ".gate_up", name)
