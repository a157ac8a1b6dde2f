"""Control networks of one folder: read when first requested, lowered beside the model, and cached by last use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

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

    kind, setting = "control", "DIPTYCH_CONTROL_MIB"

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

    def size_bytes(self) -> int:
        files = [control_file.size_bytes(control_file.find(self.folder, name)) for name in self.names()]
        return min(super().size_bytes(), sum(files))

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
        file = control_variant.read(key, control_file.find(self.folder, key), self._model)
        network = file.network.to(self._model.device).eval().requires_grad_(False)
        size = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
        kind = _BRANCHES[type(network).__name__]
        try:
            with torch.inference_mode(False):
                branch = kind(self._lower(network), network, self._model.denoiser, self._model.vae_scale)
        except ValueError as error:
            raise self._error(key, f"is of another model: {error}") from error
        if self._release and isinstance(branch.lowering, CpuLowering):
            branch.lowering.layers.release()
        scale = self._model.vae_scale
        multiple = branch.multiple if isinstance(branch, AdapterBranch) else scale
        shape = NetworkShape(branch.text_width, tuple(branch.maps), branch.kinds, multiple)
        return ReadFile(branch, file.digest, size, shape)
