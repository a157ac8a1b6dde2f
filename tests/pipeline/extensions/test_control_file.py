"""Control networks as folders and single files, in diffusers' layout and the original one; others are refused."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from contract.errors import Invalid
from contract.image import ImageParameters
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.tiny import SDXLShape
from pipeline.extensions import control_file
from tests.pipeline import worlds
from tests.pipeline.controls import adapter, control, controlnet, save, union
from tests.pipeline.original_layout import original_controlnet
from tests.pipeline.worlds import Crank, Watching, levels, model, shared_lane, solo

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


def refusal(folder: Path, name: str) -> str:
    with pytest.raises(ModelError) as caught:
        read(folder, name)
    assert str(folder) not in str(caught.value), "it tells where things lie"
    return str(caught.value)


def weights() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in net().state_dict().items()}


def test_a_file_is_read_as_the_folder(folder: Path) -> None:
    save_file(weights(), folder / "single.safetensors")
    save_file(original_controlnet(net()), folder / "original.safetensors")
    bare = {key.removeprefix("control_model."): value for key, value in original_controlnet(net()).items()}
    save_file(bare, folder / "bare.safetensors")
    assert control_file.offered(folder) == ["bare", "folder", "original", "single"]
    for name in control_file.offered(folder):
        found = read(folder, name).network
        own = found.state_dict()
        assert own.keys() == weights().keys()
        assert all(torch.equal(own[key], value) for key, value in weights().items()), name
    digests = {read(folder, name).digest for name in control_file.offered(folder)}
    assert len(digests) == 4


@pytest.mark.parametrize("original", [False, True])
def test_scaled_weights_of_8_bits_are_the_weights_that_they_stand_for(tmp_path: Path, original: bool) -> None:
    own = original_controlnet(net()) if original else weights()
    scaled: dict[str, torch.Tensor] = {}
    for key, weight in own.items():
        scaled[key] = weight
        if key.endswith(".weight") and weight.dim() >= 2:
            scale = weight.abs().max().clamp(min=1e-6) / 448  # zero convolutions are zeros
            scaled |= {
                key: (weight / scale).to(torch.float8_e4m3fn),
                f"{key.removesuffix('.weight')}.scale_weight": scale,
            }
    save_file(scaled, tmp_path / "scaled.safetensors")
    found = read(tmp_path, "scaled").network.state_dict()
    for key, weight in weights().items():
        assert (found[key] - weight).abs().max() <= 2**-4 * weight.abs().max(), key
    layer = next(key for key in scaled if key.endswith(".scale_weight")).removesuffix(".scale_weight")
    save_file({**scaled, f"{layer}.comfy_quant": torch.zeros(4, dtype=torch.uint8)}, tmp_path / "scaled.safetensors")
    assert f"scaled.safetensors: {layer}.comfy_quant names no format" in refusal(tmp_path, "scaled")


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
    config = save(union(model(SHAPE)), tmp_path, "folder") / "config.json"
    given = json.loads(config.read_text())
    for kind in ("ControlNetModel", "ControlNetModel_Union"):
        config.write_text(json.dumps({**given, "_class_name": kind}))
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
    told = refusal(tmp_path, "other")
    assert told.startswith("control other: other.safetensors: ") and words in told and key in told


def damaged(folder: Path) -> dict[str, str]:
    """What is wrong with each, by its name."""
    whole = weights()
    save_file(whole, folder / "good.safetensors")
    data = (folder / "good.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(data[:-100])
    (folder / "header.safetensors").write_bytes(data[:50])
    torch.save(whole, folder / "pickled.pth")
    torch.save(whole, folder / "disguised.safetensors")
    key = "controlnet_mid_block.weight"
    save_file({name: value for name, value in whole.items() if name != key}, folder / "missing.safetensors")
    save_file({**whole, key: whole[key][:1]}, folder / "shape.safetensors")
    save_file({**whole, key: whole[key] / 0}, folder / "infinite.safetensors")
    save_file({**whole, "more.weight": torch.zeros(2)}, folder / "more.safetensors")
    return {
        "cut": "no whole safetensors", "header": "no whole safetensors", "pickled": "is a pickle",
        "disguised": "is a pickle", "missing": f"has no weights for {key}", "shape": f"{key} is [1, 32, 1, 1], not",
        "infinite": "not finite", "more": "has no use for more.weight", "nowhere": "there is no folder nowhere",
    }  # fmt: skip


def malformed(folder: Path) -> list[str]:
    """Files with keys of a known kind, of other shapes or without those that go with them; their names."""
    kinds = {"net": weights(), "union": union(model(SHAPE)).state_dict(), "adapter": adapter(model(SHAPE)).state_dict()}
    made = {
        "number": {**kinds["net"], "controlnet_cond_embedding.conv_in.weight": torch.tensor(1.0)},
        "flat-kinds": {**kinds["union"], "task_embedding": torch.zeros(4)},
        "flat-adapter": {**kinds["adapter"], "adapter.conv_in.weight": torch.zeros(4)},
        "bare-adapter": {"adapter.conv_in.weight": torch.zeros(4, 768, 3, 3)},
        "bare-original": {"control_model.zero_convs.0.0.weight": torch.zeros(2, 2)},
    }
    for name, state in made.items():
        save_file({key: tensor.clone() for key, tensor in state.items()}, folder / f"{name}.safetensors")
    return [*made]


def test_shapes_and_keys_that_no_network_has_are_refused(folder: Path) -> None:
    for name in malformed(folder):
        assert refusal(folder, name).startswith(f"control {name}: ")
    config = folder / "folder" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": ["ControlNetModel"]}))
    assert "is of class ['ControlNetModel']" in refusal(folder, "folder")


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
            assert "there is no folder closed" in refusal(folder, "closed")


def test_damage_is_named(tmp_path: Path) -> None:
    for name, words in damaged(tmp_path).items():
        told = refusal(tmp_path, name)
        assert told.startswith(f"control {name}: ") and words in told, told


def test_folders_of_other_kinds_are_named(folder: Path) -> None:
    config = folder / "folder" / "config.json"
    given = json.loads(config.read_text())
    config.write_text(json.dumps({**given, "_class_name": "UNet2DConditionModel"}))
    assert "is of class UNet2DConditionModel" in refusal(folder, "folder")
    config.write_text("{")
    assert "is not JSON" in refusal(folder, "folder")
    config.write_text(json.dumps({**given, "cross_attention_dim": 64}))
    assert "does not fit its config.json" in refusal(folder, "folder") or "does not load" in refusal(folder, "folder")
    pickled = shutil.copytree(folder / "folder", folder / "pickled")
    (pickled / "diffusion_pytorch_model.safetensors").rename(pickled / "diffusion_pytorch_model.bin")
    assert "pickles can run code" in refusal(folder, "pickled")


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
def test_a_network_of_another_model_is_refused_and_the_runner_lives(
    changes: dict[str, Any], words: str, folder: Path
) -> None:
    save(controlnet(model(SHAPE), **changes), folder, "other")
    runner = Watching(model(SHAPE), lane=shared_lane(), controls=folder)
    good = ImageParameters("a cat", 1, 32, 32, steps=2, control=(control("folder", 32),))
    with pytest.raises(Invalid) as caught:
        Crank(runner).submit("x", ImageParameters("a cat", 1, 32, 32, steps=2, control=(control("other", 32),)))
    assert caught.value.field == "control.model" and "is of another model" in caught.value.message
    assert words in caught.value.message and not re.search(r"/tmp", caught.value.message)
    assert levels(solo(runner, good)).std() > 0
