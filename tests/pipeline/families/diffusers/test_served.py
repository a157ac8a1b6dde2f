"""A pipeline by diffusers' own loop beside a native family in one engine, with its card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from contract.card import read_card, to_data
from contract.errors import Invalid
from contract.image_request import ImageRequest
from core.batching.request import Request
from core.config import Settings
from pipeline.checkpoints.folder import ModelError
from tests.pipeline.families.diffusers.conftest import Folders
from workers.build import build
from workers.cards import image_card


def test_a_pipeline_and_a_native_family_share_an_engine(folders: Folders, tmp_path: Path) -> None:
    flux = str(folders("flux"))
    settings = Settings(
        models=f"{flux},random:tiny",
        device="cpu",
        compile=False,
        kernels=False,
        text_model="off",
        cache_dir=tmp_path,
        threads=torch.get_num_threads(),
    )
    with build(settings) as runtime:
        assert runtime.pool is not None
        native, _ = runtime.pool.load("random:tiny")
        card = read_card(to_data(image_card(runtime.image_runner)))
        assert (card.loop, card.sources, native.model.name) == ("diffusers", ("text", "image", "mask"), "random:tiny")
        with pytest.raises(ModelError, match="native family"):
            _ = runtime.images
        offers = {"flux": card.offer, "random:tiny": image_card(native).offer}
        futures = [
            runtime.engine.submit(
                Request(f"{name} {k}", "image", job.picture, model=name, tenant=name, priority=5)
            )
            for k in range(2)
            for name, offer in offers.items()
            for job in [ImageRequest(prompt="a cat", steps=3, size="32x32", seed=k).complete(offer)]
        ]  # fmt: skip
        pictures = [future.result(60) for future in futures]
        assert [picture.fingerprint.get("loop") for picture in pictures] == ["diffusers", None] * 2
        for fields in ({"lora": "a"}, {"deepcache": "auto"}, {"plan": "auto"}, {"pipeline_options": {"cfg": 1}}):
            with pytest.raises(Invalid):
                ImageRequest(prompt="a", **fields).complete(card.offer)
        with pytest.raises(Invalid, match="it has none"):
            ImageRequest(prompt="a", pipeline_options={"cfg": 1}).complete(offers["random:tiny"])


def test_settings_of_native_families_are_refused(folders: Folders, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    base = {"device": "cpu", "text_model": "off", "cache_dir": tmp_path, "threads": threads}
    for model, fields in (
        (str(folders("flux")), {"lora": "a"}),
        (str(folders("flux")), {"backend": "programs"}),
        ("random:tiny", {"precision": "nf4"}),
        ("random:tiny", {"offload": "model"}),
    ):
        with pytest.raises(ModelError, match=r"diffusers' own loop"):
            build(Settings(model=model, **base, **fields)).close()
