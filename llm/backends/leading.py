"""Rank 0's execution: tells the other ranks each step, and computes its own part of it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from core.failures import DeviceLost
from core.kernels.kv_cache import TokenBatch
from llm.backends.execution import TextExecution
from llm.checkpoints.load import TextModel
from llm.parallel.followers import Followers
from llm.parallel.ranks import KEEP, LEAVE_S, PREPARE, Placed, StepMessage, pack

log = logging.getLogger(__name__)


class LeadingExecution(TextExecution):
    """`TextExecution` of rank 0. Of a pipeline's micro-batches each has a lane, whose steps are told as they come and
    computed in that order: while one lane's step is in the last stage, others' are in the stages before.

    An error in a step is `DeviceLost`: the ranks no longer agree.
    """

    def __init__(self, model: TextModel, followers: Followers, **options: Any) -> None:
        """Raises `TextModelError`."""
        self._followers = followers
        super().__init__(model, **options, group=followers.join(options))
        followers.ready()
        self._placed: deque[Placed] = deque()
        self.cache.mirror = self._placed
        self._told = threading.Lock()
        self._turn = threading.Condition()
        self._next, self._steps = 0, 0
        self._own = threading.local()  # of a pipeline's lane: what its last step gave
        cuda = model.device.type == "cuda"
        self._stream = torch.cuda.Stream(model.device, priority=-1) if cuda and self.pipelined else None

    @property
    def pipelined(self) -> bool:
        return self._followers.parallel.pipeline > 1

    def prepare(self, sequences: int) -> None:
        self._followers.tell(pack(PREPARE, sequences))
        super().prepare(sequences)

    def __call__(self, step: TokenBatch) -> Tensor:
        step = self.with_known_tokens(step)
        with self._agreeing():
            with self._told:
                number, self._steps = self._steps, self._steps + 1
                placed = [self._placed.popleft() for _ in range(len(self._placed))]
                self._followers.tell(StepMessage(step, placed).pack())
            with self._in_turn(number):
                return self._computed(step) if self.pipelined else super().__call__(step)

    @property
    def best(self) -> Tensor | None:
        return self._own.best if self.pipelined else super().best

    @property
    def states(self) -> Tensor | None:
        return self._own.states if self.pipelined else super().states

    def _computed(self, step: TokenBatch) -> Tensor:
        """A step on the stream of all lanes; its results are copied, since another lane's step comes next."""
        logits: Tensor | None
        if self._stream is None:
            logits = super().__call__(step)
            self._own.best, self._own.states = super().best, super().states
            return logits
        lane = torch.cuda.current_stream(self.model.device)
        self._stream.wait_stream(lane)
        with torch.cuda.stream(self._stream):
            whole = super().__call__(step)
            results = (whole if step.logits else whole[:0], super().best, super().states)
            logits, self._own.best, self._own.states = (None if x is None else x.clone() for x in results)
        lane.wait_stream(self._stream)
        for result in (logits, self._own.best, self._own.states):
            if result is not None:
                result.record_stream(lane)
        assert logits is not None
        return logits

    def keep(self, step: TokenBatch, tokens: Tensor) -> None:
        assert self.group is not None
        with self._agreeing():
            self._followers.tell(pack(KEEP))
            super().keep(step, tokens)
            self.group.share(self.latest)

    def close(self) -> None:
        """End the other ranks."""
        super().close()
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
