"""Control networks of one folder: read when first requested, lowered beside the model, and cached by last use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from contract.control import FIELD, Control
from contract.errors import Invalid
from core.ops.cpu import CpuLowering
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import control_file, control_variant
from pipeline.extensions.pinned_cache import PinnedCache, PinnedFile, ReadFile
from pipeline.extensions.sized_cache import stamp_of
from pipeline.sampling.denoise import Conditioning
from unet_opt.adapter import AdapterBranch
from unet_opt.control import Condition, ControlBranch, UnionBranch

if TYPE_CHECKING:
    from core.ops.ops import Lowering
    from pipeline.families.family import ImageModel

_BRANCHES: Mapping[str, type[ControlBranch | AdapterBranch]] = {
    control_file.CONTROLNET: ControlBranch, control_file.UNION: UnionBranch, control_file.ADAPTER: AdapterBranch,
}  # fmt: skip
LowerBeside = Callable[[Any], "Lowering"]
"""Makes the lowering of a network beside the model: `ImageBackend.beside`."""


class NetworkShape(NamedTuple):
    """What requests need to know of a network while it is not in memory.

    `maps` are those that a picture becomes: channels, and how many times the latents' sides are halved. `kinds` is how
    many kinds of pictures it tells apart; 0: it does not. Pictures' sides are multiples of `multiple` pixels.
    """

    text_width: int
    maps: tuple[tuple[int, int], ...]
    kinds: int
    multiple: int


Branch = ControlBranch | AdapterBranch
ControlNetwork = PinnedFile[Branch]
"""A network of the folder as last read."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestControl:
    """What a ControlNet reads for a request: its pictures, one or for a Union several, each with the steps in which it
    acts, and keys and values of the text by the request's rows.
    """

    network: ControlNetwork
    pictures: tuple[tuple[Condition, tuple[bool, ...]], ...]
    texts: Mapping[int, Conditioning]  # `kv` [R, T, width]

    def conditions(self, step: int) -> list[Condition]:
        """Those that act in this step."""
        return [condition for condition, acts in self.pictures if acts[step]]

    @property
    def branch(self) -> ControlBranch:
        assert isinstance(self.network.content, ControlBranch)
        return self.network.content


class RequestAdapter(NamedTuple):
    """What a T2I-Adapter made of a request's picture, [1, h, w, C] each, and in which steps it is added."""

    features: Sequence[torch.Tensor]
    strength: float
    acts: tuple[bool, ...]


class RequestControls(NamedTuple):
    """A request's controls by kind."""

    networks: tuple[RequestControl, ...] = ()
    adapters: tuple[RequestAdapter, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.networks or self.adapters)


class ControlFolder:
    """The control networks of one folder for one model. Thread-safe.

    Networks are read and packed in the background: while a request is checked, before it reaches the engine, and, if
    one was evicted meanwhile, before the request joins others. A changed file is read anew: running requests keep the
    old version.
    """

    def __init__(
        self, folder: Path, model: ImageModel, lower: LowerBeside, capacity_bytes: int, *, release: bool = False
    ) -> None:
        """`capacity_bytes` limits the networks' size in the model's precision, including those in use. `release`:
        weights that are packed are dropped, so that only `lower`'s lowering can use them.
        """
        self.folder = folder.expanduser()
        self.cache: PinnedCache[Branch] = PinnedCache("control", capacity_bytes, self._read, check=self._check_header)
        self._model = model
        self._lower = lower
        self._release = release
        self._shapes: dict[str, NetworkShape] = {}  # of networks that were read

    def names(self) -> list[str]:
        """The names that requests may use now."""
        return control_file.offered(self.folder)

    def check(self, controls: Sequence[Control], size: tuple[int, int]) -> None:
        """Check that the networks exist and fit, and read them; `size` is that of the pictures. Raises `Invalid`."""
        try:
            found = {control.model: self._find(control.model) for control in controls}
            needed = sum(network.size_bytes for network in found.values())
            if needed > self.cache.capacity_bytes:
                raise ModelError(
                    f"control {' and '.join(found)}: needs {needed} bytes, and there is room for "
                    f"{self.cache.capacity_bytes} (DIPTYCH_CONTROL_MIB)"
                )
        except ModelError as error:
            raise Invalid(f"{FIELD}.model", str(error).removeprefix("control ")) from error
        for control in controls:
            _check_picture(control, self._shapes[control.model], size)

    def take(self, controls: Sequence[Control], *, wait: bool = False) -> list[ControlNetwork] | None:
        """Reserve a checked request's networks; None means not yet, as of `PinnedCache.take`."""
        return self.cache.take([*dict.fromkeys(control.model for control in controls)], wait=wait)

    def give(self, networks: Sequence[ControlNetwork], *, keep: bool = False) -> None:
        """Release them after the request has ended; `keep` as in `PinnedCache.give`."""
        self.cache.give(networks, keep=keep)

    def request_bytes(self, controls: Sequence[Control], size: tuple[int, int], rows: int, tokens: int) -> int:
        """That a request of checked controls holds: what each one's picture becomes, keys and values, and each row's
        first residual of the last deep step.
        """
        if not controls:
            return 0
        height, width = (side // self._model.vae_scale for side in (size[1], size[0]))
        shapes = [self._shapes[control.model] for control in controls]
        kept = rows * height * width * int(self._model.denoiser.config.block_out_channels[0])
        for shape in shapes:
            kept += rows * tokens * shape.text_width
            kept += sum(c * -(-height // 2**halved) * -(-width // 2**halved) for c, halved in shape.maps)
        return self._model.dtype.itemsize * kept

    @torch.inference_mode()
    def prepare(
        self,
        taken: Sequence[ControlNetwork],
        controls: Sequence[Control],
        size: tuple[int, int],
        hidden: torch.Tensor,
        acts_of: Callable[[Control], tuple[bool, ...]],
    ) -> RequestControls:
        """The inputs of all controls, for embeddings [R, T, D]. On the thread that computes. Raises `Invalid`.

        `acts_of` says in which steps each one acts. The pictures of one Union are read together.
        """
        named = {network.name: network for network in taken}
        networks: list[RequestControl] = []
        adapters: list[RequestAdapter] = []
        for control in controls:
            network = named[control.model]
            branch, acts = self._ready(network), acts_of(control)
            pixels = torch.frombuffer(bytearray(control.pixels), dtype=torch.uint8).view(1, size[1], size[0], 3)
            if isinstance(branch, AdapterBranch):
                adapters.append(RequestAdapter(branch.features(pixels), control.strength, acts))
                continue
            picture = Condition(branch.hint(pixels), control.strength, control.mode or 0), acts
            own = next((n for n, one in enumerate(networks) if branch.kinds and one.network is network), None)
            if own is not None:
                networks[own] = replace(networks[own], pictures=(*networks[own].pictures, picture))
                continue
            whole = Conditioning({"kv": branch.prepare_text(hidden)}, 0.0)
            networks.append(RequestControl(network, (picture,), {1: whole.unguided(), whole.rows: whole}))
        return RequestControls(tuple(networks), tuple(adapters))

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes of the cached networks, by name, least recently used first."""
        return self.cache.held

    def size_bytes(self) -> int:
        """That the networks of the folder take at most, as their files have them."""
        files = [control_file.size_bytes(control_file.find(self.folder, name)) for name in self.names()]
        return min(self.cache.capacity_bytes, sum(files))

    def _find(self, name: str) -> ControlNetwork:
        """The network's current content, read if it has changed or was evicted."""
        path = control_file.find(self.folder, name)
        try:
            variant = control_variant.variant_of(path, name, self._model.precision)
            stamp = stamp_of(path, *([] if variant is None else [variant]))
        except OSError as error:
            raise ModelError(f"control {name}: cannot be read ({error.strerror or error})") from error
        return self.cache.find(name, stamp)

    def _check_header(self, name: str) -> None:
        control_file.check_headers(name, control_file.find(self.folder, name))

    def _read(self, name: str) -> ReadFile[Branch]:
        found = control_variant.read(name, control_file.find(self.folder, name), self._model)
        network = found.network.to(self._model.device).eval().requires_grad_(False)
        size = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
        kind = _BRANCHES[type(network).__name__]
        try:
            with torch.inference_mode(False):
                branch = kind(self._lower(network), network, self._model.denoiser, self._model.vae_scale)
        except ValueError as error:
            raise ModelError(f"control {name}: is of another model: {error}") from error
        if self._release and isinstance(branch.lowering, CpuLowering):
            branch.lowering.layers.release()
        self._shapes[name] = _shape(branch, self._model.vae_scale)
        return ReadFile(branch, found.digest, size)

    def _ready(self, network: ControlNetwork) -> Branch:
        try:
            return self.cache.content(network)
        except ModelError as error:
            raise Invalid(f"{FIELD}.model", str(error).removeprefix("control ")) from error


def _shape(branch: ControlBranch | AdapterBranch, scale: int) -> NetworkShape:
    multiple = branch.multiple if isinstance(branch, AdapterBranch) else scale
    return NetworkShape(branch.text_width, tuple(branch.maps), branch.kinds, multiple)


def _check_picture(control: Control, shape: NetworkShape, size: tuple[int, int]) -> None:
    """Raise `Invalid` for a picture of a kind or size that the network does not read."""
    if shape.kinds and (control.mode is None or control.mode >= shape.kinds):
        words = f"{control.model} reads {shape.kinds} kinds of pictures: it must be from 0 to {shape.kinds - 1}"
        raise Invalid(f"{FIELD}.mode", words)
    if not shape.kinds and control.mode is not None:
        raise Invalid(f"{FIELD}.mode", f"is for ControlNet-Unions, and {control.model} reads one kind of pictures")
    if any(side % shape.multiple for side in size):
        words = f"{control.model} reads pictures whose sides are multiples of {shape.multiple}"
        raise Invalid("size", f"{words}, not {size[0]}x{size[1]}")


def check_controls(
    folder: ControlFolder | None, model: ImageModel, controls: Sequence[Control], size: tuple[int, int]
) -> None:
    """Raise `Invalid` for controls that this model does not offer; None: no folder is configured."""
    if not model.family.controls:
        raise Invalid(FIELD, f"is not supported by {model.family.label}")
    if folder is None:
        raise Invalid(FIELD, "no folder of control networks is configured (DIPTYCH_CONTROL_DIR)")
    folder.check(controls, size)
