"""Text over several ranks: that of one process, greedily, in flight, after preemption, embedded and scored."""

from __future__ import annotations

import pytest

from llm import tiny
from llm.load import load
from tests.llm import ranks
from tests.llm.stage import answers, greedy, serving
from llm.parameters import TextParameters

PROMPTS = [tuple(range(3, 3 + n)) for n in (5, 40, 9, 17, 2, 33, 12, 21)]


@pytest.mark.parametrize("parallel", ["tp2", "tp4", "pp2", "tp2pp2"])
def test_text_of_ranks_is_that_of_one_process(parallel: str) -> None:
    wanted = [greedy(prompt, 16) for prompt in PROMPTS]
    with serving(load(tiny.TINY), max_requests=8) as (engine, _):
        expected = [text.tokens for text in answers(engine, wanted)]
    with ranks.serving(tiny.TINY, parallel, max_requests=8) as (engine, _):
        assert [text.tokens for text in answers(engine, wanted)] == expected
