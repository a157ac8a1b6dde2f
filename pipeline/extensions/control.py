"""Control networks of one folder: read when first requested, lowered beside the model, and cached by last use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from contract.control import FIELD, Control
from contract.errors import Invalid
from core.ops.cpu import CpuLowering
from pipeline.extensions import control_file, control_variant
from pipeline.extensions.asset_cache import Asset, ReadFile
from pipeline.extensions.asset_folder import AssetFolder, stamp_of
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
ControlNetwork = Asset[Branch]
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


@dataclass(slots=True, eq=False)
class ControlLease:
    """A request's networks, what they read once its prompts are encoded, and for shallow steps the first residual
    [rows, h, w, C] of the last deep one.
    """

    files: list[ControlNetwork]
    controls: RequestControls = RequestControls()  # noqa: RUF009
    residual: torch.Tensor | None = None


class ControlFolder(AssetFolder[Branch]):
    """The control networks of one folder for one model, read and packed."""

    kind = "control"

    def __init__(
        self, folder: Path, model: ImageModel, lower: LowerBeside, capacity_bytes: int, *, release: bool = False
    ) -> None:
        """`capacity_bytes` limits the networks' size in the model's precision, including those in use. `release`:
        weights that are packed are dropped, so that only `lower`'s lowering can use them.
        """
        super().__init__(folder, capacity_bytes)
        self._model = model
        self._lower = lower
        self._release = release

    def names(self) -> list[str]:
        return control_file.offered(self.folder)

    def check(self, controls: Sequence[Control], size: tuple[int, int]) -> None:
        """Check that the networks exist and fit, and read them; `size` is that of the pictures. Raises `ModelError`,
        and `Invalid` for pictures that the networks do not read.
        """
        networks = {control.model: self.find(control.model) for control in controls}
        needed = sum(network.size_bytes for network in networks.values())
        if (room := self.cache.capacity) < needed:
            reason = f"needs {needed} bytes, and there is room for {room} (DIPTYCH_CONTROL_MIB)"
            raise self._error(" and ".join(networks), reason)
        for control in controls:
            _check_picture(control, networks[control.model].facts, size)

    def request_bytes(self, controls: Sequence[Control], size: tuple[int, int], rows: int, tokens: int) -> int:
        """That a request of checked controls holds: what each one's picture becomes, keys and values, and each row's
        first residual of the last deep step.
        """
        height, width = (side // self._model.vae_scale for side in (size[1], size[0]))
        shapes: list[NetworkShape] = [self.cache.known(control.model).facts for control in controls]
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
        """The inputs of all controls, for embeddings [R, T, D]. On the thread that computes. Raises `ModelError`.

        `acts_of` says in which steps each one acts. The pictures of one Union are read together.
        """
        named = {network.name: network for network in taken}
        networks: list[RequestControl] = []
        adapters: list[RequestAdapter] = []
        for control in controls:
            network = named[control.model]
            branch, acts = self.cache.content(network), acts_of(control)
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

    def size_bytes(self) -> int:
        files = [control_file.size_bytes(control_file.find(self.folder, name)) for name in self.names()]
        return min(super().size_bytes(), sum(files))

    def take(self, given: Sequence[Control], *, wait: bool = False) -> ControlLease | None:
        networks = self.cache.take([*dict.fromkeys(control.model for control in given)], wait=wait)
        return None if networks is None else ControlLease(networks)

    def _stamp(self, name: str) -> Hashable:
        path = control_file.find(self.folder, name)
        try:
            variant = control_variant.variant_of(path, name, self._model.precision)
            return stamp_of(path, *([] if variant is None else [variant]))
        except OSError as error:
            raise self._error(name, f"cannot be read ({error.strerror or error})") from error

    def _check_header(self, key: str) -> None:
        control_file.check_headers(key, control_file.find(self.folder, key))

    def _read(self, key: str) -> ReadFile[Branch]:
        found = control_variant.read(key, control_file.find(self.folder, key), self._model)
        network = found.network.to(self._model.device).eval().requires_grad_(False)
        size = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
        kind = _BRANCHES[type(network).__name__]
        try:
            with torch.inference_mode(False):
                branch = kind(self._lower(network), network, self._model.denoiser, self._model.vae_scale)
        except ValueError as error:
            raise self._error(key, f"is of another model: {error}") from error
        if self._release and isinstance(branch.lowering, CpuLowering):
            branch.lowering.layers.release()
        return ReadFile(branch, found.digest, size, _shape(branch, self._model.vae_scale))


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
