"""LoRAs of requests in a worker: what its card offers, what jobs get, and what its weights are kept for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from contract.errors import Invalid
from contract.image import ImageJob
from core.batching.request import Request
from core.kernels.cpu import library as kernels
from core.kernels.cpu.library import KernelsUnavailable
from pipeline.checkpoints.load import load
from pipeline.checkpoints.tiny import TINY
from tests.core.quant.stage import CACHE
from tests.pipeline import loras
from tests.workers.desk import JOB, drawn, torch_settings
from tests.workers.stage import handler_of
from workers.build import Runtime, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    model = load(TINY)
    for seed, name in enumerate(("ink", "oil")):
        loras.write(model, folder, name, seed)
    (folder / "damaged.safetensors").write_bytes(b"none")

    torch.save({"x": torch.ones(2)}, folder / "pickle.safetensors")
    other = {"transformer.single_transformer_blocks.0.attn.to_k.lora_A.weight": torch.ones(2, 2)}
    save_file(other, folder / "flux.safetensors")

    (folder / "notes.txt").write_text("none")
    return folder


@pytest.fixture(scope="module")
def works(folder: Path) -> Iterator[Runtime]:
    """On the CPU kernels where there are any."""
    with build(torch_settings(lora_dir=str(folder), kernels=True, cache_dir=CACHE.parent)) as works:
        yield works


def draw(works: Runtime, **asked: Any) -> list[Any]:
    return drawn(works, handler_of(works).requests(ImageJob.read({**JOB, **asked})))


def test_the_card_offers_what_lies_in_the_folder_now(works: Runtime, folder: Path) -> None:
    card = handler_of(works).card
    there = card().loras
    assert {"damaged", "ink", "oil"} <= {*there} and "notes" not in there
    late = folder / "late.safetensors"
    late.write_bytes((folder / "ink.safetensors").read_bytes())
    assert card().loras == tuple(sorted([*there, "late"]))
    late.unlink()


def test_jobs_with_and_without_are_drawn_side_by_side(works: Runtime) -> None:
    plain, ink, oil, again = (draw(works, lora=lora) for lora in ("", "ink", "ink:0.5,oil", ""))
    for made in zip(plain, ink, oil, strict=True):
        assert len({picture.image.tobytes() for picture in made}) == 3
    for one, other in zip(plain, again, strict=True):
        assert np.abs(np.asarray(one.image).astype(int) - np.asarray(other.image)).max() <= 1
        assert not works.images.backend.batch_invariant or one.png() == other.png(), (
            "on the CPU kernels bits are promised"
        )
    assert all(np.asarray(one.image).std() > 5 for one in ink + oil)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("damaged", "it is damaged or cut short"),
        ("pickle", "it is a pickle, which could run code; convert it to safetensors"),
        ("flux", "'transformer.single_transformer_blocks.0.attn.to_k.lora_A.weight' is for no part of an SDXL"),
        ("gone", "there is no gone.safetensors in the LoRA folder"),
    ],
)
def test_a_job_that_names_a_bad_one_is_refused_and_others_are_drawn(works: Runtime, name: str, said: str) -> None:
    """Also those that are under way meanwhile."""
    (wanted, *_) = handler_of(works).requests(ImageJob.read({**JOB, "lora": "ink", "steps": 20}))
    under_way = works.engine.submit(Request("other", "image", wanted))
    with pytest.raises(Invalid, match=f"^lora: {name}: ") as caught:
        draw(works, lora=f"ink,{name}")
    assert said in str(caught.value)
    assert under_way.result(60).png() and len(draw(works, lora="ink")) == 2


def test_the_models_own_weights_are_kept_only_where_torch_draws_with_loras(folder: Path, works: Runtime) -> None:
    try:
        kernels.library(works.settings.compiled_kernels)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    assert works.images.model.denoiser.conv_in.weight.numel() == 0, "the kernels add LoRAs to what they have packed"
    assert works.images.model.vae.decoder.conv_in.weight.numel() == 0
    with build(works.settings.model_copy(update={"kernels": False})) as other:
        assert other.images.model.denoiser.conv_in.weight.numel() > 0
        assert len(draw(other, lora="ink")) == 2
    with build(works.settings.model_copy(update={"lora_dir": ""})) as other:
        assert handler_of(other).card().loras == ()
        with pytest.raises(Invalid, match=r"^lora: no LoRA folder"):
            draw(other, lora="ink")
