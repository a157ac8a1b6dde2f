"""The text modality's Runner for the engine.

Prefill runs in chunks and decode token by token, all in one forward whose rows are tokens: a long prompt never delays
running answers. The scheduler decides order and width.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

from contract.errors import UNSUPPORTED, Invalid
from contract.text import EMBEDS_ONLY
from core.batching.cost import CostTable
from core.batching.request import Outcome, Request
from core.batching.runner import Lane, LaneTicket, NotYet
from core.kernels.kv_cache import Kind
from llm import parameters
from llm.backends.backend import FUSED, TextBackend
from llm.backends.select import select, select_ranked
from llm.cache.kv_allocator import KVAllocator
from llm.cache.pages import PAGE, PageAllocator
from llm.checkpoints.load import TextModel, TextModelError
from llm.commit import commit
from llm.drafts.drafter import Drafter, DrafterFactory, LookupDrafter, ModelDrafter
from llm.drafts.speculate import MOST_AT_ONCE
from llm.drafts.speculator import Speculator
from llm.features.adapters import AdapterSource
from llm.features.feature import RunnerParts, SequenceFeature
from llm.features.registry import FEATURES
from llm.lane import StreamLane, high_priority
from llm.model_runner import ModelRunner, StepHandle
from llm.parallel.followers import Followers
from llm.parallel.micro_batches import MicroBatches
from llm.sequence import SequenceState
from llm.step import Share, StepResult
from llm.step_planner import DECODE, PREFILL, StepPlanner
from llm.text.detokenizer import Detokenizer

GROUP = "text"
_GUESS_S = 0.005  # of an iteration, before anything was measured
_ROWS, _GPU_ROWS = (192, 64), (2048, 512)  # of a forward, and of one prompt in it


class TextRunner:
    """Generates text with one model on one lane."""

    modality = "text"

    def __init__(
        self,
        model: TextModel,
        *,
        lane: Lane | None = None,
        max_requests: int = 64,
        max_rows: int | None = None,
        chunk: int | None = None,
        pages: int | None = None,
        context: int | None = None,
        kv: Kind = "float",
        kernels: ctypes.CDLL | None = None,
        draft: TextModel | Literal["lookup"] | DrafterFactory | None = None,
        patience_s: float = 2.0,
        pace_s: float = 0.1,
        ahead: bool | None = None,
        followers: Followers | None = None,
    ) -> None:
        """`max_rows` limits the tokens of one forward, `chunk` those of one prompt in it, `pages` the KV cache.

        `context` limits one request's tokens; default: the model's own. `draft` enables speculative decoding: a smaller
        model of the same vocabulary, "lookup" for prompt lookup, or a drafter's weights. Latency objectives: the first
        token within `patience_s`, the others every `pace_s`. `ahead`: iterations are submitted before the tokens of
        those before are known, see `ModelRunner`; default: on a GPU, without speculation. `followers`: the other ranks
        of a model of which `model` is rank 0's part. Raises `TextModelError`.
        """
        self.model = model
        self.adapters: AdapterSource | None = None  # of this model
        self.context = min(context or model.context, model.context)
        self.patience_s, self.pace_s = patience_s, pace_s
        self.pages = PageAllocator(
            pages or max_requests * -(-self.context // PAGE) // 2 + 1, lookahead=getattr(draft, "lookahead", 0)
        )
        self._lane = lane or Lane("text")
        self._own_lane = lane is None
        self.overlaps = isinstance(lane, StreamLane)
        self._on_cpu = model.device.type == "cpu"
        usual = _ROWS if self._on_cpu else _GPU_ROWS
        chunk = chunk or usual[1]
        self._max_rows = max(max_rows or usual[0], chunk, MOST_AT_ONCE + 1)

        size: dict[str, Any] = {
            "pages": self.pages.capacity, "sequences": max_requests, "context": self.context, "rows": self._max_rows,
            "kv": kv,
        }  # fmt: skip
        if followers is not None and (names := getattr(draft, "features", ())):
            raise TextModelError(f"text_draft: reads layers {names}, which are spread over GPUs; take lookup or none")
        self.execution = (
            select(model, **size, kernels=kernels, features=getattr(draft, "features", ()))
            if followers is None
            else select_ranked(model, followers, **size)
        )
        self.guessing = Speculator(_drafter(draft, self.execution, **size, kernels=kernels))
        self.pipeline = stages = 1 if followers is None else followers.parallel.pipeline
        # Of a pipeline other micro-batches run meanwhile.
        self._ahead = (self.execution.kind == FUSED if ahead is None else ahead) and stages == 1
        self._model_runner = ModelRunner(self.execution, self.guessing, ahead=self._ahead)
        self._lanes = {GROUP: (self._lane, self._model_runner)}
        for number in range(1, MicroBatches.count(stages)):
            name = f"{GROUP} {number}"
            further = StreamLane(name, model.device) if self.overlaps else Lane(name)
            self._lanes[name] = further, ModelRunner(self.execution, self.guessing)
        self._micro_batches = MicroBatches([*self._lanes])
        self._sequences = max_requests
        self._allocator = KVAllocator(self.execution.cache, self.pages, sequences=max_requests)
        Detokenizer(model.tokenizer)  # builds the table of its tokens here, not on the engine's thread
        self._costs = CostTable(guess_s=_GUESS_S)
        self._forwards = CostTable(guess_s=_GUESS_S)  # the same without masks
        self._planner = StepPlanner(self.guessing, self._costs[GROUP], chunk=chunk, pace_s=pace_s)
        self._parts = RunnerParts(
            model, self.execution, self.pages, self._allocator, self._planner, self.guessing, self._model_runner,
            lambda: self.adapters, max_requests, self._max_rows,
        )  # fmt: skip
        self._features = {kind.name: kind(self._parts) for kind in FEATURES}
        for _, model_runner in self._lanes.values():
            model_runner.readers = {n: each.reader for n, each in self._features.items() if each.reader is not None}
        self._scarce = [feature for feature in self._features.values() if feature.resource]
        self._deferring = [
            feature for feature in self._features.values() if type(feature).deferred is not SequenceFeature.deferred
        ]

    # -- called by the scheduler ------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        text_parameters = request.parameters
        if not isinstance(text_parameters, parameters.TextParameters):
            raise Invalid("parameters", f"must be TextParameters, not {type(text_parameters).__name__}")
        limit = min(self.context, self.pages.tokens)
        parameters.check(text_parameters, vocabulary=self.model.vocabulary, context=limit)
        if text_parameters.max_tokens and not self.model.generates:
            raise Invalid("model", EMBEDS_ONLY, UNSUPPORTED)
        for feature in self._features.values():
            if feature.is_requested(text_parameters):
                feature.check(request)

    def resources(self, request: Request) -> frozenset[str]:
        return frozenset(each.resource for each in self._scarce if each.is_requested(request.parameters))

    def admit(self, request: Request) -> NotYet | None:
        if self._allocator.full:
            return NotYet()
        work: SequenceState = request.work or self._sequence(request)
        try:
            for feature in self._uses(work):
                if not feature.admit(work, wait=self._allocator.held > 0):
                    self._give_back(work)
                    return NotYet(feature.resource)
            if not self._allocator.allocate(work):
                self._give_back(work)
                return NotYet()
        except BaseException:  # the request ends, without a `release`: it was not admitted
            self._give_back(work)
            raise
        request.work = work
        self._micro_batches.add(request.id)
        self._planner.plan(request)
        return None

    def release(self, request: Request) -> None:
        self.preempt(request)
        request.work = None

    def preempt(self, request: Request) -> None:
        self._micro_batches.release(request.id)
        work: SequenceState = request.work
        work.pending = None  # it will be drawn again, the same
        self._allocator.free(work)
        self._give_back(work)

    def _uses(self, sequence: SequenceState) -> Iterator[SequenceFeature]:
        """The features that a sequence was asked for."""
        return map(self._features.__getitem__, sequence.uses)

    def _give_back(self, sequence: SequenceState) -> None:
        for feature in self._uses(sequence):
            feature.release(sequence)

    def reserve(self, requests: Sequence[Request]) -> bool:
        spare = self.guessing.ahead and self.pages.free > 4 * len(requests)
        for request in requests:
            work: SequenceState = request.work
            if work.uses:
                answers = [feature.reserve(work) for feature in self._uses(work)]
                if False in answers:
                    return False
                if True in answers:  # it has all pages that it needs
                    continue
            if spare and work.guesses:  # the device may make the next guesses too
                self._allocator.grow(work, min(work.computed + 2 * work.guesses + 2, self.context))
            room = len(work.holding.pages) * PAGE - work.computed
            # Of one that decodes, as most of hundreds do, one row, unless it has guesses.
            rows = 1 if request.phase == DECODE and not work.guesses else self.rows(request)
            if rows > room and not work.complete and not self._allocator.grow(work, work.computed + rows):
                return False
        return True

    def held(self) -> int:
        return self._allocator.held

    def group(self, request: Request) -> str:
        return self._micro_batches.of(request.id)

    def rows(self, request: Request) -> int:
        work: SequenceState = request.work
        rows = 1 + work.guesses if request.phase == DECODE else min(self._planner.chunk, work.unread)
        for feature in self._uses(work):
            rows = feature.rows(work, rows)
        return rows

    def iterations(self, request: Request) -> int:
        work: SequenceState = request.work
        chunks = -(-work.unread // self._planner.chunk) if request.phase == PREFILL else 0
        return chunks + work.parameters.max_tokens - work.answered

    def left_s(self, request: Request, rows: int) -> float:
        return self.iterations(request) * self.cost(GROUP, rows)

    def next_group(self, request: Request) -> None:
        """The end of an answer cannot be predicted."""

    def limit(self, group: Hashable) -> int:
        return self._max_rows

    def lane_of(self, group: Hashable) -> str:
        return str(group)

    def cost(self, group: Hashable, rows: int) -> float:
        return self._costs[GROUP](rows)

    # -- one iteration ---------------------------------------------------------------------------------------------

    def launch(self, requests: Sequence[Request]) -> LaneTicket:
        lane, model_runner = self._lanes[self.group(requests[0])]
        waiting = self._deferred(requests)
        requests = [request for request in requests if request.id not in waiting] if waiting else requests
        planned = [self._shares(request) for request in requests]
        shares = [share for each in planned for share in each]

        def compute() -> StepHandle:
            handle = model_runner(shares)
            handle.collect()
            return handle

        def take_in(handle: StepHandle) -> dict[str, Outcome]:
            started = time.perf_counter()
            outcomes, at = dict[str, Outcome](), 0
            for request, own in zip(requests, planned, strict=True):
                end = at + len(own)
                outcomes[request.id] = self._commit(request.work, handle.shares[at:end], handle.results[at:end])
                at = end
            going = [r for r in requests if not outcomes[r.id].finished and outcomes[r.id].error is None]
            self._planner.plan_all(going, decoding=sum(share.last for share in shares))
            ahead = any(result.pending is not None for result in handle.results)  # the device computed meanwhile
            host_s = 0.0 if ahead else time.perf_counter() - started
            for rows, seconds, masks_s in handle.timings:
                self._costs[GROUP].observe(rows, seconds + host_s)
                self._forwards[GROUP].observe(rows, seconds - masks_s)
                self.guessing.observe(rows, seconds - masks_s)
            return outcomes | waiting

        return lane.start(compute, take_in)

    def _deferred(self, requests: Sequence[Request]) -> dict[str, Outcome]:
        """Return the requests that are left out of this step, with the outcomes of none."""
        uses = {name for request in requests for name in request.work.uses}
        deferring = [feature for feature in self._deferring if feature.name in uses]
        if not deferring:  # most steps of most servers
            return {}
        forward_s = self._forwards[GROUP](sum(map(self.rows, requests)))
        return {id: Outcome() for feature in deferring for id in feature.deferred(requests, forward_s)}

    def _shares(self, request: Request) -> list[Share]:
        """The request's shares of a step: one, unless a feature has others."""
        sequence: SequenceState = request.work
        if sequence.uses:
            for feature in self._uses(sequence):
                if (shares := feature.shares(sequence)) is not None:
                    return shares
        if request.phase == DECODE:
            complete = sequence.pending is not None and sequence.complete
            return [Share(sequence, sequence.computed, 0 if complete else 1, not complete)]
        count = self.rows(request)
        return [Share(sequence, sequence.computed, count, sequence.computed + count == len(sequence.tokens))]

    def _commit(self, sequence: SequenceState, shares: Sequence[Share], results: Sequence[StepResult]) -> Outcome:
        """Take in a request's results."""
        for result in results:
            if result.error is not None:
                return Outcome(error=result.error)
        try:
            features = [*self._uses(sequence)] if sequence.uses else []
            for feature in features:
                if (outcome := feature.outcome(sequence, shares, results)) is not None:
                    return outcome
            (share,), (result,) = shares, results
            if result.late:
                return Outcome()
            if self.guessing.active:
                self.guessing.settle(share, result)
            outcome = commit(sequence, share, result, self.model.ends, features)
            if sequence.computed >= (sequence.holding.published + 1) * PAGE:  # another page may be complete
                self._parts.publish(sequence, min(sequence.computed, len(sequence.tokens) - 1))
            return outcome
        except Exception as error:  # with one request's text: the others' must not be generated again
            return Outcome(error=error)

    def _sequence(self, request: Request) -> SequenceState:
        model, parameters = self.model, request.parameters
        uses = [name for name, feature in self._features.items() if feature.is_requested(parameters)]
        options = {key: value for name in uses for key, value in self._features[name].options(request).items()}
        return SequenceState(parameters, model.tokenizer, model.vocabulary, uses=uses, ends=model.ends, **options)

    @property
    def _executions(self) -> list[TextBackend | Drafter]:
        return [self.execution, *([] if self.guessing.drafter is None else [self.guessing.drafter])]

    # -- before and after --------------------------------------------------------------------------------------------

    def prepare(self, *, measure_s: float = 0.0, beside_lane: bool = False) -> None:
        """Compile what decode needs, then time likely widths for so many seconds. Not while the engine runs.

        `beside_lane`: on this thread, while other models serve on the lane, and only the drafter is timed.
        """

        def compile_steps() -> None:
            for each in self._executions:
                each.prepare(self._sequences)
            self.guessing.time(self.execution)

        def measure() -> None:
            compile_steps()
            until = time.monotonic() + measure_s
            likely = {1, 2, 4, 8, 16, 32, 64, self._max_rows, *(() if self._on_cpu else (128, 256, 512, 1024))}
            widths = sorted(likely & {*range(1, self._max_rows + 1)})
            room = min(self._sequences, self.pages.capacity)
            for width, seconds in self._model_runner.time_widths(widths, sequences=room, until=until):
                self._costs[GROUP].measure(width, seconds)
                self._forwards[GROUP].measure(width, seconds)
                self.guessing.observe(width, seconds)

        if not beside_lane:
            self._lane.call(measure)
            return
        with high_priority(self.model.device):
            compile_steps()

    def release_weights(self) -> None:
        """Free duplicate weights, where our kernels have packed them. The models can then only run on these."""
        for each in self._executions:
            each.release()

    def costs(self) -> dict[Any, Mapping[int, float]]:
        """Measured seconds by rows."""
        return self._costs.measured()

    def close(self) -> None:
        """Stop the features' processes, the thread of masks, and the lane if it is the runner's own."""
        for feature in self._features.values():
            feature.close()
        for lane, model_runner in self._lanes.values():
            if lane is not self._lane or self._own_lane:
                lane.close()
            model_runner.close()
        self.execution.close()


def _drafter(
    draft: TextModel | Literal["lookup"] | DrafterFactory | None, backend: TextBackend, **size: Any
) -> Drafter | None:
    """Raises `TextModelError` for a draft that does not fit the model."""
    if draft is None or draft == "lookup":
        return None if draft is None else LookupDrafter()
    if not isinstance(draft, TextModel):
        return draft(backend, **size)
    model = backend.model
    if draft.vocabulary != model.vocabulary or draft.context < size["context"]:
        raise TextModelError(
            f"draft {draft.name}: has {draft.vocabulary} words and a context of {draft.context}, where "
            f"{model.name} has {model.vocabulary} and {size['context']}"
        )
    return ModelDrafter(select(draft, **size, companion=backend.cache))
