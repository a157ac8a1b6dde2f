"""The text modality's Runner for the engine.

Prefill runs in chunks and decode token by token, all in one forward whose rows are tokens: a long prompt never delays
running answers. The scheduler decides order and width.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import torch

from contract.errors import Invalid
from core.batching.cost import CostTable
from core.batching.request import Outcome, Request
from core.batching.runner import Lane, LaneTicket
from core.batching.slots import Slots
from core.failures import translate_device_errors
from llm import parameters
from llm.choose import SampledTokens, choose, greedy_tokens
from llm.constrain import GrammarCompiler
from llm.execution import TextExecution
from llm.kv_cache import Kind, KVCache, TokenBatch
from llm.lane import StreamLane
from llm.load import TextModel, TextModelError
from llm.pages import PAGE, PageAllocator
from llm.parts import ScheduledTokens, gather_step
from llm.sequence import SequenceState
from llm.speculate import MOST, DraftLengths, DraftModel, DraftTokens
from llm.speculator import Speculator

PREFILL, DECODE = "prefill", "decode"
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
        draft: TextModel | Literal["lookup"] | None = None,
        patience_s: float = 2.0,
        pace_s: float = 0.1,
    ) -> None:
        """`max_rows` limits the tokens of one forward, `chunk` those of one prompt in it, `pages` the KV cache.

        `context` limits one request's tokens; default: the model's own. `draft` enables speculative decoding: a smaller
        model of the same vocabulary, or "lookup" for prompt lookup. Latency objectives: the first token within
        `patience_s`, the others every `pace_s`. Raises `TextModelError`.
        """
        self.model = model
        self.context = min(context or model.context, model.context)
        self.patience_s, self.pace_s = patience_s, pace_s
        self.pages = PageAllocator(pages or max_requests * -(-self.context // PAGE) // 2 + 1)
        self._lane = lane or Lane("text")
        self._own_lane = lane is None
        self.overlaps = isinstance(lane, StreamLane)
        self._slots = Slots(max_requests)
        self._on_cpu = model.device.type == "cpu"
        usual = _ROWS if self._on_cpu else _GPU_ROWS
        self._chunk = chunk or usual[1]
        self._max_rows = max(max_rows or usual[0], self._chunk, MOST + 1)

        def execution(of: TextModel, near: KVCache | None = None) -> TextExecution:
            size = {"pages": self.pages.capacity, "sequences": max_requests, "context": self.context}
            return TextExecution(of, **size, kv=kv, kernels=kernels, beside=near)

        self.execution = execution(model)
        self._executions = [self.execution]
        self.guessing = Speculator(lookup=draft == "lookup")
        if draft is not None and not isinstance(draft, str):
            self._check_draft(draft)
            self.guessing.draft = DraftModel(execution(draft, self.execution.cache))
            self._executions.append(self.guessing.draft.execution)
        self._constraints = GrammarCompiler(model.tokenizer, model.vocabulary, sorted(model.ends))
        self._costs = CostTable(guess_s=_GUESS_S)
        self._decoding = 0  # requests with new tokens in the last iteration
        self._chunk_now = self._chunk

    @property
    def guessed(self) -> int:
        """Guessed tokens, since the start."""
        return self.guessing.guessed

    @property
    def accepted(self) -> int:
        """Accepted guesses, since the start."""
        return self.guessing.accepted

    def _check_draft(self, draft: TextModel) -> None:
        if draft.vocabulary != self.model.vocabulary or draft.context < self.context:
            raise TextModelError(
                f"draft {draft.name}: has {draft.vocabulary} words and a context of {draft.context}, where "
                f"{self.model.name} has {self.model.vocabulary} and {self.context}"
            )

    # -- called by the scheduler ------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        wanted = request.parameters
        if not isinstance(wanted, parameters.TextParameters):
            raise Invalid("parameters", f"must be TextParameters, not {type(wanted).__name__}")
        most = min(self.context, self.pages.capacity * PAGE)
        parameters.check(wanted, vocabulary=self.model.vocabulary, context=most)
        if wanted.json_schema is not None:
            self._constraints.check(wanted.json_schema)

    def admit(self, request: Request) -> bool:
        row = self._slots.take()
        if row is None:
            return False
        work: SequenceState = request.work or self._work(request.parameters, row)
        self.pages.find(work.holding, work.tokens)
        others = self._slots.taken - 1
        # A page for each of the others to grow into, or the last one admitted would be preempted at once.
        if not self.pages.extend(work.holding, len(work.tokens) + 1) or self.pages.free < others:
            self.pages.release(work.holding)
            self._slots.give(row)
            return False
        request.work, work.row = work, row[0]
        work.computed = work.drafted = work.holding.shared * PAGE
        if not work.answered:
            work.cached = work.computed
        self.execution.cache.place(work.row, work.holding.pages)
        self._plan(request)
        return True

    def release(self, request: Request) -> None:
        self.preempt(request)
        request.work = None

    def preempt(self, request: Request) -> None:
        work: SequenceState = request.work
        self.pages.release(work.holding)
        self._slots.give([work.row])
        work.row, work.computed, work.drafted = -1, 0, 0

    def reserve(self, requests: Sequence[Request]) -> bool:
        for request in requests:
            work: SequenceState = request.work
            wanted, had = work.computed + self.rows(request), len(work.holding.pages)
            if wanted <= work.holding.room:
                continue
            if not self.pages.extend(work.holding, wanted):
                return False
            self.execution.cache.place(work.row, work.holding.pages[had:], had)
        return True

    def held(self) -> int:
        return self._slots.taken + self.pages.held

    def group(self, request: Request) -> str:
        return GROUP

    def rows(self, request: Request) -> int:
        work: SequenceState = request.work
        if request.phase == DECODE:
            return 1 + work.guess_count
        return min(self._chunk_now, work.unread)

    def iterations(self, request: Request) -> int:
        work: SequenceState = request.work
        chunks = -(-work.unread // self._chunk_now) if request.phase == PREFILL else 0
        return chunks + work.parameters.max_tokens - work.answered

    def left_s(self, request: Request, rows: int) -> float:
        return self.iterations(request) * self.cost(GROUP, rows)

    def next_group(self, request: Request) -> None:
        """The end of an answer cannot be predicted."""

    def limit(self, group: Hashable) -> int:
        return self._max_rows

    def lane(self, group: Hashable) -> str:
        return "text"

    def cost(self, group: Hashable, rows: int) -> float:
        return self._costs[GROUP](rows)

    # -- one iteration ---------------------------------------------------------------------------------------------

    def launch(self, requests: Sequence[Request]) -> LaneTicket:
        requests = list(requests)
        parts = [self._part(request) for request in requests]

        def compute() -> tuple[list[SampledTokens | BaseException | None], list[DraftTokens], int, float]:
            with torch.inference_mode():
                guesses = self.guessing.make(parts)
                started = time.perf_counter()  # making guesses is timed separately
                made, rows = self._forward(parts, guesses)
            return made, guesses, rows, time.perf_counter() - started

        def commit(
            made: tuple[list[SampledTokens | BaseException | None], list[DraftTokens], int, float],
        ) -> dict[str, Outcome]:
            chosen, guesses, rows, seconds = made
            started = time.perf_counter()
            self.guessing.observe(rows, seconds)
            self._decoding = sum(part.last for part in parts)
            outcomes = {
                request.id: self._committed(request, part, c, guess)
                for request, part, c, guess in zip(requests, parts, chosen, guesses, strict=True)
            }
            self._plan_all([r for r in requests if not outcomes[r.id].finished and outcomes[r.id].error is None])
            self._costs[GROUP].observe(rows, seconds + time.perf_counter() - started)
            return outcomes

        return self._lane.start(lambda: translate_device_errors(compute), commit)

    def _part(self, request: Request) -> ScheduledTokens:
        work: SequenceState = request.work
        if request.phase == DECODE:
            return ScheduledTokens(work, work.computed, 1, True)
        count = self.rows(request)
        return ScheduledTokens(work, work.computed, count, work.computed + count == len(work.tokens))

    def _forward(
        self, parts: Sequence[ScheduledTokens], guesses: Sequence[DraftTokens]
    ) -> tuple[list[SampledTokens | BaseException | None], int]:
        step, asked = gather_step(parts, guesses)
        logits = self.execution(step)
        self.guessing.read_along(parts)
        made: list[SampledTokens | BaseException | None] = [None] * len(parts)
        best = greedy_tokens(logits, list(asked.values()), self.execution.best)
        good = list(asked)
        if min(best, default=0) < 0:
            good = [i for i, ask in asked.items() if all(best[row] >= 0 for row in ask.rows)]
            for i in asked.keys() - good:
                made[i] = FloatingPointError(f"{self.model.name} in {self.model.precision} returned NaN")
        for i, chosen in zip(good, choose(logits, [asked[i] for i in good], best), strict=True):
            made[i] = chosen
        return made, len(step.tokens)

    def _committed(
        self, request: Request, part: ScheduledTokens, made: SampledTokens | BaseException | None, guess: DraftTokens
    ) -> Outcome:
        """An error with one request's text must not regenerate the others'."""
        try:
            return self._commit(request, part, made, guess)
        except Exception as error:
            return Outcome(error=error)

    def _commit(
        self, request: Request, part: ScheduledTokens, made: SampledTokens | BaseException | None, guess: DraftTokens
    ) -> Outcome:
        work = part.work
        total = work.parameters.max_tokens
        if isinstance(made, BaseException):
            return Outcome(error=made)
        kept = 0 if made is None else len(made.tokens) - 1
        self.guessing.settle(part, guess, kept)
        work.computed = part.start + part.count + kept
        if made is None:
            self._publish(work)
            return Outcome(progress=(0, total))
        news, whole = work.take(made.tokens, made.logprobs, self.model.ends)
        self._publish(work)
        return Outcome(progress=(work.answered, total), token=news, result=whole, finished=whole is not None)

    def _publish(self, work: SequenceState) -> None:
        """Make complete pages findable, including the draft's."""
        computed = min(work.computed, len(work.tokens) - 1)
        if self.guessing.draft is not None:
            computed = min(computed, work.drafted)
        if computed >= (work.holding.published + 1) * PAGE:
            self.pages.publish(work.holding, work.tokens, computed)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _work(self, wanted: parameters.TextParameters, row: list[int]) -> SequenceState:
        try:
            matcher = None if wanted.json_schema is None else self._constraints.matcher(wanted.json_schema)
            return SequenceState(
                wanted, self.model.tokenizer, self.model.vocabulary, matcher, lookup=self.guessing.lookup
            )
        except BaseException:
            self._slots.give(row)
            raise

    def _plan_all(self, requests: Sequence[Request]) -> None:
        self._chunk_now = self._chunk
        cost = self._costs[GROUP]
        while self._chunk_now > PAGE and cost(1) <= self.pace_s < cost(self._decoding + self._chunk_now):
            self._chunk_now //= 2
        lengths = self.guessing.lengths(self._decoding)
        for request in requests:
            self._plan(request, lengths)

    def _plan(self, request: Request, lengths: DraftLengths | None = None) -> None:
        """Set the phase and the guesses of the next iteration."""
        work: SequenceState = request.work
        request.phase = DECODE if work.decoding else PREFILL
        if work.decoding:
            self.guessing.plan(work, lengths)
        else:
            work.guesses = 0

    def prepare(self, *, measure_s: float = 0.0) -> None:
        """Compile what decode needs, then time likely widths for so many seconds. Not while the engine runs."""
        self._lane.call(lambda: self._measure(measure_s))

    def _measure(self, measure_s: float) -> None:
        for execution in self._executions:
            execution.prepare(self._slots.capacity, self._max_rows)
        until = time.monotonic() + measure_s
        room = min(self._slots.capacity, self.pages.capacity)
        likely = {1, 2, 4, 8, 16, 32, 64, self._max_rows, *(() if self._on_cpu else (128, 256, 512, 1024))}
        for width in sorted(likely & {*range(1, self._max_rows + 1)}):
            sequences = [i % room for i in range(width)]
            step = TokenBatch.of([0] * width, [0] * width, sequences, list(range(min(width, room))))
            for run in range(3):
                if time.monotonic() >= until:
                    return
                started = time.perf_counter()
                greedy_tokens(self.execution(step), [], self.execution.best)  # waits for the device
                if run:  # the first run is warm-up
                    self._costs[GROUP].observe(width, time.perf_counter() - started)

    def release_weights(self) -> None:
        """Free duplicate weights, where our kernels have packed them. The models can then only run on these."""
        for execution in self._executions:
            execution.release()

    def costs(self) -> dict[Any, Mapping[int, float]]:
        """Measured seconds by rows."""
        return self._costs.measured()

    def close(self) -> None:
        """Stop the lane if it is the runner's own."""
        if self._own_lane:
            self._lane.close()
