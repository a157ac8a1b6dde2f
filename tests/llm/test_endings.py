"""How answers end: `min_tokens` and further end tokens are transformers' own, whoever shares the forwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from contract.errors import Invalid
from llm.parameters import TextParameters, check
from tests.llm import stage

MOST = 24


def ended(model: Any, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """A token of each prompt's free answer, from its middle."""
    return [(answer[len(answer) // 2],) for answer in stage.generated(model, prompts, MOST)]


@pytest.mark.parametrize("native", [True, False])
def test_answers_are_transformers_own(native: bool) -> None:
    model = stage.small()
    prompts = stage.prompts(model, 8)
    stops = ended(model, prompts)
    limits = [0, 1, 9, MOST, 0, 5, 14, 2]
    requests = [
        stage.greedy(prompt, MOST, min_tokens=limit, stop_token_ids=stop)
        for prompt, limit, stop in zip(prompts, limits, stops, strict=True)
    ]
    texts = stage.write(model, [*requests, *(stage.greedy(prompt, MOST) for prompt in prompts)], native=native)
    for prompt, limit, stop, text in zip(prompts, limits, stops, texts[: len(prompts)], strict=True):
        ends = {*model.ends, *stop}
        (expected,) = stage.generated(replace(model, ends=frozenset(ends)), [prompt], MOST, min_new_tokens=limit)
        assert text.tokens == expected and len(text.tokens) >= limit
        assert text.finish == ("stop" if text.tokens[-1] in ends else "length")
    assert [text.tokens for text in texts[len(prompts) :]] == stage.generated(model, prompts, MOST)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_text_without_its_own_end_ends_at_tokens_that_are_named(temperature: float) -> None:
    model = stage.small()
    stop = tuple(range(3, model.vocabulary, 3))
    options: dict[str, Any] = {"temperature": temperature, "ignore_end": True, "seed": 3}
    free, named, late = stage.write(
        model,
        [
            TextParameters(stage.prompts(model, 1)[0], 60, **options, **more)
            for more in ({}, {"stop_token_ids": stop}, {"stop_token_ids": stop, "min_tokens": 20})
        ],
    )
    assert len(free.tokens) == 60 and free.finish == "length"
    assert named.finish == "stop" and named.tokens[-1] in stop and not {*named.tokens[:-1]} & {*stop}
    assert late.finish == "stop" and len(late.tokens) > 20 and not {*late.tokens[:-1]} & {*stop}


def test_a_stop_within_the_least_tokens_does_not_end_an_answer() -> None:
    model = stage.small()
    prompt = stage.prompts(model, 1)[0]
    (free,) = stage.write(model, [TextParameters(prompt, 40, ignore_end=True, seed=3)])
    stop = next(letter for letter in free.text if letter.isprintable() and letter != "\ufffd")
    early, late = stage.write(
        model,
        [TextParameters(prompt, 40, ignore_end=True, seed=3, stop=(stop,), min_tokens=least) for least in (0, 40)],
    )
    assert early.finish == "stop" and stop not in early.text
    assert (late.finish, late.text, late.tokens) == ("length", free.text, free.tokens)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"min_tokens": 9}, "min_tokens"), ({"stop_token_ids": (300,)}, "stop_token_ids"),
        ({"stop_token_ids": (True,)}, "stop_token_ids"), ({"stop_token_ids": (1,) * 129}, "stop_token_ids"),
        ({"min_tokens": 1, "json_schema": "{}"}, "min_tokens"),
        ({"ignore_end": True, "json_schema": "{}"}, "ignore_eos"),
        ({"beams": 2, "stop_token_ids": (5,)}, "stop_token_ids"), ({"beams": 2, "min_tokens": 1}, "min_tokens"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        check(TextParameters((5,), 8, temperature=0.0, **options), vocabulary=262, context=99)
    assert caught.value.field == field
