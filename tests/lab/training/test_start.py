"""What is kept of a run in training is exported elsewhere as the run itself would be."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from lab.training import checkpoint, draft, latents, lm, loop, start, tokens, unet
from tests.lab.training.world import Trained

# LCMScheduler and Euler's convert tensors the old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def test_kept_weights_are_the_averages_in_half_precision(trained: Trained, tmp_path: Path) -> None:
    kept = start.save_averages(trained.run, tmp_path)
    assert {"vae", "clip", "unet"} <= set(kept)
    shutil.copytree(trained.run.work / "tokens", tmp_path / "tokens")
    elsewhere = dataclasses.replace(trained.run, work=tmp_path)
    for name, module in unet.load(elsewhere).modules().items():
        wanted = unet.load(trained.run).modules()[name].state_dict()
        for key, tensor in module.state_dict().items():
            expected = wanted[key].half().to(tensor.dtype) if tensor.is_floating_point() else wanted[key]
            assert torch.equal(tensor, expected), key
    state = checkpoint.load(tmp_path / "unet" / "state.pt")
    assert state is not None and list(state) == ["averaged"], "no optimizer travels"


def test_nothing_is_kept_of_what_is_not_trained(trained: Trained, tmp_path: Path) -> None:
    assert start.save_averages(dataclasses.replace(trained.run, work=tmp_path / "work"), tmp_path / "kept") == []


def test_the_denoiser_alone_begins_with_the_exported_codec(trained: Trained, tmp_path: Path) -> None:
    run = dataclasses.replace(trained.run, work=tmp_path / "work")
    shutil.copytree(trained.run.work / "tokens", run.work / "tokens")
    start.convert(run, denoiser=True)
    assert sorted(path.name for path in (run.work / "start").iterdir()) == ["unet.pt"]
    codec, wanted = latents.load_codec(run), latents.load_codec(trained.run)
    assert codec.config.scaling_factor == pytest.approx(wanted.config.scaling_factor)
    for key, tensor in codec.state_dict().items():
        assert torch.equal(tensor, wanted.state_dict()[key].half().float()), key
    begun = checkpoint.need(run.work / "start" / "unet.pt", "start")
    for name, module in unet.load(trained.run).modules().items():
        for key, tensor in module.state_dict().items():
            assert torch.equal(begun[name][key].float(), tensor.half().float()), key


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
