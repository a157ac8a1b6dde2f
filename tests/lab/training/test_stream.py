"""What is streamed depends on the iteration alone: not on where a run began, nor on how many processes compose."""

from __future__ import annotations

import pytest
import torch

from lab.training import captions, stream
from lab.training.run import TrainingRun


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_workers_and_resumed_runs_stream_the_same(worded: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # as a stage may have it
    run = worded
    alone, helped = stream.SceneStream(run, 8), stream.SceneStream(run, 8, workers=2)
    wanted = [alone.at(iteration) for iteration in range(6)]
    for iteration in (3, 4, 5):
        found = helped.at(iteration)
        assert torch.equal(found.ids, wanted[iteration].ids) and torch.equal(found.label, wanted[iteration].label)
        assert torch.equal(helped.draw(found), alone.draw(wanted[iteration]))


def test_single_emoji_keep_to_their_wordings_and_no_hidden_one_is_drawn(run: TrainingRun) -> None:
    world = stream.World.read(run)
    hidden = captions.held_out(world.rows, run.held_out)
    drawn = [world.scene(index, (32, 32)) for index in range(1500)]
    singles = [(scene, row) for scene, row in drawn if row >= 0]
    assert hidden and abs(len(singles) / len(drawn) - stream.SINGLES) < 0.05
    for scene, row in singles:
        assert row not in hidden and scene.truth is None and scene.layers[0].row == row
        assert any(scene.caption.startswith(words) for words in world.wordings[row])


def test_sizes_are_those_that_the_model_offers_and_one_larger(run: TrainingRun) -> None:
    import dataclasses

    shares = stream.buckets(dataclasses.replace(run, size=128))
    assert set(shares) == {(128, 128), (192, 192), (64, 64), (96, 160), (160, 96), (96, 192), (192, 96)}
    assert sum(shares.values()) == pytest.approx(1)
