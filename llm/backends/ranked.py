"""Runs rank 0's part of a model: tells the other ranks each batch, and has its own part computed by another backend."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from core.failures import DeviceLost
from core.kernels.kv_cache import TokenBatch
from core.ops.branches import LowRank, PackedAdapter
from llm.backends.backend import FUSED, TextBackend
from llm.backends.forward import Forward
from llm.parallel.followers import Followers
from llm.parallel.ranks import KEEP, LEAVE_S, PREPARE, Placed, StepMessage, pack

log = logging.getLogger(__name__)


class RankedBackend(TextBackend):
    """A model that is spread over ranks, of which this process is the first.

    Of a pipeline's micro-batches each has a lane, whose batches are told as they come and computed in that order: while
    one lane's batch is in the last stage, others' are in the stages before. An error in a batch is `DeviceLost`: the
    ranks no longer agree.
    """

    spread = True

    def __init__(self, backend: TextBackend, followers: Followers) -> None:
        """`backend` runs this rank's part; the followers have built theirs."""
        super().__init__(backend.model, backend.cache, backend.latest.table)
        self._backend, self._followers = backend, followers
        self.kind, self.group, self.kernels_reason = backend.kind, backend.group, backend.kernels_reason
        self._placed: deque[Placed] = deque()
        self.cache.mirror = self._placed
        self._told = threading.Lock()
        self._turn = threading.Condition()
        self._next, self._steps = 0, 0
        own_stream = self.model.device.type == "cuda" and followers.parallel.pipeline > 1
        self._stream = torch.cuda.Stream(self.model.device, priority=-1) if own_stream else None

    @property
    def kernels(self) -> str:
        return self._backend.kernels

    @property
    def size_bytes(self) -> int:
        return self._backend.size_bytes

    def pack(self, factors: Mapping[str, LowRank]) -> PackedAdapter:
        return self._backend.pack(factors)

    def release(self) -> None:
        self._backend.release()

    def prepare(self, sequences: int) -> None:
        self._followers.tell(pack(PREPARE, sequences))
        self._backend.prepare(sequences)

    def forward(self, batch: TokenBatch) -> Forward:
        if self.kind != FUSED:  # whose ranks have the latest tokens on their devices
            batch = self.latest.filled(batch)
        with self._agreeing():
            with self._told:
                number, self._steps = self._steps, self._steps + 1
                placed = [self._placed.popleft() for _ in range(len(self._placed))]
                self._followers.tell(StepMessage(batch, placed).pack())
            with self._in_turn(number):
                return self._backend.forward(batch) if self._stream is None else self._in_order(batch, self._stream)

    def _in_order(self, batch: TokenBatch, stream: torch.cuda.Stream) -> Forward:
        """Compute a batch on the stream of all lanes; results are copied, since another lane's batch comes next."""
        lane = torch.cuda.current_stream(self.model.device)
        stream.wait_stream(lane)
        with torch.cuda.stream(stream):
            forward = self._backend.forward(batch)
            logits = forward.logits if batch.logits else forward.logits[:0]
            copied = Forward(logits.clone(), _clone(forward.best), _clone(forward.states))
        lane.wait_stream(stream)
        for result in (copied.logits, copied.best, copied.states):
            if result is not None:
                result.record_stream(lane)
        return copied

    def keep(self, batch: TokenBatch, tokens: Tensor) -> None:
        assert self.group is not None
        with self._agreeing():
            self._followers.tell(pack(KEEP))
            self.latest.keep(batch, tokens)
            self.group.share(self.latest.table)

    def close(self) -> None:
        """End the other ranks."""
        self._backend.close()
        leaving = None if self.group is None else self.group.leave()
        self._followers.close()
        if leaving is not None:
            leaving.join(LEAVE_S)
            if leaving.is_alive():
                log.warning("%s: the group is left behind: a rank has not left it", self._followers.parallel)

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Make any error one of all ranks."""
        try:
            yield
        except Exception as error:
            self._followers.await_report()
            raise DeviceLost(f"{self._followers.parallel}: a step has failed ({error})") from error

    @contextmanager
    def _in_turn(self, number: int) -> Iterator[None]:
        """Wait for the steps that were told before."""
        with self._turn:
            self._turn.wait_for(lambda: self._next == number)
        try:
            yield
        finally:
            with self._turn:
                self._next += 1
                self._turn.notify_all()


def _clone(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()
