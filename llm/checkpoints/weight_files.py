"""Reads the tensors of a network from safetensors files one module at a time, so that the host holds no more of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.json_files import read_object

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_GENERATION = "generation_config.json"
_FLOATS = ("F16", "BF16", "F32")
_MOST_FILES, _NAME_LENGTH = 1_000, 255


class CheckpointError(ValueError):
    """A checkpoint that cannot be read. The message names the file, and the key or field."""


class WeightFiles:
    """The safetensors files of a folder. `places` are the file names of all keys. Raises `CheckpointError`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[str, str] = {}
        self._forms: dict[str, tuple[str, tuple[int, ...]]] = {}
        declared = self._declared()
        names = sorted(set(declared.values())) if declared else [_SINGLE]
        if len(names) > _MOST_FILES:
            raise CheckpointError(f"{folder / _INDEX}: names {len(names)} files, more than {_MOST_FILES}")
        for name in names:
            with self._open(name) as file:
                for key in file.keys():  # noqa: SIM118 - it is no dict
                    entry = file.get_slice(key)
                    self.places[key], self._forms[key] = name, (entry.get_dtype(), tuple(entry.get_shape()))
        for key, name in declared.items():
            if self.places.get(key) != name:
                raise CheckpointError(f"{folder / _INDEX}: says that {name} has {key[:100]}, which it has not")

    def _open(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.folder / name, "pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / name}: cannot be read ({error})") from error

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

    @property
    def in_floats(self) -> bool:
        """Return whether all tensors are in fp16, bf16 or fp32."""
        return all(kind in _FLOATS for kind, _ in self._forms.values())

    def check(self, key: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Raise `CheckpointError` if this key is missing, or of another type or shape."""
        if key not in self.places:
            raise CheckpointError(f"{self.folder}: has no {key}")
        actual_dtype, actual = self._forms[key]
        if actual_dtype not in dtypes or actual not in (shape, () if shape == (1,) else shape):
            expected = f"{' or '.join(dtypes)} {[*shape]}"
            raise CheckpointError(
                f"{self.folder / self.places[key]}: {key} is {actual_dtype} {[*actual]}, not {expected}"
            )

    def tensors(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these keys, which are mapped: a page of a file takes memory once its numbers are used."""
        from safetensors import SafetensorError

        keys_of: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            keys_of[self.places[key]].append(key)
        tensors: dict[str, Tensor] = {}
        for name, those in keys_of.items():
            with self._open(name) as file:
                try:
                    tensors |= {key: file.get_tensor(key) for key in those}
                except SafetensorError as error:
                    raise CheckpointError(f"{self.folder / name}: has changed while it was read ({error})") from error
        return tensors


def meta_network(folder: Path, dtype: dtype, attention: str) -> tuple[Any, dict[str, Any], WeightFiles] | None:
    """A network with its parameters on meta, transformers' account of keys that did not fit, and the files.

    None for a checkpoint whose keys or types transformers converts as it reads. Raises `CheckpointError`, and what
    transformers raises.
    """
    import torch
    from transformers.generation.configuration_utils import GenerationConfig
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from llm.families import family

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    both = (folder / _SINGLE).is_file() and (folder / _INDEX).is_file()  # transformers ignores the index then
    if both or config.model_type in family.MIXTURES or getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    files, tensors = WeightFiles(folder), skeleton.state_dict(keep_vars=True)
    if not files.in_floats or files.places.keys() - tensors.keys():
        return None
    if len({id(tensors[key]) for key in files.places}) < len(files.places):  # tied, but stored apart
        return None
    for key in files.places:
        files.check(key, _FLOATS, tuple(tensors[key].shape))
    # Stand-ins without memory: transformers ties weights, and makes buffers that no file has.
    standing = {key: torch.empty((), dtype=dtype).expand(tensors[key].shape) for key in files.places}
    network, info = type(skeleton).from_pretrained(
        None, config=config, state_dict=standing, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    if getattr(network, "_weight_conversions", None):  # of the numbers, whose keys stay what they are
        return None
    network.config.name_or_path = str(folder)
    if (folder / _GENERATION).is_file():  # it may name tokens that end answers
        network.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    on_meta = {
        id(parameter): torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        for parameter in network.parameters()
    }
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, on_meta[id(parameter)])
    return network, info, files


class DeferredWeights:
    """The tensors of a network on meta, which are read when a module that has them is filled.

    They are found by identity, so that a network may lose and renumber layers before. A tied one is read once.
    """

    def __init__(self, network: nn.Module, files: WeightFiles) -> None:
        self._files = files
        self._keys: dict[int, tuple[str, Tensor]] = {}  # with the tensors: an identity lasts as long as they do
        self._tied: dict[int, Tensor | None] = {}
        for key, tensor in network.state_dict(keep_vars=True).items():
            if id(tensor) in self._keys:
                self._tied[id(tensor)] = None
            if id(tensor) not in self._keys or key in files.places:
                self._keys[id(tensor)] = key, tensor

    def fill_(self, module: nn.Module) -> None:
        """Replace the tensors of a module that are on meta. Raises `CheckpointError`."""
        from torch import nn

        from core.quant.sparse import SparseInt8Linear

        places = [
            (owner, name, tensor)
            for owner in module.modules()
            for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
            if tensor.is_meta
        ]
        read = self._files.tensors({self._keys[id(t)][0] for _, _, t in places if self._tied.get(id(t)) is None})
        names: dict[nn.Module, str] = {}
        for owner, name, tensor in places:
            key, _ = self._keys[id(tensor)]
            names[owner] = key.rpartition(".")[0]
            if (value := self._tied.get(id(tensor))) is None:
                # A vector that outlives its layer's matrices would keep the pages of all of them.
                value = read[key] if tensor.dim() > 1 else read[key].clone()
                value = nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value
            if id(tensor) in self._tied:
                self._tied[id(tensor)] = value
            setattr(owner, name, value)
        for owner, name in names.items():
            if isinstance(owner, SparseInt8Linear):
                try:
                    owner.check()
                except ValueError as error:
                    raise CheckpointError(f"{self._files.folder}: layer {name}: {error}") from error
