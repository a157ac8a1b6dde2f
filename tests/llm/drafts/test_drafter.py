"""The interface of drafters: what one is told of every sequence, in chunks, after preemption and a shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from llm.drafts.drafter import DraftRequest, LookupDrafter
from llm.drafts.speculate import DraftTokens
from llm.drafts.speculator import Speculator
from llm.sequence import SequenceState
from tests.llm import stage

LAYERS = (1, 0, 1)


class Witness(LookupDrafter):
    """Guesses the model's own next tokens, one of them wrong, and keeps the features of all that it reads."""

    name, features, lookahead, reads = "witness", LAYERS, 1, True

    def __init__(self, known: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self._known = known  # answers by prompt
        self.read: dict[tuple[int, ...], dict[int, Tensor]] = {}  # by position
        self.state: dict[tuple[int, int], tuple[int, ...]] = {}  # by page and position: its token and the next one

    def __call__(self, execution: Any, **size: Any) -> Witness:
        self._table = execution.cache.table
        return self

    def limit(self, work: SequenceState, count: int) -> int:
        return count

    def guess(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        drafts = []
        for r in requests:
            assert r.features is not None and len(r.features) == r.stop - r.read
            prompt = next(prompt for prompt in self._known if tuple(r.tokens[: len(prompt)]) == prompt)
            for position in range(r.stop):  # all that is behind is known in its pages, of the right tokens
                page, own = int(self._table[r.row, position // 16]), tuple(r.tokens[position : position + 2])
                if position >= r.read:
                    self.read.setdefault(prompt, {})[position] = r.features[position - r.read].clone()
                    self.state[page, position] = own
                assert self.state[page, position] == own
            answer = self._known[prompt][len(r.tokens) - len(prompt) :]
            guesses = [*answer, *[0] * r.count][: r.count]
            if len(r.tokens) % 3 == 0 and len(guesses) > 1:
                guesses[1] += 1
            drafts.append(DraftTokens(guesses))
        return drafts


@pytest.mark.parametrize("options", [{}, {"chunk": 7, "pages": 30, "max_requests": 6}], ids=["roomy", "preempted"])
@pytest.mark.parametrize("on_kernels", [True, False])
def test_a_drafter_gets_the_features_of_every_position(
    monkeypatch: pytest.MonkeyPatch, on_kernels: bool, options: dict[str, Any]
) -> None:
    """Those of transformers; pages that are shared hold what belongs to the tokens in and behind them."""
    monkeypatch.setattr(Speculator, "lengths", lambda self, decoding: None)  # load decides nothing
    model = stage.small()
    shared = stage.plain(model, "abcabcabcabcabcabca")[:17]
    prompts = [(*shared[: 17 - i % 2], *range(5 + i, 9 + i)) for i in range(8)]
    wanted = [stage.greedy(prompt, 40, ignore_end=True) for prompt in prompts]
    plain = stage.write(model, wanted, native=on_kernels)
    witness = Witness({prompt: text.tokens for prompt, text in zip(prompts, plain, strict=True)})
    kernels = stage.kernels() if on_kernels else None
    with stage.serving(model, kernels=kernels, draft=witness, **options) as (engine, runner):
        made = stage.answers(engine, wanted)
        assert runner.guessing.accepted > 50
    for prompt, text, same in zip(prompts, plain, made, strict=True):
        assert text.tokens == same.tokens
        tokens = (*prompt, *text.tokens)
        with stage.by_transformers(model) as network:
            states = network(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer][0] for layer in LAYERS], -1)
        assert len(witness.read[prompt]) > 30
        for position, row in witness.read[prompt].items():
            torch.testing.assert_close(row, expected[position], rtol=1e-3, atol=1e-4)
