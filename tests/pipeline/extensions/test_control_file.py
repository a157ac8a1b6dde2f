"""Control networks as folders and single files, in diffusers' layout and the original one; others are refused."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_bytes
from safetensors.torch import save_file

from contract.image import ImageParameters
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.tiny import SDXLShape
from pipeline.extensions import control_file
from tests.pipeline import worlds
from tests.pipeline.controls import adapter, control, controlnet, save, union
from tests.pipeline.damage import edit
from tests.pipeline.extensions.checks import refusal
from tests.pipeline.original_layout import original_controlnet
from tests.pipeline.worlds import Watching, model, shared_lane

SHAPE = "files"


@pytest.fixture(scope="module", autouse=True)
def shapes() -> None:
    worlds.MORE[SHAPE] = SDXLShape(resnets=2)  # the original layout counts two in each block


@functools.cache
def net() -> Any:
    return controlnet(model(SHAPE))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(net(), tmp_path, "folder")
    return tmp_path


def read(folder: Path, name: str) -> Any:
    return control_file.read(name, control_file.find(folder, name), model(SHAPE), torch.float32)


def refused(folder: Path, name: str) -> str:
    with pytest.raises(ModelError) as caught:
        read(folder, name)
    assert str(folder) not in str(caught.value), "it tells where things lie"
    return str(caught.value)


def weights() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in net().state_dict().items()}


def test_a_file_is_read_as_the_folder(folder: Path) -> None:
    original = original_controlnet(net())
    bare = {key.removeprefix("control_model."): value for key, value in original.items()}
    for name, state in (("single", weights()), ("original", original), ("bare", bare)):
        save_file(state, folder / f"{name}.safetensors")
    assert control_file.offered(folder) == ["bare", "folder", "original", "single"]
    found = [read(folder, name) for name in control_file.offered(folder)]
    for own in (file.network.state_dict() for file in found):
        assert own.keys() == weights().keys() and all(torch.equal(own[key], value) for key, value in weights().items())
    assert len({file.digest for file in found}) == 4


@pytest.mark.parametrize("original", [False, True])
def test_scaled_weights_of_8_bits_are_the_weights_that_they_stand_for(tmp_path: Path, original: bool) -> None:
    own = original_controlnet(net()) if original else weights()
    scaled, layer = dict(own), ""
    for key in [key for key, weight in own.items() if key.endswith(".weight") and weight.dim() >= 2]:
        layer, scale = key.removesuffix(".weight"), own[key].abs().max().clamp(min=1e-6) / 448  # some are zeros
        scaled |= {key: (own[key] / scale).to(torch.float8_e4m3fn), f"{layer}.scale_weight": scale}
    save_file(scaled, tmp_path / "scaled.safetensors")
    found = read(tmp_path, "scaled").network.state_dict()
    for key, weight in weights().items():
        assert (found[key] - weight).abs().max() <= 2**-4 * weight.abs().max(), key
    save_file({**scaled, f"{layer}.comfy_quant": torch.zeros(4, dtype=torch.uint8)}, tmp_path / "scaled.safetensors")
    assert f"scaled.safetensors: {layer}.comfy_quant names no format" in refused(tmp_path, "scaled")


@pytest.mark.parametrize("make", [union, adapter])
def test_other_kinds_are_read_as_folders_and_files(make: Any, tmp_path: Path) -> None:
    made = make(model(SHAPE))
    save(made, tmp_path, "folder")
    save_file({name: tensor.clone() for name, tensor in made.state_dict().items()}, tmp_path / "single.safetensors")
    for name in ("folder", "single"):
        found = read(tmp_path, name).network
        assert type(found) is type(made)
        assert all(torch.equal(found.state_dict()[key], value) for key, value in made.state_dict().items()), name


def test_a_union_is_known_by_its_weights_whatever_its_config_says(tmp_path: Path) -> None:
    save(union(model(SHAPE)), tmp_path, "folder")
    for kind in ("ControlNetModel", "ControlNetModel_Union"):
        edit("folder/config.json", _class_name=kind)(tmp_path)
        assert type(read(tmp_path, "folder").network).__name__ == "ControlNetUnionModel"


def test_weights_of_a_variant_are_found(folder: Path) -> None:
    stem = folder / "folder" / "diffusion_pytorch_model"
    stem.with_suffix(".safetensors").rename(f"{stem}.fp16.safetensors")
    assert read(folder, "folder").network is not None


OTHERS = {
    "lora_controlnet": "is a Control-LoRA",
    "lllite_unet_input_blocks_1_0.down.0.weight": "is a ControlNet-LLLite",
    "body.0.in_conv.weight": "is no ControlNet or T2I-Adapter of SDXL",
    "image_proj.proj.weight": "is an IP-Adapter",
    "lora_unet_down_blocks_0.lora_up.weight": "is a LoRA",
    "model.diffusion_model.input_blocks.0.0.weight": "is a checkpoint",
    "up_blocks.0.resnets.0.conv1.weight": "is a UNet",
    "anything.weight": "is no ControlNet or T2I-Adapter of SDXL",
}


@pytest.mark.parametrize(("key", "words"), OTHERS.items())
def test_other_kinds_are_named_with_the_key(key: str, words: str, tmp_path: Path) -> None:
    save_file({key: torch.zeros(2)}, tmp_path / "other.safetensors")
    told = refused(tmp_path, "other")
    assert told.startswith("control other: other.safetensors: ") and words in told and key in told


def damaged(folder: Path) -> dict[str, str]:
    """What is wrong with each, by its name."""
    whole, key = weights(), "controlnet_mid_block.weight"
    data = save_bytes(whole)
    (folder / "cut.safetensors").write_bytes(data[:-100])
    (folder / "header.safetensors").write_bytes(data[:50])
    torch.save(whole, folder / "pickled.pth")
    torch.save(whole, folder / "disguised.safetensors")
    kinds = {make.__name__: make(model(SHAPE)).state_dict() for make in (union, adapter)}
    files: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "missing": ({name: value for name, value in whole.items() if name != key}, f"has no weights for {key}"),
        "shape": ({**whole, key: whole[key][:1]}, f"{key} is [1, 32, 1, 1], not"),
        "infinite": ({**whole, key: whole[key] / 0}, "not finite"),
        "more": ({**whole, "more.weight": torch.zeros(2)}, "has no use for more.weight"),
        "number": ({**whole, "controlnet_cond_embedding.conv_in.weight": torch.tensor(1.0)}, ""),
        "flat-kinds": ({**kinds["union"], "task_embedding": torch.zeros(4)}, ""),
        "flat-adapter": ({**kinds["adapter"], "adapter.conv_in.weight": torch.zeros(4)}, ""),
        "bare-adapter": ({"adapter.conv_in.weight": torch.zeros(4, 768, 3, 3)}, ""),
        "bare-original": ({"control_model.zero_convs.0.0.weight": torch.zeros(2, 2)}, ""),
    }
    for name, (state, _) in files.items():
        save_file({key: tensor.clone() for key, tensor in state.items()}, folder / f"{name}.safetensors")
    return {
        "cut": "no whole safetensors", "header": "no whole safetensors", "pickled": "is a pickle",
        "disguised": "is a pickle", "nowhere": "there is no folder nowhere",
        **{name: said for name, (_, said) in files.items()},
    }  # fmt: skip


def test_a_file_in_8_bits_is_read(tmp_path: Path) -> None:
    eight = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in weights().items()}
    save_file(eight, tmp_path / "eight.safetensors")
    found = read(tmp_path, "eight").network.state_dict()
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in eight.items())


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's right to read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_may_not_be_read_is_none_of_them() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "lost+found").mkdir(mode=0)
        (folder / "closed").mkdir(mode=0)
        save_file(weights(), folder / "net.safetensors")
        with as_nobody():
            assert control_file.offered(folder) == ["net"]
            assert "there is no folder closed" in refused(folder, "closed")


def test_damage_is_named(tmp_path: Path) -> None:
    for name, words in damaged(tmp_path).items():
        told = refused(tmp_path, name)
        assert told.startswith(f"control {name}: ") and words in told, told


def test_folders_of_other_kinds_are_named(folder: Path) -> None:
    for changes, words in (
        ({"_class_name": "UNet2DConditionModel"}, "is of class UNet2DConditionModel"),
        ({"_class_name": ["ControlNetModel"]}, "is of class ['ControlNetModel']"),
        ({"_class_name": "ControlNetModel", "cross_attention_dim": 64}, "does not"),  # fit its config.json, or load
    ):
        edit("folder/config.json", **changes)(folder)
        assert words in refused(folder, "folder")
    (folder / "folder" / "config.json").write_text("{")
    assert "is not JSON" in refused(folder, "folder")
    save(net(), folder, "pickled")
    stem = folder / "pickled" / "diffusion_pytorch_model"
    stem.with_suffix(".safetensors").rename(stem.with_suffix(".bin"))
    assert "pickles can run code" in refused(folder, "pickled")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cross_attention_dim": 64}, "cross_attention_dim is 64, and that of the model's unet is 32"),
        ({"block_out_channels": (16, 48)}, "its skips have"),
        ({"conditioning_embedding_out_channels": (4, 8)}, "it reads 2 pixels for each latent along a side"),
        ({"in_channels": 9}, "its inputs have [9] channels"),
        ({"global_pool_conditions": True}, "global_pool_conditions is True"),
        ({"addition_embed_type": None}, "addition_embed_type is None"),
        ({"conditioning_channels": 6}, "conditioning_channels is 6"),
    ],
)
def test_a_network_of_another_model_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    save(controlnet(model(SHAPE), **changes), tmp_path, "other")
    runner = Watching(model(SHAPE), lane=shared_lane(), controls=tmp_path)
    error = refusal(runner, ImageParameters("a cat", 1, 32, 32, steps=2, control=(control("other", 32),)))
    assert error.field == "control.model" and "is of another model" in error.message
    assert words in error.message and not re.search(r"/tmp", error.message)
