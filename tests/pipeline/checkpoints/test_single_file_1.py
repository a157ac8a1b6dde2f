"""Stable Diffusion 1 in one file: the folder that comes of it is the model's own, as diffusers reads the file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from contract.image import ImageParameters
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from pipeline.checkpoints.single_file import CheckpointOptions, convert
from tests.pipeline.families.sd15.test_drawing import CASES, parts, pipeline
from tests.pipeline.original_layout import checkpoint_1
from tests.pipeline.worlds import SHAPES, Watching, apart, levels, solo, stock_options

Weights = dict[str, torch.Tensor]
TEXT = "cond_stage_model.transformer."
NETWORKS = ("unet", "vae", "text_encoder")
MORE = {  # of files of training, and of CompVis's code
    "model_ema.diffusion_modelinput_blocks00weight": torch.ones(2), "model_ema.decay": torch.ones(()),
    "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77)[None],
    "alphas_cumprod": torch.ones(3), "betas": torch.ones(3), "cond_stage_model.logit_scale": torch.ones(()),
    "cond_stage_model.transformer.text_projection.weight": torch.ones(2, 2), "global_step": torch.ones(()),
}  # fmt: skip


@pytest.fixture(scope="module")
def own() -> Any:
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    return pipeline(**parts())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the same shape and other weights, with a safety checker in its index."""
    other = pipeline(**parts())
    with torch.no_grad():
        for name in NETWORKS:
            for parameter in getattr(other, name).parameters():
                parameter.mul_(1.5)
    folder = tmp_path_factory.mktemp("models") / "base"
    other.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"], "requires_safety_checker": True}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def check_weights(folder: Path, own: Any) -> None:
    model = load(str(folder))
    for name in NETWORKS:
        found, expected = model.parts[name].state_dict(), getattr(own, name).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key].float()) for key in expected), name


CHANGES: dict[str, Callable[[Any], Weights]] = {
    "pruned": checkpoint_1,
    "of old CLIPs": lambda own: checkpoint_1(own, level=""),
    "with averages and buffers": lambda own: checkpoint_1(own) | MORE,
    "in another order": lambda own: dict(reversed(checkpoint_1(own).items())),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_every_weight_comes_back(kind: str, own: Any, base: Path, tmp_path: Path) -> None:
    save_file(CHANGES[kind](own), tmp_path / "mine.safetensors")
    folder = convert(tmp_path / "mine.safetensors", tmp_path / "mine", CheckpointOptions(str(base)))
    check_weights(folder, own)
    index = json.loads((folder / "model_index.json").read_text())
    assert index["safety_checker"] == [None, None] and index["requires_safety_checker"] is False


def test_the_picture_is_that_of_diffusers_from_the_same_file(own: Any, base: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    file = tmp_path / "mine.safetensors"
    save_file(checkpoint_1(own), file)
    theirs = StableDiffusionPipeline.from_single_file(
        str(file), config=str(base), local_files_only=True, safety_checker=None, feature_extractor=None
    )
    theirs.set_progress_bar_config(disable=True)
    folder = convert(file, tmp_path / "mine", CheckpointOptions(str(base)))
    check_weights(folder, theirs)
    asked = ImageParameters(**{"width": 16, "height": 16, **CASES[0]})
    theirs.scheduler = own.scheduler  # the base's, which a file does not have
    expected = np.asarray(theirs(**stock_options(asked)).images[0]).astype(int)
    picture = solo(Watching(load(str(folder))), asked)
    assert expected.std() > 10 and apart(levels(picture), expected) <= 1


def test_a_file_in_fp16_keeps_its_weights(own: Any, base: Path, tmp_path: Path) -> None:
    weights = {key: value.half() if value.is_floating_point() else value for key, value in checkpoint_1(own).items()}
    save_file(weights, tmp_path / "mine.safetensors")
    folder = convert(tmp_path / "mine.safetensors", tmp_path / "mine", CheckpointOptions(str(base)))
    model = load(str(folder))
    for key, value in model.parts["unet"].state_dict().items():
        assert torch.equal(value, own.unet.state_dict()[key].half().float()), key


def test_v_prediction_is_read_from_the_file(own: Any, base: Path, tmp_path: Path) -> None:
    save_file(checkpoint_1(own), tmp_path / "mine.safetensors", {"modelspec.prediction_type": "v"})
    folder = convert(tmp_path / "mine.safetensors", tmp_path / "mine", CheckpointOptions(str(base)))
    assert load(str(folder)).scheduler_config["prediction_type"] == "v_prediction"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda found: found | {f"{TEXT}text_model.gate": torch.ones(2)}, "base's text_encoder has no use for.*gate"),
        (lambda found: found | {"conditioner.embedders.1.model.x": torch.ones(2)}, "Stable Diffusion 1 has no use for"),
        (lambda found: {key: value for key, value in found.items() if "mlp.fc1" not in key}, "no weights for text_enc"),
        (lambda found: {key: value for key, value in found.items() if "diffusion_model" not in key}, "has no UNet"),
        (lambda found: found | {"cond_stage_model.model.ln_final.weight": torch.ones(2)}, "Stable Diffusion 2, which"),
    ],
)  # fmt: skip
def test_what_is_no_such_checkpoint_is_refused_by_its_key(
    change: Callable[[Weights], Weights], reason: str, own: Any, base: Path, tmp_path: Path
) -> None:
    save_file(change(checkpoint_1(own)), tmp_path / "mine.safetensors")
    with pytest.raises(ModelError, match=reason):
        convert(tmp_path / "mine.safetensors", tmp_path / "mine", CheckpointOptions(str(base)))
    assert not (tmp_path / "mine").exists()


def test_the_base_must_be_of_the_files_family(own: Any, tmp_path: Path) -> None:
    save_file(checkpoint_1(own), tmp_path / "mine.safetensors")
    xl = tiny.save(tmp_path / "xl", SHAPES["plain"])
    with pytest.raises(ModelError, match=r"xl: is a SDXL, and .*mine\.safetensors is a Stable Diffusion 1"):
        convert(tmp_path / "mine.safetensors", tmp_path / "mine", CheckpointOptions(str(xl)))
