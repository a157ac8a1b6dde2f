"""What the language models are judged by."""

from __future__ import annotations

import dataclasses

from evaluation.scenes import emoji
from training import judge_text, phrases
from training.run import TrainingRun
from training.shapes import SMOKE


def test_held_out_chats_are_new_prompts(run: TrainingRun) -> None:
    import random

    run = dataclasses.replace(run, seed=3, shapes=dataclasses.replace(SMOKE, chats=200))
    found = judge_text.held_out_chats(run, 30)
    expander, draw = phrases.Expander(emoji.read_rows(run.data)), random.Random(3)
    known = {expander.draw(draw).prompt for _ in range(200)}
    assert len({chat.prompt for chat in found}) == len(found) > 20
    assert not known & {chat.prompt for chat in found}
