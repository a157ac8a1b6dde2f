"""The ranks that run one text model together: their process group, and the steps that rank 0 tells the others."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from core.kernels.cuda.exchange_kernel import Exchange
from core.kernels.kv_cache import TokenBatch
from core.ops.collectives import Peers
from llm.parallel.shards import Rank

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
# Of one operation by gloo, and of the first meeting. A rank that ends is noticed at once, by its socket.
_TIMEOUT = timedelta(seconds=120)
LEAVE_S = 5.0  # for all ranks to leave the group
STEP, KEEP, PREPARE, CLOSE = range(4)  # kinds of messages
Placed = tuple[int, int, list[int]]  # a sequence, the first of its pages that are set, and these


def open_store() -> TCPStore:
    """The store in which ranks find each other, on a free port of this host."""
    return TCPStore(_HOST, 0, None, True, timeout=_TIMEOUT, wait_for_workers=False)


class RankGroup:
    """One process's membership: its peers in a layer, and its neighbours in the pipeline."""

    def __init__(self, rank: Rank, device: torch.device, store: TCPStore | int) -> None:
        """Join by the store, or by its port. Waits for the other ranks."""
        self.rank, self.device = rank, device
        store = TCPStore(_HOST, store, None, False, timeout=_TIMEOUT) if isinstance(store, int) else store
        self._store = store  # in which the backends find each other until the end
        connect = _nccl if device.type == "cuda" else _gloo
        self._world, stage = connect(rank, device, store)
        self.peers = Peers(stage, rank.tensor, rank.parallel.tensor)
        self._stage = stage

    def open_exchange(self, width: int, dtype: torch.dtype) -> None:
        """Sum rows of so many channels in symmetric memory from now on, if that works on all ranks of the stage."""
        if self.device.type != "cuda" or self.peers.size == 1:
            return
        exchange, reason = None, ""
        try:
            exchange = Exchange.over(self._stage, width, dtype, self.device)
        except Exception as error:  # of torch or the driver
            reason = f"{type(error).__name__}: {error}"
        if not self._all(exchange is not None) or exchange is None:  # else one would wait for others
            reason = reason or "another rank has no symmetric memory"
        elif not (reason := exchange.check(self._all)):
            self.peers.exchange = exchange
            return
        log.warning("%s sums by NCCL: %s", self.rank, reason)

    def _all(self, yes: bool) -> bool:
        """Whether all ranks of the stage say so."""
        answers = self.peers.gather(torch.tensor([int(yes)], dtype=torch.int32, device=self.device))
        return bool((answers > 0).all())

    @property
    def sums(self) -> str:
        """How sums over the ranks of a stage are computed."""
        if self.peers.size == 1:
            return "none"
        return "symmetric" if self.peers.exchange is not None else "nccl" if self.device.type == "cuda" else "gloo"

    def all_reduce(self, x: Tensor) -> None:
        """The backend's own sum over the stage, in place, in its own order: what ours is compared with."""
        self._stage.allreduce([x]).wait()

    def receive(self, x: Tensor) -> Tensor:
        """Fill x with the activations of the stage before."""
        self._world.recv([x], self.rank.before, 0).wait()
        return x

    def send(self, x: Tensor) -> None:
        """Give activations to the stage after."""
        self._world.send([x.contiguous()], self.rank.after, 0).wait()

    def share(self, x: Tensor) -> None:
        """Replace x by rank 0's, in all ranks."""
        self._world.broadcast(x, 0).wait()

    def leave(self) -> threading.Thread:
        """Leave the group on a thread, as all ranks do at once: NCCL waits for the others and for graphs that hold its
        operations. Whoever ends the process bounds the wait.
        """
        leave = dist.destroy_process_group if self.device.type == "cuda" else lambda: None
        thread = threading.Thread(target=leave, name="leave", daemon=True)
        thread.start()
        return thread


def _gloo(rank: Rank, device: torch.device, store: Store) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The group of all ranks, and that of the rank's stage."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_HOST)]
    options._timeout = _TIMEOUT

    def group(name: str, number: int, size: int) -> dist.ProcessGroup:
        backend = gloo(PrefixStore(name, store), number, size, options)
        return cast("dist.ProcessGroup", backend)

    world = group("world", rank.number, rank.parallel.ranks)
    return world, group(f"stage {rank.stage}", rank.tensor, rank.parallel.tensor)


def _nccl(rank: Rank, device: torch.device, store: Store) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The same; one of a process, since symmetric memory knows groups by their names."""
    # NVLink multicast stays off: it gains nothing for the few rows of a step of decoding.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.set_device(device)
    size, tensor = rank.parallel.ranks, rank.parallel.tensor
    dist.init_process_group("nccl", store=store, rank=rank.number, world_size=size, timeout=_TIMEOUT)
    stages = [dist.new_group([*range(first, first + tensor)]) for first in range(0, size, tensor)]
    assert dist.group.WORLD is not None
    return dist.group.WORLD, stages[rank.number // tensor]


def shared_(network: Any, group: RankGroup) -> None:
    """Make a rank's network, run by torch, sum what its layers give over the ranks, and join their logits."""
    peers, vocabulary = group.peers, int(network.config.vocab_size)
    if peers.size == 1:
        return

    def summed(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return peers.sum(output)

    def joined(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return peers.whole(output[0], vocabulary)[None]

    for layer in network.model.layers:
        layer.self_attn.o_proj.register_forward_hook(summed)
        layer.mlp.down_proj.register_forward_hook(summed)
    if group.rank.last:
        network.lm_head.register_forward_hook(joined)


class StageLink:
    """A stage's hidden states at fixed addresses: those that it reads, and those that the next one does."""

    def __init__(self, group: RankGroup, rows: int, width: int, dtype: torch.dtype) -> None:
        self._group = group
        first, last = group.rank.first, group.rank.last
        self._before = None if first else torch.zeros(rows, width, dtype=dtype, device=group.device)
        self._after = None if last else torch.zeros(rows, width, dtype=dtype, device=group.device)

    def of(self, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """Both, of so many rows; None of the first and the last stage."""
        return (
            None if self._before is None else self._before[:rows],
            None if self._after is None else self._after[:rows],
        )

    def receive(self, rows: int) -> None:
        if self._before is not None:
            self._group.receive(self._before[:rows])

    def send(self, rows: int) -> None:
        if self._after is not None:
            self._group.send(self._after[:rows])


class StepMessage(NamedTuple):
    """A step as rank 0 tells it, and the pages that were placed since the last one."""

    step: TokenBatch
    placed: list[Placed]

    def pack(self) -> bytes:
        """One array of int32: the kind, five lengths, and the parts."""
        step = self.step
        parts = [step.tokens, step.positions, step.sequences, step.output_rows]
        states = step.state_rows if step.state_rows is not None else torch.empty(0, dtype=torch.int32)
        placed = [number for sequence, start, pages in self.placed for number in (sequence, start, len(pages), *pages)]
        head = [STEP, len(step.tokens), len(step.output_rows), len(states), len(placed), step.logits]
        numbers = [head, *(part.numpy() for part in (*parts, states)), placed]
        return np.concatenate([np.asarray(part, np.int32) for part in numbers]).tobytes()

    @classmethod
    def unpack(cls, message: bytes) -> StepMessage:
        numbers = np.frombuffer(bytearray(message), np.int32)
        _, rows, outputs, states, placed, logits = numbers[:6].tolist()
        sizes = (6, rows, rows, rows, outputs, states, placed)
        _, *parts, pages, _ = np.split(numbers, np.cumsum(sizes))
        tokens, positions, sequences, output_rows, state_rows = (torch.from_numpy(part) for part in parts)
        step = TokenBatch(
            tokens, positions, sequences, output_rows, state_rows if states else None, logits=bool(logits)
        )
        return cls(step, list(_placed(pages.tolist())))


def _placed(numbers: list[int]) -> Iterable[Placed]:
    at = 0
    while at < len(numbers):
        sequence, start, count = numbers[at : at + 3]
        yield sequence, start, numbers[at + 3 : at + 3 + count]
        at += 3 + count


def pack(kind: int, value: int = 0) -> bytes:
    """A message without a step."""
    return np.array([kind, value], np.int32).tobytes()


def kind_of(message: bytes) -> tuple[int, int]:
    """The kind of a message, and the number behind it."""
    kind, value = np.frombuffer(message, np.int32, 2).tolist()
    return kind, value
