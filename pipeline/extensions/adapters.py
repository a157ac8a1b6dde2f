"""Per-request LoRAs: files of one folder, read in the background when first requested and cached by last use.

As in S-LoRA (Sheng et al., 2023): only the small factors are kept, within a budget, and the model's own weights are
unchanged. `pipeline.extensions.adapted` applies them.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from contract import loras as names
from contract.errors import Invalid
from contract.precision import PRECISIONS, is_quantized
from core.ops.branches import LowRank, PackedAdapter
from pipeline.checkpoints.folder import ModelError, first_line
from pipeline.extensions import lora_file, weight_files
from pipeline.extensions.lora_file import Factors
from pipeline.extensions.pinned_cache import PinnedCache, PinnedFile, ReadFile

if TYPE_CHECKING:
    from pipeline.families.family import ImageModel

T = TypeVar("T")
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
    """What is kept of a file, on the model's device and in its precision."""

    factors: Factors
    packed: PackedAdapter | None


@dataclass(slots=True, eq=False)
class AdapterLease:
    """The LoRAs held by one request, from admission to end, and their scales."""

    files: list[PinnedFile[_Content]]
    scales: list[float]


def refused(model: ImageModel, *, packs: bool) -> str | None:
    """Why this model does not support per-request LoRAs; None if it does. `packs`: its backend packs them."""
    if packs or not is_quantized(model.precision):
        return None
    *most, last = (name for name in PRECISIONS if not is_quantized(name))
    return f"weights in {model.precision} take none on {model.device.type}; {', '.join(most)} and {last} do"


class AdapterCache:
    """The LoRAs of one folder for one model. Thread-safe.

    Files are read in the background: when a request is checked, before it reaches the engine, and, if it was evicted
    meanwhile, before it joins others. A changed file is read anew: running requests keep the old version.
    """

    def __init__(self, folder: Path, model: ImageModel, capacity_bytes: int, pack: Pack | None = None) -> None:
        """`capacity_bytes` limits the factors' size in the model's precision, or packed, including those in use.

        `pack` packs the denoiser's as soon as a file is read; without it, the factors are moved to the model's device.
        """
        self.folder = folder.expanduser()
        self.cache = PinnedCache("lora", capacity_bytes, self._read, check=self._check_header, at_once=_LOADS)
        self._model = model
        self._pack = pack

    def names(self) -> list[str]:
        """The names that requests may use now."""
        return weight_files.offered(self.folder)

    def check(self, text: str) -> None:
        """Check that the LoRAs in `name:scale,name` exist and fit. Raises `ModelError`, naming the LoRA."""
        files = [self.cache.find(named.name, self._stamp(named.name)) for named in names.read(text)]
        needed = sum(file.size_bytes for file in files)
        if needed > self.cache.capacity_bytes:
            raise self._too_large(" and ".join(file.name for file in files), needed)

    def take(self, text: str, *, wait: bool = False) -> AdapterLease | None:
        """Reserve a checked request's LoRAs; None means not yet, as of `PinnedCache.take`."""
        named = names.read(text)
        files = self.cache.take([one.name for one in named], wait=wait)
        return None if files is None else AdapterLease(files, [one.scale for one in named])

    def give(self, taken: AdapterLease, *, keep: bool = False) -> None:
        """Release them after the request has ended; `keep` as in `PinnedCache.give`."""
        self.cache.give(taken.files, keep=keep)

    def uses(self, taken: AdapterLease) -> tuple[ScaledAdapter, ...]:
        """The same, ready to use. Raises `ModelError`, naming the LoRA."""
        made = ((file, scale, self.cache.content(file)) for file, scale in zip(taken.files, taken.scales, strict=True))
        return tuple(ScaledAdapter(file.name, file.digest, own.factors, scale, own.packed) for file, scale, own in made)

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes of the cached LoRAs, by name, least recently used first."""
        return self.cache.held

    def _stamp(self, name: str) -> tuple[int, ...]:
        """What changes with the file."""
        path = self.folder / f"{name}{weight_files.SUFFIX}"
        try:
            found = path.stat()
        except OSError:
            found = None
        if found is None or not stat.S_ISREG(found.st_mode):  # reading a special file might never end
            raise ModelError(f"lora {name}: there is no {path.name} in the LoRA folder")
        if found.st_size > 2 * self.cache.capacity_bytes:  # factors are rounded to half their size at most
            raise self._too_large(name, found.st_size // 2)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _too_large(self, named: str, needed: int) -> ModelError:
        room = self.cache.capacity_bytes
        return ModelError(f"lora {named}: needs {needed} bytes, and there is room for {room} (DIPTYCH_LORA_MIB)")

    def _check_header(self, name: str) -> None:
        try:
            weight_files.check_header(self.folder / f"{name}{weight_files.SUFFIX}")
        except ValueError as error:
            raise ModelError(f"lora {name}: does not fit (it {error})") from error
        except OSError as error:
            raise ModelError(f"lora {name}: cannot be read ({error.strerror})") from error

    def _read(self, name: str) -> ReadFile[_Content]:
        try:
            data = (self.folder / f"{name}{weight_files.SUFFIX}").read_bytes()
        except OSError as error:
            raise ModelError(f"lora {name}: cannot be read ({error.strerror})") from error
        most = self.cache.capacity_bytes // self._model.dtype.itemsize
        factors = lora_file.read(name, data, self._model.parts, self._model.family.adapters, most)
        content, size = self._content(name, factors)
        return ReadFile(content, hashlib.sha256(data).hexdigest(), size)

    def _content(self, name: str, factors: Factors) -> tuple[_Content, int]:
        """Its factors as requests use them: all that is computed of a file is computed here."""
        denoiser, packed = self._model.family.denoiser, None
        if self._pack is not None:
            lora_file.check_finite(name, factors)
            try:
                packed = self._pack(lora_file.of_part(factors, denoiser))
            except ValueError as error:
                raise ModelError(f"lora {name}: does not fit ({first_line(error)})") from error
            factors = {at: factor for at, factor in factors.items() if at[0] != denoiser}
        factors = lora_file.converted(name, factors, self._model.device, self._model.dtype)
        count = sum(factor.down.numel() + factor.up.numel() for factor in factors.values())
        size = count * self._model.dtype.itemsize + (0 if packed is None else packed.size_bytes)
        return _Content(factors, packed), size


def same(uses: Sequence[ScaledAdapter]) -> tuple[tuple[str, float], ...]:
    """A key, equal for LoRAs that give equal embeddings."""
    return tuple((use.digest, use.scale) for use in uses)


def check_loras(adapters: AdapterCache | None, text: str, why_none: str | None) -> None:
    """Raise `Invalid` for LoRAs that are not offered. Without a cache, `why_none` or no LoRA folder is the reason."""
    if adapters is None:
        raise Invalid("lora", why_none or "no LoRA folder is configured (DIPTYCH_LORA_DIR)")
    named(lambda: adapters.check(text))


def named(ask: Callable[[], T]) -> T:
    """Context that turns a LoRA's `ModelError` into an error of the request's field."""
    try:
        return ask()
    except ModelError as error:
        raise Invalid("lora", str(error).removeprefix("lora ")) from error
