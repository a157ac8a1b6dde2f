"""A recorder for tests without a GPU: what a CUDA graph means, held to more strictly than a GPU holds it.

It records the tensor operations of a callable and replays them on the same memory, without running its Python again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class Tape:
    """A `Recorder` on any device. As with CUDA graphs a value that the host reads cannot be recorded, the results of a
    recording hold nothing before its first replay, and those of every other one are overwritten by each replay: with
    NaN here, so that whoever still reads them is found out.
    """

    def __init__(self) -> None:
        self.recordings = 0
        self.replays = 0
        self.settled = 0
        self._results: list[list[torch.Tensor]] = []

    def record(self, function: Callable[[], T]) -> tuple[Callable[[], None], T]:
        function()  # as CUDA's is warmed up: lazily made buffers are there before
        with _Operations() as operations:
            made = function()
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self._results.append(results)
        self.recordings += 1
        self._spoil()

        def replay() -> None:
            self.replays += 1
            self._spoil()
            with torch.inference_mode():
                operations.replay()

        return replay, made

    def settle(self) -> None:
        self.settled += 1

    def _spoil(self) -> None:
        with torch.inference_mode():
            for results in self._results:
                for tensor in results:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


class _Operations(TorchDispatchMode):
    """The operations that run while it is entered, in order, with the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value is read by the host while a graph is recorded")
        made = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for function, args, kwargs, made in self._calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                # Views and what is written in place lie where they lay.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
