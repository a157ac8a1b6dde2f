"""CUDA graphs for static shapes: a callable's kernels are recorded once, and then replayed together.

The recording itself is a parameter (`Recorder`), so that a test without a GPU can run the same code. Not thread-safe
but for `CAPTURE_LOCK`, which the recorders of all threads share.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

T = TypeVar("T")

# Held during a capture and by waits for the whole device: such a wait fails while any of the device's streams is
# captured, and invalidates the capture (CUDA C++ Programming Guide, "Prohibited and Unhandled Operations").
CAPTURE_LOCK = threading.Lock()

_WARM = 2  # runs before recording: they compile kernels, choose algorithms and warm up the allocator


class Recorder(Protocol):
    """Records what a callable does on the device. All recordings of one recorder share memory: one runs at a time."""

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Run `function`; returns its replay function, and its result.

        A replay runs no Python of `function`: it repeats the same kernels on the same memory. It reads the tensors that
        were read then, and writes into the result's tensors, which hold its values until the next replay of any
        recording.
        """
        ...

    def settle(self) -> None:
        """Wait for the device and free memory needed only for recording: call after the last one, and after a failed
        one.

        Raises if the device is lost, and no later result could be trusted.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, all in one private memory pool, or in a new one after the last graph of one is gone."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Record on `stream`, whose priority graphs keep; default: one of its own."""
        self._device = device
        self._new_pool()
        # One stream for all recordings: cuBLAS keeps a workspace for each stream it has ever seen.
        self._stream = stream or torch.cuda.Stream(device)

    def _new_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()  # of this pool

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM):
                function()
            self._stream.synchronize()
            # Not `torch.cuda.graph`, which empties the allocator's cache each time: requests are served between
            # recordings. "thread_local": other threads may allocate meanwhile, e.g. the text model on its own stream.
            with CAPTURE_LOCK, without_collections():
                if not self._graphs:
                    self._new_pool()  # the last ended with the last of its graphs, and takes no other
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = function()
                    graph.capture_end()
                except BaseException:
                    self._give_up(graph)
                    raise
        self._graphs.add(graph)
        current.wait_stream(self._stream)
        return graph.replay, outputs

    @property
    def size_bytes(self) -> int:
        """The memory of its graphs."""
        return sum(int(segment["total_size"]) for segment in torch.cuda.memory_snapshot(self._pool))

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a capture that is still empty
                graph.capture_end()
        except RuntimeError:
            # A capture that CUDA aborted, e.g. at an operation it cannot record, leaves the pool unusable for another.
            self._new_pool()

    def settle(self) -> None:
        with CAPTURE_LOCK:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()


@contextmanager
def without_collections() -> Iterator[None]:
    """Context: no garbage is collected. A graph among it would be destroyed on this thread, which ends its capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CapturedGraph:
    """One recorded callable, at the shapes of its recorded arguments."""

    def __init__(
        self, function: Callable[..., Any], arguments: Any, options: Mapping[str, Any], recorder: Recorder
    ) -> None:
        """Record `function(*arguments, **options)` on copies of the tensors among them."""
        leaves, self._form = tree_flatten((tuple(arguments), dict(options)))
        self._static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        # The last copied tensors, kept alive so that no other tensor can get their address while it is compared.
        self._last: list[Any] = [None] * len(leaves)
        inputs, named = tree_unflatten(self._static, self._form)
        self._replay, self._made = recorder.record(lambda: function(*inputs, **named))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """The callable's result, in memory that the next replay of any of the recorder's graphs overwrites.

        Tensors that are the same objects as in the previous call are taken as unchanged. Raises ValueError for
        arguments of other structure, shapes or types than recorded.
        """
        leaves, form = tree_flatten((arguments, options))
        if form != self._form:
            raise ValueError("the arguments differ in structure from the recorded ones")
        for i, (value, buffer, last) in enumerate(zip(leaves, self._static, self._last, strict=True)):
            if not isinstance(buffer, torch.Tensor):
                if value != buffer:
                    raise ValueError(f"argument {i} is {value!r}, but {buffer!r} was recorded")
            elif value is not last:
                if value.shape != buffer.shape or value.dtype != buffer.dtype:
                    new, recorded = (f"{t.dtype} {[*t.shape]}" for t in (value, buffer))
                    raise ValueError(f"argument {i} is {new}, but {recorded} was recorded")
                buffer.copy_(value)
                self._last[i] = value
        self._replay()
        return self._made


class GraphCache:
    """Recorded callables by phase and shape; the least recently used are dropped beyond `capacity`."""

    def __init__(
        self, phases: Mapping[str, Callable[..., Any]], recorder: Recorder | None, *, capacity: int = 128
    ) -> None:
        """Create a cache; without a recorder, as on a device without CUDA graphs, callables are called directly."""
        self._phases = phases
        self._recorder = recorder
        self.capacity = capacity
        self._known: OrderedDict[Hashable, CapturedGraph] = OrderedDict()

    @property
    def records(self) -> bool:
        """Return whether it records at all."""
        return self._recorder is not None

    def has(self, phase: str, shape: Hashable) -> bool:
        """Return whether this shape is recorded. Thread-safe."""
        return (phase, shape) in self._known

    def record(self, phase: str, shape: Hashable, *arguments: Any, **options: Any) -> None:
        """Record the phase's callable on these arguments, unless it is recorded. Raises the callable's errors, keeping
        nothing.
        """
        key = (phase, shape)
        if self._recorder is None or key in self._known:
            return
        while len(self._known) >= self.capacity:
            self._known.popitem(last=False)
        self._known[key] = CapturedGraph(self._phases[phase], arguments, options, self._recorder)

    def settle(self) -> None:
        """The recorder's `settle`: call after the last recording, and after one that failed."""
        if self._recorder is not None:
            self._recorder.settle()

    def run(self, phase: str, shape: Hashable, *arguments: Any, **options: Any) -> Any:
        """Run the phase's callable: replayed if this shape is recorded, else called.

        `shape` distinguishes what needs separate recordings.
        """
        captured = self._known.get((phase, shape))
        if captured is None:
            return self._phases[phase](*arguments, **options)
        self._known.move_to_end((phase, shape))
        return captured(*arguments, **options)

    def __len__(self) -> int:
        return len(self._known)
