"""Errors of 8 bits by type of layer: every layer of the UNet has a type, and the inputs have the tails they claim."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from benchmarks import layer_errors, tables
from benchmarks.layer_errors import TYPES, Inputs
from pipeline.tiny import SDXLShape
from unet_opt import recipe as recipes


@pytest.fixture(scope="module")
def narrow(request: pytest.FixtureRequest) -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    shape = SDXLShape(channels=(32, 64, 128), transformers=(1, 1, 1), heads=(1, 2, 4), text_width=32)
    return UNet2DConditionModel(**shape.unet()).requires_grad_(False)


def test_every_layer_that_the_recipe_quantizes_is_measured(narrow: nn.Module) -> None:
    kinds = {name: kind for name, kind, _, _ in layer_errors.measured(narrow)}
    assert set(recipes.unet(narrow).targets(narrow)) <= kinds.keys()
    assert set(kinds.values()) == TYPES.keys(), "no type without layers"


@pytest.mark.parametrize("reads", sorted({reads for _, reads in TYPES.values()}))
def test_inputs_have_the_tails_that_are_asked_for(reads: str) -> None:
    def spread(multiple: float) -> float:
        """The largest channel's root mean square over the median channel's."""
        power = Inputs(multiple, seed=3)("a", reads, 256).square().mean(0).sqrt()
        return float(power.max() / power.median())

    heavy = spread(100)
    assert heavy > 30 and heavy > 8 * spread(1)
    draw = Inputs(100, seed=3)
    first, second = draw("a", reads, 256), draw("a", reads, 256)
    assert not torch.equal(first, second), "values are drawn anew"
    loud = [set(x.square().mean(0).topk(2).indices.tolist()) for x in (first, second)]
    assert loud[0] == loud[1], "the gains are the layer's"


def test_the_first_token_is_as_published() -> None:
    x = Inputs(1, seed=0)("a", "text", 64)
    assert x[1:77].abs().max() <= 12 and 100 < x[::77].abs().max() <= 828


def test_smoothing_pays_where_tails_are_heavy(narrow: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_errors, "unet", lambda: narrow)
    monkeypatch.setattr(layer_errors, "MULTIPLES", (1, 100))
    found = layer_errors.measure()
    kept = {kind for kind, one in found.items() if one["kept"]}
    assert kept == {kind for kind in TYPES if re.search(r"attn2\.to_k|shortcut", kind)}
    for kind in ("ff.net.0.proj", "attn1.to_out", "proj_in"):
        one = found[kind]
        assert one["recipe@100"] < one["plain@100"] / 2, kind
        assert one["recipe@1"] < 0.02, kind
    rows = tables.layer_errors({"types": found, "multiples": [1, 100]})
    assert len(rows) == 2 + len(TYPES) and "| no |" in next(row for row in rows if "to_k" in row and "attn2" in row)
