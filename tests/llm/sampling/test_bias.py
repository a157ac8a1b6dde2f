"""logit_bias: transformers' own bias gives the same greedy answers; -100 is never drawn and 100 always."""

from __future__ import annotations

import pytest
import torch

from contract.errors import Invalid
from llm.parameters import TextParameters
from llm.sampling.choose import choose
from llm.step import Output
from tests.llm import stage


def test_greedy_answers_are_transformers_own() -> None:
    model = stage.small()
    prompts = stage.prompts(model, 8)
    free = stage.generated(model, prompts, 20)
    biases = [{one[0]: -3.0, one[-1]: -0.5, (one[0] + 7) % model.vocabulary: 2.5, 70: 1.0} for one in free]
    wanted = [stage.greedy(p, 20, logit_bias=tuple(bias.items())) for p, bias in zip(prompts, biases, strict=True)]
    found = [text.tokens for text in stage.write(model, wanted)]
    for prompt, bias, tokens in zip(prompts, biases, found, strict=True):
        sequence_bias = [[[token], value] for token, value in bias.items()]
        assert [tokens] == stage.generated(model, [prompt], 20, sequence_bias=sequence_bias)
    assert sum(map(tuple.__ne__, found, free)) > 4, "the biases do something"


def _asked(temperature: float, bias: dict[int, float], first: int) -> Output:
    wanted = TextParameters((5, 6), 9, temperature=temperature, seed=first, logit_bias=tuple(bias.items()))
    return stage.asking(stage.state_of(wanted, vocabulary=64), first)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_whatever_the_logits_are(temperature: float) -> None:
    """A ban holds where the model is sure of a token, and a wish where it is sure of another."""
    for k in range(40):
        logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(k)) * 50
        sure = int(logits[0].argmax())
        logits[:, sure] += 10_000
        asked = [
            _asked(temperature, {sure: -100}, 0), _asked(temperature, {11: 100, 12: 100}, 1), _asked(temperature, {}, 2)
        ]  # fmt: skip
        banned, wished, free = choose(logits.clone(), asked)
        assert not isinstance(banned, Invalid) and banned.tokens[0] != sure
        assert not isinstance(wished, Invalid) and wished.tokens[0] in (11, 12)
        assert not isinstance(free, Invalid) and free.tokens == [sure]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_wish_excludes_all_others_that_have_a_bias_too(temperature: float) -> None:
    for other in (99.5, 5.0, -5.0, -100.0):
        logits = torch.zeros(1, 64)
        logits[0, 12] = 10_000
        (wished,) = choose(logits, [_asked(temperature, {11: 100, 12: other}, 0)])
        assert not isinstance(wished, Invalid) and wished.tokens[0] == 11


def test_one_that_leaves_nothing_costs_nobody_else() -> None:
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    for temperature in (0.0, 1.0):
        nothing, free = choose(
            logits.clone(),
            [_asked(temperature, dict.fromkeys(range(64), -100), 0), _asked(0.0, {}, 1)],
        )
        assert isinstance(nothing, Invalid) and str(nothing).startswith("logit_bias: ")
        assert not isinstance(free, Invalid) and free.tokens == [int(logits[1].argmax())]
