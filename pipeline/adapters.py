"""Per-request LoRAs: files of one folder, read in the background when first requested and cached by last use.

As in S-LoRA (Sheng et al., 2023): only the small factors are kept, within a budget, and the model's own weights are
unchanged. `pipeline.adapted` applies them.
"""

from __future__ import annotations

import hashlib
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from contract import loras as names
from contract.errors import Invalid
from contract.precision import PRECISIONS, is_quantized
from core.ops.branches import LowRank, PackedBranches
from core.threads import lower_priority
from pipeline import lora_file, weight_files
from pipeline.folder import ModelError, first_line
from pipeline.lora_file import Factors

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
    packed: PackedBranches | None = None


Pack = Callable[[Mapping[str, LowRank]], PackedBranches]
"""`ImageBackend.pack_adapter`: raises ValueError, naming the layer."""


class _Content(NamedTuple):
    """What is kept of a file."""

    factors: Factors
    packed: PackedBranches | None
    size_bytes: int


@dataclass(slots=True, eq=False)
class _File:
    """A file as last read."""

    name: str
    stamp: tuple[int, ...]
    digest: str
    size_bytes: int  # of its factors in the model's precision, or as they are packed
    content: _Content | None  # None: evicted
    ready: bool  # on the model's device, in its precision, and checked to be finite
    pins: int = 0  # requests that use it
    error: ModelError | None = None  # of the last attempt to read it again


@dataclass(slots=True, eq=False)
class AdapterLease:
    """The LoRAs held by one request, from admission to end."""

    files: list[tuple[_File, float]] = field(default_factory=list)


def refused(model: ImageModel, *, packs: bool) -> str | None:
    """Why this model does not support per-request LoRAs; None if it does. `packs`: its backend packs them."""
    if packs or not is_quantized(model.precision):
        return None
    *most, last = (name for name in PRECISIONS if not is_quantized(name))
    return f"weights in {model.precision} take none on {model.device.type}; {', '.join(most)} and {last} do"


class AdapterCache:
    """The LoRAs of one folder for one model. Thread-safe.

    Files are read by threads of low priority, so that iterations of other requests go on: when a request is checked,
    before it reaches the engine, and, if it was evicted meanwhile, before it joins others. A changed file is read anew:
    running requests keep the old version.
    """

    def __init__(self, folder: Path, model: ImageModel, capacity_bytes: int, pack: Pack | None = None) -> None:
        """`capacity_bytes` limits the factors' size in the model's precision, or packed, including those in use.

        `pack` packs the denoiser's as soon as a file is read; without it, the factors are moved to the model's device.
        """
        self.folder = folder.expanduser()
        self.capacity_bytes = capacity_bytes
        self.reads = 0
        self._model = model
        self._pack = pack
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._loads: dict[tuple[str, tuple[int, ...]], Future[_File]] = {}  # under way
        self._awaited: list[_File] = []  # of the request that is admitted next
        self._pinned_bytes = 0
        self._lock = threading.Lock()
        self._places = threading.Semaphore(_LOADS)

    def names(self) -> list[str]:
        """The names that requests may use now."""
        return weight_files.offered(self.folder)

    def check(self, text: str) -> None:
        """Check that the LoRAs in `name:scale,name` exist and fit. Raises `ModelError`, naming the LoRA."""
        files = [self._find(named.name) for named in names.read(text)]
        needed = sum(file.size_bytes for file in files)
        if needed > self.capacity_bytes:
            with self._lock:
                self._evict()
            raise self._too_large(" and ".join(file.name for file in files), needed)

    def take(self, text: str, *, wait: bool = False) -> AdapterLease | None:
        """Reserve a checked request's LoRAs; None means not yet: other requests' fill the memory.

        Reads no file itself. With `wait` None may also mean that one is read again, which was evicted; without,
        `uses` waits for it.
        """
        with self._lock:
            wanted = [(self._files[named.name], named.scale) for named in names.read(text)]
            self._awaited = []
            more = sum(file.size_bytes for file, _ in wanted if not file.pins)
            if self._pinned_bytes and self._pinned_bytes + more > self.capacity_bytes:
                return None
            gone = [file for file, _ in wanted if file.content is None and file.error is None]
            for file in gone:
                self._load(file.name, file.stamp)
            if gone and wait:
                self._awaited = [file for file, _ in wanted]
                return None
            self._pinned_bytes += more
            for file, _ in wanted:
                file.pins += 1
            return AdapterLease(wanted)

    def give(self, taken: AdapterLease) -> None:
        """Release them after the request has ended."""
        with self._lock:
            for file, _ in taken.files:
                file.pins -= 1
                if not file.pins:
                    self._pinned_bytes -= file.size_bytes
            self._evict()

    def uses(self, taken: AdapterLease) -> tuple[ScaledAdapter, ...]:
        """Load them to the device. On the thread that computes. Raises `ModelError`, naming the LoRA."""
        made = ((file, scale, self._ready(file)) for file, scale in taken.files)
        return tuple(ScaledAdapter(file.name, file.digest, own.factors, scale, own.packed) for file, scale, own in made)

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes of the cached LoRAs, by name, least recently used first."""
        with self._lock:
            return {name: file.size_bytes for name, file in self._files.items() if file.content is not None}

    def _find(self, name: str) -> _File:
        """The file's current content, read if it has changed or was evicted."""
        stamp = self._stamp(name)
        with self._lock:
            known = self._files.get(name)
            if known is not None and known.stamp == stamp and known.content is not None:
                self._files.move_to_end(name)
                return known
            load = self._load(name, stamp)
        return load.result()

    def _stamp(self, name: str) -> tuple[int, ...]:
        """What changes with the file."""
        path = self.folder / f"{name}{weight_files.SUFFIX}"
        try:
            found = path.stat()
        except OSError:
            found = None
        if found is None or not stat.S_ISREG(found.st_mode):  # reading a special file might never end
            raise ModelError(f"lora {name}: there is no {path.name} in the LoRA folder")
        if found.st_size > 2 * self.capacity_bytes:  # factors are rounded to half their size at most
            raise self._too_large(name, found.st_size // 2)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _too_large(self, named: str, needed: int) -> ModelError:
        room = self.capacity_bytes
        return ModelError(f"lora {named}: needs {needed} bytes, and there is room for {room} (DIPTYCH_LORA_MIB)")

    def _load(self, name: str, stamp: tuple[int, ...]) -> Future[_File]:
        """Begin to read a file unless that is under way. Under the lock."""
        key = (name, stamp)
        if key not in self._loads:
            self._loads[key] = load = Future[_File]()
            # Ends rather than waits for the next: a thread that computed keeps a team of OpenMP threads (see Lane).
            threading.Thread(target=self._run, args=(key, load), name=f"lora {name}", daemon=True).start()
        return self._loads[key]

    def _run(self, key: tuple[str, tuple[int, ...]], load: Future[_File]) -> None:
        lower_priority("reading LoRAs")
        name, stamp = key
        try:
            with self._places:
                digest, content = self._read(name)
            with self._lock:
                made = self._keep(name, stamp, digest, content)
        except BaseException as error:
            with self._lock:
                del self._loads[key]
                if (known := self._files.get(name)) is not None and known.content is None:
                    known.error = error if isinstance(error, ModelError) else ModelError(f"lora {name}: {error}")
            load.set_exception(error)
        else:
            load.set_result(made)

    def _keep(self, name: str, stamp: tuple[int, ...], digest: str, content: _Content) -> _File:
        """The file with this content. Under the lock."""
        del self._loads[name, stamp]
        file = self._files.get(name)
        if file is None or (file.stamp, file.digest) != (stamp, digest):
            file = self._files[name] = _File(name, stamp, digest, content.size_bytes, None, ready=False)
        if file.content is None:
            file.content, file.ready, file.error = content, self._pack is not None, None
        self._files.move_to_end(name)
        self._evict(but=file)
        return file

    def _read(self, name: str) -> tuple[str, _Content]:
        self.reads += 1
        try:
            data = (self.folder / f"{name}{weight_files.SUFFIX}").read_bytes()
        except OSError as error:
            raise ModelError(f"lora {name}: cannot be read ({error.strerror})") from error
        most = self.capacity_bytes // self._model.dtype.itemsize
        factors = lora_file.read(name, data, self._model.parts, self._model.family.adapters, most)
        return hashlib.sha256(data).hexdigest(), self._content(name, factors)

    def _content(self, name: str, factors: Factors) -> _Content:
        denoiser, packed = self._model.family.denoiser, None
        if self._pack is not None:
            lora_file.check_finite(name, factors)
            try:
                packed = self._pack(lora_file.of_part(factors, denoiser))
            except ValueError as error:
                raise ModelError(f"lora {name}: does not fit ({first_line(error)})") from error
            rest = {at: factor for at, factor in factors.items() if at[0] != denoiser}
            factors = lora_file.moved(rest, self._model.device, self._model.dtype)
        count = sum(factor.down.numel() + factor.up.numel() for factor in factors.values())
        size = count * self._model.dtype.itemsize + (0 if packed is None else packed.size_bytes)
        return _Content(factors, packed, size)

    def _ready(self, file: _File) -> _Content:
        with self._lock:
            load = self._load(file.name, file.stamp) if file.content is None and file.error is None else None
        if load is not None:
            load.result()
        with self._lock:
            found, ready, error = file.content, file.ready, file.error
        if found is None:
            raise error or ModelError(f"lora {file.name}: its file changed before it was used; ask again")
        if not ready:
            factors = lora_file.moved(found.factors, self._model.device, self._model.dtype)
            lora_file.check_finite(file.name, factors)
            found = found._replace(factors=factors)
            with self._lock:
                file.content, file.ready = found, True
        return found

    def _evict(self, but: _File | None = None) -> None:
        """Evict least recently used files that nobody uses, as far as needed. Under the lock."""
        held = sum(file.size_bytes for file in self._files.values() if file.content is not None)
        for file in list(self._files.values()):
            if held <= self.capacity_bytes:
                return
            unused = file.content is not None and not file.pins and file not in self._awaited
            if unused and file is not but:
                file.content, file.ready = None, False
                held -= file.size_bytes


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
