"""Control networks and T2I-Adapters of requests: read when first requested, lowered beside the model, and cached."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from contract.control import FIELD, Control
from contract.errors import Invalid
from core.ops.cpu import CpuLowering
from pipeline.backends.phases import DEEP
from pipeline.extensions import control_file, control_variant, costs
from pipeline.extensions.asset_cache import ReadFile
from pipeline.extensions.asset_folder import AssetFolder, stamp_of
from pipeline.extensions.control_rows import (
    Branch,
    ControlLease,
    ControlSteps,
    RequestAdapter,
    RequestControl,
    RequestControls,
)  # fmt: skip
from pipeline.extensions.extension import Extension, invalid
from pipeline.sampling.denoise import Conditioning
from unet_opt.adapter import AdapterBranch
from unet_opt.control import Condition, ControlBranch, UnionBranch

if TYPE_CHECKING:
    from contract.image import ImageParameters
    from core.config import Settings
    from core.ops.ops import Lowering
    from pipeline.backends.backend import ImageBackend
    from pipeline.families.family import ImageModel
    from pipeline.request_state import ImageState

_BRANCHES: Mapping[str, type[Branch]] = {
    control_file.CONTROLNET: ControlBranch, control_file.UNION: UnionBranch, control_file.ADAPTER: AdapterBranch,
}  # fmt: skip
LowerBeside = Callable[[Any], "Lowering"]
"""Makes the lowering of a network beside the model: `ImageBackend.lowering_for`."""


class NetworkShape(NamedTuple):
    """The facts of a network that requests need while it is not in memory.

    `maps` are those that a picture becomes: channels, and how many times the latents' sides are halved. `kinds` is how
    many kinds of pictures it tells apart; 0: it does not. Pictures' sides are multiples of `multiple` pixels.
    """

    text_width: int
    maps: tuple[tuple[int, int], ...]
    kinds: int
    multiple: int


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

    def asset_names(self) -> list[str]:
        return control_file.offered(self.folder)

    def size_bytes(self) -> int:
        files = [control_file.size_bytes(control_file.find(self.folder, name)) for name in self.asset_names()]
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


class ControlExtension(Extension[ControlFolder]):
    field, model_field, card_field = FIELD, f"{FIELD}.model", Control.OFFER
    unconfigured = "no folder of control networks is configured (--control-dir, or DIPTYCH_CONTROL_DIR)"
    supported, waits = "controls", True
    networks = "control network"
    steps: ControlSteps

    def __init__(self, model: ImageModel, backend: ImageBackend, folder: ControlFolder | None = None) -> None:
        super().__init__(model, backend, folder)
        family = model.family
        lengths = family.longest if backend.fixed_shapes else family.padded
        self.steps = ControlSteps(model.dtype, lengths, model.latent_channels)
        self._tokens = 0 if folder is None else family.text_encoder(model).tokens

    @classmethod
    def open(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> Self:
        if not settings.control_dir or not model.family.controls:
            return cls(model, backend)
        path, capacity = Path(settings.control_dir), settings.control_mib * 2**20
        return cls(model, backend, ControlFolder(path, backend.model, backend.lowering_for, capacity, release=True))

    def costs(self, backend: ImageBackend, sizes: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """Return the seconds of one row of a network at the cheapest batch width, by size; empty without a folder."""
        rows_s = {
            f"{size[0]}x{size[1]}": min(
                costs.seconds(self.steps, backend, DEEP, size, rows) / rows for rows in costs.WIDTHS
            )
            for size in (sizes if self.folder is not None else ())
        }
        return {"control_row_step_s": rows_s}

    def _check_files(self, request: ImageParameters) -> None:
        networks = {control.model: self._files.find(control.model) for control in request.control}
        self._files.check_room(networks.values())
        for control in request.control:
            _check_picture(control, networks[control.model].facts, (request.width, request.height))

    def size_bytes(self, request: ImageParameters, checked: None, rows: int, chunks: int) -> int:
        """Return what each control's picture becomes, keys and values, and each row's first residual of a deep step."""
        height, width = (side // self.model.vae_scale for side in (request.height, request.width))
        shapes: list[NetworkShape] = [self._files.cache.known(control.model).facts for control in request.control]
        count = rows * height * width * int(self.model.denoiser.config.block_out_channels[0])
        for shape in shapes:
            count += rows * self._tokens * chunks * shape.text_width
            count += sum(c * -(-height // 2**halved) * -(-width // 2**halved) for c, halved in shape.maps)
        return self.model.dtype.itemsize * count

    def acquire(self, request: ImageParameters, checked: None, *, wait: bool) -> ControlLease | None:
        networks = self._files.cache.take([*dict.fromkeys(c.model for c in request.control)], wait=wait)
        return None if networks is None else ControlLease(networks)

    def prepare(self, request: ImageParameters, state: ImageState, hidden: torch.Tensor) -> Iterable[torch.Tensor]:
        lease: ControlLease = state.extensions[self.field]
        if not lease.controls.any:
            with invalid(self.model_field), torch.inference_mode():
                lease.controls = self._controls(lease, request, state, hidden)
        networks, adapters = lease.controls
        hints = [condition.hint for network in networks for condition, _ in network.pictures]
        texts = [text for network in networks for whole in network.texts.values() for text in whole.tensors.values()]
        return [*hints, *texts, *(part for adapter in adapters for part in adapter.features)]

    def finite_steps(self, lease: ControlLease) -> torch.Tensor | None:
        return lease.finite

    def _controls(
        self, lease: ControlLease, request: ImageParameters, state: ImageState, hidden: torch.Tensor
    ) -> RequestControls:
        """Compute the inputs of all controls. The pictures of one Union are read together. Raises `ModelError`."""
        files = {file.name: file for file in lease.files}
        networks: list[RequestControl] = []
        adapters: list[RequestAdapter] = []
        for control in request.control:
            network, acts = files[control.model], state.acts(control)
            branch = self._files.cache.content(network)
            pixels = torch.frombuffer(bytearray(control.pixels), dtype=torch.uint8)
            pixels = pixels.view(1, request.height, request.width, 3)
            if isinstance(branch, AdapterBranch):
                adapters.append(RequestAdapter(branch.features(pixels), control.strength, acts))
                continue
            picture = Condition(branch.hint(pixels), control.strength, control.mode or 0), acts
            own = next((n for n, other in enumerate(networks) if branch.kinds and other.network is network), None)
            if own is not None:
                networks[own] = replace(networks[own], pictures=(*networks[own].pictures, picture))
                continue
            whole = Conditioning({"kv": branch.prepare_text(hidden)}, 0.0)
            networks.append(RequestControl(network, (picture,), {1: whole.unguided(), whole.rows: whole}))
        return RequestControls(tuple(networks), tuple(adapters))


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
