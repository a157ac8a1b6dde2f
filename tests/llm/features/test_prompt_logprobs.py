"""Log probabilities of prompts' tokens: transformers' own, in a batch, after preemption, with a prefix cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llm.backends.forward import Forward
from llm.cache.pages import PAGE
from llm.checkpoints.load import TextModel, load
from llm.families import tiny
from llm.model_runner import ModelRunner
from llm.parameters import Logprob, TextParameters
from llm.runner import TextRunner
from tests.llm import stage


def scored(prompt: tuple[int, ...], most: int = 1, top: int = 3, **options: Any) -> TextParameters:
    return TextParameters(prompt, most, temperature=0, logprobs=top, prompt_logprobs=True, **options)


def assert_transformers_own(model: TextModel, prompt: Sequence[int], logprobs: Sequence[Logprob], top: int) -> None:
    expected = stage.logits(model, prompt).log_softmax(-1)
    assert [entry.token for entry in logprobs] == [*prompt[1:]]
    for row, entry in zip(expected, logprobs, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token].item(), abs=1e-3)
        assert len(entry.top) == top
        assert [value for _, value in entry.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-3)
        for token, value in entry.top:
            assert value == pytest.approx(row[token].item(), abs=1e-3)


@pytest.mark.quick
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3", "emoji"])
def test_they_are_transformers_own(name: str, kernels: bool) -> None:
    """In the company of answers, of chunks of several lengths, and with guesses beside."""
    model = stage.small() if name == "llama" else stage.emoji() if name == "emoji" else load(tiny.QWEN3_TINY)
    prompts = stage.prompts(model, 6)
    prompts.append(stage.prompt_of(model, 130))
    requests = [item for prompt in prompts for item in (scored(prompt, 4), stage.greedy(prompt, 12))]
    texts = stage.write(model, requests, native=kernels, chunk=48, max_rows=80, draft="lookup")
    for prompt, text, plain in zip(prompts, texts[::2], texts[1::2], strict=True):
        assert_transformers_own(model, prompt + text.tokens, text.prompt_logprobs + text.logprobs, 3)
        assert text.tokens == plain.tokens[:4]
        assert plain.prompt_logprobs == ()


def test_equal_beginnings_are_computed_anew_and_found_by_others() -> None:
    model = stage.small()
    prompt = stage.prompt_of(model, 5 * PAGE + 3)
    plain = stage.greedy(prompt, 4)
    with stage.serving(model, kernels=stage.kernels()) as (engine, _):
        (first,), (again,), (last,) = (stage.answers(engine, [each]) for each in (plain, scored(prompt, 4), plain))
    assert (first.cached, again.cached, last.cached) == (0, 0, 5 * PAGE)
    assert_transformers_own(model, prompt, again.prompt_logprobs, 3)
    assert first.tokens == again.tokens == last.tokens


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_a_preempted_prompt_goes_on_where_it_was(draft: Any) -> None:
    """Preempted after each number of iterations, with and without other requests' pages to be found by its content."""
    model = stage.small()
    prompts = [tuple(itertools.islice(itertools.cycle(p), 75)) for p in stage.prompts(model, 2)]
    runner = TextRunner(model, kernels=stage.kernels(), chunk=20, draft=draft)
    for prompt, after in itertools.product(prompts, range(1, 8)):
        text = stage.preempted(runner, scored(prompt, 6), after, after + 2)
        assert_transformers_own(model, prompt, text.prompt_logprobs, 3)
        assert text.tokens == stage.generated(model, [prompt], 6)[0]
    runner.close()


@pytest.mark.parametrize("length", [1, 2, 70])
def test_a_prompt_alone_is_read_without_an_answer(length: int) -> None:
    model = stage.small()
    prompt = stage.prompt_of(model, length)
    texts = stage.write(model, [scored(prompt, 0, top=0), stage.greedy(prompt, 0)])
    assert [(text.text, text.tokens, text.finish) for text in texts] == [("", (), "length")] * 2
    assert_transformers_own(model, prompt, texts[0].prompt_logprobs, 0)


def test_logits_of_prompts_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward has more rows of logits than are scored at once and one for each answer, however much is asked for."""
    model = stage.small()
    prompts = [tuple(itertools.islice(itertools.cycle(p), 100)) for p in stage.prompts(model, 6)]
    widths: list[int] = []
    with stage.serving(model, kernels=stage.kernels(), chunk=64, max_rows=192) as (engine, runner):
        runner._model_runner.score_rows = 20
        forward = runner.execution.forward

        def count(self: Any, step: Any) -> Forward:
            widths.append(len(step.output_rows))
            return forward(step)

        monkeypatch.setattr(type(runner.execution), "forward", count)
        texts = stage.answers(engine, [scored(prompt, 3) for prompt in prompts])
    assert max(widths) <= 20 + len(prompts) and len(widths) > 6 * 100 / 20
    for prompt, text in zip(prompts, texts, strict=True):
        assert_transformers_own(model, prompt, text.prompt_logprobs, 3)


def test_the_rows_of_a_large_vocabulary_are_few() -> None:
    class Execution:
        def __init__(self, vocabulary: int) -> None:
            self.model = type("Model", (), {"vocabulary": vocabulary, "device": torch.device("cpu")})
            self.cache = type("Cache", (), {"table": torch.zeros(1, 1)})

    class Guessing:
        draft = None

    rows = []
    for vocabulary in (262, 128_256, 10**9):
        runner = ModelRunner(Execution(vocabulary), Guessing())  # type: ignore[arg-type]
        rows.append(runner.score_rows)
        runner.close()
    assert rows == [256, 130, 16]
