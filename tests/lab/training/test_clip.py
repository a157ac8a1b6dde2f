"""The stage's figures are over the rows that they can be asked of."""

from __future__ import annotations

import torch

from lab.training import clip, stream
from lab.training.run import TrainingRun


def test_before_foil_is_a_share_of_the_rows_that_have_one(worded: TrainingRun) -> None:
    run = worded
    drawn = stream.SceneStream(run, 32, native=True)
    batch = drawn.at(0)
    has = batch.foils[:, 1] != batch.foils[:, -1]
    assert 0 < int(has.sum()) < 32
    towers = clip.CLIPLoss(run).eval()
    with torch.no_grad():
        pixels = drawn.draw(batch)
        seen = torch.nn.functional.normalize(towers.see(pixels), dim=-1)
        own, foil = (torch.nn.functional.normalize(towers.read(ids), dim=-1) for ids in (batch.ids, batch.foils))
        wanted = ((seen * own).sum(1) > (seen * foil).sum(1))[has].float().mean()
        before = towers(pixels, batch.ids, batch.foils, batch.label)[2]
        none = towers(pixels, batch.ids, batch.foils[~has][:1].expand_as(batch.foils), batch.label)[2]
    assert 0 < float(wanted) < 1 and float(before) == float(wanted)
    assert float(none) == 0
