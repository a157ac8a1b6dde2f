"""Finds a model's folder and validates its files in diffusers' layout, before anything heavy is imported or loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from contract.printable import printable, printable_message
from core.batching.runner import DeviceLost, OutOfMemory
from core.digests import digest_of
from core.hub_cache import snapshot
from core.json_files import missing, read_object
from pipeline.checkpoints import release_assets, safetensors_header

TINY_VAE = "vae-tiny"  # a part that a model's folder may have, whatever its family
_STEMS = {"encoder": "model", "network": "diffusion_pytorch_model"}  # of weight files, as the two libraries name them
_TEXTS = ("json", "txt", "jinja")  # the endings of files that are no weights
_DTYPES = ("F64", "F32", "F16", "BF16")


Fact = tuple[str, Any, Any]
"""What is compared, what it is in a model, and what it must be."""


class ModelError(ValueError):
    """A model that cannot be loaded. The message names the folder, the part and what is wrong with it.

    It is one line: files, in which anything may stand, are quoted in it. Of a file that a request names the `kind`
    begins it, and `detail` is the rest, which begins with the file's name.
    """

    def __init__(self, detail: str, *, kind: str = "") -> None:
        self.kind, self.detail = kind, printable_message(detail)
        super().__init__(f"{kind} {self.detail}".lstrip())

    def without_traceback(self) -> ModelError:
        """Return the same error without a traceback and causes, which would keep what was read."""
        return ModelError(self.detail, kind=self.kind)

    @property
    def lasting(self) -> bool:
        """Return whether the same files fail again: neither the operating system nor a lack of memory is the cause."""
        cause: BaseException | None = self
        while cause is not None:
            if isinstance(cause, OSError | MemoryError | OutOfMemory | DeviceLost):
                return False
            cause = cause.__cause__
        return True


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model's folder.

    kind: a tokenizer or a text encoder of transformers, a network of diffusers, or a scheduler's config.
    classes: the accepted class names, of which the first is loaded; empty: any.
    module: where that class is. Full paths: diffusers' and transformers' top levels import slowly.
    strict: whether weights that the class has no use for are rejected.
    unread: how the names of weights begin that the class has and does not read: files may lack them.
    """

    kind: Literal["tokenizer", "encoder", "network", "scheduler"]
    classes: tuple[str, ...] = ()
    module: str = ""
    strict: bool = False
    unread: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """Return how the names of its weight files begin; "" for a part without weights."""
        return _STEMS.get(self.kind, "")


def find(name: str, variant: str | None, parts: Callable[[Path], Mapping[str, Part]]) -> Path:
    """Return the folder of a model, downloaded first if `name` is a hub id and no folder. Raises `ModelError`.

    `parts` reads the model's parts from its folder, which may hold no more than its model_index.json yet.
    """
    if variant is not None and not re.fullmatch(r"[\w-]+", variant):
        raise ModelError(f"variant: must be a word such as fp16, not {variant!r}")
    folder = local(name)
    if folder is not None:
        return folder
    index = _download(name, ["model_index.json"])
    # Only one variant's files: a repository often holds the same weights three times.
    patterns = ["model_index.json", *(f"*/*.{ending}" for ending in _TEXTS)]
    for part_name, part in parts(index).items():
        if part.stem and variant:
            patterns += [f"{part_name}/{part.stem}*{variant}*.safetensors"]
        elif part.stem:
            patterns += [f"{part_name}/{part.stem}.safetensors", f"{part_name}/{part.stem}-?????-of-?????.safetensors"]
    patterns += [f"{TINY_VAE}/{_STEMS['network']}.safetensors"]
    return _download(name, patterns)


def find_network(name: str) -> Path:
    """Return the folder of one network: `name`, or of a hub id, downloaded first. Raises `ModelError`."""
    return local(name) or _download(name, ["config.json", f"{_STEMS['network']}.safetensors"])


def find_configs(name: str, *more: str) -> Path:
    """Return the folder of a model of which only configs and tokenizers are needed, and files by these patterns.

    Downloaded first, as `find` does. Raises `ModelError`.
    """
    patterns = ["model_index.json", *(f"*/*.{ending}" for ending in _TEXTS), *more]
    return local(name) or _download(name, patterns)


def local(name: str) -> Path | None:
    """Return the folder of a model, or None for a hub id. Raises `ModelError` if the name is neither."""
    if not name:
        raise ModelError("the name is empty; a model is a folder in diffusers' format or a hub id")
    short = _short(name)
    if asset := release_assets.named(name):
        raise ModelError(f"{short}: is not installed; {asset.remedy}")
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return snapshot(folder)
        if folder.exists():
            raise ModelError(
                f"{short}: is a file; a model is a folder in diffusers' format, which `diptych models add` makes of it"
            )
    except LookupError as error:
        raise ModelError(f"{short}: {error}") from error
    except (OSError, RuntimeError) as error:  # a name too long, no permission, ~ of nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{short}: no such folder ({reason})") from error
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "/")):
        raise ModelError(f"{short}: no such folder, and not a hub id of the form owner/name")
    return None


def _short(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]}…"


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    short = _short(name)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelError(f"{short}: no such folder, and not a hub id of the form owner/name") from error
    except HfHubHTTPError as error:  # missing, or access denied
        raise ModelError(f"{short}: no such folder, and the hub says: {first_line(error)}") from error
    except OSError as error:
        reason = "the hub cannot be reached and its cache does not hold it"
        raise ModelError(f"{short}: no such folder, and {reason} ({type(error).__name__})") from error


def check(
    folder: Path, variant: str | None, parts: Mapping[str, Part], label: str
) -> tuple[dict[str, Any], dict[str, list[Path]]]:
    """Read everything possible without loading: (model_index.json, the weight files of each part).

    `label` names the family that has these parts.

    Raises:
        ModelError: for another kind of part, and for a file that is missing, damaged or of another format.
    """
    index = _check_index(folder, parts, label)
    return index, {name: check_part(folder / name, name, part, variant) for name, part in parts.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises `ModelError`."""
    return read_object(path, ModelError)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened and printable."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0], 300)


def _check_index(folder: Path, parts: Mapping[str, Part], label: str) -> dict[str, Any]:
    index = read_json(folder / "model_index.json")
    for name, part in parts.items():
        entry = index.get(name)
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(word, str) for word in entry):
            raise ModelError(f"{folder}/model_index.json: names no {name}; {label} has {', '.join(parts)}")
        _check_class(folder / "model_index.json", name, part, entry[1])
        if not (folder / name).is_dir():
            raise ModelError(f"{folder}: the part {name} is missing")
    return index


def _check_class(path: Path, name: str, part: Part, class_name: object) -> None:
    if part.classes and class_name not in part.classes:
        raise ModelError(f"{path}: {name} is of class {class_name}; this engine runs {part.classes[0]}")


def check_part(where: Path, name: str, part: Part, variant: str | None = None) -> list[Path]:
    """Return the weight files of the part in this folder, each checked to be complete; none for a part without weights.

    Raises `ModelError`, as `check`.
    """
    if part.kind == "scheduler":
        read_json(where / "scheduler_config.json")
        return []
    if part.kind == "tokenizer":
        _check_tokenizer(where)
        return []
    config = read_json(where / "config.json")
    if "_class_name" in config:
        _check_class(where / "config.json", name, part, config["_class_name"])
    files = _weight_files(where, part.stem, variant)
    for file in files:
        _check_safetensors(file, old_buffers=part.kind == "encoder")
    return files


def _check_tokenizer(where: Path) -> None:
    # Without these files the library creates a tokenizer anyway, with an empty vocabulary.
    read_json(where / "tokenizer_config.json")
    if (where / "tokenizer.json").exists():
        read_json(where / "tokenizer.json")
        return
    read_json(where / "vocab.json")
    merges = where / "merges.txt"
    try:
        if not merges.read_text(encoding="utf-8").strip():
            raise ModelError(f"{merges}: is empty")
    except FileNotFoundError:
        raise ModelError(f"{where}: {missing(merges)}") from None
    except OSError as error:
        raise ModelError(f"{merges}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{merges}: is not UTF-8 (byte {error.start})") from error


def _weight_files(where: Path, stem: str, variant: str | None) -> list[Path]:
    single = where / f"{stem}{f'.{variant}' if variant else ''}.safetensors"
    listing = where / f"{stem}.safetensors.index{f'.{variant}' if variant else ''}.json"
    if single.is_file():
        return [single]
    if listing.is_file():
        shards = read_json(listing).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
            raise ModelError(f"{listing}: has no weight_map")
        return [where / shard for shard in sorted(set(shards.values()))]
    weight_names = sorted(path.name for path in where.glob("*.safetensors") if path.is_file())
    pickles = sorted(path.name for path in where.iterdir() if path.suffix in (".bin", ".ckpt", ".pt", ".pth"))
    also = ""
    if weight_names:
        also = f" (there is {', '.join(weight_names)[:200]}{'' if variant else ': give its variant'})"
    elif pickles:
        also = f" (there is {', '.join(pickles)[:200]}: pickles can run code and are not read; save as safetensors)"
    raise ModelError(f"{where}: {missing(single)}{also}")


def _check_safetensors(file: Path, *, old_buffers: bool) -> None:
    """Check a complete file of floats. `old_buffers`: older text encoders contain unused integer position ids."""
    try:
        tensors = safetensors_header.read(file).tensors
    except FileNotFoundError:
        raise ModelError(f"{file.parent}: {missing(file)}") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{file}: is damaged ({first_line(error)})") from error
    if not tensors:
        raise ModelError(f"{file}: holds no tensors")
    wrong = next((name for name, entry in tensors.items() if entry.dtype not in _DTYPES), None)
    if wrong is not None and not old_buffers:
        dtype = tensors[wrong].dtype
        kinds = ", ".join(_DTYPES)
        raise ModelError(f"{file}: {printable(wrong)} is {printable(dtype)}; weights must be one of {kinds}")


def digest(folder: Path, files: Mapping[str, list[Path]]) -> str:
    """Compute SHA-256 (16 hex digits) over all that determines the model, independent of its folder's path.

    `files` are the weight files of each part.
    """
    texts = [p for part in files for ending in _TEXTS for p in sorted((folder / part).glob(f"*.{ending}"))]
    return digest_of(
        folder, [folder / "model_index.json", *texts, *(file for part_files in files.values() for file in part_files)]
    )


def check_facts(which: str, facts: Iterable[Fact]) -> None:
    """Raise `ModelError` for the first fact that differs; `which` begins the message: "sdxl: not an SDXL refiner"."""
    for name, actual, expected in facts:
        if actual != expected:
            raise ModelError(f"{which}: {name} is {actual}, not {expected}")
