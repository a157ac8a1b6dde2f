"""Control networks of one folder: read when first requested, lowered beside the model, and cached by last use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contract.control import FIELD, Control
from contract.errors import Invalid
from core.ops.cpu import CpuLowering
from pipeline import control_file, control_variant
from pipeline.denoise import Conditioning
from pipeline.folder import ModelError
from unet_opt.control import ControlBranch

if TYPE_CHECKING:
    from core.ops.ops import Lowering
    from pipeline.families.family import ImageModel

LowerBeside = Callable[[Any], "Lowering"]
"""Makes the lowering of a network beside the model: `ImageBackend.beside`."""


@dataclass(slots=True, eq=False)
class ControlNetwork:
    """A network of the folder as last read. `branch` None: evicted."""

    name: str
    stamp: tuple[Any, ...]
    digest: str
    size_bytes: int
    text_width: int
    branch: ControlBranch | None
    pins: int = 0  # requests that use it


@dataclass(frozen=True, slots=True, eq=False)
class RequestControl:
    """A request's control: its network, its rows' inputs, and what it adds in which of the request's steps.

    `conditionings` by their rows: `kv` [R, T, width] and `hint` [R, h, w, C].
    """

    network: ControlNetwork
    conditionings: Mapping[int, Conditioning]
    strength: float
    acts: tuple[bool, ...]


@dataclass(slots=True, eq=False)
class ControlLease:
    """The networks held by one request, from admission to end."""

    networks: list[ControlNetwork] = field(default_factory=list)


class ControlFolder:
    """The control networks of one folder for one model. Thread-safe.

    Networks are read and packed by the caller that checks a request, before it reaches the engine; one evicted before
    the request runs is read again. A changed file is read anew: running requests keep the old version.
    """

    def __init__(
        self, folder: Path, model: ImageModel, lower: LowerBeside, capacity_bytes: int, *, release: bool = False
    ) -> None:
        """`capacity_bytes` limits the networks' size in the model's precision, including those in use. `release`:
        weights that are packed are dropped, so that only `lower`'s lowering can use them.
        """
        self.folder = folder.expanduser()
        self.capacity_bytes = capacity_bytes
        self.reads = 0
        self._model = model
        self._lower = lower
        self._release = release
        self._networks: OrderedDict[str, ControlNetwork] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def names(self) -> list[str]:
        """The names that requests may use now."""
        return control_file.offered(self.folder)

    def check(self, controls: Sequence[Control]) -> None:
        """Check that the networks exist and fit, and read them. Raises `Invalid`."""
        try:
            found = {control.model: self._find(control.model) for control in controls}
            needed = sum(network.size_bytes for network in found.values())
            if needed > self.capacity_bytes:
                raise ModelError(
                    f"control {' and '.join(found)}: needs {needed} bytes, and there is room for {self.capacity_bytes} "
                    "(DIPTYCH_CONTROL_MIB)"
                )
        except ModelError as error:
            raise Invalid(f"{FIELD}.model", str(error).removeprefix("control ")) from error

    def take(self, controls: Sequence[Control]) -> ControlLease | None:
        """Reserve a checked request's networks; None means not yet: others' fill the memory. Reads no file."""
        with self._lock:
            wanted = {control.model: self._networks[control.model] for control in controls}
            pinned = sum(network.size_bytes for network in self._networks.values() if network.pins)
            more = sum(network.size_bytes for network in wanted.values() if not network.pins)
            if pinned and pinned + more > self.capacity_bytes:
                return None
            for network in wanted.values():
                network.pins += 1
            return ControlLease([*wanted.values()])

    def give(self, lease: ControlLease) -> None:
        """Release them after the request has ended."""
        with self._lock:
            for network in lease.networks:
                network.pins -= 1
            self._evict()

    def request_bytes(self, controls: Sequence[Control], size: tuple[int, int], rows: int, tokens: int) -> int:
        """That a request of checked controls holds: each one's hint and keys and values, and each row's first residual
        of the last deep step.
        """
        if not controls:
            return 0
        scale = self._model.vae_scale
        hint = (size[0] // scale) * (size[1] // scale) * int(self._model.denoiser.config.block_out_channels[0])
        with self._lock:
            widths = [self._networks[control.model].text_width for control in controls]
        return self._model.dtype.itemsize * (hint * (rows + len(controls)) + rows * tokens * sum(widths))

    def prepare(
        self, lease: ControlLease, controls: Sequence[Control], size: tuple[int, int], hidden: torch.Tensor, steps: int
    ) -> list[RequestControl]:
        """The inputs of each control, for embeddings [R, T, D]. On the thread that computes. Raises `Invalid`."""
        named = {network.name: network for network in lease.networks}
        return [self._prepared(named[control.model], control, size, hidden, steps) for control in controls]

    @torch.inference_mode()
    def _prepared(
        self, network: ControlNetwork, control: Control, size: tuple[int, int], hidden: torch.Tensor, steps: int
    ) -> RequestControl:
        branch = self._ready(network)
        pixels = torch.frombuffer(bytearray(control.image), dtype=torch.uint8).view(1, size[1], size[0], 3)
        hint = branch.hint(pixels).expand(len(hidden), -1, -1, -1)
        whole = Conditioning({"kv": branch.prepare_text(hidden), "hint": hint}, 0.0)
        return RequestControl(network, {1: whole.unguided(), whole.rows: whole}, control.strength, control.acts(steps))

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes of the cached networks, by name, least recently used first."""
        with self._lock:
            return {name: one.size_bytes for name, one in self._networks.items() if one.branch is not None}

    def size_bytes(self) -> int:
        """That the networks of the folder take at most, as their files have them."""
        files = [control_file.size_bytes(control_file.find(self.folder, name)) for name in self.names()]
        return min(self.capacity_bytes, sum(files))

    def _find(self, name: str) -> ControlNetwork:
        """The network's current content, read if it has changed or was evicted."""
        with self._reading:
            path = control_file.find(self.folder, name)
            stamp = _stamp(path, control_variant.variant_of(path, name, self._model.precision))
            with self._lock:
                known = self._networks.get(name)
                if known is not None and known.stamp == stamp and known.branch is not None:
                    self._networks.move_to_end(name)
                    return known
            # In a thread that ends: OpenMP keeps a team of threads for every thread that ever computed.
            with ThreadPoolExecutor(1, "control") as thread:
                branch, digest, size = thread.submit(self._read, name, path).result()
            with self._lock:
                if known is not None and (known.stamp, known.digest) == (stamp, digest):
                    known.branch = branch
                else:
                    known = self._networks[name] = ControlNetwork(name, stamp, digest, size, branch.text_width, branch)
                self._networks.move_to_end(name)
                self._evict(but=known)
                return known

    def _read(self, name: str, path: Path) -> tuple[ControlBranch, str, int]:
        self.reads += 1
        found = control_variant.read(name, path, self._model)
        network = found.network.to(self._model.device).eval().requires_grad_(False)
        size = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
        try:
            with torch.inference_mode(False):
                branch = ControlBranch(self._lower(network), network, self._model.denoiser, self._model.vae_scale)
        except ValueError as error:
            raise ModelError(f"control {name}: is of another model: {error}") from error
        if self._release and isinstance(branch.lowering, CpuLowering):
            branch.lowering.layers.release()
        return branch, found.digest, size

    def _ready(self, network: ControlNetwork) -> ControlBranch:
        with self._lock:
            branch = network.branch
        if branch is not None:
            return branch
        try:
            branch, digest, _ = self._read(network.name, control_file.find(self.folder, network.name))
        except ModelError as error:
            raise Invalid(f"{FIELD}.model", str(error).removeprefix("control ")) from error
        if digest != network.digest:
            raise Invalid(f"{FIELD}.model", f"{network.name}: its file changed before it was used; ask again")
        with self._lock:
            network.branch = branch
            self._evict(but=network)
        return branch

    def _evict(self, but: ControlNetwork | None = None) -> None:
        """Evict least recently used networks that nobody uses, as far as needed. Under the lock."""
        held = sum(network.size_bytes for network in self._networks.values() if network.branch is not None)
        for network in list(self._networks.values()):
            if held <= self.capacity_bytes:
                return
            if network.branch is not None and not network.pins and network is not but:
                network.branch = None
                held -= network.size_bytes


def _stamp(path: Path, variant: Path | None) -> tuple[Any, ...]:
    """Changes when any file of the network does, or of its variant in 8 bits."""
    places = [path] if variant is None else [path, variant]
    files = [
        one for place in places for one in ([place] if place.is_file() else sorted(place.iterdir())) if one.is_file()
    ]
    found = ((file.name, file.stat()) for file in files)
    return tuple((name, about.st_ino, about.st_size, about.st_mtime_ns) for name, about in found)


def check_controls(folder: ControlFolder | None, model: ImageModel, controls: Sequence[Control]) -> None:
    """Raise `Invalid` for controls that this model does not offer; None: no folder is configured."""
    if not model.family.controls:
        raise Invalid(FIELD, f"is not supported by {model.family.label}")
    if folder is None:
        raise Invalid(FIELD, "no folder of control networks is configured (DIPTYCH_CONTROL_DIR)")
    folder.check(controls)
