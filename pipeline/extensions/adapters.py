"""Per-request LoRAs: files of one folder, read in the background when first requested and cached by last use.

As in S-LoRA (Sheng et al., 2023): only the small factors are kept, within a budget, and the model's own weights are
unchanged. `pipeline.extensions.adapted` applies them.
"""

from __future__ import annotations

import hashlib
import stat
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from contract import loras as names
from contract.precision import PRECISIONS, is_quantized
from core.ops.branches import LowRank, PackedAdapter
from pipeline.checkpoints import safetensors_header
from pipeline.checkpoints.folder import ModelError, first_line
from pipeline.extensions import lora_file, weight_files
from pipeline.extensions.asset_cache import Asset, ReadFile
from pipeline.extensions.asset_folder import AssetFolder
from pipeline.extensions.lora_file import Factors

if TYPE_CHECKING:
    from core.config import Settings
    from pipeline.families.family import ImageModel

_LOADS = 2  # files that are read at a time


@dataclass(frozen=True, slots=True, eq=False)
class ScaledAdapter:
    """A LoRA on the model's device, and its scale in a request.

    `packed` are its branches in the denoiser, if a backend has packed them for its kernels; `factors` then lack these.
    """

    name: str
    digest: str
    factors: Factors
    scale: float
    packed: PackedAdapter | None = None


Pack = Callable[[Mapping[str, LowRank]], PackedAdapter]
"""`ImageBackend.pack_adapter`: raises ValueError, naming the layer."""


class _Content(NamedTuple):
    """The content that is kept of a file, on the model's device and in its precision."""

    factors: Factors
    packed: PackedAdapter | None


@dataclass(slots=True, eq=False)
class LoraLease:
    """The LoRAs held by one request, from admission to end, and their scales; `uses` once its prompts are encoded."""

    files: list[Asset[_Content]]
    scales: list[float]
    uses: tuple[ScaledAdapter, ...] = ()


def refused(model: ImageModel, *, packs: bool) -> str | None:
    """Return why this model does not support per-request LoRAs; None if it does. `packs`: its backend packs them."""
    if packs or not is_quantized(model.precision):
        return None
    *most, last = (name for name in PRECISIONS if not is_quantized(name))
    return f"weights in {model.precision} take none on {model.device.type}; {', '.join(most)} and {last} do"


def kept_parts(settings: Settings, model: ImageModel, *, packs: bool) -> set[str | None]:
    """Return the parts whose own weights torch reads for LoRAs, beside a backend that `packs` them or does not."""
    family = model.family
    if not settings.lora_dir or refused(model, packs=packs) is not None:
        return set()
    adapted: set[str | None] = {*family.adapters.parts}
    return adapted - {family.denoiser} if packs else adapted | {family.language_model}


class LoraFolder(AssetFolder[_Content]):
    """The LoRAs of one folder for one model."""

    kind, setting = "lora", "DIPTYCH_LORA_MIB"
    missing = "there is no {} in the LoRA folder"

    def __init__(self, folder: Path, model: ImageModel, capacity_bytes: int, pack: Pack | None = None) -> None:
        """`capacity_bytes` limits the factors' size in the model's precision, or packed, including those in use.

        `pack` packs the denoiser's as soon as a file is read; without it, the factors are moved to the model's device.
        """
        super().__init__(folder, capacity_bytes, at_once=_LOADS)
        self._model = model
        self._pack = pack
        self._titles: dict[str, tuple[Hashable, str]] = {}  # by file: its stamp, and the name that it was trained as

    def aliases(self) -> dict[str, str]:
        """Return the files' names by those that kohya's trainer knew them by, as the web UI writes them into prompts:
        without those that two have, or that are a file's name.
        """
        files = self.asset_names()
        titled = [(title, name) for name in files if (title := self._title(name)) not in ("", *files)]
        counts = Counter(title for title, _ in titled)
        return {title: name for title, name in titled if counts[title] == 1}

    def _title(self, name: str) -> str:
        """Return `ss_output_name` of a file's metadata, if it may be a name; else ""."""
        try:
            stamp = self._stamp(name)
            known = self._titles.get(name)
            if known is None or known[0] != stamp:
                title = names.normal(safetensors_header.read(self._path(name)).metadata.get("ss_output_name", ""))
                known = self._titles[name] = stamp, title if names.is_name(title) else ""
        except (ModelError, ValueError, OSError):  # requests that name it are told
            return ""
        return known[1]

    def check(self, text: str) -> None:
        """Check that the LoRAs in `name:scale,name` exist and fit. Raises `ModelError`, naming the LoRA."""
        files = [self.find(named.name) for named in names.read(text)]
        self.check_room(files)

    def take(self, text: str, *, wait: bool = False) -> LoraLease | None:
        """Reserve a checked request's LoRAs; None means not yet, as of `AssetCache.take`."""
        named = names.read(text)
        files = self.cache.take([lora.name for lora in named], wait=wait)
        return None if files is None else LoraLease(files, [lora.scale for lora in named])

    def uses(self, lease: LoraLease) -> tuple[ScaledAdapter, ...]:
        """Return the LoRAs of a lease, ready to use. Raises `ModelError`, naming the LoRA."""
        read = ((file, scale, self.cache.content(file)) for file, scale in zip(lease.files, lease.scales, strict=True))
        return tuple(ScaledAdapter(file.name, file.digest, own.factors, scale, own.packed) for file, scale, own in read)

    def _stamp(self, name: str) -> Hashable:
        path = self._path(name)
        try:
            about = path.stat()
        except OSError:
            about = None
        if about is None or not stat.S_ISREG(about.st_mode):  # reading a special file might never end
            raise self._error(name, self.missing.format(path.name))
        if about.st_size > 2 * self.cache.capacity:  # factors are rounded to half their size at most
            raise self._too_large(name, about.st_size // 2)
        return about.st_ino, about.st_size, about.st_mtime_ns

    def _check_header(self, key: str) -> None:
        try:
            weight_files.check_header(self._path(key))
        except ValueError as error:
            raise self._error(key, f"does not fit (it {error})") from error
        except OSError as error:
            raise self._error(key, f"cannot be read ({error.strerror})") from error

    def _read(self, key: str) -> ReadFile[_Content]:
        data = self._data(key)
        most = self.cache.capacity // self._model.dtype.itemsize
        factors = lora_file.read(key, data, self._model.parts, self._model.family.adapters, most)
        content, size = self._content(key, factors)
        return ReadFile(content, hashlib.sha256(data).hexdigest(), size)

    def _content(self, name: str, factors: Factors) -> tuple[_Content, int]:
        """Convert its factors as requests use them: all that is computed of a file is computed here."""
        denoiser, packed = self._model.family.denoiser, None
        if self._pack is not None:
            lora_file.check_finite(name, factors)
            try:
                packed = self._pack(lora_file.of_part(factors, denoiser))
            except ValueError as error:
                raise self._error(name, f"does not fit ({first_line(error)})") from error
            factors = {at: factor for at, factor in factors.items() if at[0] != denoiser}
        factors = lora_file.converted(name, factors, self._model.device, self._model.dtype)
        count = sum(factor.down.numel() + factor.up.numel() for factor in factors.values())
        size = count * self._model.dtype.itemsize + (0 if packed is None else packed.size_bytes)
        return _Content(factors, packed), size


def same(uses: Sequence[ScaledAdapter]) -> tuple[tuple[str, float], ...]:
    """Return a key, equal for LoRAs that give equal embeddings."""
    return tuple((use.digest, use.scale) for use in uses)
