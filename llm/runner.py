"""The text modality's Runner for the engine.

Prefill runs in chunks and decode token by token, all in one forward whose rows are tokens: a long prompt never delays
running answers. The scheduler decides order and width.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

from contract.errors import CONTEXT_LENGTH, UNSUPPORTED, Invalid
from contract.text import EMBEDS_ONLY, NO_EMBEDDINGS
from contract.tools import TOOLS
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
from llm.features.beam_search import BeamSearch
from llm.grammars.constrain import GrammarCompiler
from llm.grammars.mask_turns import MaskTurns
from llm.lane import StreamLane, high_priority
from llm.model_runner import ModelRunner, StepHandle
from llm.parallel.followers import Followers
from llm.parallel.micro_batches import MicroBatches
from llm.parameters import Logprob, TextDelta
from llm.sequence import SequenceState
from llm.step import Share, StepResult
from llm.step_planner import DECODE, PREFILL, StepPlanner
from llm.text.detokenizer import Detokenizer

GROUP = "text"
_ADAPTERS = "text adapters"  # a resource
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
        if text_parameters.adapter:
            if self.adapters is None:
                raise Invalid("model", "has no adapters", UNSUPPORTED)
            self.adapters.check(text_parameters.adapter)
        if text_parameters.beams:
            self._check_beams(text_parameters)
        if text_parameters.json_schema is not None:
            request.checked = self._grammars.compile(text_parameters.json_schema, request.tenant)
        if text_parameters.tool_grammar is not None:
            try:
                request.checked = self._grammars.compile_lark(text_parameters.tool_grammar, request.tenant)
            except Invalid as error:
                raise error.of(TOOLS) from error

    def _check_beams(self, search: parameters.TextParameters) -> None:
        """Reject a search whose beams cannot all be in the cache, or in one forward."""
        if self.execution.spread:  # pages are copied in this rank's cache only
            raise Invalid("use_beam_search", "is not supported where the model is spread over GPUs", UNSUPPORTED)
        if search.beams > (most := min(self._sequences, self._max_rows)):
            raise Invalid("n", f"{search.beams} beams are more than the {most} sequences that run at once here")
        pages = -(-len(search.prompt) // PAGE) + search.beams * (2 + -(-search.max_tokens // PAGE))
        if pages > self.pages.capacity:
            raise Invalid("max_tokens", f"{search.beams} beams of so many tokens do not fit the cache", CONTEXT_LENGTH)

    def resources(self, request: Request) -> frozenset[str]:
        return frozenset([_ADAPTERS] if getattr(request.parameters, "adapter", "") else ())

    def admit(self, request: Request) -> NotYet | None:
        if self._allocator.full:
            return NotYet()
        work: SequenceState = request.work or self._sequence(request)
        if request.parameters.adapter and work.adapter is None:
            assert self.adapters is not None
            work.adapter = self.adapters.acquire(request.parameters.adapter, wait=self._allocator.held > 0)
            if work.adapter is None:
                return NotYet(_ADAPTERS)
        if not self._allocator.allocate(work):
            self._release_adapter(work)
            return NotYet()
        request.work = work
        self._micro_batches.add(request.id)
        self._planner.plan(request)
        return None

    def release(self, request: Request) -> None:
        self.preempt(request)
        request.work = None

    def _release_adapter(self, work: SequenceState) -> None:
        if work.adapter is not None and self.adapters is not None:
            self.adapters.release(work.adapter)
            work.adapter = None

    def preempt(self, request: Request) -> None:
        self._micro_batches.release(request.id)
        work: SequenceState = request.work
        work.pending = None  # it will be drawn again, the same
        self._allocator.free(work)
        self._release_adapter(work)
        if work.beams is not None and work.beams.running:  # what they have in common is read again first, as a prompt
            work.tokens = [*request.parameters.prompt, *work.beams.common]
            work.prompt = len(work.tokens)

    def reserve(self, requests: Sequence[Request]) -> bool:
        spare = self.guessing.ahead and self.pages.free > 4 * len(requests)
        for request in requests:
            work: SequenceState = request.work
            if (beams := work.beams) is not None:
                if not self._allocator.grow_beams(beams, self._beam_rows(beams)):
                    return False
                if beams.states:  # they have all pages that they need
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
        if work.beams is not None and work.beams.states:
            return len(work.beams.states) * self._beam_rows(work.beams)
        if request.phase == DECODE:
            return 1 + work.guesses
        scored = self._model_runner.score_rows if work.scored else work.unread
        return min(self._planner.chunk, work.unread, scored)

    def _beam_rows(self, beams: BeamSearch[SequenceState]) -> int:
        """The tokens of each running beam in the next iteration: one, or more that a preempted search reads again."""
        unread = max((state.unread for state in beams.states), default=0)
        return min(unread, max(1, self._planner.chunk // beams.width)) or 1

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
        waiting = self._waiting_for_masks(requests)
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

    def _waiting_for_masks(self, requests: Sequence[Request]) -> dict[str, Outcome]:
        """Answers that are left out of this iteration, since masks of their grammars would delay the others."""
        if not any(request.work.matcher for request in requests):  # most iterations of most servers
            return {}
        matchers = [request.work.matcher if request.phase == DECODE else None for request in requests]
        answers = [(request.tenant, matcher) for request, matcher in zip(requests, matchers, strict=True)]
        forward_s = self._forwards[GROUP](sum(map(self.rows, requests)))
        return {requests[i].id: Outcome() for i in self._mask_turns.waiting(answers, forward_s)}

    def _shares(self, request: Request) -> list[Share]:
        """The request's shares of a step: one, or one of each of its beams."""
        sequence: SequenceState = request.work
        if sequence.beams is not None and sequence.beams.states:
            count = self._beam_rows(sequence.beams)
            return [Share(state, state.computed, count, not state.unread) for state in sequence.beams.states]
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
            if sequence.beams is not None:
                return self._commit_beams(sequence, shares, results)
            (share,), (result,) = shares, results
            if result.late:
                return Outcome()
            if self.guessing.active:
                self.guessing.settle(share, result)
            outcome = commit(sequence, share, result, self.model.ends)
            if sequence.computed >= (sequence.holding.published + 1) * PAGE:  # another page may be complete
                self._publish(sequence, min(sequence.computed, len(sequence.tokens) - 1))
            return outcome
        except Exception as error:  # with one request's text: the others' must not be generated again
            return Outcome(error=error)

    def _publish(self, sequence: SequenceState, computed: int) -> None:
        """Let others find the pages of so many tokens, as far as the drafter has read them too."""
        self._allocator.publish(sequence, min(computed, sequence.drafted) if self.guessing.active else computed)

    def _commit_beams(self, work: SequenceState, shares: Sequence[Share], results: Sequence[StepResult]) -> Outcome:
        """Let beams go on, by the results of their shares; or begin, by that of what they have in common."""
        beams, candidates = work.beams, list[Logprob]()
        assert beams is not None
        for share, result in zip(shares, results, strict=True):
            if self.guessing.active:
                self.guessing.settle(share, result)
            share.sequence.computed = share.start + share.length
            self._publish(share.sequence, share.sequence.computed)
            candidates += result.logprobs
        total = beams.width * beams.parameters.max_tokens
        if len(candidates) < len(shares):  # more is to be read
            return Outcome((beams.width * beams.length, total))
        resumed = beams.length > 0 and not beams.states
        parents = [0] * len(beams.running) if resumed else beams.advance(candidates)
        news, text = TextDelta("", tuple(beam.tokens[-1] for beam in beams.running)), None
        if parents:
            beams.states = beams.states or [work]
            self._allocator.fork(beams, parents)
            for state, beam in zip(beams.states, beams.running, strict=True):
                state.tokens, state.prompt = [*beams.parameters.prompt, *beam.tokens], len(beams.parameters.prompt)
        else:
            text = beams.result(self.model.tokenizer, work.cached)
        progress = (beams.width * beams.length, total)
        return Outcome(progress, token=news, result=text, finished=text is not None)

    def _sequence(self, request: Request) -> SequenceState:
        parameters, grammar = request.parameters, request.checked
        matcher = None if grammar is None else grammar.matcher(request.tenant)
        return SequenceState(
            parameters, self.model.tokenizer, self.model.vocabulary, matcher, ends=self.model.ends,
            pooling=self.model.pooling if parameters.embed else None,
            beams=BeamSearch(parameters, self.model.ends, self.model.vocabulary) if parameters.beams else None,
        )  # fmt: skip

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
        """Stop the process that checks schemas, the thread of masks, and the lane if it is the runner's own."""
        self._grammars.close()
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
