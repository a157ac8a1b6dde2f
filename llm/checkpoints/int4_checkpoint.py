"""Reads language models that are published in 4 bits: by AWQ, by GPTQ, by compressed-tensors, or by ModelOpt.

What the files declare of layers in 4 bits is compared with the model's own shapes before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contract.precision import Scheme
from core.json_files import read_object
from core.quant.fp4 import SCALED
from core.quant.fp4_layouts import Fp4Layout
from core.quant.int4 import GROUP, FourBitLinear
from core.quant.int4_layouts import Layout
from llm.checkpoints.weight_files import CheckpointError, WeightFiles

if TYPE_CHECKING:
    import torch

_CONFIG, _GENERATION, _MODELOPT = "config.json", "generation_config.json", "hf_quant_config.json"
_KEY, _NVFP4 = "quantization_config", "nvfp4-pack-quantized"


class Published(NamedTuple):
    """The method by which a model is published in 4 bits, and the precision that reads it."""

    method: str
    precision: Scheme


def published(folder: Path) -> Published | None:
    """How a model's folder is published in 4 bits, as its files say; None for other models.

    Raises `CheckpointError` for a config.json that cannot be read.
    """
    _, _, config = _config(folder)
    name = config.get("quant_method")
    if not isinstance(name, str) or name not in _DECLARED:
        return None
    in_fp4 = name == "modelopt" or (name == "compressed-tensors" and config.get("format") == _NVFP4)
    return Published(name, "nvfp4" if in_fp4 else "w4a16")


def layout(folder: Path) -> Layout | Fp4Layout:
    """The layout that the files declare. Raises `CheckpointError`, by field, for one that is not supported."""
    path, key, config = _config(folder)
    try:
        return _DECLARED[config["quant_method"]](config)
    except ValueError as error:
        raise CheckpointError(f"{path}: {key}.{error}") from error


def _config(folder: Path) -> tuple[Path, str, dict[str, Any]]:
    """The file, the key and the object that describe a quantization; older files of ModelOpt have one of their own."""
    config = read_object(folder / _CONFIG, CheckpointError).get(_KEY)
    if config is None and (path := folder / _MODELOPT).is_file():
        config = read_object(path, CheckpointError).get("quantization")
        return path, "quantization", {**config, "quant_method": "modelopt"} if isinstance(config, dict) else {}
    return folder / _CONFIG, _KEY, config if isinstance(config, dict) else {}


def _awq(config: Mapping[str, Any]) -> Layout:
    _expect("bits", config.get("bits", config.get("w_bit")), (4,))
    _expect("version", str(config.get("version", config.get("format", "gemm"))).lower(), ("gemm",))
    _expect("zero_point", config.get("zero_point", True), (True, False))
    group = _group("group_size", config.get("group_size", config.get("q_group_size", GROUP)))
    return Layout("awq", group, config.get("zero_point", True))


def _gptq(config: Mapping[str, Any]) -> Layout:
    _expect("bits", config.get("bits"), (4,))
    form = config.get("checkpoint_format", "gptq")
    _expect("checkpoint_format", form, ("gptq", "gptq_v2"))
    if config.get("dynamic"):
        raise ValueError("dynamic: rules for single layers are not supported")
    return Layout("gptq", _group("group_size", config.get("group_size", GROUP)), zeros=True, shifted=form == "gptq")


def _modelopt(config: Mapping[str, Any]) -> Fp4Layout:
    _expect("quant_algo", config.get("quant_algo"), ("NVFP4",))
    _expect("group_size", config.get("group_size", SCALED), (SCALED,))
    return Fp4Layout("modelopt")


def _compressed(config: Mapping[str, Any]) -> Layout | Fp4Layout:
    _expect("format", config.get("format"), ("pack-quantized", _NVFP4))
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError("config_groups: one group is supported")
    if config.get("transform_config"):
        raise ValueError("transform_config: rotations of inputs are not supported")
    ((name, group),) = groups.items()
    weights = group.get("weights") if isinstance(group, dict) else None
    in_fp4 = config["format"] == _NVFP4  # whose inputs in 4 bits no GPU here multiplies
    if not isinstance(weights, dict) or not (in_fp4 or group.get("input_activations") is None):
        raise ValueError(f"config_groups.{name}: only weights can be quantized")
    where, strategy = f"config_groups.{name}.weights.", weights.get("strategy", "group")
    _expect(where + "num_bits", weights.get("num_bits"), (4,))
    if in_fp4:
        _expect(where + "type", weights.get("type"), ("float",))
        _expect(where + "group_size", weights.get("group_size"), (SCALED,))
        return Fp4Layout("compressed-tensors")
    _expect(where + "type", weights.get("type", "int"), ("int",))
    _expect(where + "actorder", weights.get("actorder"), (None, False, "weight", "static"))
    _expect(where + "strategy", strategy, ("group", "channel"))
    size = -1 if strategy == "channel" else weights.get("group_size")
    return Layout("compressed-tensors", _group(where + "group_size", size), zeros=not weights.get("symmetric", True))


_DECLARED: dict[str, Callable[[Mapping[str, Any]], Layout | Fp4Layout]] = {
    "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "modelopt": _modelopt,
}  # fmt: skip


def _expect(field: str, value: object, supported: tuple[object, ...]) -> None:
    if not isinstance(value, (str, int, bool, type(None))) or value not in supported:
        raise ValueError(f"{field}: {repr(value)[:100]} is not supported, only {' or '.join(map(repr, supported))}")


def _group(field: str, size: object) -> int | None:
    if size == -1:
        return None
    if not isinstance(size, int) or size <= 0 or size % GROUP:
        raise ValueError(f"{field}: {repr(size)[:100]} is not supported, only -1 and multiples of {GROUP}")
    return size


def read(folder: Path, dtype: torch.dtype, attention: str) -> tuple[Any, dict[str, Any]]:
    """The network, its unquantized parameters as `dtype`, and transformers' account of keys that did not fit.

    Raises `CheckpointError`, and what transformers raises.
    """
    import torch
    from transformers.generation.configuration_utils import GenerationConfig
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from core.quant.convert import swap_

    form = layout(folder)
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    if hasattr(config, _KEY):
        del config.quantization_config
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    files = WeightFiles(folder)
    sides = {
        name: (module.out_features, module.in_features)
        for name, module in skeleton.named_modules()
        if isinstance(module, torch.nn.Linear) and f"{name}.{form.weight_key}" in files.places
    }
    if not sides:
        raise CheckpointError(f"{folder}: no layer has a {form.weight_key}, but {_CONFIG} says {form.method}")
    parts = {name: _checked(files, form, name, *side) for name, side in sides.items()}
    layers = {name: _layer(files, form, name, side, parts[name]) for name, side in sides.items()}
    taken = {f"{name}.{part}" for name in sides for part in parts[name]}
    tensors = files.tensors(key for key in files.places if key not in taken)
    # Stand-ins without memory, which the layers replace.
    tensors |= {f"{name}.weight": torch.empty(1, 1, dtype=dtype).expand(side) for name, side in sides.items()}
    network, info = type(skeleton).from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    swap_(network, layers)
    if (folder / _GENERATION).is_file():  # it may name tokens that end answers
        network.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return network, info


def _checked(files: WeightFiles, form: Layout | Fp4Layout, name: str, n: int, k: int) -> list[str]:
    """The parts of a layer that there are, all of the declared types and shapes."""
    try:
        expected = form.parts(n, k)
    except ValueError as error:
        raise CheckpointError(f"{files.folder}: {name}: {error}") from error
    present = []
    for part, (dtypes, shape) in expected.items():
        key = f"{name}.{part}"
        if key not in files.places and part in form.optional:
            continue
        files.check(key, dtypes, shape)
        present.append(part)
    return present


def _layer(
    files: WeightFiles, form: Layout | Fp4Layout, name: str, side: tuple[int, int], parts: list[str]
) -> FourBitLinear:
    bias = f"{name}.bias"
    if bias in files.places:
        files.check(bias, ("F16", "BF16", "F32"), side[:1])
    stored = files.tensors([f"{name}.{part}" for part in parts] + ([bias] if bias in files.places else []))
    try:
        return form.layer(*side, {part: stored[f"{name}.{part}"] for part in parts}, stored.get(bias))
    except ValueError as error:
        raise CheckpointError(f"{files.places[f'{name}.{parts[0]}']}: {name}: {error}") from error
