"""What the language models are judged by."""

from __future__ import annotations

import dataclasses
from itertools import product
from math import prod

import torch

from lab.scenes import emoji
from lab.training import judge_text, phrases
from lab.training.run import TrainingRun
from lab.training.shapes import SMOKE


def test_held_out_chats_are_new_prompts(run: TrainingRun) -> None:
    import random

    run = dataclasses.replace(run, seed=3, shapes=dataclasses.replace(SMOKE, chats=200))
    found = judge_text.held_out_chats(run, 30)
    expander, draw = phrases.Expander(emoji.read_rows(run.data)), random.Random(3)
    known = {expander.draw(draw).prompt for _ in range(200)}
    assert len({chat.prompt for chat in found}) == len(found) > 20
    assert not known & {chat.prompt for chat in found}


def test_trees_of_guesses_are_the_likeliest_prefixes() -> None:
    p = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)).softmax(-1)
    place = judge_text.Place(torch.arange(12).view(3, 4), p)
    prefixes = [path for length in range(4) for path in product(range(4), repeat=length)]
    prefixes.sort(key=lambda path: -prod(float(p[i, j]) for i, j in enumerate(path)))
    expected = [[4 * i + j for i, j in enumerate(path)] for path in prefixes[:12]]
    assert judge_text.likeliest_prefixes(place, 11) == expected
