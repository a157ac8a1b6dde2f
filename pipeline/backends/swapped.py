"""Shares a backend among models of one architecture: its graphs, its buffers and its costs.

Kernels and recorded graphs read weights at fixed addresses. Before the first forward of another model than the last
one's, the weights of the part that runs are copied there, within the device's memory: for SDXL's UNet in 8 bits 2.6 GB,
against which recording its graphs anew takes a minute. Text encoders are not swapped: each model has its own, or those
of another that are equal.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.batching.runner import Lane
from core.cuda_graphs import GraphCache
from core.graphs import ExecutableKey
from core.ops.branches import LowRank, PackedAdapter
from core.ops.cuda import CudaLowering
from core.ops.cuda_branches import AdaptableLayers
from core.ops.ops import Lowering
from core.transfers import copy_to_device, copy_to_host, refill
from pipeline.backends.backend import BatchGroup, ExecutionPlan, ImageBackend
from pipeline.backends.graphs import GraphBackend, embed_recorded
from pipeline.backends.phases import KEYS, STEPS, TEXT, TEXT_WIDTHS, VAE, drop_text_input
from pipeline.backends.timing import PhaseTimer, synchronize
from pipeline.extensions.adapters import ScaledAdapter
from pipeline.families.family import ImageModel
from pipeline.memory_ledger import RequestCapacity
from pipeline.recording import BackgroundRecorder, GraphSet

_DECODER = ("decoder.", "post_quant_conv.")  # what names of a VAE's parameters begin with
_ENCODER = ("encoder", "quant_conv")
_WORD = 8  # bytes that a copy moves at a time, where a tensor has a multiple of them


class Weights:
    """A model's own copy of what the kernels of one part read. `size_bytes` is 0 for the only model of a backend, whose
    weights are where the kernels read them.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        """`pairs` are each tensor that kernels read and its own, of one shape, type and layout."""
        self._copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        self.fill(pairs)

    def fill(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for pair in pairs:
            read, own = _flattened(*pair)
            targets, sources = self._copies.setdefault(read.dtype, ([], []))
            targets.append(read)
            sources.append(own)

    @property
    def own(self) -> list[Tensor]:
        return [tensor for _, sources in self._copies.values() for tensor in sources]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.own)

    @torch.inference_mode()
    def copy_in(self) -> None:
        """Copy them to where the kernels read, in the current stream."""
        for targets, sources in self._copies.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Keep these copies of `own` instead. On any thread, while nothing copies from them."""
        kept = iter(tensors)
        self._copies = {dtype: (targets, [next(kept) for _ in own]) for dtype, (targets, own) in self._copies.items()}

    def equals(self, other: Weights) -> bool:
        """Return whether both are of the same values. Waits for the device."""
        return len(self.own) == len(other.own) and all(map(torch.equal, self.own, other.own))


class SharedBackend:
    """A backend, and which of its models' weights are where its kernels read them. Forwards run on one thread, the
    lane's; `join` on any other.
    """

    def __init__(self, backend: GraphBackend, lane: Lane, busy: Callable[[], bool]) -> None:
        """`busy` returns whether requests are running."""
        self.backend = backend
        self.recording = BackgroundRecorder(lane, backend.graphs.record_next, busy)
        self._lane = lane
        self._members: weakref.WeakSet[SwappedBackend] = weakref.WeakSet()
        # Weakly, so that the weights of a model that is gone are, too.
        self._present: dict[str, weakref.ref[Weights]] = {}
        self._built: dict[str, weakref.ref[Weights]] = {}  # of the model that the backend was built with
        self._spare: list[list[Tensor]] = []  # memory of a denoiser's weights that have left the device
        self._complete = self._closed = False
        self._lock = threading.Lock()

    def first(self) -> SwappedBackend:
        """Return the backend of the model that the backend was built with. Call once, before anything runs."""
        weights = {part: Weights() for part in self._lowerings}
        self._present, self._built = ({part: weakref.ref(own) for part, own in weights.items()} for _ in range(2))
        adaptable = self._lowerings[self.backend.model.family.denoiser].adaptable()  # before anything is swapped
        return self._member(self.backend.model, weights, self.backend.phases[TEXT], adaptable, ())

    def join(self, model: ImageModel) -> SwappedBackend | None:
        """Return the backend of another model, which takes on the parts that are equal to another's; None for one of
        another architecture.
        """
        denoiser = model.family.denoiser
        with self._lock:
            if self._closed or not _alike(self.backend.model, model):
                return None
            self._spare.clear()
            if not self._complete:
                self._lane.call(partial(_run_all, self.backend))
                self._complete = True
            try:
                counterparts = {
                    part: lowering.counterparts(model.parts[part], without=_ENCODER if part == "vae" else ())
                    for part, lowering in self._lowerings.items()
                }
            except ValueError:
                return None
            for lowering in self._lowerings.values():
                lowering.fix_layers()
            weights = {part: Weights(each.pairs) for part, each in counterparts.items()}
            shared: dict[str, nn.Module] = {}
            text: Callable[..., Any] | None = None
            for member in self._members:
                equal = {
                    name for name in _modules(model)
                    if name not in shared and _equal(name, member, model, weights, self._lowerings)
                }  # fmt: skip
                shared |= {name: member.model.parts[name] for name in equal}
                weights |= {part: member.weights[part] for part in weights if part in equal}
                if text is None and {*_modules(model)} - {*weights} <= equal:
                    text = member.phases[TEXT]
            copied_bytes = self._copy_aside({part: c.pairs for part, c in counterparts.items() if part not in shared})
            # Of the denoiser's modules only shapes are read now.
            shared[denoiser] = self.backend.model.denoiser
            joined = model.with_parts(**shared)
            text = text or _text_phase(joined, self.backend)
            member = self._member(joined, weights, text, counterparts[denoiser].adaptable, shared)
            member.copied_bytes = copied_bytes
            synchronize(model.device)  # the lane's stream reads what this one wrote
            member.swap_s = self._lane.call(partial(self._timed_swap, weights[denoiser]))
            return member

    def _copy_aside(self, pairs: Mapping[str, Sequence[tuple[Tensor, Tensor]]]) -> int:
        """Copy what kernels read of parts whose weights are only there, before others take the place; returns the
        bytes.
        """
        built = {part: own for part in pairs if (own := self._built[part]()) is not None and not own.own}
        copies = {part: [(read, read.clone()) for read, _ in pairs[part]] for part in built}  # all, or none
        for part, weights in built.items():
            weights.fill(copies[part])
        return sum(weights.size_bytes for weights in built.values())

    @property
    def _lowerings(self) -> Mapping[str, CudaLowering]:
        return self.backend.lowerings

    def _member(
        self,
        model: ImageModel,
        weights: Mapping[str, Weights],
        text: Callable[..., Any],
        adaptable: AdaptableLayers,
        shared: Iterable[str],
    ) -> SwappedBackend:
        member = SwappedBackend(self, model, weights, text, adaptable, shared)
        self._members.add(member)
        return member

    def swap_in(self, part: str, weights: Weights) -> None:
        """Have the kernels of a part read these weights from the next forward on."""
        if not self.holds(part, weights):
            self._present[part] = weakref.ref(Weights())  # of no model, should a copy fail
            weights.copy_in()
            self._present[part] = weakref.ref(weights)

    @torch.inference_mode()
    def offload(self, weights: Weights) -> None:
        """Move a denoiser's weights to the host's memory. Their memory on the device is kept for the next ones: torch's
        allocator would give it to other streams only.
        """
        left = weights.own
        weights.keep(copy_to_host(left))
        self._spare[:] = [left]

    @torch.inference_mode()
    def onload(self, weights: Weights) -> None:
        """Move them back."""
        try:
            spare = self._spare.pop()
        except IndexError:  # none, or another thread took it
            spare = copy_to_device(weights.own, self.backend.model.device)
        else:
            refill(spare, weights.own)
        weights.keep(spare)

    def leave(self, member: SwappedBackend) -> None:
        """End recording if no other model is left. Not on the lane's thread."""
        with self._lock:
            self._members.discard(member)
            self._closed = not self._members
        if self._closed:
            self.recording.close()

    def _timed_swap(self, weights: Weights) -> float:
        """Seconds in which a denoiser's weights are swapped in. On the lane's thread."""
        model = self.backend.model
        synchronize(model.device)
        started = time.perf_counter()
        self.swap_in(model.family.denoiser, weights)
        synchronize(model.device)
        return time.perf_counter() - started

    def holds(self, part: str, weights: Weights) -> bool:
        """Return whether these weights are where the kernels read."""
        return self._present[part]() is weights


class SharedBackends:
    """The shared backends of a worker's models. A backend ends with the last of its models."""

    def __init__(self, lane: Lane) -> None:
        self.capacity: RequestCapacity | None = None  # of the requests of all models
        self._lane = lane
        self._shared: weakref.WeakSet[SharedBackend] = weakref.WeakSet()

    def backend_of(self, model: ImageModel, make: Callable[[], GraphBackend]) -> SwappedBackend:
        """Return the view of another model's backend, or else of what `make` builds. Raises what it raises."""
        for shared in [*self._shared]:
            if (member := shared.join(model)) is not None:
                return member
        shared = SharedBackend(make(), self._lane, self._busy)
        self._shared.add(shared)
        return shared.first()

    def _busy(self) -> bool:
        return self.capacity is not None and self.capacity.slots.taken > 0


class SwappedBackend(ImageBackend):
    """A model's view of a shared backend: its weights are swapped in before its forwards."""

    fixed_shapes = GraphBackend.fixed_shapes
    packs = GraphBackend.packs

    def __init__(
        self, shared: SharedBackend, model: ImageModel, weights: Mapping[str, Weights], text: Callable[..., Any],
        adaptable: AdaptableLayers, shared_parts: Iterable[str],
    ) -> None:  # fmt: skip
        """`weights` are by part. `text` is the phase `TEXT`; `adaptable` packs adapters. `shared_parts` are another
        model's too.
        """
        self._adaptable = adaptable
        self._shared, self._base = shared, shared.backend
        self.model, self.weights, self.shared_parts = model, weights, frozenset(shared_parts)
        self.denoiser, self.widths, self.graphs = self._base.denoiser, self._base.widths, self._base.graphs
        self.kernels, self.costs = self._base.kernels, self._base.costs
        self.phases = {
            name: _with_weights(shared, weights, _part(model, name), run) for name, run in self._base.phases.items()
        } | {TEXT: text}
        self.recording = shared.recording
        self.swap_s = 0.0  # that it takes to swap the denoiser in
        self.copied_bytes = 0  # of other models, for its sake

    def plan(self, group: BatchGroup, rows: int, *, live: bool = False) -> ExecutionPlan:
        plan, part = self._base.plan(group, rows, live=live), _part(self.model, group.phase)
        if part is None or self._shared.holds(part, self.weights[part]):
            return plan
        if live:  # now, rather than within the forward, which is timed
            self._shared.swap_in(part, self.weights[part])
        return plan._replace(seconds=plan.seconds + self.swap_s)

    def held_bytes(self) -> dict[str, int]:
        denoiser = self.model.family.denoiser
        own_bytes = self.weights[denoiser].size_bytes if denoiser in self.shared_parts else 0
        return {f"{denoiser} weights": own_bytes, "copied aside": self.copied_bytes}

    def offload(self, *, back: bool = False) -> bool:
        if not {*_modules(self.model)} <= self.shared_parts:
            return False  # text encoders are read where they are, and a VAE's encoder is a module
        (self._shared.onload if back else self._shared.offload)(self.weights[self.model.family.denoiser])
        return True

    def deterministic_mode(
        self, size: tuple[int, int], depth: str, decode: str, chunks: int = 1, *, controlled: bool = False
    ) -> str:
        return self._base.deterministic_mode(size, depth, decode, chunks, controlled=controlled)

    def lowering_for(self, network: Any) -> Lowering:
        return self._base.lowering_for(network)

    def executable(self, mode: str) -> str:
        return self._base.executable(mode)

    def prepare(self, size: tuple[int, int] | None = None, *, measure_s: float = 0.0) -> None:
        self._base.prepare(size, measure_s=measure_s)

    def adapt(self, owners: Sequence[tuple[ScaledAdapter, ...]], *, apart: bool) -> AbstractContextManager[None]:
        return self._base.adapt(owners, apart=apart)

    def pack_adapter(self, factors: Mapping[str, LowRank]) -> PackedAdapter:
        return self._adaptable.pack(factors)

    def forget_adapters(self) -> None:
        self._base.forget_adapters()

    def close(self) -> None:
        self._shared.leave(self)


def _part(model: ImageModel, phase: str) -> str | None:
    """The part that a phase runs, if its weights are swapped."""
    return model.family.denoiser if phase in (*STEPS, KEYS) else "vae" if phase == VAE else None


def _with_weights(
    shared: SharedBackend, weights: Mapping[str, Weights], part: str | None, run: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a phase that swaps the weights of its part in."""
    if part is None:
        return run

    def forward(*arguments: Any, **options: Any) -> Any:
        shared.swap_in(part, weights[part])
        return run(*arguments, **options)

    return forward


@torch.inference_mode()
def _run_all(backend: GraphBackend) -> None:
    """Run all that has weights once, kernel by kernel, so that each layer is met. On the lane's thread."""
    model = backend.model
    timer = PhaseTimer(model, backend.costs, backend.denoiser)
    for phase in (*STEPS, VAE):
        run = drop_text_input(backend.denoiser, phase, backend.phases[phase])
        timer.example(phase, 1, (model.native, model.native))(run)
    synchronize(model.device)


def _equal(
    name: str, member: SwappedBackend, model: ImageModel, weights: Mapping[str, Weights],
    lowerings: Mapping[str, CudaLowering],
) -> bool:  # fmt: skip
    """Return whether a part of another model, whose `weights` these are, is equal to a member's."""
    own, other = member.model.parts[name], model.parts[name]
    if _architecture(own) != _architecture(other):
        return False
    apart: tuple[str, ...] = ()
    if name in weights:
        if name == model.family.denoiser:  # it is what makes it another model
            return False
        held = member.weights[name]
        present = held if held.own else Weights(lowerings[name].counterparts(own, without=_ENCODER).pairs)
        if not present.equals(weights[name]):
            return False
        apart = _DECODER  # which the kernels read, and may be another model's now
    tensors, others = (
        {key: tensor for key, tensor in part.state_dict().items() if not key.startswith(apart)} for part in (own, other)
    )
    return tensors.keys() == others.keys() and all(_same(tensors[key], others[key]) for key in tensors)


def _modules(model: ImageModel) -> list[str]:
    """The parts that have weights."""
    return [name for name, part in model.parts.items() if isinstance(part, nn.Module)]


def _alike(model: ImageModel, other: ImageModel) -> bool:
    """Return whether a backend that was built for one model serves another, if its weights have the same shapes."""
    tiny, other_tiny = (None if each.tiny_vae is None else each.tiny_vae.digest for each in (model, other))
    plain = model.embed is None and other.embed is None
    if not plain or other_tiny not in (None, tiny) or model.family is not other.family:
        return False
    traits, others = ((each.precision, each.device, each.dtype, each.tiled_above) for each in (model, other))
    return traits == others and all(
        _architecture(model.parts[part]) == _architecture(other.parts[part]) for part in model.family.quantized
    )


def _architecture(part: Any) -> dict[str, Any]:
    """A part's configuration, of diffusers or transformers, without where it is from."""
    config = part.config.to_dict() if hasattr(part.config, "to_dict") else dict(part.config)
    return {name: value for name, value in config.items() if not name.startswith("_")}


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _flattened(read: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Both as words in the order of their memory, where they have no gaps: copies of small types are slow."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(read.shape, read.stride(), strict=True))
    if not read.numel() or extent != read.numel():
        return read, own
    pair = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in (read, own)]
    aligned = all(t.nbytes % _WORD == 0 and t.data_ptr() % _WORD == 0 for t in pair)
    return tuple(t.view(torch.int64 if aligned else torch.uint8) for t in pair)  # type: ignore[return-value]


def _text_phase(model: ImageModel, base: GraphBackend) -> Callable[..., Any]:
    """The phase `TEXT` of a model with text encoders of its own, in graphs of its own where the base has such."""
    embed = partial(model.family.embed, model)
    if model.family.padded:
        return embed

    def record(key: ExecutableKey, run: Callable[..., Any]) -> None:
        with torch.inference_mode():
            run(model.family.example_ids(model, key.rows))

    cache = GraphCache({TEXT: embed}, base.recorder, capacity=len(TEXT_WIDTHS))
    # Recorded while requests are running: the device is not to be waited for.
    return partial(embed_recorded, GraphSet(cache, {TEXT: TEXT_WIDTHS}, record, settles=False), model.device)
