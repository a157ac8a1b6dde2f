"""Training begins where the exported language models ended."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tests.training.world import Trained
from training import draft, lm, loop, start, tokens


def test_language_models_begin_where_the_exported_ones_ended(trained: Trained, tmp_path: Path) -> None:
    """With the tokenizer that they were exported with, and a rate at which they forget less."""
    run = dataclasses.replace(trained.run, work=tmp_path, iterations=1)
    start.convert_text(run)
    mine, wanted = tokens.lm_tokenizer(run), tokens.lm_tokenizer(trained.run)
    assert (mine.get_vocab(), mine.chat_template) == (wanted.get_vocab(), wanted.chat_template)
    for stage, part, module in (("lm", "lm", lm), ("draft", "draft", draft)):
        model = module.build(run)
        assert loop.begin(stage, {part: model}, run)
        for key, tensor in module.load(trained.run).state_dict().items():
            assert torch.equal(model.state_dict()[key], tensor.half().float()), key
        assert module.train(run).done and run.rate(1.0, stage) == 0.6
