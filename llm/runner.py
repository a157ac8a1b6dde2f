"""The text modality's Runner for the engine.

Prefill runs in chunks and decode token by token, all in one forward whose rows are tokens: a long prompt never delays
running answers. The scheduler decides order and width.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

from contract.errors import UNSUPPORTED, Invalid
from contract.text import EMBEDS_ONLY, NO_EMBEDDINGS
from contract.tools import TOOLS
from core.batching.cost import CostTable
from core.batching.request import Outcome, Request
from core.batching.runner import Lane, LaneTicket, NotYet
from core.kernels.kv_cache import Kind
from llm import parameters
from llm.constrain import GrammarCompiler
from llm.detokenizer import Detokenizer
from llm.drafts import Drafter, DrafterFactory, LookupDrafter, ModelDrafter
from llm.execution import FUSED, TextExecution
from llm.kv_allocator import KVAllocator
from llm.lane import StreamLane
from llm.load import TextModel, TextModelError
from llm.mask_turns import MaskTurns
from llm.model_runner import ModelRunner, PartResult, StepResult
from llm.pages import PAGE, PageAllocator
from llm.parts import ScheduledTokens
from llm.sequence import SequenceState
from llm.speculate import MOST_AT_ONCE
from llm.speculator import Speculator
from llm.step_planner import DECODE, PREFILL, StepPlanner

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
    ) -> None:
        """`max_rows` limits the tokens of one forward, `chunk` those of one prompt in it, `pages` the KV cache.

        `context` limits one request's tokens; default: the model's own. `draft` enables speculative decoding: a smaller
        model of the same vocabulary, "lookup" for prompt lookup, or a drafter's weights. Latency objectives: the first
        token within `patience_s`, the others every `pace_s`. `ahead`: iterations are submitted before the tokens of
        those before are known, see `ModelRunner`; default: on a GPU, without speculation. Raises `TextModelError`.
        """
        self.model = model
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
            "kv": kv, "kernels": kernels,
        }  # fmt: skip
        self.execution = TextExecution(model, **size, features=getattr(draft, "features", ()))
        self.guessing = Speculator(_drafter(draft, self.execution, **size))
        self._ahead = (self.execution.kind == FUSED if ahead is None else ahead) and draft is None
        self._model_runner = ModelRunner(self.execution, self.guessing, ahead=self._ahead)
        self._sequences = max_requests
        self._allocator = KVAllocator(self.execution.cache, self.pages, sequences=max_requests)
        Detokenizer(model.tokenizer)  # builds the table of its tokens here, not on the engine's thread
        self._grammars = GrammarCompiler(model.tokenizer, model.vocabulary, sorted(model.ends))
        self._mask_turns = MaskTurns()
        self._costs = CostTable(guess_s=_GUESS_S)
        self._forwards = CostTable(guess_s=_GUESS_S)  # the same without masks
        self._planner = StepPlanner(self.guessing, self._costs[GROUP], chunk=chunk, pace_s=pace_s)

    # -- called by the scheduler ------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        text_parameters = request.parameters
        if not isinstance(text_parameters, parameters.TextParameters):
            raise Invalid("parameters", f"must be TextParameters, not {type(text_parameters).__name__}")
        limit = min(self.context, self.pages.tokens)
        parameters.check(text_parameters, vocabulary=self.model.vocabulary, context=limit)
        if text_parameters.embed and self.model.pooling.reason:
            raise Invalid("model", f"{NO_EMBEDDINGS}: {self.model.pooling.reason}", UNSUPPORTED)
        if text_parameters.max_tokens and not self.model.generates:
            raise Invalid("model", EMBEDS_ONLY, UNSUPPORTED)
        if text_parameters.json_schema is not None:
            request.checked = self._grammars.compile(text_parameters.json_schema, request.tenant)
        if text_parameters.tool_grammar is not None:
            try:
                request.checked = self._grammars.compile_lark(text_parameters.tool_grammar, request.tenant)
            except Invalid as error:
                raise error.of(TOOLS) from error

    def resources(self, request: Request) -> frozenset[str]:
        return frozenset()

    def admit(self, request: Request) -> NotYet | None:
        if self._allocator.full:
            return NotYet()
        work: SequenceState = request.work or self._sequence(request)
        if not self._allocator.allocate(work):
            return NotYet()
        request.work = work
        self._planner.plan(request)
        return None

    def release(self, request: Request) -> None:
        self.preempt(request)
        request.work = None

    def preempt(self, request: Request) -> None:
        request.work.pending = None  # it will be drawn again, the same
        self._allocator.free(request.work)

    def reserve(self, requests: Sequence[Request]) -> bool:
        for request in requests:
            work: SequenceState = request.work
            tokens = work.computed + (0 if work.complete else self.rows(request))
            if tokens > work.holding.room and not self._allocator.grow(work, tokens):
                return False
        return True

    def held(self) -> int:
        return self._allocator.held

    def group(self, request: Request) -> str:
        return GROUP

    def rows(self, request: Request) -> int:
        work: SequenceState = request.work
        if request.phase == DECODE:
            return 1 + work.guesses
        scored = self._model_runner.score_rows if work.scored else work.unread
        return min(self._planner.chunk, work.unread, scored)

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
        return "text"

    def cost(self, group: Hashable, rows: int) -> float:
        return self._costs[GROUP](rows)

    # -- one iteration ---------------------------------------------------------------------------------------------

    def launch(self, requests: Sequence[Request]) -> LaneTicket:
        waiting = self._waiting_for_masks(requests)
        requests = [request for request in requests if request.id not in waiting]
        parts = [self._part(request) for request in requests]

        def commit(step: StepResult) -> dict[str, Outcome]:
            started = time.perf_counter()
            outcomes = {
                request.id: self._commit(part, result)
                for request, part, result in zip(requests, parts, step.parts, strict=True)
            }
            going = [r for r in requests if not outcomes[r.id].finished and outcomes[r.id].error is None]
            self._planner.plan_all(going, decoding=sum(part.last for part in parts))
            host_s = 0.0 if self._ahead else time.perf_counter() - started  # ahead: while the device computes
            for rows, seconds, masks_s in step.timings:
                self._costs[GROUP].observe(rows, seconds + host_s)
                self._forwards[GROUP].observe(rows, seconds - masks_s)
                self.guessing.observe(rows, seconds - masks_s + host_s)
            return outcomes | waiting

        return self._lane.start(lambda: self._model_runner(parts), commit)

    def _waiting_for_masks(self, requests: Sequence[Request]) -> dict[str, Outcome]:
        """Answers that are left out of this iteration, since masks of their grammars would delay the others."""
        matchers = [request.work.matcher if request.phase == DECODE else None for request in requests]
        if all(matcher is None for matcher in matchers):  # most iterations of most servers
            return {}
        answers = [(request.tenant, matcher) for request, matcher in zip(requests, matchers, strict=True)]
        forward_s = self._forwards[GROUP](sum(map(self.rows, requests)))
        return {requests[i].id: Outcome() for i in self._mask_turns.waiting(answers, forward_s)}

    def _part(self, request: Request) -> ScheduledTokens:
        work: SequenceState = request.work
        if request.phase == DECODE:
            return ScheduledTokens(work, work.computed, 0 if work.complete else 1, not work.complete)
        count = self.rows(request)
        return ScheduledTokens(work, work.computed, count, work.computed + count == len(work.tokens))

    def _commit(self, part: ScheduledTokens, result: PartResult) -> Outcome:
        outcome, guess = result.outcome, result.guess
        if isinstance(outcome, BaseException):
            return Outcome(error=outcome)
        if outcome is not None and not outcome.tokens:
            return Outcome()
        work, total = part.work, part.work.parameters.max_tokens
        accepted = len(outcome.tokens) - 1 if outcome is not None and guess.tokens else 0
        work.pending = result.pending
        news = text = None
        try:
            if self.guessing.active:
                self.guessing.settle(part, guess, accepted, result.features)
            work.computed = part.start + part.count + accepted
            work.prompt_logprobs += result.scores
            work.pooled = result.pooled or work.pooled
            if outcome is not None or (part.last and not total):
                tokens, logprobs = ([], []) if outcome is None else (outcome.tokens, outcome.logprobs)
                news, text = work.take(tokens, logprobs, self.model.ends)
            computed = min(work.computed, len(work.tokens) - 1)
            if self.guessing.active:
                computed = min(computed, work.drafted)
            self._allocator.publish(work, computed)
        except Exception as error:  # with one request's text: the others' must not be generated again
            return Outcome(error=error)
        progress = (0 if outcome is None else work.answered, total)
        return Outcome(progress, token=news, result=text, finished=text is not None)

    def _sequence(self, request: Request) -> SequenceState:
        parameters, grammar = request.parameters, request.checked
        matcher = None if grammar is None else grammar.matcher(request.tenant)
        return SequenceState(
            parameters, self.model.tokenizer, self.model.vocabulary, matcher,
            pooling=self.model.pooling if parameters.embed else None,
        )  # fmt: skip

    @property
    def _executions(self) -> list[TextExecution | Drafter]:
        return [self.execution, *([] if self.guessing.drafter is None else [self.guessing.drafter])]

    # -- before and after --------------------------------------------------------------------------------------------

    def prepare(self, *, measure_s: float = 0.0) -> None:
        """Compile what decode needs, then time likely widths for so many seconds. Not while the engine runs."""

        def measure() -> None:
            for each in self._executions:
                each.prepare(self._sequences)
            self.guessing.time(self.execution.no_features)
            until = time.monotonic() + measure_s
            likely = {1, 2, 4, 8, 16, 32, 64, self._max_rows, *(() if self._on_cpu else (128, 256, 512, 1024))}
            widths = sorted(likely & {*range(1, self._max_rows + 1)})
            room = min(self._sequences, self.pages.capacity)
            for width, seconds in self._model_runner.time_widths(widths, sequences=room, until=until):
                self._costs[GROUP].observe(width, seconds)
                self._forwards[GROUP].observe(width, seconds)
                self.guessing.observe(width, seconds)

        self._lane.call(measure)

    def release_weights(self) -> None:
        """Free duplicate weights, where our kernels have packed them. The models can then only run on these."""
        for each in self._executions:
            each.release()

    def costs(self) -> dict[Any, Mapping[int, float]]:
        """Measured seconds by rows."""
        return self._costs.measured()

    def close(self) -> None:
        """Stop the process that checks schemas, the thread of masks, and the lane if it is the runner's own."""
        self._grammars.close()
        if self._own_lane:
            self._lane.close()
        self._model_runner.close()


def _drafter(
    draft: TextModel | Literal["lookup"] | DrafterFactory | None, execution: TextExecution, **size: Any
) -> Drafter | None:
    """Raises `TextModelError` for a draft that does not fit the model."""
    if draft is None or draft == "lookup":
        return None if draft is None else LookupDrafter()
    if not isinstance(draft, TextModel):
        return draft(execution, **size)
    model = execution.model
    if draft.vocabulary != model.vocabulary or draft.context < size["context"]:
        raise TextModelError(
            f"draft {draft.name}: has {draft.vocabulary} words and a context of {draft.context}, where "
            f"{model.name} has {model.vocabulary} and {size['context']}"
        )
    return ModelDrafter(TextExecution(draft, **size, companion=execution.cache))
