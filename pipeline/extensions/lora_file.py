"""Parses LoRA files: low-rank matrix pairs for layers of a model's parts (Hu et al., 2021).

A family's `Adapters` says which layouts are read. Does not need peft.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from core import transfers
from core.failures import translate_device_errors
from core.ops.branches import LowRank
from core.quant.linear import ScaledConv2d, ScaledLinear
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import lycoris, weight_files
from pipeline.families.family import Adapters

_KEY = re.compile(r"(.+)\.lora_([AB])\.weight")
# Parts of keys, to which a dot is added, of adapters that are no product of two matrices beside a layer's weight.
_UNKNOWN = {
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "a LoRA of embeddings",
    "bundle_emb.": "a textual inversion inside of a LoRA (files of these go into DIPTYCH_EMBEDDINGS_DIR)",
    ".oft_": "OFT",
    "boft_": "BOFT",
    ".on_input.": "IA3",
    ".a1.weight.": "GLoRA",
    ".b1.weight.": "GLoRA",
    "vera_lambda": "VeRA",
    ".w_norm.": "a trained norm",
    ".b_norm.": "a trained norm",
    ".diff_b.": "a difference of biases",
    ".diff.": "a difference of whole weights",
    ".lora_B.bias.": "a LoRA with biases",
    ".reshape_weight.": "a LoRA that changes a layer's shape",
}

Factors = Mapping[tuple[str, str], LowRank]
"""By part and by the layer's name in it."""


def read(
    name: str, data: bytes, parts: Mapping[str, Any], adapters: Adapters, most: int = 2**40
) -> dict[tuple[str, str], LowRank]:
    """The factors of the LoRA `name` for these parts, in the file's own precision, or in 16 bits of one of 8.

    `parts` has at least those of `adapters`. May run on any thread. LyCORIS's kinds become pairs of at most `most`
    elements. Raises `ModelError`, naming the LoRA, for a file that is damaged, of an unknown kind, or does not fit
    these parts.
    """

    def factors_of_file() -> dict[tuple[str, str], LowRank]:
        state, config = _read(data)
        state, alphas = adapters.to_diffusers(lycoris.as_pairs(state, most), parts)
        return dict(_factors(state, alphas, config, parts, adapters))

    try:
        factors = translate_device_errors(factors_of_file)
        if not factors:
            raise ValueError(f"nothing in it is for {adapters.models}")
    except Exception as error:  # of several libraries: it does not fit
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ModelError(f"{name}: does not fit ({kind}{' '.join(str(error).split())[:300]})", kind="lora") from error
    return factors


def converted(name: str, factors: Factors, device: torch.device, dtype: torch.dtype) -> dict[tuple[str, str], LowRank]:
    """A copy in a precision, on a device. Raises `ModelError`, naming the LoRA, for what is not finite in it."""
    made = {
        at: replace(
            factor,
            down=factor.down.to("cpu", dtype, copy=True).contiguous(),
            up=factor.up.to("cpu", dtype, copy=True).contiguous(),
        )
        for at, factor in factors.items()
    }
    check_finite(name, made)
    tensors = iter(
        transfers.copy_to_device([part for factor in made.values() for part in (factor.down, factor.up)], device)
    )
    return {at: replace(factor, down=next(tensors), up=next(tensors)) for at, factor in made.items()}


def of_part(factors: Factors, part: str) -> dict[str, LowRank]:
    """The factors of one part, by the layers' names in it."""
    return {layer: factor for (owner, layer), factor in factors.items() if owner == part}


def check_finite(name: str, factors: Factors) -> None:
    """Raise `ModelError`, naming the LoRA, for NaN and infinities."""
    for (_, layer), factor in factors.items():
        if not all(math.isfinite(end) for part in (factor.down, factor.up) for end in part.aminmax()):
            raise ModelError(f"{name}: {layer} holds what is no finite number", kind="lora")


@torch.no_grad()
def add_(parts: Mapping[str, Any], factors: Factors, scale: float) -> None:
    """Add it, scaled, to the layers' weights, in place; computed in fp32 and rounded once."""
    for (part, layer), factor in factors.items():
        weight = parts[part].get_submodule(layer).weight
        product = factor.up.float().flatten(1) @ factor.down.float().flatten(1)
        sum_ = weight.float() + (scale * factor.scale) * product.view(weight.shape).to(weight.device)
        weight.copy_(sum_)


def _read(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The file's tensors, and the config that diffusers writes."""
    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY

    try:
        state = weight_files.tensors(data)
    except ValueError as error:
        raise ValueError(f"it {error}") from error
    for key in state:
        for mark, kind in _UNKNOWN.items():
            if mark in f"{key}.":
                raise ValueError(f"{_shown(key)} is {kind}, which is not supported")
    config = weight_files.table_of(data)[0].text(LORA_ADAPTER_METADATA_KEY)
    found = json.loads(config) if config else {}
    if not isinstance(found, dict):
        raise ValueError(f"its metadata's {LORA_ADAPTER_METADATA_KEY} is no object")
    return state, found


def _factors(
    state: Mapping[str, Tensor],
    alphas: Mapping[str, float],
    config: Mapping[str, Any],
    parts: Mapping[str, Any],
    adapters: Adapters,
) -> Iterator[tuple[tuple[str, str], LowRank]]:
    left = set(state)
    for part in adapters.parts:
        old = [key.removeprefix(f"{part}.") for key in state if key.startswith(f"{part}.")]
        left -= {f"{part}.{key}" for key in old}
        new = adapters.to_peft(part, old)
        pairs: dict[str, dict[str, str]] = {}
        for key, own in new.items():
            found = _KEY.fullmatch(key)
            if found is None:
                raise ValueError(f"{_shown(key)} in the {part} is nothing that is known")
            pairs.setdefault(found[1], {})[found[2]] = f"{part}.{own}"
        own_config = {key.removeprefix(f"{part}."): v for key, v in config.items() if key.startswith(f"{part}.")}
        patterns = _alpha_patterns(own_config)
        for layer, pair in pairs.items():
            if pair.keys() != {"A", "B"}:
                raise ValueError(f"{_shown(layer)} in the {part} has one of its two matrices")
            known, module = _layer(part, parts[part], layer)
            down, up = _fitted(known, module, state[pair["A"]], state[pair["B"]])
            scale = _scale(layer, down.shape[0], _alpha(alphas, pair["A"]), own_config, patterns)
            if not math.isfinite(scale):
                raise ValueError(f"the alpha of {_shown(layer)} is no finite number")
            yield (part, known), LowRank(down, up, scale)
    if left:
        raise ValueError(f"{_shown(min(left))} is for no part of {adapters.models}")


def _layer(part: str, model: Any, name: str) -> tuple[str, nn.Module]:
    """The layer of this name. In some versions of transformers CLIP text encoders have one level less."""
    text = "text_model."
    for candidate in (name, name.removeprefix(text) if name.startswith(text) else text + name):
        try:
            module: nn.Module = model.get_submodule(candidate)
        except AttributeError:
            continue
        return candidate, module
    raise ValueError(f"the {part} has no {_shown(name)}")


def _fitted(name: str, module: nn.Module, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Both matrices in the shape of this layer's kind. Raises ValueError where they do not fit."""
    if not (down.is_floating_point() and up.is_floating_point()):
        raise ValueError(f"{name} is not in floats")
    rank = down.shape[0] if down.dim() else 0
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    if isinstance(module, nn.Linear | ScaledLinear):
        sizes = (rank, module.in_features), (module.out_features, rank)
    elif isinstance(module, ScaledConv2d) or _is_plain(module):
        sizes = (rank, module.in_channels, *module.kernel_size), (module.out_channels, rank, 1, 1)
    else:
        raise ValueError(f"{name} is a {type(module).__name__}, which takes none")
    if isinstance(module, nn.Conv2d | ScaledConv2d) and down.dim() == 2 and down.shape[1] == math.prod(sizes[0][1:]):
        down = down.reshape(sizes[0])  # LyCORIS's convolutions as matrices
    for given, expected in zip((down, up), sizes, strict=True):
        # Trailing dimensions of one make no difference: a linear layer is a 1×1 convolution.
        if not rank or _bare(given.shape) != _bare(expected):
            raise ValueError(f"{_shown(name)} has {[*given.shape]}, and this model needs {[*expected]}")
    return down.reshape(sizes[0]), up.reshape(sizes[1])


def _is_plain(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether it is a convolution that a branch's can follow."""
    return isinstance(module, nn.Conv2d) and module.groups == 1 and module.padding_mode == "zeros"


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape without a convolution's trailing ones."""
    return shape[:2] if len(shape) == 4 and tuple(shape[2:]) == (1, 1) else tuple(shape)


def _alpha(alphas: Mapping[str, float], down: str) -> float | None:
    """kohya's alpha, which diffusers stores under the matrix's whole name, or under its prefix."""
    for name in (down, down.partition(".lora.")[0]):
        if f"{name}.alpha" in alphas:
            return alphas[f"{name}.alpha"]
    return None


def _alpha_patterns(config: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    """peft's alphas by the ends of layers' names that they are for, each with its place: the first that fits counts."""
    patterns: dict[str, tuple[int, Any]] = {}
    for place, (pattern, alpha) in enumerate((config.get("alpha_pattern") or {}).items()):
        plain = pattern.removeprefix("^").removesuffix("$").partition(".lora_")[0]
        patterns.setdefault(plain, (place, alpha))
    return patterns


def _pattern_alpha(patterns: Mapping[str, tuple[int, Any]], layer: str, default: Any) -> Any:
    """The alpha of the first pattern that is the layer's name, or its last words, between dots."""
    words = layer.split(".")
    ends = (".".join(words[start:]) for start in range(len(words)))
    found = [patterns[end] for end in ends if end in patterns]
    return min(found, key=lambda pattern: pattern[0])[1] if found else default


def _scale(
    layer: str, rank: int, alpha: float | None, config: Mapping[str, Any], patterns: Mapping[str, tuple[int, Any]]
) -> float:
    """alpha / rank; without an alpha 1, as in diffusers. `config` is peft's LoraConfig, with its `_alpha_patterns`."""
    root = False
    if config:
        if config.get("use_dora"):
            raise ValueError("it is DoRA, which is not supported")
        root = bool(config.get("use_rslora"))
        alpha = _pattern_alpha(patterns, layer, config.get("lora_alpha", alpha))
    return 1.0 if alpha is None else float(alpha) / (math.sqrt(rank) if root else rank)


def _shown(text: str) -> str:
    """Sanitize a name from a file, which may be anything."""
    return ascii(text[:120])
