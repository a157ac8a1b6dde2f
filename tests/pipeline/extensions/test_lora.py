"""LoRAs merged at start, by name: fused weights are the sum by hand, and digests tell apart."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, ModelError, load
from pipeline.extensions import lora
from tests.children import in_fork
from tests.pipeline import loras

LAYERS = {"unet": loras.UNET[1:2], "text_encoder": loras.TEXT[:1]}


@pytest.fixture(scope="module")
def model() -> ImageModel:
    return load(tiny.TINY)


def test_names_lead_to_files_of_the_folder_alone(tmp_path: Path, model: ImageModel) -> None:
    paths = [loras.write(model, tmp_path, name, layers=LAYERS) for name in ("emoji-v1.2", "other")]
    found = lora.find("emoji-v1.2:0.5, other", str(tmp_path))
    assert found == (lora.Lora("emoji-v1.2", paths[0], 0.5), lora.Lora("other", paths[1]))
    assert lora.find("", "") == ()


@pytest.mark.parametrize("text", ["../x", "x:nan", "gone"])
def test_what_is_no_name_or_no_file_is_refused(tmp_path: Path, model: ImageModel, text: str) -> None:
    (tmp_path / "in").mkdir()
    loras.write(model, tmp_path, "x", layers=LAYERS)
    with pytest.raises(ModelError, match=r"^lora"):
        lora.find(text, str(tmp_path / "in"))
    with pytest.raises(ModelError, match="no folder"):
        lora.find("x", "")


def test_digests_tell_files_and_scales_apart(tmp_path: Path, model: ImageModel) -> None:
    for seed, name in enumerate("ab"):
        loras.write(model, tmp_path, name, seed, layers=LAYERS)
    texts = ["a", "b", "a:0.5", "a,b", "b,a"]
    digests = {lora.digest("model", lora.find(text, str(tmp_path))) for text in texts}
    assert len(digests | {"model"}) == len(texts) + 1
    assert lora.digest("model", lora.find("a:1", str(tmp_path))) in digests


def test_no_peft_is_needed(tmp_path: Path, model: ImageModel) -> None:
    loras.write(model, tmp_path, "a", layers=LAYERS)

    def fuse() -> None:
        sys.modules |= {name: None for name in {"peft", *sys.modules} if name.partition(".")[0] == "peft"}  # type: ignore[dict-item]
        with pytest.raises(ImportError):
            importlib.import_module("peft")
        load(tiny.TINY, loras=lora.find("a", str(tmp_path)))

    assert in_fork(fuse) == 0


def test_fused_weights_are_the_sum_and_all_others_stay(tmp_path: Path, model: ImageModel) -> None:
    scales = (0.5, -2.0)
    for seed, name in enumerate("ab"):
        loras.write(model, tmp_path, name, seed, layers=LAYERS)
    fused = load(tiny.TINY, loras=lora.find("a:0.5,b:-2", str(tmp_path)))
    assert fused.digest != model.digest
    pairs = [loras.matrices(model, seed, layers=LAYERS) for seed in range(2)]
    for part, (name,) in LAYERS.items():
        weight = loras.layer(model, part, name).weight
        expected = weight + sum(
            scale * pair[part, name][1] @ pair[part, name][0] for scale, pair in zip(scales, pairs, strict=True)
        )
        torch.testing.assert_close(loras.layer(fused, part, name).weight, expected, rtol=0, atol=1e-5)
        before, after = (one.parts[part].state_dict() for one in (model, fused))
        assert before.keys() == after.keys()
        assert sum(not torch.equal(before[key], after[key]) for key in before) == 1


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"none")
    with pytest.raises(ModelError, match=r"^lora bad: does not fit"):
        load(tiny.TINY, loras=lora.find("bad", str(tmp_path)))
