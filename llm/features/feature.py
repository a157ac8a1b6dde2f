"""The interface of what a text request may ask for besides a plain answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from core.batching.request import Outcome, Request
from llm.backends.backend import TextBackend
from llm.cache.kv_allocator import KVAllocator
from llm.cache.pages import PageAllocator
from llm.checkpoints.load import TextModel
from llm.drafts.speculator import Speculator
from llm.features.adapters import AdapterSource
from llm.model_runner import ModelRunner
from llm.parameters import TextParameters
from llm.sequence import SequenceState
from llm.step import Reader, Share, StepResult
from llm.step_planner import StepPlanner


@dataclass(frozen=True, eq=False)
class RunnerParts:
    """The parts of a runner that features work with. At most so many `sequences` run at once, in so many `rows`."""

    model: TextModel
    backend: TextBackend
    pages: PageAllocator
    allocator: KVAllocator
    planner: StepPlanner
    guessing: Speculator
    model_runner: ModelRunner
    adapters: Callable[[], AdapterSource | None]
    sequences: int
    rows: int

    def publish(self, sequence: SequenceState, computed: int) -> None:
        """Let others find the pages of a sequence's `computed` tokens, as far as the drafter has read them too."""
        self.allocator.publish(sequence, min(computed, sequence.drafted) if self.guessing.active else computed)


class SequenceFeature:
    """One kind of what requests ask for, of one runner. Each kind overrides the methods that it needs.

    Only the features that a request asks for are called for its sequence: their names are its `uses`.
    """

    name: ClassVar[str]
    reader: ClassVar[Reader | None] = None  # which reads the logits, or the hidden states, of forwards
    resource: ClassVar[str] = ""  # what its requests may have to wait for

    def __init__(self, parts: RunnerParts) -> None:
        self.parts = parts

    def is_requested(self, parameters: TextParameters) -> bool:
        """Return whether a request asks for it."""
        raise NotImplementedError

    def check(self, request: Request) -> None:
        """Check a request that asks for it, on the thread that submits it. Raises `Invalid`."""

    def options(self, request: Request) -> Mapping[str, Any]:
        """Return the arguments of `SequenceState` for a checked request."""
        return {}

    def admit(self, sequence: SequenceState, *, wait: bool) -> bool:
        """Reserve what a sequence needs until `release`. False: not yet; without `wait` nobody will give any back."""
        return True

    def release(self, sequence: SequenceState) -> None:
        """Give back what was reserved, if anything was: the sequence has left the cache."""

    def rows(self, sequence: SequenceState, rows: int) -> int:
        """Return the rows of the sequence's next step, which would have so many."""
        return rows

    def reserve(self, sequence: SequenceState) -> bool | None:
        """Have pages for the next step. False: there are too few; None: there are enough beside the usual ones."""
        return None

    def deferred(self, requests: Sequence[Request], forward_s: float) -> Collection[str]:
        """Return the ids of those requests of a step that are to wait for a later one, never all of them.

        `forward_s` is what the step's forward is expected to take.
        """
        return ()

    def shares(self, sequence: SequenceState) -> list[Share] | None:
        """Return the shares of the sequence in its next step; None: the usual one."""
        return None

    def take(self, sequence: SequenceState, result: StepResult) -> None:
        """Take its part of a share's result, which has no error, before the tokens are taken."""

    def outcome(
        self, sequence: SequenceState, shares: Sequence[Share], results: Sequence[StepResult]
    ) -> Outcome | None:
        """Commit results without errors in place of `llm.commit`; None: it does not."""
        return None

    def close(self) -> None:
        """End its threads and processes."""
