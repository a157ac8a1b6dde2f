"""Loads decoder-only models of the Llama family in transformers' format, and rejects unsupported ones.

Modelling code and weights are transformers' own; attention is ours (llm.backends.attention).
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.precision import PRECISIONS, SCHEMES, is_quantized
from contract.precision import dtype as dtype_of
from core.digests import digest_of
from core.hub_cache import model_name, snapshot
from core.json_files import missing
from llm.families import tiny
from llm.features.pooling import Pooling

if TYPE_CHECKING:
    import torch
    from torch import nn

    from llm.checkpoints.int4_checkpoint import Published
    from llm.checkpoints.weight_files import WeightFiles
    from llm.parallel.shards import Rank

_HEAD = "lm_head.weight"
_CASTS = 4  # at a time: a layer has seven matrices


def variant(scheme: str) -> str:
    """The subfolder of a model's quantized variant."""
    return f"model-{scheme}"


class TextModelError(ValueError):
    """A language model that cannot be loaded. The message names it and says what is wrong."""


@dataclass(eq=False)
class TextModel:
    """A network in evaluation mode on one device, and its tokenizer. `digest` identifies its weights.

    `pooling` is how it embeds texts; one that does not `generates` has no head, and only embeds.
    """

    name: str
    digest: str
    precision: str
    device: torch.device
    dtype: torch.dtype
    network: Any
    tokenizer: Any
    ends: frozenset[int]  # tokens that end an answer
    pooling: Pooling = field(default_factory=Pooling)
    generates: bool = True

    @property
    def config(self) -> Any:
        return self.network.config

    @property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)

    @property
    def context(self) -> int:
        """The model's maximum of prompt and answer tokens."""
        return int(self.config.max_position_embeddings)

    @property
    def expansion_instruction(self) -> str:
        """The system message that the model was trained to expand prompts by, as its config.json says; "" for none."""
        instruction = getattr(self.config, "expansion_instruction", "")
        return instruction if isinstance(instruction, str) else ""

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def kv_heads(self) -> int:
        return int(self.config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads)


def load(name: str, *, precision: str = "fp32", device: str = "cpu", rank: Rank | None = None) -> TextModel:
    """Load a model.

    Args:
        name: a folder as `save_pretrained` lays it out, a hub id, or a seeded model of `llm.families.tiny.SHAPES`.
        precision: of `contract.precision`; a quantized one is for a model whose folder holds it, such as `model-int8`,
            and w4a16 or nvfp4 also for one that is published in 4 bits, which has no other.
        rank: whose part of the model it is; None: all of it.

    Raises:
        TextModelError: if it is missing, damaged, no decoder-only language model, or the device does not exist.
    """
    import torch

    from llm.backends.attention import NAME, register
    from llm.families import experts, family

    if precision not in PRECISIONS:
        raise TextModelError(f"precision: must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    where = _device(device)
    dtype = getattr(torch, dtype_of(precision, where.type))
    register()
    pooling, generates = Pooling(), True
    with _quiet():
        if name in tiny.SHAPES:
            shape = tiny.SHAPES[name]
            network, tokenizer = tiny.make(shape, device=device, dtype=str(dtype).removeprefix("torch."))
            network.set_attn_implementation(NAME)
            suffix = f"-{where.type}-{dtype}" if shape.large else ""
            folder, form, short, digest = None, None, name, f"{name}-seed0-torch{torch.__version__}{suffix}"
            files = None
        else:
            folder = find(name)
            pooling, form = _pooling(folder), published(name)
            if form is not None and precision != form.precision:
                raise TextModelError(
                    f"{name}: is published in 4 bits ({form.method}), which {form.precision} reads, not {precision}"
                )
            in_fp32 = is_quantized(precision) and form is None
            network, tokenizer, generates, files = _read(folder, torch.float32 if in_fp32 else dtype)
            short = model_name(Path(name)) if Path(name).expanduser().is_dir() else Path(name).name
            digest = digest_of(folder, sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]))
        _check(name, network, tokenizer)
        experts.adopt(network, family.MIXTURES)
        if is_quantized(precision) and form is None:
            digest, files = _quantized(name, folder, network, files, digest, precision)
        network = _part(name, network, files, rank, where, dtype).eval().requires_grad_(False)
    ends = _ends(network, tokenizer)
    return TextModel(short, digest, precision, where, dtype, network, tokenizer, ends, pooling, generates)


def _part(
    name: str, network: Any, files: WeightFiles | None, rank: Rank | None, device: torch.device, dtype: torch.dtype
) -> Any:
    """The network, or a rank's part of it, on a device; of one on meta the layers are read there, one by one."""
    from llm.checkpoints.weight_files import CheckpointError, DeferredWeights
    from llm.families.family import body
    from llm.parallel.shards import shard_

    weights = None if files is None else DeferredWeights(network, files)

    def fill(module: nn.Module) -> None:
        if weights is not None:
            weights.fill_(module)

    def place(module: nn.Module) -> None:
        place_(module, device, dtype)

    try:
        if rank is not None:
            shard_(network, rank, fill=fill, place=place)
        else:
            for module in [*getattr(body(network), "layers", ()), network]:
                fill(module)
                place(module)
    except CheckpointError as error:
        raise TextModelError(str(error)) from error
    except ValueError as error:
        raise TextModelError(f"{name}: {error}") from error
    place(network)
    return network


def place_(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a module, its parameters cast; rotary frequencies stay fp32, as transformers loads them."""

    def cast(parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(dtype)

    if uncast := [parameter for parameter in module.parameters() if parameter.dtype != dtype]:
        with ThreadPoolExecutor(_CASTS) as pool:  # each reads pages of its own, and none waits for torch's threads
            list(pool.map(cast, uncast))
    module.to(device)


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise TextModelError(f"cannot be put on {name!r}: no device that torch knows") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise TextModelError(
            f"cannot be put on {name}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def check_name(name: str) -> None:
    """Reject a name that leads to no model, before anything is loaded. Raises `TextModelError`."""
    if name not in tiny.SHAPES:
        _local(name)


def _local(name: str) -> Path | None:
    """Return the folder of a model, or None if `name` is a hub id. Raises `TextModelError`."""
    short = name if len(name) <= 200 else f"{name[:200]}…"
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            files = snapshot(folder)
            if (files / "config.json").is_symlink() and not (files / "config.json").is_file():
                raise TextModelError(f"{short}: {missing(files / 'config.json')}")
            if not (files / "config.json").is_file():
                raise TextModelError(
                    f"{short}: holds no config.json; a language model is a folder in transformers' format"
                )
            return files
    except LookupError as error:
        raise TextModelError(f"{short}: {error}") from error
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TextModelError(f"{short}: no such folder ({reason})") from error
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "/")):
        raise TextModelError(f"{short}: no such folder, and not a hub id of the form owner/name")
    return None


def find(name: str) -> Path:
    """The folder of a model, downloaded first if `name` is a hub id and no folder."""
    if (folder := _local(name)) is not None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["original/*"]))
    except Exception as error:  # of many libraries, all with the same meaning
        raise TextModelError(f"{name}: cannot be downloaded ({type(error).__name__}: {_first_line(error)})") from error


def file_bytes(name: str) -> int:
    """Return the size of a model's weight files, as they are stored; 0 for a seeded model. Raises `TextModelError`."""
    return 0 if name in tiny.SHAPES else sum(path.stat().st_size for path in find(name).glob("*.safetensors"))


def _pooling(folder: Path) -> Pooling:
    try:
        return Pooling.read(folder)
    except ValueError as error:
        raise TextModelError(str(error)) from error


def _read(folder: Path, dtype: torch.dtype) -> tuple[Any, Any, bool, WeightFiles | None]:
    """The network, its tokenizer, whether it has a head (those that only embed are published without), and files.

    With files the network is on meta, and they have its tensors; without, it is in memory.
    """
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    from llm.backends.attention import NAME
    from llm.checkpoints import int4_checkpoint
    from llm.checkpoints.weight_files import CheckpointError, meta_network

    files = None
    try:
        if int4_checkpoint.published(folder) is not None:
            network, info = int4_checkpoint.read(folder, dtype, NAME)
        elif (on_meta := meta_network(folder, dtype, NAME)) is not None:
            network, info, files = on_meta
        else:
            network, info = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, attn_implementation=NAME, local_files_only=True, use_safetensors=True,
                output_loading_info=True,
            )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except CheckpointError as error:
        raise TextModelError(f"{folder}: does not load ({error})") from error
    except Exception as error:  # many libraries, many exceptions: the model does not load
        raise TextModelError(f"{folder}: does not load ({type(error).__name__}: {_first_line(error)})") from error
    generates = _HEAD not in (info.get("missing_keys") or ()) or not (folder / "modules.json").is_file()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(key if isinstance(key, str) else key[0] for key in info.get(kind) or ())
        if keys and (generates or keys != [_HEAD]):
            raise TextModelError(
                f"{folder}: does not fit its config.json: {len(keys)} {kind.replace('_', ' ')}, the first is {keys[0]}"
            )
    if not generates:
        network.lm_head.weight = network.get_input_embeddings().weight
    return network, tokenizer, generates, files


def _check(name: str, network: Any, tokenizer: Any) -> None:
    config = network.config
    for attribute in ("vocab_size", "max_position_embeddings", "num_hidden_layers", "num_key_value_heads"):
        if not isinstance(getattr(config, attribute, None), int):
            raise TextModelError(
                f"{name}: {config.model_type} is of no family that is served: its config has no {attribute}"
            )
    if getattr(config, "is_encoder_decoder", False) or not hasattr(network, "lm_head"):
        raise TextModelError(f"{name}: {config.model_type} is not a decoder-only language model")
    from llm.families import family

    try:
        family.check_attention(network)
        family.temper_(network)
    except ValueError as error:
        raise TextModelError(f"{name}: {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise TextModelError(f"{name}: its tokenizer has no tokenizer.json")
    if len(tokenizer) > config.vocab_size:
        raise TextModelError(
            f"{name}: its tokenizer has {len(tokenizer)} words, and the model has room for {config.vocab_size}"
        )


def variants(name: str) -> set[str]:
    """The schemes that a model's folder has a variant of. Raises `TextModelError` if there is no model."""
    from core.quant import store

    if name in tiny.SHAPES:
        return set()
    folder = find(name)
    return {scheme for scheme in SCHEMES if (folder / variant(scheme) / store.MANIFEST).is_file()}


def published(name: str) -> Published | None:
    """How a model is published in 4 bits, if it is. Raises `TextModelError` if there is no model."""
    from llm.checkpoints import int4_checkpoint
    from llm.checkpoints.weight_files import CheckpointError

    if name in tiny.SHAPES:
        return None
    try:
        return int4_checkpoint.published(find(name))
    except CheckpointError as error:
        raise TextModelError(str(error)) from error


def _quantized(
    name: str, folder: Path | None, network: Any, files: WeightFiles | None, digest: str, scheme: str
) -> tuple[str, WeightFiles | None]:
    """Turn a network into its quantized variant; the digest, and the variant's files if the network is on meta."""
    import torch

    from core.quant import store
    from llm.checkpoints.weight_files import DeferredWeights, WeightFiles

    where = (folder or Path(name)) / variant(scheme)
    if folder is None or not (where / store.MANIFEST).is_file():
        raise TextModelError(f"precision {scheme}: there is no quantized model in {where}")
    try:
        if files is not None and not store.read_manifest(where).weights:  # they are quantized from the model's own
            DeferredWeights(network, files).fill_(network)
            place_(network, torch.device("cpu"), torch.float32)
            files = None
        manifest = store.load_(network, where, source=digest)
        files = files and WeightFiles(where)
    except ValueError as error:
        raise TextModelError(str(error)) from error
    return hashlib.sha256(f"{digest}:{manifest.recipe}:{manifest.sha256}".encode()).hexdigest()[:16], files


def _ends(network: Any, tokenizer: Any) -> frozenset[int]:
    """End tokens of the generation config, the config and the tokenizer: models may name them in any of these."""
    tokens: set[int] = set()
    generation = getattr(network, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), network.config.eos_token_id, tokenizer.eos_token_id):
        tokens |= set(value) if isinstance(value, (list, tuple)) else set() if value is None else {int(value)}
    return frozenset(tokens)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason given")[:300]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' progress bars and advice: loading has its own progress display."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
