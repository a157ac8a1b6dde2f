"""The text runner in a real engine: seeds, stops, ends, limits, shared pages, failures, and books that balance."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contract.errors import Invalid
from core.batching.request import Outcome, Request, State
from core.batching.runner import Lane, NotYet, OutOfMemory
from core.batching.scheduler import Scheduler
from llm.cache.pages import PAGE
from llm.checkpoints.load import TextModel, TextModelError
from llm.drafts.drafter import DraftRequest, LookupDrafter
from llm.drafts.speculate import DraftTokens
from llm.drafts.speculator import Speculator
from llm.model_runner import ModelRunner
from llm.parameters import TextDelta, TextParameters
from llm.runner import TextRunner
from llm.sampling.pending import PendingTokens
from tests.llm import stage
from tests.llm.test_exact import watch


@pytest.mark.quick("model")
@pytest.mark.parametrize("draft", [None, "model", "lookup"])
def test_a_seed_means_one_text_whatever_the_companions(draft: Any) -> None:
    """Alone, in a crowd, and sent away: also with guesses, whose number must then not depend on the load."""
    model, draft = stage.emoji(), stage.emoji_draft() if draft == "model" else draft
    wanted = [
        TextParameters(
            prompt, 20, temperature=0.5 + i / 20, seed=i, top_p=1 - i % 3 / 10, top_k=i % 2 * 40, ignore_end=True
        )
        for i, prompt in enumerate(stage.prompts(model, 14))
    ]

    def write(count: int, **options: Any) -> list[tuple[int, ...]]:
        return [text.tokens for text in stage.write(model, wanted[:count], draft=draft, **options)]

    crowd = write(14, max_requests=14)
    assert write(5, max_requests=1) == crowd[:5]
    assert write(14, max_requests=12, pages=20, chunk=5) == crowd
    assert len({*crowd}) == len(crowd)


class Failing:
    """A backend every n-th forward of which runs out of memory with several sequences, after it has begun."""

    def __init__(self, backend: Any, every: int) -> None:
        self._backend, self._steps = backend, itertools.cycle(range(every))

    def forward(self, step: Any) -> Any:
        forward = self._backend.forward(step)
        if next(self._steps) == 0 and len(step.sequences.unique()) > 1:
            self.latest.table.fill_(77)
            raise OutOfMemory("planted")
        return forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def of_all_kinds(model: stage.TextModel) -> list[TextParameters]:
    """What the device draws by itself, and what needs the host's hand, of mixed lengths."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0, "logprobs": 2},
        {"temperature": 0.8, "repetition_penalty": 1.3}, {"temperature": 0, "logit_bias": ((70, 5.0),)},
        {"temperature": 0, "stop": ("e",)}, {"temperature": 1.0, "min_p": 0.1}, {"temperature": 0, "max_tokens": 1},
        {"temperature": 0, "prompt_logprobs": True, "logprobs": 1},
        {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5}, {"temperature": 0.9, "logprobs": 3},
        {"temperature": 1.0, "top_k": 9, "logit_bias": ((70, -100), (71, 3.0))},
    ]  # fmt: skip
    return [
        TextParameters(prompt, **{"max_tokens": 5 + 7 * i % 40, "seed": i, **kinds[i % len(kinds)]})
        for i, prompt in enumerate(stage.prompts(model, 30))
    ]


def test_iterations_ahead_of_their_tokens_write_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever shares a step, after preemption, and where an iteration fails while tokens are pending."""
    model = stage.emoji()
    requests = of_all_kinds(model)
    expected = stage.write(model, requests, ahead=False)
    with stage.serving(model, kernels=stage.kernels(), ahead=True) as (engine, runner):
        assert stage.answers(engine, requests) == expected
        drawn = [replace(request, prompt_logprobs=False) for request in requests]
        with monkeypatch.context() as patch:
            patch.delattr(ModelRunner, "_choose")  # the device alone draws all of these
            texts = stage.answers(engine, drawn)
        assert [(text.tokens, text.logprobs) for text in texts] == [(text.tokens, text.logprobs) for text in expected]
        runner._model_runner.backend = Failing(runner.execution, every=5)
        several = [i for i, request in enumerate(requests) if request.max_tokens > 1]
        texts = stage.answers(engine, [drawn[i] for i in several])
        assert [text.tokens for text in texts] == [expected[i].tokens for i in several]
    texts = stage.write(model, requests, ahead=True, pages=14, chunk=5)
    assert [text.tokens for text in texts] == [text.tokens for text in expected]


@pytest.mark.quick(1)
@pytest.mark.parametrize("pages", [None, 14])
def test_embeddings_and_schemas_beside_iterations_ahead(pages: int | None) -> None:
    """They need the host after each of their forwards, which the answers beside them then wait for."""
    pytest.importorskip("llguidance")
    model = stage.emoji()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"max_tokens": 0, "embed": True}, {"temperature": 0.9}, {"max_tokens": 0},
        {"temperature": 0.9, "json_schema": "{}"}, {"temperature": 0, "max_tokens": 1},
    ]  # fmt: skip
    requests = [
        TextParameters(prompt, **{"max_tokens": 9 + i, "seed": i, **kinds[i % len(kinds)]})
        for i, prompt in enumerate(stage.prompts(model, 24))
    ]
    texts, ahead = (stage.write(model, requests, ahead=ahead, pages=pages, chunk=7) for ahead in (False, True))
    for text, other, request in zip(texts, ahead, requests, strict=True):
        assert (text.tokens, text.finish, text.pooled) == (other.tokens, other.finish, other.pooled)
        assert bool(other.pooled) == request.embed


def test_other_seeds_give_other_texts_and_no_seed_any() -> None:
    wanted = [TextParameters((1, 9), 12, seed=seed, ignore_end=True) for seed in (1, 1, 2, None, None)]
    texts = stage.write(stage.small(), wanted)
    one, same, *others = (text.tokens for text in texts)
    assert one == same and len({one, *others}) == 4
    assert {(len(text.tokens), text.finish) for text in texts} == {(12, "length")}


@pytest.mark.parametrize("stops", [False, True])
def test_events_add_up_to_the_result(stops: bool) -> None:
    """Text and tokens as they came, one iteration after another; progress counts up; stops are left out."""
    model, told = stage.emoji(), []
    wanted = stage.greedy(stage.chat(model, "cat"), 30, logprobs=3)
    with stage.serving(model, kernels=stage.kernels(), draft="lookup") as (engine, _):
        (whole,) = stage.answers(engine, [wanted])
        stop = whole.text[len(whole.text) // 2 :][:3]
        wanted = replace(wanted, stop=("never", stop) if stops else ())
        text = stage.submit(engine, wanted, listener=lambda _, outcome: told.append(outcome)).result()
    deltas = [outcome.token for outcome in told if outcome.token is not None]
    assert all(isinstance(delta, TextDelta) for delta in deltas) and len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == text.text
    assert tuple(t for delta in deltas for t in delta.tokens) == text.tokens
    assert tuple(p for delta in deltas for p in delta.logprobs) == text.logprobs
    assert [outcome.progress[0] for outcome in told] == sorted(outcome.progress[0] for outcome in told)
    assert text.finish == "stop"
    if stops:
        assert text.text == whole.text[: whole.text.index(stop)] and len(text.tokens) < len(whole.tokens)
    else:
        assert text.tokens == whole.tokens and text.tokens[-1] in model.ends
        assert text.text == model.tokenizer.decode(text.tokens, skip_special_tokens=True)


def test_answers_that_must_be_json() -> None:
    pytest.importorskip("llguidance")
    properties = {"name": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}}
    schema = {"type": "object", "properties": properties, "required": ["name", "legs"], "additionalProperties": False}
    model = stage.small()
    wanted = [
        TextParameters(stage.plain(model, "x" * i), 60, seed=i, json_schema=json.dumps(schema)) for i in range(1, 9)
    ]
    *texts, free = stage.write(model, [*wanted, replace(wanted[0], json_schema=None)], draft="lookup")
    for text in texts:
        answer = json.loads(text.text)
        assert answer["name"] in ("cat", "dog") and 0 <= answer["legs"] <= 8 and len(answer) == 2
        assert text.finish == "stop"
    with pytest.raises(ValueError):
        json.loads(free.text)


def broken() -> TextModel:
    """The small model, of which token 77 makes NaN; it is never likely."""
    model = stage.small()
    network, _ = stage.tiny.make(stage.tiny.SHAPES[stage.tiny.TINY])
    network.set_attn_implementation("diptych")
    with torch.no_grad():
        network.model.embed_tokens.weight[77] = torch.nan
        network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.clone())
        network.lm_head.weight[77] = 0
    return replace(model, network=network.eval().requires_grad_(False))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_model_that_makes_nan_fails_the_request_alone(ahead: bool) -> None:
    with stage.serving(broken(), ahead=ahead) as (engine, _):
        good, bad = (stage.submit(engine, stage.greedy((1, token, 8), 6), f"{token}") for token in (9, 77))
        with pytest.raises(FloatingPointError, match="returned NaN"):
            bad.result()
        assert len(good.result().tokens) <= 6


@pytest.mark.parametrize(("right", "native"), [(0, True), (2, True), (2, False)])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"temperature": 0, "logprobs": 2}, {"temperature": 0.8, "top_k": 3, "seed": 1, "logprobs": 2}],
    ids=["greedy", "log probabilities", "sampled"],
)
def test_nan_behind_a_wrong_guess_is_nobodys(
    monkeypatch: pytest.MonkeyPatch, right: int, native: bool, options: dict[str, Any]
) -> None:
    """So many likely guesses, then one that the model never takes, and whose logits are NaN, and one behind it."""
    model = broken()
    wanted = TextParameters((1, 9, 8), 24, ignore_end=True, **options)
    (alone,) = stage.write(model, [wanted], native=native)

    def guess(self: LookupDrafter, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        starts = [len(request.tokens) - len(wanted.prompt) for request in requests]
        return [
            DraftTokens([*alone.tokens[start : start + right], 77, 5][: request.count])
            for start, request in zip(starts, requests, strict=True)
        ]

    monkeypatch.setattr(LookupDrafter, "guess", guess)
    monkeypatch.setattr(LookupDrafter, "limit", lambda self, work, count: count)
    monkeypatch.setattr(Speculator, "lengths", lambda *_: lambda acceptance: 4)
    with stage.serving(model, draft="lookup", kernels=stage.kernels() if native else None) as (engine, runner):
        text = stage.submit(engine, wanted).result(timeout=300)
        guessing = runner.guessing
    assert len(text.tokens) == 24 and guessing.guessed > guessing.accepted >= right * (wanted.temperature == 0)
    assert wanted.temperature or text.tokens == alone.tokens
    assert all(math.isfinite(each.logprob) for each in text.logprobs or ())


def test_text_that_cannot_be_made_fails_its_request_alone() -> None:
    """A tokenizer that breaks in the middle: the others of the batch lose and repeat nothing."""
    model = stage.small()
    with stage.serving(model, kernels=stage.kernels()) as (engine, runner):
        admit = runner.admit

        def spoilt(request: Request) -> NotYet | None:
            refusal: NotYet | None = admit(request)
            if refusal is None and request.id == "bad":
                request.work.writer = None
            return refusal

        runner.admit = spoilt
        told: list[int] = []
        wanted = stage.greedy((1, 9), 30, ignore_end=True)
        good = stage.submit(engine, wanted, listener=lambda _, outcome: told.extend(outcome.token.tokens))
        bad = stage.submit(engine, wanted, "bad")
        with pytest.raises(AttributeError):
            bad.result()
        assert good.result().tokens == tuple(told) and len(told) == 30


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": ()}, "prompt: must not be empty"),
        ({"prompt": (1, 262)}, "prompt: token ids must be between 0 and 261"),
        ({"prompt": [1]}, "prompt: must be a tuple"),
        ({"prompt": (1,) * 500}, "max_tokens: 500 tokens of prompt and 20 to come are more than the model's context"),
        ({"prompt": (1,) * 512, "max_tokens": 1}, "prompt: 512 tokens are more than the model's context"),
        ({"max_tokens": -1}, "max_tokens: must be between"),
        ({"max_tokens": True}, "max_tokens: must be a whole number"),
        ({"temperature": -0.1}, "temperature: must be between 0 and 2, not -0.1"),
        ({"temperature": float("nan")}, "temperature: must be a finite number"),
        ({"top_p": 0.0}, "top_p: must be more than 0"),
        ({"top_p": 1.1}, "top_p: must be between"),
        ({"top_k": -1}, "top_k: must be between"),
        ({"min_p": 2}, "min_p: must be between"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be more than 0"),
        ({"presence_penalty": 3}, "presence_penalty: must be between"),
        ({"frequency_penalty": "1"}, "frequency_penalty: must be a number"),
        ({"seed": -1}, "seed: must be between"),
        ({"seed": 10**400}, "seed: must be between 0 and 9223372036854775807, not that"),
        ({"logprobs": 21}, "logprobs: must be between"),
        ({"stop": ("",)}, "stop: must be text that is not empty"),
        ({"stop": ("a",) * 17}, "stop: must be at most 16 texts"),
        ({"stop": ("a\x00",)}, "stop: character 2"),
        ({"json_schema": 5}, "json_schema: must be text"),
        *(({"json_schema": schema}, "json_schema: ")
          for schema in ("{", "[]", '{"type": "nothing"}', '{"$ref": "#/none"}')),
        ({"prompt_logprobs": True}, "prompt_logprobs: needs logprobs"),
        *(({"logit_bias": ((token, 1.0),)}, "logit_bias: token ids") for token in (-1, 262, True)),
        ({"logit_bias": ((5, 100.1),)}, "logit_bias: must be between -100 and 100"),
        ({"logit_bias": ((5, float("nan")),)}, "logit_bias: must be a finite number"),
        ({"logit_bias": ((5, 0.0),) * 1025}, "logit_bias: must be of at most 1024 tokens"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], said: str) -> None:
    if "json_schema" in change:
        pytest.importorskip("llguidance")
    with pytest.raises(Invalid) as caught:
        stage.write(stage.small(), [replace(TextParameters((1, 9), 20), **change)])
    assert str(caught.value).startswith(said)


def test_drafts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TextModelError, match="262 words and a context of 512, where emoji-lm has 4096 and 256"):
        TextRunner(stage.emoji(), draft=stage.small())


@pytest.mark.parametrize(
    ("count", "options"),
    [(1_200, {"draft": "lookup"}), (800, {"ahead": True}),
     pytest.param(10_000, {"draft": "lookup"}, marks=pytest.mark.long)],
)  # fmt: skip
def test_thousands_of_admissions_aborts_and_preemptions_leave_every_page_free(
    count: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner under the scheduler, without an engine: what is done between iterations is drawn at random.

    Its clock counts calls, so that no real time decides about widths, and with them about who is sent away.
    """
    clock = SimpleNamespace(perf_counter=itertools.count(0, 0.001).__next__)
    for module in ("llm.runner", "llm.model_runner"):
        monkeypatch.setattr(f"{module}.time", clock)
    model, draw, lane = stage.small(), random.Random(5), Lane("text")
    runner = TextRunner(model, lane=lane, max_requests=12, pages=22, chunk=6, kernels=stage.kernels(), **options)
    scheduler = Scheduler([runner], starvation_s=0.5)
    away = watch(runner)
    operations, number, now, ends = 0, 0, 0.0, Counter[State]()
    while operations < count or not scheduler.idle:
        now += 0.01
        for _ in range(draw.randint(0, 4) if operations < count else 0):
            operations += 1
            if draw.random() < 0.75 and len(scheduler.live) < 40:
                prompt = (1, *([draw.choice((7, 9))] * draw.randint(1, 30)))
                wanted = TextParameters(prompt, draw.randint(1, 120), temperature=draw.choice((0, 1)), seed=number)
                number += 1
                scheduler.add(Request(f"{number}", "text", wanted, priority=draw.choice((0, 5))), now)
            elif scheduler.live:
                scheduler.abort(draw.choice(list(scheduler.live)), now)
        for batch in scheduler.schedule(now):
            outcomes = runner.launch(batch.requests).outcome()
            scheduler.finish(batch, outcomes, now)
        ends.update(request.state for request in scheduler.take_ended())
        runner.pages.check()
    scheduler.check_idle()
    assert runner.held() == 0 and runner.pages.free == runner.pages.capacity
    assert len(away) > count // 200
    assert {*ends} == {State.DONE, State.ABORTED} and min(ends.values()) > count // 20
    lane.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_retried_iteration_draws_the_same(ahead: bool) -> None:
    """Nothing changes before an outcome is asked for: an iteration that is thrown away leaves no trace."""
    model, lane = stage.emoji(), Lane("text")
    options: dict[str, Any] = {"ahead": True} if ahead else {"draft": stage.emoji_draft()}
    runner = TextRunner(model, lane=lane, kernels=stage.kernels(), **options)
    request = Request("a", "text", TextParameters(stage.chat(model, "cat"), 12, temperature=1.2, seed=4))
    assert runner.admit(request) is None
    made: list[Any] = []
    while not made or not made[-1].finished:
        assert runner.reserve([request])
        for _ in range(2):
            ended = threading.Event()
            runner.launch([request]).notify(ended.set)
            ended.wait()
        made.append(runner.launch([request]).outcome()["a"])
    runner.release(request)
    assert stage.write(model, [request.parameters], **options) == [made[-1].result]
    lane.close()


def test_an_answer_of_which_only_the_last_token_is_awaited_takes_no_page() -> None:
    lane = Lane("text")
    runner = TextRunner(stage.small(), lane=lane, pages=4, ahead=True)
    request = stage.greedy((1, *[7] * (PAGE - 1)), PAGE + 1, ignore_end=True)
    pages = max(len(work.holding.pages) for work, _ in stage.iterations(runner, request))
    assert pages == 2, "its last token is at the first place of a third one, and is never computed with"
    runner.close()
    lane.close()


def test_a_runner_that_closes_waits_for_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that ended by a stop leaves one on the device, which writes to memory that is freed next."""
    waits: list[int] = []
    wait = PendingTokens.wait

    def counted(self: PendingTokens) -> list[int]:
        waits.append(id(self))
        return wait(self)

    monkeypatch.setattr(PendingTokens, "wait", counted)
    runner = TextRunner(stage.small(), ahead=True)
    request = Request("a", "text", stage.greedy((1, 9), 9))
    assert runner.admit(request) is None
    runner.launch([request]).outcome()
    runner.release(request)
    assert not waits
    runner.close()
    assert len(waits) == 1


def test_a_long_prompt_does_not_hold_up_answers() -> None:
    """While it is read in chunks, a token is written in every iteration."""
    model, order = stage.small(), []
    begun, asked = threading.Event(), threading.Event()
    # Tokens are never late: on a loaded machine the answer would have precedence.
    with stage.serving(model, chunk=16, kernels=stage.kernels(), pace_s=1e3) as (engine, _):

        def tell(request: Request, outcome: Outcome) -> None:
            order.append((request.id, outcome.progress[0]))
            if len(order) == 3:
                begun.set()
                asked.wait()  # or all could be written before the other is asked for

        first = stage.submit(engine, stage.greedy((1, 9), 450, ignore_end=True), "writes", listener=tell)
        begun.wait()
        long = stage.submit(engine, stage.greedy((1, *[7] * 300), 2), "reads", listener=tell)
        asked.set()
        long.result(), first.result()
    reading = [i for i, (name, done) in enumerate(order) if name == "reads" and done == 0]
    assert len(reading) == 301 // 16
    between = order[reading[0] : reading[-1]]
    assert sum(name == "writes" for name, _ in between) >= len(reading) - 1
