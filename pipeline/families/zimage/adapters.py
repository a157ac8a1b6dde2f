"""The LoRA files of Z-Image: names of diffusers' layers, and those of its authors' code, with queries, keys and values
in one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.families.family import Adapters

if TYPE_CHECKING:
    from torch import Tensor

_PATCH = "2-1"
_OTHERS = {  # ends of diffusers' paths, and the same in the authors' code
    ".attention.to_out.0": (".attention.out", ".attention.to_out"),
    ".attention.norm_q": (".attention.q_norm",), ".attention.norm_k": (".attention.k_norm",),
}  # fmt: skip
_STARTS = {f"all_x_embedder.{_PATCH}": "x_embedder", f"all_final_layer.{_PATCH}": "final_layer"}


def _others(part: str, model: Any) -> Iterator[tuple[str, str]]:
    for path, _ in model.named_modules():
        for end, names in _OTHERS.items():
            yield from ((path, path.removesuffix(end) + name) for name in names if path.endswith(end))
        yield from (
            (path, name + path.removeprefix(start)) for start, name in _STARTS.items() if path.startswith(start)
        )


def _fused(part: str, model: Any) -> Mapping[str, Sequence[str]]:
    attentions = [path for path, _ in model.named_modules() if path.endswith(".attention")]
    return {f"{path}.qkv": [f"{path}.{name}" for name in ("to_q", "to_k", "to_v")] for path in attentions}


def to_diffusers(state: dict[str, Tensor], parts: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the tensors under diffusers' names, and alphas."""
    from pipeline.extensions.lora_names import LoraNames, to_peft

    names = LoraNames(
        prefixes={"transformer": ("lora_unet_", "lora_transformer_", "lycoris_")},
        dotted={"model.diffusion_model.": "lora_unet_", "diffusion_model.": "lora_unet_"},
        others=_others,
        fused=_fused,
    )
    return to_peft(state, {"transformer": parts["transformer"]}, names)


ADAPTERS = Adapters(("transformer",), "a Z-Image", to_diffusers, lambda part, keys: {key: key for key in keys})
