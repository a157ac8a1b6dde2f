"""The edge ControlNet begins where the denoiser is, learns from edges, and is served as it was exported."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from contract.control import Control
from contract.image import ImageParameters
from core.batching.runner import Lane
from pipeline.checkpoints.load import load
from pipeline.extensions import canny
from tests.pipeline.extensions.test_canny import picture
from tests.pipeline.worlds import Watching, levels, solo
from tests.training.world import Trained, adopted, surely_less
from training import control, unet
from training.edges import edges
from training.run import TrainingRun
from training.shapes import EMOJI

# EulerDiscreteScheduler converts tensors the old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("kind", ["noise", "blocks", "slopes"])
def test_edges_are_the_preprocessors(kind: str) -> None:
    for seed in range(12):
        pixels = picture(kind, seed)
        both = np.stack([pixels, pixels[::-1]])
        found = edges(torch.from_numpy(both.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1)
        for own, given in zip(found, both, strict=True):
            expected = canny.edges(given)
            assert np.array_equal(own.permute(1, 2, 0).numpy() * 255, expected), (kind, seed)


def test_a_long_line_of_weak_pixels_is_followed_to_its_end() -> None:
    """One strong end of a line that is weak otherwise, longer than the rounds between two looks."""
    line = np.full((9, 200, 3), 100, np.uint8)
    line[:5] = 140  # a step of 40: 160, between the thresholds
    line[:5, :3] = 200
    found = edges(torch.from_numpy(line[None]).permute(0, 3, 1, 2).float() / 127.5 - 1)
    assert np.array_equal(found[0].permute(1, 2, 0).numpy() * 255, canny.edges(line))
    assert found[0, 0, :, 150].any()


def test_the_shipped_network_fits() -> None:
    run = TrainingRun(Path(), Path(), Path(), shapes=EMOJI)
    from diffusers import UNet2DConditionModel

    net = control.build(run, UNet2DConditionModel(**run.picture.unet()))
    assert 2 * sum(parameter.numel() for parameter in net.parameters()) < control.MOST_BYTES


def test_it_learns_what_edges_tell_and_serves_it(trained: Trained, tmp_path: Path) -> None:
    run = adopted(trained, tmp_path, 100)
    parts = unet.load(run)
    fresh = control.build(run, parts.unet)
    own = parts.unet.state_dict()
    shared = [name for name in fresh.state_dict() if name in own]
    assert "mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight" in shared
    assert all(torch.equal(fresh.state_dict()[name], own[name]) for name in shared)

    def errors(net: torch.nn.Module) -> list[float]:
        """Of later batches than any that it is trained on."""
        losses = control.ControlLoss(run, net, parts)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            return [float(losses(10_000 + n, generator)[1]["eps_noisy"]) for n in range(24)]

    before = errors(fresh)
    outcome = control.train(run)
    assert outcome.done and outcome.loss == outcome.loss
    after = errors(control.load(run))
    assert surely_less(after, before), (np.mean(before), np.mean(after), outcome)

    folder = control.export(run)
    model = load(str(run.models / "emoji-xl"))
    runner = Watching(model, lane=Lane("tests"), controls=folder.parent)
    shown = canny.edges(
        np.full((32, 32, 3), 255, np.uint8) * (np.indices((32, 32)).sum(0) > 30)[..., None].astype("u1")
    )
    given = Control(model=control.NAME, image=shown.tobytes())
    one = ImageParameters("red square", 1, 32, 32, steps=4, control=(given,))
    assert not np.array_equal(levels(solo(runner, one)), levels(solo(runner, dataclasses.replace(one, control=()))))
