"""LoRAs that requests bring along: files of one folder, read when they are first named, the last used ones kept.

As S-LoRA (Sheng et al., 2023) keeps adapters: the small factors only, within a budget, while the model's own weights
stay as they are. Knows files, memory and who uses what; leaves adding them to `pipeline.adapted`.
"""

from __future__ import annotations

import hashlib
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from contract import loras as names
from contract.errors import Invalid
from contract.precision import PRECISIONS, is_quantized
from pipeline import lora, lora_file
from pipeline.folder import ModelError
from pipeline.lora_file import Factors

if TYPE_CHECKING:
    from pipeline.load import Model

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """A LoRA, ready on the model's device, and how much of it a request wants."""

    name: str
    digest: str
    factors: Factors
    scale: float


@dataclass(slots=True, eq=False)
class _File:
    """One file as it was when it was read."""

    name: str
    stamp: tuple[int, ...]
    digest: str
    size_bytes: int  # of its factors in the model's precision
    factors: Factors | None  # None: they were let go
    ready: bool = False  # on the model's device, in its precision, and every number is one
    pins: int = 0  # requests in the making that use it


@dataclass(slots=True, eq=False)
class Taken:
    """What one request uses, from its admission to its end."""

    files: list[tuple[_File, float]] = field(default_factory=list)


def refused(model: Model) -> str | None:
    """Why requests cannot bring LoRAs to this model; None where they can."""
    if not is_quantized(model.precision):
        return None
    *most, last = (name for name in PRECISIONS if not is_quantized(name))
    return f"weights in {model.precision} take none; {', '.join(most)} and {last} do"


class Adapters:
    """The LoRAs of one folder for one model. Thread-safe.

    Files are read by whoever checks a request, before it reaches the engine; what had to be let go until the request's
    turn came is read once more. A file that changes is read anew: requests that have begun go on with the old one.
    """

    def __init__(self, folder: Path, model: Model, capacity_bytes: int) -> None:
        """`capacity_bytes` is what factors may take in the model's precision, those in use first of all."""
        self.folder = folder.expanduser()
        self.capacity_bytes = capacity_bytes
        self.reads = 0
        self._model = model
        self._parts = _parts(model)
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._pinned_bytes = 0
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def names(self) -> list[str]:
        """What requests may name now."""
        return lora.offered(self.folder)

    def check(self, text: str) -> None:
        """See that what `name:scale,name` means is there and fits. Raises `ModelError`, naming the LoRA."""
        files = [self._find(named.name) for named in names.read(text)]
        needed = sum(file.size_bytes for file in files)
        if needed > self.capacity_bytes:
            with self._lock:
                self._evict()
            named, room = " and ".join(file.name for file in files), self.capacity_bytes
            raise ModelError(f"lora {named}: needs {needed} bytes, and there is room for {room} (DIPTYCH_LORA_MIB)")

    def take(self, text: str) -> Taken | None:
        """What a checked request will use; None means not yet: others' fill the memory. Reads no file."""
        with self._lock:
            wanted = [(self._files[named.name], named.scale) for named in names.read(text)]
            more = sum(file.size_bytes for file, _ in wanted if not file.pins)
            if self._pinned_bytes and self._pinned_bytes + more > self.capacity_bytes:
                return None
            self._pinned_bytes += more
            for file, _ in wanted:
                file.pins += 1
            return Taken(wanted)

    def give(self, taken: Taken) -> None:
        """The request has ended."""
        with self._lock:
            for file, _ in taken.files:
                file.pins -= 1
                if not file.pins:
                    self._pinned_bytes -= file.size_bytes
            self._evict()

    def uses(self, taken: Taken) -> tuple[Use, ...]:
        """Ready to be added. On the thread that computes. Raises `ModelError`, naming the LoRA."""
        return tuple(Use(file.name, file.digest, self._ready(file), scale) for file, scale in taken.files)

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes of the factors that are kept now, by name, least recently used first."""
        with self._lock:
            return {name: file.size_bytes for name, file in self._files.items() if file.factors is not None}

    def _find(self, name: str) -> _File:
        """The file as it is now, read where that has changed or its factors are gone."""
        path = self.folder / f"{name}{lora.SUFFIX}"
        with self._reading:
            try:
                found = path.stat()
            except OSError:
                found = None
            if found is None or not stat.S_ISREG(found.st_mode):  # what is no file might never end
                raise ModelError(f"lora {name}: is not known: there is no {path.name} among the LoRAs")
            stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
            with self._lock:
                known = self._files.get(name)
                if known is not None and known.stamp == stamp and known.factors is not None:
                    self._files.move_to_end(name)
                    return known
            digest, factors, size = self._read(name, path)
            with self._lock:
                if known is not None and (known.stamp, known.digest) == (stamp, digest):
                    if known.factors is None:
                        known.factors, known.ready = factors, False
                else:
                    known = self._files[name] = _File(name, stamp, digest, size, factors)
                self._files.move_to_end(name)
                self._evict(but=known)
                return known

    def _read(self, name: str, path: Path) -> tuple[str, Factors, int]:
        self.reads += 1
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ModelError(f"lora {name}: cannot be read ({error.strerror})") from error
        factors = lora_file.read(name, data, self._parts)
        count = sum(factor.down.numel() + factor.up.numel() for factor in factors.values())
        return hashlib.sha256(data).hexdigest(), factors, count * self._model.dtype.itemsize

    def _ready(self, file: _File) -> Factors:
        with self._lock:
            found, ready = file.factors, file.ready
        if found is None:
            digest, found, _ = self._read(file.name, self.folder / f"{file.name}{lora.SUFFIX}")
            if digest != file.digest:
                raise ModelError(f"lora {file.name}: its file changed before it was used; ask again")
        if not ready:
            found = lora_file.moved(found, self._model.device, self._model.dtype)
            lora_file.check_finite(file.name, found)
            with self._lock:
                file.factors, file.ready = found, True
                self._evict(but=file)
        return found

    def _evict(self, but: _File | None = None) -> None:
        """Let go of what was used least recently, as far as that is needed and nobody uses it. Under the lock."""
        held = sum(file.size_bytes for file in self._files.values() if file.factors is not None)
        for file in list(self._files.values()):
            if held <= self.capacity_bytes:
                return
            if file.factors is not None and not file.pins and file is not but:
                file.factors, file.ready = None, False
                held -= file.size_bytes


def _parts(model: Model) -> dict[str, object]:
    return {"unet": model.unet, **dict(zip(("text_encoder", "text_encoder_2"), model.text_encoders, strict=True))}


def same(uses: Sequence[Use]) -> tuple[tuple[str, float], ...]:
    """Equal for what gives equal embeddings."""
    return tuple((use.digest, use.scale) for use in uses)


def check_loras(adapters: Adapters | None, model: Model, text: str) -> None:
    """Raise `Invalid` for LoRAs that requests cannot bring to this model; None: no folder of theirs is named."""
    if adapters is None:
        raise Invalid("lora", refused(model) or "no folder with LoRAs is named (DIPTYCH_LORA_DIR)")
    named(lambda: adapters.check(text))


def named(ask: Callable[[], T]) -> T:
    """Ask for LoRAs; what is wrong with one is wrong with the request's field."""
    try:
        return ask()
    except ModelError as error:
        raise Invalid("lora", str(error).removeprefix("lora ")) from error
