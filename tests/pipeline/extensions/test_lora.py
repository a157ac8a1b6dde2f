"""LoRA by name: fused weights are the sum by hand, diffusers draws the same from the same file, digests tell apart."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from contract.image import ImageParameters
from core.batching.runner import Lane
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ModelError, load
from pipeline.extensions import lora, weight_files
from tests.children import in_fork
from tests.pipeline.worlds import Watching, levels, solo

# Stock diffusers hands torch tensors to numpy in a way that numpy 2 complains about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
UNET = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_q"
TEXT = "encoder.layers.0.self_attn.q_proj"
RANK = 2


def written(folder: Path, name: str, seed: int = 0, *, loud: float = 1.0) -> Path:
    """A LoRA of the tiny model's UNet and of its first text encoder, as diffusers writes one."""
    shape = tiny.SHAPES[tiny.TINY]
    generator = torch.Generator().manual_seed(seed)
    width, text = shape.channels[1], shape.text_width

    def random(*size: int) -> torch.Tensor:
        return loud * torch.randn(size, generator=generator)

    tensors = {
        f"unet.{UNET}.lora_A.weight": random(RANK, width),
        f"unet.{UNET}.lora_B.weight": random(width, RANK),
        f"text_encoder.text_model.{TEXT}.lora_A.weight": random(RANK, text),
        f"text_encoder.text_model.{TEXT}.lora_B.weight": random(text, RANK),
    }
    save_file(tensors, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def wanted(**options: object) -> ImageParameters:
    return replace(ImageParameters("a red cat", 1, 32, 32, steps=3), **options)  # type: ignore[arg-type]


def test_names_lead_to_files_of_the_folder_alone(tmp_path: Path) -> None:
    path = written(tmp_path, "emoji-v1.2")
    written(tmp_path, "other")
    found = lora.find("emoji-v1.2:0.5, other", str(tmp_path))
    assert [(one.name, one.scale) for one in found] == [("emoji-v1.2", 0.5), ("other", 1.0)]
    assert found[0].path == path and lora.find("", "") == ()


@pytest.mark.parametrize(
    "text",
    ["../x", "/etc/passwd", "a/b", "..", ".hidden", "a\0", "a:b", "a:nan", "a:inf", "gone", "x,x", "x:1:2", "ä", "x\n"],
)
def test_what_is_no_name_or_no_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "in").mkdir()
    written(tmp_path, "x")
    written(tmp_path / "in", "x")
    written(tmp_path / "in", "a")
    with pytest.raises(ModelError, match=r"^lora"):
        lora.find(text, str(tmp_path / "in"))
    with pytest.raises(ModelError, match="no folder"):
        lora.find("x", "")


def test_digests_tell_files_and_scales_apart(tmp_path: Path) -> None:
    written(tmp_path, "a")
    written(tmp_path, "b", seed=1)
    texts = ["a", "b", "a:0.5", "a,b", "b,a"]
    digests = {lora.digest("model", lora.find(text, str(tmp_path))) for text in texts}
    assert len(digests | {"model"}) == len(texts) + 1
    assert lora.digest("model", lora.find("a:1", str(tmp_path))) in digests


def test_what_a_folder_offers_is_its_files_with_plain_names(tmp_path: Path) -> None:
    for name in ("b", "a.1", ".hidden", "-x", "ä"):
        written(tmp_path, name)
    (tmp_path / "notes.txt").write_text("none")
    assert weight_files.offered(tmp_path) == ["a.1", "b", "ä"]
    assert weight_files.offered(tmp_path / "gone") == []


def test_no_peft_is_needed(tmp_path: Path) -> None:
    written(tmp_path, "a")

    def fuse() -> None:
        sys.modules |= {name: None for name in {"peft", *sys.modules} if name.partition(".")[0] == "peft"}  # type: ignore[dict-item]
        with pytest.raises(ImportError):
            importlib.import_module("peft")
        assert load(tiny.TINY).digest != load(tiny.TINY, loras=lora.find("a", str(tmp_path))).digest

    assert in_fork(fuse) == 0


def test_fused_weights_are_the_sum(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain, files = load(tiny.TINY), [written(tmp_path, name, seed) for seed, name in enumerate(("a", "b"))]
    fused = load(tiny.TINY, loras=lora.find("a:0.5,b:-2", str(tmp_path)))
    for part, name in (("unet", UNET), ("text_encoder", f"text_model.{TEXT}")):
        one = plain.parts[part]
        two = fused.parts[part]
        own = name if part == "unet" or hasattr(one, "text_model") else TEXT
        expected = one.get_submodule(own).weight.clone()
        for path, scale in zip(files, (0.5, -2.0), strict=True):
            tensors = load_file(path)
            expected += scale * tensors[f"{part}.{name}.lora_B.weight"] @ tensors[f"{part}.{name}.lora_A.weight"]
        assert torch.allclose(two.get_submodule(own).weight, expected, atol=1e-5)
        changed = [key for key, value in two.state_dict().items() if not torch.equal(value, one.state_dict()[key])]
        assert changed == [f"{own}.weight"], "and nothing is left of the adapters"
    assert fused.digest != plain.digest


def test_a_picture_equals_diffusers_with_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = written(tmp_path, "a", loud=0.5)
    stock = tiny.make(tiny.SHAPES[tiny.TINY])
    stock.set_progress_bar_config(disable=True)
    stock.load_lora_weights(str(tmp_path), weight_name=path.name)
    stock.fuse_lora(lora_scale=0.7)
    expected = stock(
        "a red cat", width=32, height=32, num_inference_steps=3, guidance_scale=5.0,
        generator=torch.Generator().manual_seed(1),
    ).images[0]  # fmt: skip
    lane = Lane("tests")
    fused = Watching(load(tiny.TINY, loras=lora.find("a:0.7", str(tmp_path))), lane=lane)
    drawn = levels(solo(fused, wanted()))
    assert np.abs(drawn - np.asarray(expected).astype(int)).max() <= 1
    plain = levels(solo(Watching(load(tiny.TINY), lane=lane), wanted()))
    assert np.abs(drawn - plain).max() > 3, "it would prove nothing"
    lane.close()


@pytest.mark.parametrize("kind", ["of another shape", "of nothing", "damaged"])
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "bad.safetensors"
    if kind == "of another shape":
        save_file(
            {f"unet.{UNET}.lora_A.weight": torch.ones(2, 99), f"unet.{UNET}.lora_B.weight": torch.ones(99, 2)}, path
        )
    elif kind == "of nothing":
        save_file({"something.else": torch.ones(3)}, path)
    else:
        path.write_bytes(b"none")
    with pytest.raises(ModelError, match=r"^lora bad: "):
        load(tiny.TINY, loras=lora.find("bad", str(tmp_path)))
