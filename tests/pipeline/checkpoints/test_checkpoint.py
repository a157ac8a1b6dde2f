"""Headers of safetensors files, and the kinds of files that are told apart by their keys."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from pipeline.checkpoints.checkpoint import Header, check_checkpoint, header_bytes, read_header
from pipeline.checkpoints.folder import ModelError

UNET, TEXT = "model.diffusion_model.", "conditioner.embedders.0.transformer.text_model."
TEXT_2 = "conditioner.embedders.1.model."
SDXL = (f"{UNET}out.2.weight", f"{TEXT}final_layer_norm.bias", f"{TEXT_2}ln_final.bias", "first_stage_model.x")
TO_K = f"{UNET}input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight"


def header(*keys: str, **shapes: tuple[int, ...]) -> Header:
    return Header(dict.fromkeys(keys, (1,)) | shapes, dict.fromkeys(keys, "F16"), {})


# Keys as they stand in files that people share, in the layouts of kohya's scripts, diffusers, PEFT, LyCORIS and others.
OTHERS = {
    "LoRA": [
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_k.lora_down.weight",
        "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_k.lora_A.weight",
        "base_model.model.down_blocks.1.attentions.0.proj_in.lora_B.weight",
        "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_k_lora.down.weight",
        "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora.up.weight",
        "lycoris_unet_down_blocks_1_attentions_0_proj_in.hada_w1_a",
        "oft_unet_down_blocks_1_attentions_0_proj_in.oft_blocks",
        "lora_unet_mid_block_attentions_0_proj_in.lokr_w1",
    ],
    "IP-Adapter": [
        "ip_adapter.1.to_k_ip.weight",
        "image_proj.latents",
    ],
    "ControlNet": [
        "control_model.input_hint_block.0.weight",
        "controlnet_cond_embedding.conv_in.weight",
        "lora_controlnet",
    ],
    "T2I-Adapter": ["adapter.body.0.resnets.0.block1.weight"],
    "refiner": ["conditioner.embedders.0.model.transformer.resblocks.0.ln_1.bias"],
    "Stable Diffusion 2": ["cond_stage_model.model.transformer.resblocks.0.ln_1.bias"],
    "Flux": [
        "double_blocks.0.img_attn.qkv.weight",
        "model.diffusion_model.double_blocks.0.img_attn.qkv.weight",
        "single_transformer_blocks.0.attn.to_q.weight",
    ],
    "Stable Diffusion 3": ["model.diffusion_model.joint_blocks.0.context_block.attn.qkv.weight"],
    "Lumina's or Z-Image's": ["model.diffusion_model.cap_embedder.0.weight"],
}


@pytest.mark.parametrize(("key", "told"), [(key, told) for told, keys in OTHERS.items() for key in keys])
def test_what_else_a_file_is_is_said_with_the_key_that_tells(key: str, told: str) -> None:
    for found in (header(key), header(*SDXL, key)):
        with pytest.raises(ModelError) as caught:
            check_checkpoint("mine.safetensors", found)
        assert str(caught.value).startswith("mine.safetensors: is ")
        assert told in str(caught.value) and key in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("encoder.down.0.block.0.conv1.weight quant_conv.bias", "is a VAE alone.*--vae"),
        ("first_stage_model.decoder.conv_in.weight", "is a VAE alone"),
        ("decoder.up_blocks.0.resnets.0.conv1.weight", "is a VAE alone"),
        ("text_model.encoder.layers.0.layer_norm1.bias", "is a text encoder"),
        ("down_blocks.0.resnets.0.conv1.weight conv_in.bias time_embedding.linear_1.bias", "is a UNet alone"),
        ("clip_l clip_g", "is a textual inversion"),
        ("emb_params", "is a textual inversion"),
        ("conv_first.weight body.0.rdb1.conv1.weight", "is an upscaler"),
        ("model.0.weight model.1.sub.0.RDB1.conv1.0.weight", "is an upscaler"),
        ("something else", "has no UNet .*its first key is else"),
        ("", "its first key is no key at all"),
        (SDXL[0], "is a UNet without text encoders; it has no first text encoder"),
        (" ".join(SDXL[:2]), "has no second text encoder"),
    ],
)
def test_parts_of_a_checkpoint_are_said_to_be_parts(keys: str, told: str) -> None:
    with pytest.raises(ModelError, match=f"^mine: .*{told}"):
        check_checkpoint("mine", header(*keys.split()))


@pytest.mark.parametrize(
    ("width", "told"), [(768, "Stable Diffusion 1"), (1024, "Stable Diffusion 2"), (1280, "refiner"), (2048, "SDXL")]
)
def test_a_unet_alone_is_told_by_the_width_of_what_it_reads(width: int, told: str) -> None:
    with pytest.raises(ModelError, match=f"is a UNet of .*{told} without text encoders"):
        check_checkpoint("mine", header(SDXL[0], **{TO_K: (640, width)}))


@pytest.mark.parametrize("channels", [4, 9])
def test_a_whole_checkpoint_is_accepted(channels: int) -> None:
    check_checkpoint("mine", header(*SDXL, **{f"{UNET}input_blocks.0.0.weight": (320, channels, 3, 3)}))


@pytest.mark.parametrize("level", ["text_model.", ""])
def test_a_checkpoint_of_stable_diffusion_1_is_told_by_its_text_encoder(level: str) -> None:
    text = f"cond_stage_model.transformer.{level}encoder.layers.0.layer_norm1.bias"
    assert check_checkpoint("mine", header(SDXL[0], text)).label == "Stable Diffusion 1"
    assert check_checkpoint("mine", header(*SDXL)).label == "SDXL"
    with pytest.raises(
        ModelError, match=r"is a Stable Diffusion 1 that inpaints, which is not supported: .* 9 channels"
    ):
        check_checkpoint("mine", header(SDXL[0], text, **{f"{UNET}input_blocks.0.0.weight": (320, 9, 3, 3)}))
    with pytest.raises(ModelError, match="has no UNet"):
        check_checkpoint("mine", header(text))


def test_weights_without_a_second_side_are_refused_too() -> None:
    for keys, told in (
        ((*SDXL, f"{UNET}input_blocks.0.0.weight"), "has 0 channels, not 4 or 9"),
        ((SDXL[0], TO_K), "is a UNet without text encoders"),
    ):
        with pytest.raises(ModelError, match=told):
            check_checkpoint("x", header(*keys))


def test_a_header_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_file({"a.b": torch.zeros(2, 3), "c": torch.zeros((), dtype=torch.float16)}, tmp_path / "x", {"k": "v"})
    found = read_header(tmp_path / "x")
    assert found == Header({"a.b": (2, 3), "c": ()}, {"a.b": "F32", "c": "F16"}, {"k": "v"})
    data = (tmp_path / "x").read_bytes()
    assert header_bytes(data) == len(data) - 26
    (tmp_path / "start").write_bytes(data[: header_bytes(data)])
    assert read_header(tmp_path / "start", size_bytes=len(data)) == found
    with pytest.raises(ModelError, match=rf"^it: .*it has {len(data) - 26} bytes of {len(data)}"):
        read_header(tmp_path / "start", "it")


def test_pickles_are_known_by_their_content_and_safetensors_by_theirs(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    torch.save({"state_dict": {"x": torch.zeros(1)}}, file)
    with pytest.raises(ModelError, match=r"model\.safetensors: is a pickle, whatever its name ends in"):
        read_header(file)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        file.write_bytes(pickle.dumps({"x": 1}, protocol))
        with pytest.raises(ModelError, match="is a pickle"):
            read_header(file)
    named = tmp_path / "model.ckpt"
    named.write_bytes(save({"x": torch.zeros(1)}))
    assert read_header(named).shapes == {"x": (1,)}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"GGUF\3\0\0\0\0\0", "is a GGUF file"),
        (b"<!DOCTYPE html><p>Log in", "is a web page"),
        (b"\xff" * 8 + b"{", "no whole safetensors file"),
        ((100).to_bytes(8, "little") + b'{"a":', "cut short within its header"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "its header has no type, shape and place"),
    ],
)
def test_what_is_no_such_file_is_said(data: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ModelError, match=told):
        read_header(tmp_path / "x")
    with pytest.raises(ModelError, match="there is no such file"):
        read_header(tmp_path / "gone")
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path)
