"""What follows for requests of all kinds in one pass: each as if it were alone, by the formulas written out here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from llm.drafts.speculate import MOST, DraftTokens, accepted
from llm.grammars.constrain import GrammarCompiler
from llm.parameters import TextParameters
from llm.sampling import sample
from llm.sampling.choose import choose, draw_on_device, greedy_tokens
from llm.sampling.token_counts import TokenCounts
from llm.sequence import SequenceState
from llm.step import Output
from tests.core.quant.stage import normal
from tests.llm import stage
from tests.llm.sampling.test_sample import settings as sampling_settings

PROMPT = (5, 9, 9, 30)


@dataclass(frozen=True)
class Kind:
    """A request, how many guesses are made for it, and what it has said so far."""

    wanted: dict[str, Any]
    guesses: int = 0
    drafted: bool = False  # guesses from a draft's distribution; else looked up
    said: tuple[int, ...] = ()


GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 11, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.3}
KINDS = {
    "greedy": Kind(GREEDY),
    "greedy with logprobs": Kind({**GREEDY, "logprobs": 3}),
    "greedy with guesses": Kind(GREEDY, MOST),
    "greedy with one guess and logprobs": Kind({**GREEDY, "logprobs": 2}, 1),
    "greedy with penalties": Kind({**GREEDY, **PENALTIES}, said=(7, 7, 12)),
    "drawn": Kind(SEEDED),
    "drawn later": Kind(SEEDED, said=(3, 4)),
    "drawn with logprobs": Kind({**SEEDED, "seed": 2, "logprobs": 0}),
    "drawn with penalties": Kind({**SEEDED, **PENALTIES, "logprobs": 4}, said=(12, 12, 1)),
    "drawn with certain guesses": Kind({**SEEDED, "seed": 5}, 4),
    "drawn with a draft's guesses": Kind({**SEEDED, "seed": 6, "logprobs": 1}, 3, drafted=True),
}


def work_of(kind: Kind) -> SequenceState:
    made = stage.state_of(TextParameters(PROMPT, 50, ignore_end=True, **kind.wanted))
    made.take(list(kind.said), [], set())
    return made


def guess_of(kind: Kind, logits: Tensor, seed: int) -> DraftTokens:
    """Some right and some wrong guesses, by the logits [k + 1, V] that they will be held against."""
    if not kind.guesses:
        return DraftTokens([])
    if kind.drafted:
        q = (logits[:-1] + normal(seed, *logits[:-1].shape)).softmax(-1)
        return DraftTokens(q.argmax(-1).tolist(), q)
    best = logits.argmax(-1).tolist()
    right = seed % (kind.guesses + 1)
    return DraftTokens([best[j] if j < right else best[j] + 1 for j in range(kind.guesses)])


def penalized(kind: Kind, row: Tensor) -> Tensor:
    """By Keskar et al. (2019), and then by OpenAI's reference."""
    row, wanted = row.clone(), kind.wanted
    if "repetition_penalty" not in wanted:
        return row
    for token in {*PROMPT, *kind.said}:
        row[token] = row[token] / 1.4 if row[token] > 0 else row[token] * 1.4
    for token in set(kind.said):
        row[token] -= 0.7 + 0.3 * kind.said.count(token)
    return row


def alone(kind: Kind, logits: Tensor, guess: DraftTokens) -> list[int]:
    """What follows for one request, of its own logits [k + 1, V]."""
    wanted, rows = kind.wanted, torch.stack([penalized(kind, row) for row in logits])
    if wanted["temperature"] == 0:
        best = [int(token) for token in rows.argmax(-1)]
        right = next((j for j, token in enumerate(guess.tokens) if token != best[j]), len(guess.tokens))
        return best[: right + 1]
    names = ("temperature", "top_k", "top_p", "min_p")
    settings = replace(sampling_settings(1, **{name: wanted[name] for name in names}),
                       seeds=np.array([wanted["seed"]], np.uint64))  # fmt: skip
    p = sample.probabilities(rows, settings.at(torch.zeros(len(rows), dtype=torch.long)))
    p = p / p.sum(-1, keepdim=True)
    index = np.array([len(PROMPT) + len(kind.said)])
    if guess.tokens:
        return accepted(p, [0], [guess], settings, index)[0]
    return sample.draw(p, sample.uniform(settings.seeds, index, sample.TOKEN)).tolist()


def check_drawn_on_device(logits: Tensor, asked: list[Output], chosen: Sequence[Any]) -> None:
    """The device alone draws what is chosen with the host's help, of what has no guesses."""
    some = [(part, one) for part, one in zip(asked, chosen, strict=True) if not part.guess.tokens]
    counts = TokenCounts(logits.shape[1], logits.device)
    pending = draw_on_device(logits.clone(), [part for part, _ in some], sample.likeliest(logits), counts)
    pending.wait()
    for part, one in some:
        assert pending.known is not None
        assert [pending.known[part.first]] == one.tokens and [*pending.logprobs(part.first)] == [*one.logprobs]


def check(names: list[str], seed: int, *, looked: bool) -> None:
    asked: list[Output] = []
    rows: list[Tensor] = []
    for n, name in enumerate(names):
        kind = KINDS[name]
        own = normal(seed + n, kind.guesses + 1, stage.small().vocabulary, scale=3)
        asked.append(stage.asking(work_of(kind), sum(map(len, rows)), guess_of(kind, own, seed + n)))
        rows.append(own)
    logits = torch.cat(rows) if rows else torch.zeros(0, stage.small().vocabulary)
    best = greedy_tokens(logits, asked) if looked else None
    chosen = choose(logits.clone(), asked, best)
    check_drawn_on_device(logits, asked, chosen)
    assert len(chosen) == len(names)
    for name, own, ask, found in zip(names, rows, asked, chosen, strict=True):
        kind = KINDS[name]
        assert found.tokens == alone(kind, own, ask.guess), name
        most = kind.wanted.get("logprobs")
        assert len(found.logprobs) == (0 if most is None else len(found.tokens))
        logs = own.double().log_softmax(-1)  # as the model gave them: before penalties and temperature
        for j, (token, told) in enumerate(zip(found.tokens, found.logprobs, strict=False)):
            assert told.token == token and told.logprob == pytest.approx(float(logs[j, token]), abs=1e-5)
            top = logs[j].topk(most or 0)
            assert [t for t, _ in told.top] == top.indices.tolist()
            assert [log for _, log in told.top] == pytest.approx(top.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_alone(name: str) -> None:
    for seed in range(6):
        check([name], seed, looked=seed % 2 == 0)


@examples(max_examples=40)
@given(st.lists(st.sampled_from(sorted(KINDS)), max_size=7), st.integers(0, 10_000), st.booleans())
def test_all_kinds_together_are_what_each_is_alone(names: list[str], seed: int, looked: bool) -> None:
    check(names, seed, looked=looked)


def test_a_grammar_allows_what_it_allows_and_no_other_row_is_touched(compiler: GrammarCompiler) -> None:
    model = stage.small()
    logits = normal(3, 3, model.vocabulary, scale=3)
    held, drawn, free = (
        stage.state_of(TextParameters(PROMPT, 50, **wanted), matcher)
        for wanted, matcher in (
            (GREEDY, compiler.compile('{"type": "boolean"}').matcher()),
            (SEEDED, compiler.compile('{"type": "integer"}').matcher()),
            (GREEDY, None),
        )
    )
    assert held.matcher is not None and drawn.matcher is not None
    allowed, digits = held.matcher.allowed(), drawn.matcher.allowed()
    assert 0 < allowed.sum() < model.vocabulary and not allowed[logits[0].argmax()]
    made = choose(logits.clone(), [stage.asking(held, 0), stage.asking(drawn, 1), stage.asking(free, 2)])
    assert made[0].tokens == [int(logits[0].where(allowed, -torch.inf).argmax())]
    assert digits[made[1].tokens[0]]
    assert made[2].tokens == [int(logits[2].argmax())]


def test_rows_that_are_not_finite_are_found() -> None:
    greedy, drawn = stage.asking(work_of(KINDS["greedy"]), 0), stage.asking(work_of(KINDS["drawn"]), 1)
    logits = normal(1, 4, stage.small().vocabulary)
    logits[1, 3], logits[2, 0] = torch.nan, torch.inf
    best = logits.argmax(-1).tolist()
    assert greedy_tokens(logits, [greedy, drawn]) == [best[0], -1, -1, best[3]]
    assert [token >= 0 for token in greedy_tokens(logits, [drawn])] == [True, False, False, True]
    assert greedy_tokens(logits, [greedy], torch.tensor([4, 3, 2, 1])) == [4, 3, 2, 1], "the forward has looked already"
