"""Parses LoRA files: low-rank matrix pairs for layers of a model's parts (Hu et al., 2021).

A family's `Adapters` says which layouts are read. Does not need peft.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from core import transfers
from core.failures import translate_device_errors
from core.ops.branches import LowRank
from core.peft_config import LayerPatterns, Targets, check_fields
from core.quant.linear import ScaledConv2d, ScaledLinear
from pipeline.checkpoints import safetensors_header
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import lycoris, weight_files
from pipeline.extensions.lora_names import DIRECT
from pipeline.families.family import Adapters

_KEY = re.compile(rf"(.+)\.(lora_[AB]\.weight|{'|'.join(DIRECT)})")
_MAGNITUDES = ("lora_magnitude_vector", "dora_scale")  # of DoRA: peft's, and kohya's and LyCORIS's
_MAGNITUDE_ENDINGS = (*_MAGNITUDES, f"{_MAGNITUDES[0]}.weight")
_DOWN, _UP = "lora_A.weight", "lora_B.weight"
_MERGED = "such a file is merged into the weights at start (DIPTYCH_LORA)"
# Parts of keys, to which a dot is added, of adapters that are no product of two matrices beside a layer's weight.
_UNKNOWN = {
    "lora_embedding_": "a LoRA of embeddings",
    "bundle_emb.": "a textual inversion inside of a LoRA (files of these go into DIPTYCH_EMBEDDINGS_DIR)",
    # They turn a layer's weight: what they add to it is no product of narrow matrices, and needs the weight itself.
    ".oft_": "OFT, which turns a layer's weights,",
    "boft_": "BOFT, which turns a layer's weights,",
    ".on_input.": "IA3",
    ".a1.weight.": "GLoRA",
    ".b1.weight.": "GLoRA",
    "vera_lambda": "VeRA",
    ".lora_B.bias.": "a LoRA with biases",
    ".reshape_weight.": "a LoRA that changes a layer's shape",
}

Factors = Mapping[tuple[str, str], LowRank]
"""By part and by the layer's name in it."""


Originals = dict[tuple[str, str], Tensor]
"""Weights before LoRAs were merged into them, by part and by the layer's name in it."""


class Difference(NamedTuple):
    """What is added to a layer's `parameter`, "weight" or "bias". `key` names it in the file."""

    key: str
    parameter: str
    value: Tensor


def read(
    name: str, data: bytes, parts: Mapping[str, Any], adapters: Adapters, most: int = 2**40
) -> dict[tuple[str, str], LowRank]:
    """The factors of the LoRA `name` for these parts, in the file's own precision, or in 16 bits of one of 8.

    `parts` has at least those of `adapters`. May run on any thread. LyCORIS's kinds, whole differences and DoRA become
    pairs of at most `most` elements. Raises `ModelError`, naming the LoRA, for a file that is damaged, of an unknown
    kind, or does not fit these parts, and for norms and biases, which the rows of a batch have in common.
    """

    def factors_of_file() -> dict[tuple[str, str], LowRank]:
        factors, left = dict[tuple[str, str], LowRank](), most
        for at, factor in _parsed(data, parts, adapters, most, {}):
            if isinstance(factor, Difference):
                factor = _pair(factor, parts[at[0]].get_submodule(at[1]), left)
                left -= factor.down.numel() + factor.up.numel()
            factors[at] = factor
        return factors

    with _errors(name):
        return translate_device_errors(factors_of_file)


def is_decomposed(path: Path) -> bool:
    """Return whether a file has DoRA's magnitudes; False for one that cannot be read."""
    try:
        return any(key.endswith(_MAGNITUDE_ENDINGS) for key in safetensors_header.read(path).tensors)
    except (OSError, ValueError):
        return False


@torch.no_grad()
def fuse_(
    name: str,
    data: bytes,
    parts: Mapping[str, Any],
    adapters: Adapters,
    scale: float,
    originals: Originals | None = None,
) -> None:
    """Add the LoRA `name`, scaled, to the weights of these parts, in place: computed in fp32, and rounded once.

    `originals` gets a copy of each weight before it is changed, and DoRA is computed of those in it.

    Raises `ModelError`, as `read`.
    """
    with _errors(name):
        for (part, layer), factor in _parsed(data, parts, adapters, 2**40, {} if originals is None else originals):
            module = parts[part].get_submodule(layer)
            if originals is not None and (part, layer) not in originals:
                originals[part, layer] = module.weight.detach().clone()
            if isinstance(factor, LowRank):
                check_finite(name, {(part, layer): factor})
                add_(parts, {(part, layer): factor}, scale)
            else:
                parameter = getattr(module, factor.parameter)
                sum_ = parameter.float() + scale * factor.value.to(parameter.device)
                parameter.copy_(sum_)


def _parsed(
    data: bytes, parts: Mapping[str, Any], adapters: Adapters, most: int, originals: Mapping[tuple[str, str], Tensor]
) -> Iterator[tuple[tuple[str, str], LowRank | Difference]]:
    """Yield what a file has for each layer, one after another. Raises ValueError for one with nothing, and for a layer
    that it has twice, in two spellings.
    """
    state, config = _read(data)
    state, alphas = adapters.to_diffusers(lycoris.as_pairs(state, most), parts)
    seen: set[tuple[str, str, str]] = set()
    for (part, layer), factor in _factors(state, alphas, config, parts, adapters, originals):
        parameter = factor.parameter if isinstance(factor, Difference) else "weight"
        if (part, layer, parameter) in seen:
            raise ValueError(f"it has the {parameter} of {layer} in the {part} twice")
        seen.add((part, layer, parameter))
        yield (part, layer), factor
    if not seen:
        raise ValueError(f"nothing in it is for {adapters.models}")


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Context that turns all errors of a file into `ModelError`, naming the LoRA."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # of several libraries: it does not fit
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ModelError(f"{name}: does not fit ({kind}{' '.join(str(error).split())[:300]})", kind="lora") from error


def _pair(difference: Difference, module: nn.Module, most: int) -> LowRank:
    """Return the difference of a whole weight as a pair of matrices, one of them the identity."""
    if difference.parameter != "weight" or not isinstance(module, nn.Linear | ScaledLinear | nn.Conv2d | ScaledConv2d):
        what = "embeddings" if isinstance(module, nn.Embedding) else "a norm or a bias"
        raise ValueError(f"{difference.key} changes {what}, which all rows of a batch share; {_MERGED}")
    value = difference.value
    if (value.shape[0] + value[0].numel()) * min(value.shape[0], value[0].numel()) > most:
        raise ValueError(f"{difference.key} changes a whole weight, and LoRAs have no room for it; {_MERGED}")
    up, down = lycoris.whole(value)
    return LowRank(down, up.reshape(*up.shape, *[1] * (value.dim() - 2)), 1.0)


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
    originals: Mapping[tuple[str, str], Tensor],
) -> Iterator[tuple[tuple[str, str], LowRank | Difference]]:
    left = set(state)
    for part in adapters.parts:
        old = [key.removeprefix(f"{part}.") for key in state if key.startswith(f"{part}.")]
        left -= {f"{part}.{key}" for key in old}
        new = adapters.to_peft(part, old)
        layers: dict[str, dict[str, str]] = {}
        for key, own in new.items():
            match = _KEY.fullmatch(key)
            if match is None:
                raise ValueError(f"{_shown(key)} in the {part} is nothing that is known")
            layers.setdefault(match[1], {})[match[2]] = f"{part}.{own}"
        own_config = {key.removeprefix(f"{part}."): v for key, v in config.items() if key.startswith(f"{part}.")}
        check_fields(own_config, "its metadata", ("use_dora",))
        targets = Targets("its metadata", own_config)
        patterns = [
            LayerPatterns(f"its metadata: {name}", own_config.get(name)) for name in ("alpha_pattern", "rank_pattern")
        ]
        for layer, keys in layers.items():
            known, module = _layer(part, parts[part], layer)
            for factor in _differences(known, module, {kind: (key, state[key]) for kind, key in keys.items()}):
                yield (part, known), factor
            if not {_DOWN, _UP, *_MAGNITUDES} & keys.keys():
                continue
            if not {_DOWN, _UP} <= keys.keys():
                raise ValueError(f"{_shown(layer)} in the {part} has one of its two matrices")
            down, up = _fitted(known, module, state[keys[_DOWN]], state[keys[_UP]])
            targets.check(layer)
            scale = _scale(layer, down.shape[0], _alpha(alphas, keys[_DOWN]), own_config, patterns)
            if not math.isfinite(scale):
                raise ValueError(f"the alpha of {_shown(layer)} is no finite number")
            pair = LowRank(down, up, scale)
            magnitude = next((keys[kind] for kind in _MAGNITUDES if kind in keys), None)
            if magnitude is not None:
                weight = originals.get((part, known), module.weight)
                yield (part, known), _decomposed(magnitude, weight, pair, state[magnitude])
            elif own_config.get("use_dora"):
                raise ValueError(f"{_shown(layer)} in the {part} is DoRA without a lora_magnitude_vector")
            else:
                yield (part, known), pair
    if left:
        raise ValueError(f"{_shown(min(left))} is for no part of {adapters.models}")


def _differences(name: str, module: nn.Module, tensors: Mapping[str, tuple[str, Tensor]]) -> Iterator[Difference]:
    """Yield what is added to the layer's parameters as it stands in the file: LyCORIS's full weights, norms, biases."""
    for kind, parameter in (("diff", "weight"), ("w_norm", "weight"), ("diff_b", "bias"), ("b_norm", "bias")):
        if kind not in tensors:
            continue
        key, value = _shown(tensors[kind][0]), tensors[kind][1]
        if kind == "diff" and _DOWN in tensors:
            raise ValueError(f"{key} is beside two matrices of the same layer")
        expected = _shape(module) if parameter == "weight" else getattr(getattr(module, "bias", None), "shape", None)
        if expected is None:
            raise ValueError(f"{key} is for a {parameter} that {_shown(name)} does not have")
        if not value.is_floating_point() or _bare(value.shape) != _bare(tuple(expected)):
            raise ValueError(f"{key} has {[*value.shape]}, and this model needs {[*expected]} in floats")
        yield _finite(Difference(key, parameter, value.float().reshape(expected)))


def _shape(module: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of a layer's weight, also where a backend has packed it and dropped the original."""
    if isinstance(module, nn.Linear | ScaledLinear):
        return module.out_features, module.in_features
    if isinstance(module, nn.Conv2d | ScaledConv2d):
        return module.out_channels, module.in_channels, *module.kernel_size
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else None


def _decomposed(key: str, weight: object, pair: LowRank, magnitude: Tensor) -> Difference:
    """Return what DoRA (Liu et al., 2024) adds to a weight W: m · V / |V| - W, where V is W + scale · up · down.

    Norms and magnitudes m are of each output; those of LyCORIS's default, [1, in, …], are of each input.
    """
    if not isinstance(weight, Tensor) or not weight.numel() or weight.itemsize == 1:
        raise ValueError(
            f"{_shown(key)} is DoRA, which needs the layer's own weights, and they are in 8 bits or packed; {_MERGED}"
        )
    own = weight.detach().float().cpu()
    merged = own + pair.scale * (pair.up.float().flatten(1) @ pair.down.float().flatten(1)).view(own.shape)
    out, width = own.shape[:2]
    by_output = key.endswith(_MAGNITUDES[0]) or magnitude.shape[:1] == (out,)
    if not magnitude.is_floating_point() or magnitude.numel() != (out if by_output else width):
        raise ValueError(f"{_shown(key)} has {[*magnitude.shape]}, for a weight {[*own.shape]}")
    axes = tuple(axis for axis in range(own.dim()) if axis != (0 if by_output else 1))
    norm = merged.square().sum(axes, keepdim=True).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    value = merged * (magnitude.float().reshape(norm.shape) / norm) - own
    return _finite(Difference(_shown(key), "weight", value))


def _finite(difference: Difference) -> Difference:
    if not bool(difference.value.isfinite().all()):
        raise ValueError(f"{difference.key} holds what is no finite number")
    return difference


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


def _scale(
    layer: str, rank: int, alpha: float | None, config: Mapping[str, Any], patterns: Sequence[LayerPatterns]
) -> float:
    """alpha / rank; without an alpha 1, as in diffusers. `config` is peft's LoraConfig, `patterns` are its alphas and
    ranks. Raises ValueError for another rank than it says.
    """
    root = False
    if config:
        root = bool(config.get("use_rslora"))
        alpha = patterns[0].value(layer, config.get("lora_alpha", alpha))
        if (said := patterns[1].value(layer, config.get("r", rank))) != rank:
            raise ValueError(f"{_shown(layer)} is of rank {rank}, and its metadata says {_shown(repr(said))}")
    return 1.0 if alpha is None else float(alpha) / (math.sqrt(rank) if root else rank)


def _shown(text: str) -> str:
    """Sanitize a name from a file, which may be anything."""
    return ascii(text[:120])
