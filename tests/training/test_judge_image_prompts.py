"""The judge of image prompts finds what they show in true pictures of them, and not in those of others."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from training import cards, ip_adapter, judge_image_prompts
from training.run import TrainingRun

COUNT = 3


def copied(texts: list[str], shown: Tensor, strength: float) -> Tensor:
    """The image prompt itself where it is to be read at all, else a blank picture."""
    return (shown + 1) / 2 if strength else torch.ones_like(shown)


def test_shares_are_of_what_is_shown(large: TrainingRun) -> None:
    found = judge_image_prompts.judge(large, COUNT, copied, {"steps": 4, "guidance_scale": 3.0})
    for part in ("subject", "subject_in_colour"):
        assert found["nothing"][part].value == found["text"][part].value == 0
        assert found["image"][part].value == 1
        assert found["text_and_other_image"][part].value < 1
        assert found["text_and_other_image_as_the_image"][part].value == 1
    folder = large.folder("judge")
    assert json.loads((folder / "image-prompts.json").read_text(encoding="utf-8")) == json.loads(json.dumps(found))
    assert (folder / "image-prompts.png").stat().st_size > 0
    told = ip_adapter._measured(large)
    assert f"| image | {cards.share(found['image']['subject'])} |" in told and f"{COUNT} prompts" in told
