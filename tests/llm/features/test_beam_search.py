"""Beams are transformers': their answers, order and scores; alone, in flight with other requests, after preemption."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from contract.errors import Invalid
from core.batching.request import Outcome, Request
from llm.cache.pages import PAGE
from llm.checkpoints.load import TextModel
from llm.features.beam_search import BeamSearch
from llm.parameters import GeneratedText, Logprob, TextParameters
from llm.runner import TextRunner
from llm.sequence import SequenceState
from tests.llm import stage
from tests.llm.test_exact import watch

MOST = 16
CLOSE = 2e-4  # between two scores: either answer may be the better one


@dataclass(frozen=True)
class Search:
    width: int
    length_penalty: float
    early_stopping: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"length_penalty": self.length_penalty, "early_stopping": self.early_stopping}


SEARCHES = [Search(4, 1.0, False), Search(3, 0.6, True), Search(4, 2.0, False)]


@functools.cache
def searched(name: str, search: Search, count: int) -> list[list[tuple[tuple[int, ...], float]]]:
    """transformers' answers and scores, best first."""
    model: TextModel = getattr(stage, name)()
    texts = []
    for prompt in stage.prompts(model, count):
        output = stage.generate(
            model, [prompt], MOST, num_beams=search.width, num_return_sequences=search.width, output_scores=True,
            return_dict_in_generate=True, **search.options,
        )  # fmt: skip
        rows = [stage.until_end(model, row) for row in output.sequences[:, len(prompt) :].tolist()]
        texts.append([*zip(rows, output.sequences_scores.tolist(), strict=True)])
    return texts


def scored(text: GeneratedText) -> list[tuple[tuple[int, ...], float | None]]:
    return [(answer.tokens, answer.cumulative_logprob) for answer in (text, *text.alternatives)]


def check(texts: list[GeneratedText], expected: list[list[tuple[tuple[int, ...], float]]], search: Search) -> int:
    """Equal in order, or else of scores that are as good; returns how many searches have such ties."""
    ties = 0
    for text, best in zip(texts, expected, strict=True):
        answers = [text, *text.alternatives]
        scores = [(a.cumulative_logprob or 0) / len(a.tokens) ** search.length_penalty for a in answers]
        assert scores == pytest.approx([score for _, score in best], abs=CLOSE)
        ties += [answer.tokens for answer in answers] != [tokens for tokens, _ in best]
    return ties


@pytest.mark.parametrize(("name", "search"), [("emoji", SEARCHES[0]), *(("small", search) for search in SEARCHES)])
def test_beams_are_transformers(name: str, search: Search) -> None:
    model, count = getattr(stage, name)(), 6
    prompts = stage.prompts(model, count)
    options = {"answers": search.width, "beams": search.width, **search.options}
    requests = [stage.greedy(prompt, MOST, **options) for prompt in prompts]
    plain = [stage.greedy(prompt, MOST) for prompt in prompts]
    alone = [stage.write(model, [request])[0] for request in requests[:3]]
    mixed = stage.write(model, [*requests, *plain], max_requests=32)
    assert check(mixed[:count], searched(name, search, count), search) <= 1
    assert [*map(scored, alone)] == [*map(scored, mixed[:3])]
    assert [text.tokens for text in mixed[count:]] == [text.tokens for text in stage.write(model, plain)]


@pytest.mark.parametrize("name", ["emoji", "small"])
def test_beams_after_preemption(name: str) -> None:
    """Preempted before each iteration: they read again what they have in common, and then each its own tokens."""
    search, model, count = SEARCHES[0], getattr(stage, name)(), 2
    runner = TextRunner(model, kernels=stage.kernels(), chunk=9)
    for prompt, expected in zip(stage.prompts(model, count), searched(name, search, 6)[:count], strict=True):
        request = stage.greedy(prompt, MOST, beams=4, answers=4)
        whole = stage.preempted(runner, request)
        check([whole], [expected], search)
        for after in range(1, MOST, 3):
            assert scored(stage.preempted(runner, request, after, after + 2)) == scored(whole)
    runner.pages.check()
    runner.close()


def test_a_search_that_goes_on_after_preemption_has_rows_in_each_iteration() -> None:
    """Whatever its width, as `iterations` checks: a scheduler divides time by them."""
    runner, prompt = TextRunner(stage.small(), kernels=stage.kernels(), chunk=9), stage.prompts(stage.small(), 1)[0]
    for width, after in itertools.product((1, 2, 4), (1, 2, 5)):
        stage.preempted(runner, stage.greedy(prompt, 8, beams=width), after)
    runner.close()


def test_a_search_whose_commit_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of its iteration keep what they got: none of their tokens comes twice."""
    model = stage.small()
    prompt, other = stage.prompts(model, 2)

    def fails(self: BeamSearch[SequenceState], *_: object) -> list[int]:
        raise RuntimeError("this search")

    (expected,) = stage.write(model, [stage.greedy(other, MOST)])
    monkeypatch.setattr(BeamSearch, "advance", fails)
    tokens: list[int] = []

    def listener(_: Request, outcome: Outcome) -> None:
        tokens.extend(() if outcome.token is None else outcome.token.tokens)

    with stage.serving(model, kernels=stage.kernels()) as (engine, _):
        beside = stage.submit(engine, stage.greedy(other, MOST), listener=listener)
        searching = stage.submit(engine, stage.greedy(prompt, MOST, beams=3), "b")
        with pytest.raises(RuntimeError, match="this search"):
            searching.result(60)
        assert beside.result(60).tokens == expected.tokens == tuple(tokens)


def test_beams_among_answers_that_take_their_pages() -> None:
    search, model, count = SEARCHES[0], stage.emoji(), 8
    prompts = stage.prompts(model, count)
    older = [stage.greedy(prompt, 100, ignore_end=True) for prompt in prompts]
    requests = [stage.greedy(prompt, MOST, beams=4, answers=4) for prompt in prompts]
    with stage.serving(model, kernels=stage.kernels(), max_requests=24, pages=48, chunk=7) as (engine, runner):
        preempted = watch(runner)
        found = stage.answers(engine, [*older, *requests])[len(older) :]
        assert preempted
    assert check(found, searched("emoji", search, count), search) <= 1


def test_beams_share_all_pages_but_the_last() -> None:
    model = stage.small()
    runner, most = TextRunner(model, kernels=stage.kernels(), max_requests=8), 0
    request = stage.greedy(stage.prompt_of(model, 5 * PAGE + 3), 40, beams=4, answers=1)
    for work, outcome in stage.iterations(runner, request):
        beams = work.beams
        assert beams is not None
        for one, other in itertools.combinations(() if outcome.finished else beams.states, 2):
            shared = [a == b for a, b in zip(one.holding.pages, other.holding.pages, strict=False)]
            pairs = enumerate(zip(one.tokens, other.tokens, strict=True))
            common = next((n for n, (a, b) in pairs if a != b), one.computed)
            assert all(shared[: min(common, one.computed) // PAGE]) and not any(shared[one.computed // PAGE :])
        most = max(most, runner.pages.held)
    assert most < 4 * 6, "each beam has its own last pages alone"
    runner.pages.check()
    runner.close()


def test_a_search_that_finds_no_pages_to_grow_into_reserves_none() -> None:
    """Beside an answer that has taken what was left."""
    runner = TextRunner(stage.small(), max_requests=8, pages=20)
    search = Request("0", "text", stage.greedy((1, 2, 3), 3 * PAGE, beams=3))
    other = Request("1", "text", stage.greedy((1, *[7] * 14 * PAGE), 8))
    assert runner.admit(search) is None and runner.admit(other) is None
    while runner.reserve([search]):
        assert not runner.launch([search]).outcome()["0"].finished
    for request in (search, other):
        runner.release(request)
    runner.pages.check()
    runner.close()


REFUSED: dict[str, dict[str, Any]] = {
    "stop": {"stop": ("x",)}, "logit_bias": {"logit_bias": ((3, 1.0),)}, "json_schema": {"json_schema": "{}"},
    "repetition_penalty": {"repetition_penalty": 1.1}, "temperature": {"temperature": 1.0}, "n": {"answers": 5},
    "prompt_logprobs": {"prompt_logprobs": True, "logprobs": 0}, "max_tokens": {"max_tokens": 0},
    "length_penalty": {"length_penalty": 11.0}, "early_stopping": {"early_stopping": "never"},
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
def test_what_no_search_has_is_refused_by_name(field: str) -> None:
    runner = TextRunner(stage.small(), max_requests=8)
    parameters = replace(stage.greedy((1, 2, 3), 8, beams=4), **REFUSED[field])
    with pytest.raises(Invalid) as refused:
        runner.check(Request("0", "text", parameters))
    assert refused.value.field == field
    runner.close()


def test_beams_that_cannot_be_in_the_cache_at_once_are_refused() -> None:
    runner = TextRunner(stage.small(), max_requests=8, pages=20)
    runner.check(Request("0", "text", stage.greedy((1, 2, 3), 3 * PAGE, beams=3)))
    with pytest.raises(Invalid, match="9 beams are more than the 8 sequences"):
        runner.check(Request("0", "text", stage.greedy((1, 2, 3), 3, beams=9)))
    with pytest.raises(Invalid, match="3 beams of so many tokens do not fit the cache"):
        runner.check(Request("0", "text", stage.greedy((1, 2, 3), 5 * PAGE, beams=3)))
    runner.close()


@settings(deadline=None)
@given(
    data=st.data(), width=st.integers(1, 3), ends=st.sets(st.integers(0, 9), max_size=5), early=st.booleans(),
    most=st.integers(1, 4),
)  # fmt: skip
def test_as_many_beams_run_on_whichever_tokens_end(
    data: st.DataObject, width: int, ends: set[int], early: bool, most: int
) -> None:
    """As transformers does with several end tokens: the likeliest that do not end run on, `width` of them, and those
    that end are finished that are among the `width` likeliest of all.
    """
    vocabulary = 10
    parameters = TextParameters((1,), most, beams=width, early_stopping=early)
    search: BeamSearch[None] = BeamSearch(parameters, ends, vocabulary)
    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, most + 1):
        # Distinct, and so that any token may be the likeliest.
        tables = [[-value / 64 for value in data.draw(st.permutations(range(64)))[:vocabulary]] for _ in running]
        candidates = []
        for table in tables:
            order = sorted(range(vocabulary), key=lambda token: -table[token])[: search.candidates]
            candidates.append(Logprob(order[0], table[order[0]], tuple((token, table[token]) for token in order)))
        every = sorted(
            ((total + table[token], n, token) for n, ((_, total), table) in enumerate(zip(running, tables, strict=True))
             for token in range(vocabulary)), key=lambda entry: -entry[0],
        )  # fmt: skip
        assume(all(first[0] - second[0] > 1e-5 for first, second in itertools.pairwise(every)))
        going, full = [], len(finished) == width
        for rank, (total, n, token) in enumerate(every):
            tokens = (*running[n][0], token)
            if token not in ends and length < most:
                going.append((tokens, total))
            elif rank < width and not (full and early):
                finished.append((total / length, tokens))
        finished = sorted(finished, key=lambda entry: -entry[0])[:width]
        search.advance(candidates)
        if not search.running:
            break
        running = going[:width]
        assert [beam.tokens for beam in search.running] == [tokens for tokens, _ in running]
    assert [beam.tokens for _, beam in search._finished] == [tokens for _, tokens in finished]
