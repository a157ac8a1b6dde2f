"""Reads language models that are published in 4 bits: by AWQ, by GPTQ, by compressed-tensors, or by ModelOpt.

What the files declare of layers in 4 bits is compared with the model's own shapes before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contract.precision import Scheme
from core.json_files import read_object
from core.quant.fp4 import SCALED
from core.quant.fp4_layouts import Fp4Layout
from core.quant.int4 import GROUP, FourBitLinear
from core.quant.int4_layouts import Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_GENERATION, _MODELOPT = "generation_config.json", "hf_quant_config.json"
_MOST_FILES, _NAME_LENGTH = 1_000, 255
_KEY, _NVFP4 = "quantization_config", "nvfp4-pack-quantized"


class CheckpointError(ValueError):
    """A checkpoint in 4 bits that cannot be read. The message names the file, and the key or field."""


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
    with ExitStack() as stack:
        files = _Files(folder, stack)
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
        tensors = {key: files.tensor(key) for key in files.places if key not in taken}
    # Stand-ins without memory, which the layers replace.
    tensors |= {f"{name}.weight": torch.empty(1, 1, dtype=dtype).expand(side) for name, side in sides.items()}
    network, info = type(skeleton).from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    swap_(network, layers)
    if (folder / _GENERATION).is_file():  # it may name tokens that end answers
        network.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return network, info


def _checked(files: _Files, form: Layout | Fp4Layout, name: str, n: int, k: int) -> list[str]:
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
    files: _Files, form: Layout | Fp4Layout, name: str, side: tuple[int, int], parts: list[str]
) -> FourBitLinear:
    bias = f"{name}.bias"
    if bias in files.places:
        files.check(bias, ("F16", "BF16", "F32"), side[:1])
    tensors = {part: files.tensor(f"{name}.{part}") for part in parts}
    try:
        return form.layer(*side, tensors, files.tensor(bias) if bias in files.places else None)
    except ValueError as error:
        raise CheckpointError(f"{files.places[f'{name}.{parts[0]}']}: {name}: {error}") from error


class _Files:
    """The safetensors files of a folder, open while `stack` is. `places` are the file names of all keys."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        declared = self._declared()
        names = sorted(set(declared.values())) if declared else [_SINGLE]
        if len(names) > _MOST_FILES:
            raise CheckpointError(f"{folder / _INDEX}: names {len(names)} files, more than {_MOST_FILES}")
        self._files: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        for name in names:
            try:
                file = stack.enter_context(safe_open(folder / name, "pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{folder / name}: cannot be read ({error})") from error
            self._files[name] = file
            self.places |= dict.fromkeys(file.keys(), name)
        for key, name in declared.items():
            if self.places.get(key) != name:
                raise CheckpointError(f"{folder / _INDEX}: says that {name} has {key[:100]}, which it has not")

    def _declared(self) -> dict[str, str]:
        """The index's file of each key; empty without an index."""
        path = self.folder / _INDEX
        if not path.is_file():
            return {}
        places = read_object(path, CheckpointError).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise CheckpointError(f"{path}: weight_map: must be an object of file names")
        for name in places.values():
            if Path(name).name != name or not name.endswith(".safetensors") or len(name) > _NAME_LENGTH:
                raise CheckpointError(f"{path}: weight_map: {name[:100]!r} is no .safetensors file of this folder")
        return places

    def check(self, key: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Raise `CheckpointError` if this key is missing, or of another type or shape."""
        if key not in self.places:
            raise CheckpointError(f"{self.folder}: has no {key}")
        entry = self._files[self.places[key]].get_slice(key)
        found = tuple(entry.get_shape())
        if entry.get_dtype() not in dtypes or found not in (shape, () if shape == (1,) else shape):
            expected = f"{' or '.join(dtypes)} {[*shape]}"
            raise CheckpointError(
                f"{self.folder / self.places[key]}: {key} is {entry.get_dtype()} {[*found]}, not {expected}"
            )

    def tensor(self, key: str) -> Tensor:
        tensor: Tensor = self._files[self.places[key]].get_tensor(key)
        return tensor
