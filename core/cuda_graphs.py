"""CUDA graphs for static shapes: a callable's kernels are recorded once, and then started all together.

Knows callables and tensors; knows nothing of what is computed. To be used by one thread at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

_WARM = 2  # runs before recording: they compile kernels, choose algorithms and fill the allocator


class Captured:
    """One callable at the shapes of the arguments that it was made with."""

    def __init__(self, function: Callable[..., Any], arguments: Any, options: Mapping[str, Any], pool: Any) -> None:
        """Runs `function(*arguments, **options)` to record it. `pool` is memory that graphs share."""
        leaves, self._form = tree_flatten((tuple(arguments), dict(options)))
        self._static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._last = list(leaves)
        given, named = tree_unflatten(self._static, self._form)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                function(*given, **named)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.current_stream().synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: another panel on its own stream.
        with torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            self._made = function(*given, **named)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What the callable returns, in memory that the next call of any graph of the pool overwrites.

        Tensors that are the very ones of the call before are taken to hold what they held. Raises ValueError for
        arguments of other forms or shapes than those recorded.
        """
        leaves, form = tree_flatten((arguments, options))
        if form != self._form:
            raise ValueError("the arguments have another form than those that were recorded")
        for i, (given, own, last) in enumerate(zip(leaves, self._static, self._last, strict=True)):
            if not isinstance(own, torch.Tensor):
                if given != own:
                    raise ValueError(f"argument {i} is {given!r}, and {own!r} was recorded")
            elif given is not last:
                if given.shape != own.shape:
                    raise ValueError(f"argument {i} is {[*given.shape]}, and {[*own.shape]} was recorded")
                own.copy_(given)
                self._last[i] = given
        self._graph.replay()
        return self._made


class Graphs:
    """Callables by phase, recorded when a shape is first met; the least recently used are let go beyond `capacity`."""

    def __init__(self, phases: Mapping[str, Callable[..., Any]], device: torch.device, *, capacity: int = 128) -> None:
        """On a device that records no graphs the callables are simply called."""
        self._phases = phases
        self._capacity = capacity
        self._known: OrderedDict[Hashable, Captured] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, phase: str, shape: Hashable, *arguments: Any, **options: Any) -> Any:
        """The phase's callable on these arguments. `shape` tells apart what one recording cannot serve."""
        if self._pool is None:
            return self._phases[phase](*arguments, **options)
        key = (phase, shape)
        captured = self._known.get(key)
        if captured is None:
            while len(self._known) >= self._capacity:
                self._known.popitem(last=False)
            captured = self._known[key] = Captured(self._phases[phase], arguments, options, self._pool)
        self._known.move_to_end(key)
        return captured(*arguments, **options)

    def __len__(self) -> int:
        return len(self._known)
