"""The recorded agreement with other implementations, and what they are handed."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.harness.record import RESULTS
from evaluation.inception import InceptionNetwork
from tests.evaluation import agreement

FOUND = json.loads((RESULTS / "agreement.json").read_text("utf-8"))


def test_every_figure_agrees_or_says_why_not() -> None:
    for row in FOUND["rows"]:
        assert row["relative"] == pytest.approx(abs(row["ours"] - row["theirs"]) / abs(row["theirs"]))
        assert row["relative"] <= 1e-4 or row["reason"], row


def test_all_four_implementations_are_asked() -> None:
    asked = {(row["figure"], row["reference"].partition(",")[0]) for row in FOUND["rows"]}
    wanted = {("FID", name) for name in ("torchmetrics", "torch-fidelity", "clean-fid", "MLPerf")}
    wanted |= {("KID", name) for name in ("torchmetrics", "torch-fidelity", "clean-fid")}
    assert wanted | {("CLIP score", "MLPerf")} <= asked
    assert FOUND["pictures"] > 2048, "a covariance of Inception's features needs more for its full rank"


def test_open_clip_is_handed_every_weight_once() -> None:
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 12}
    config = CLIPConfig(
        text_config=tower | {"vocab_size": 40},
        vision_config=tower | {"image_size": 32, "patch_size": 16},
        projection_dim=8,
    )
    weights = CLIPModel(config).state_dict()
    made = agreement.open_clip_weights(weights)
    assert sum(value.numel() for value in made.values()) == sum(value.numel() for value in weights.values())
    fused = made["visual.transformer.resblocks.11.attn.in_proj_weight"]
    keys = weights["vision_model.encoder.layers.11.self_attn.k_proj.weight"]
    assert torch.equal(fused[16:32], keys) and made["visual.proj"].shape == (16, 8)


def test_seeded_weights_are_of_the_published_layout_and_let_no_layer_die() -> None:
    made = agreement.inception_weights()
    network = InceptionNetwork().eval()
    told = network.load_state_dict(
        {name: value for name, value in made.items() if not name.startswith("fc.")}, strict=False
    )
    assert all(name.endswith("num_batches_tracked") for name in told.missing_keys) and not told.unexpected_keys
    noise = torch.randn(2, 3, 299, 299, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        seen = network(noise)
    assert seen.isfinite().all() and seen.std() > 1e-3 and (seen[0] - seen[1]).abs().max() > 1e-3
