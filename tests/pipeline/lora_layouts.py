"""Layouts of LoRA files that are about, by the names of their keys in SDXL's own UNet and text encoders.

Names are those that the tools write, as in their sources, issues and published files; tensors are random. A layout is a
list of keys without endings, each with the layer that it stands for, and the endings of its factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pipeline.checkpoints.tiny import SDXLShape

# SDXL's blocks: two residual blocks a level; none, two and ten transformer blocks.
SHAPE = SDXLShape(
    native=64, channels=(16, 16, 16), transformers=(1, 2, 10), resnets=2, heads=(1, 1, 1), text_layers=(2, 2)
)

At = tuple[str, str]  # a part, and a layer in it
KOHYA, PEFT, ADAPTER = "kohya", "peft", "adapter"
DIFFUSERS, PROCESSOR, TEXT_OLD, TEXT_OLDEST = "diffusers", "processor", "text-old", "text-oldest"
DORA, DORA_INPUTS, DORA_PEFT, DORA_LOKR, FULL = "dora", "dora-inputs", "dora-peft", "dora-lokr", "full"
LOHA, LOHA_TUCKER, LOKR, LOKR_FACTORED, LOKR_TUCKER, LOCON_TUCKER = (
    "loha", "loha-tucker", "lokr", "lokr-factored", "lokr-tucker", "locon-tucker",
)  # fmt: skip


class Layout(NamedTuple):
    """`layers` by the file's names for them; `styles` are the endings of keys, by a name's beginning."""

    layers: Mapping[str, At]
    styles: Mapping[str, str]
    source: str


_T = "transformer_blocks"
_SGM_ATTENTION: dict[str, At] = {
    f"lora_unet_input_blocks_4_1_{_T}_0_attn1_to_k": ("unet", f"down_blocks.1.attentions.0.{_T}.0.attn1.to_k"),
    f"lora_unet_input_blocks_8_1_{_T}_9_attn2_to_out_0": ("unet", f"down_blocks.2.attentions.1.{_T}.9.attn2.to_out.0"),
    f"lora_unet_middle_block_1_{_T}_3_ff_net_0_proj": ("unet", f"mid_block.attentions.0.{_T}.3.ff.net.0.proj"),
    f"lora_unet_output_blocks_0_1_{_T}_1_ff_net_2": ("unet", f"up_blocks.0.attentions.0.{_T}.1.ff.net.2"),
    "lora_unet_output_blocks_5_1_proj_in": ("unet", "up_blocks.1.attentions.2.proj_in"),
    "lora_unet_input_blocks_5_1_proj_out": ("unet", "down_blocks.1.attentions.1.proj_out"),
}
_SGM_CONV: dict[str, At] = {
    "lora_unet_input_blocks_1_0_in_layers_2": ("unet", "down_blocks.0.resnets.0.conv1"),
    "lora_unet_input_blocks_2_0_out_layers_3": ("unet", "down_blocks.0.resnets.1.conv2"),
    "lora_unet_input_blocks_3_0_op": ("unet", "down_blocks.0.downsamplers.0.conv"),
    "lora_unet_input_blocks_4_0_emb_layers_1": ("unet", "down_blocks.1.resnets.0.time_emb_proj"),
    "lora_unet_middle_block_0_in_layers_2": ("unet", "mid_block.resnets.0.conv1"),
    "lora_unet_middle_block_2_out_layers_3": ("unet", "mid_block.resnets.1.conv2"),
    "lora_unet_output_blocks_2_2_conv": ("unet", "up_blocks.0.upsamplers.0.conv"),
    "lora_unet_output_blocks_8_0_skip_connection": ("unet", "up_blocks.2.resnets.2.conv_shortcut"),
}
_SGM_ENDS: dict[str, At] = {
    "lora_unet_input_blocks_0_0": ("unet", "conv_in"),
    "lora_unet_time_embed_0": ("unet", "time_embedding.linear_1"),
    "lora_unet_time_embed_2": ("unet", "time_embedding.linear_2"),
    "lora_unet_label_emb_0_0": ("unet", "add_embedding.linear_1"),
    "lora_unet_label_emb_0_2": ("unet", "add_embedding.linear_2"),
    "lora_unet_out_2": ("unet", "conv_out"),
}
_MIDDLE = f"mid_block.attentions.0.{_T}.9.attn2"
_Q, _Q_TEXT, _OUT_TEXT = (
    f"down_blocks.1.attentions.0.{_T}.0.attn1", "text_model.encoder.layers.0.self_attn",
    "text_model.encoder.layers.1.self_attn",
)  # fmt: skip


def _underscored(prefix: str, part: str, *names: str) -> dict[str, At]:
    return {prefix + name.replace(".", "_"): (part, name) for name in names}


_KOHYA_TEXT: dict[str, At] = {
    **_underscored("lora_te1_", "text_encoder", f"{_Q_TEXT}.q_proj", "text_model.encoder.layers.1.mlp.fc1"),
    **_underscored("lora_te2_", "text_encoder_2", f"{_OUT_TEXT}.out_proj"),
}
_PATHS: dict[str, At] = {  # of diffusers' own names
    name: ("unet", name) for name in (f"{_Q}.to_q", f"{_MIDDLE}.to_v", f"up_blocks.1.attentions.2.{_T}.1.ff.net.0.proj")
}
_ATTENTION: dict[str, At] = {
    f"{_Q}.processor.to_q": ("unet", f"{_Q}.to_q"), f"{_MIDDLE}.processor.to_out": ("unet", f"{_MIDDLE}.to_out.0"),
}  # fmt: skip
_DIFFUSERS_TEXT: dict[str, At] = {
    f"text_encoder.{_Q_TEXT}.q_proj": ("text_encoder", f"{_Q_TEXT}.q_proj"),
    f"text_encoder_2.{_OUT_TEXT}.out_proj": ("text_encoder_2", f"{_OUT_TEXT}.out_proj"),
}
_OLDEST_TEXT: dict[str, At] = {
    f"text_encoder.{_Q_TEXT}.to_q": ("text_encoder", f"{_Q_TEXT}.q_proj"),
    f"text_encoder_2.{_OUT_TEXT}.to_out": ("text_encoder_2", f"{_OUT_TEXT}.out_proj"),
}
_UNDERSCORED = _underscored(
    "lora_unet_", "unet", *_PATHS, "down_blocks.0.resnets.0.conv1", "up_blocks.0.upsamplers.0.conv",
    "mid_block.resnets.1.time_emb_proj", "time_embedding.linear_1", "add_embedding.linear_2", "conv_in", "conv_out",
)  # fmt: skip
_PROJECTION: dict[str, At] = {"lora_te2_text_projection": ("text_encoder_2", "text_projection")}
_COMFY: dict[str, At] = {
    f"diffusion_model.input_blocks.4.1.{_T}.0.attn1.to_k": ("unet", f"down_blocks.1.attentions.0.{_T}.0.attn1.to_k"),
    "diffusion_model.output_blocks.2.2.conv": ("unet", "up_blocks.0.upsamplers.0.conv"),
    "diffusion_model.input_blocks.1.0.in_layers.2": ("unet", "down_blocks.0.resnets.0.conv1"),
}
_COMFY_TEXT: dict[str, At] = {
    "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc2": (
        "text_encoder", "text_model.encoder.layers.0.mlp.fc2"),
    "text_encoders.clip_g.transformer.text_model.encoder.layers.1.self_attn.k_proj": (
        "text_encoder_2", "text_model.encoder.layers.1.self_attn.k_proj"),
}  # fmt: skip


def _behind(prefix: str, layers: Mapping[str, At]) -> dict[str, At]:
    return {prefix + name: at for name, at in layers.items()}


def _renamed(old: str, new: str, layers: Mapping[str, At]) -> dict[str, At]:
    return {new + name.removeprefix(old): at for name, at in layers.items()}


def _layout(layers: Mapping[str, At], source: str, style: str = KOHYA, **others: str) -> Layout:
    """A layout of this style, but for keys that begin with the names of others."""
    return Layout(layers, {"": style, **others}, source)


LAYOUTS: dict[str, Layout] = {
    "sd-scripts": _layout({**_SGM_ATTENTION, **_KOHYA_TEXT}, "kohya-ss/sd-scripts networks/lora.py"),
    "sd-scripts, c3lier": _layout({**_SGM_ATTENTION, **_SGM_CONV}, "the same, conv_dim"),
    "all of sgm's layers": _layout({**_SGM_CONV, **_SGM_ENDS}, "huggingface/diffusers #14005"),
    "diffusers' names with underscores": _layout(_UNDERSCORED, "LCM-LoRA, OneTrainer"),
    "OneTrainer": _layout({**_UNDERSCORED, **_KOHYA_TEXT, **_PROJECTION}, "huggingface/diffusers #8237"),
    "one text encoder's old prefix": _layout(
        _underscored("lora_te_", "text_encoder", "text_model.encoder.layers.0.mlp.fc1"),
        "kohya-ss/sd-scripts before SDXL"),
    "underscores in peft's endings": _layout(_UNDERSCORED, "Nerogar/OneTrainer #1544", PEFT),
    "LyCORIS LoHa": _layout(_SGM_ATTENTION, "KohakuBlueleaf/LyCORIS lycoris/modules/loha.py", LOHA),
    "LyCORIS LoHa of convolutions": _layout(_SGM_CONV, "the same, without use_tucker", LOHA),
    "LyCORIS LoHa, Tucker": Layout(
        {**_SGM_CONV, **_SGM_ATTENTION}, {"": LOHA, **{name: LOHA_TUCKER for name in _SGM_CONV if name.endswith(
            ("in_layers_2", "out_layers_3", "op", "conv"))}}, "the same, use_tucker"),
    "LyCORIS LoHa of text encoders": _layout(_KOHYA_TEXT, "huggingface/diffusers #3087", LOHA),
    "LyCORIS LoKr": _layout(_SGM_ATTENTION, "KohakuBlueleaf/LyCORIS lycoris/modules/lokr.py", LOKR),
    "LyCORIS LoKr of convolutions": _layout(_SGM_CONV, "the same", LOKR),
    "LyCORIS LoKr, factored": _layout({**_SGM_ATTENTION, **_SGM_CONV}, "the same, decompose_both", LOKR_FACTORED),
    "LyCORIS LoKr, Tucker": _layout(
        dict([next(iter(_SGM_CONV.items()))]), "the same, use_tucker", LOKR_TUCKER),
    "SimpleTuner's LyCORIS": _layout(
        _renamed("lora_unet_", "lycoris_", _UNDERSCORED), "Comfy-Org/ComfyUI #4476, #5417", LOKR),
    "LyCORIS LoCon, Tucker": _layout(
        _underscored("lora_unet_", "unet", "down_blocks.0.resnets.0.conv1", "conv_in"),
        "huggingface/diffusers #11943", LOCON_TUCKER),
    "diffusers 0.17 to 0.21": _layout(
        _behind("unet.", _ATTENTION), "LucianoCirino/efficiency-nodes-comfyui #104", PROCESSOR),
    "diffusers 0.17 with text": _layout(
        {**_behind("unet.", _ATTENTION), **_OLDEST_TEXT}, "train_dreambooth_lora", PROCESSOR, text=TEXT_OLDEST),
    "diffusers before parts": _layout(_ATTENTION, "huggingface/diffusers 0.13, pytorch_lora_weights", PROCESSOR),
    "diffusers 0.22": _layout(_behind("unet.", _PATHS), "train_text_to_image_lora_sdxl", DIFFUSERS),
    "diffusers 0.22 with text": _layout(
        {**_behind("unet.", _PATHS), **_DIFFUSERS_TEXT}, "train_dreambooth_lora_sdxl", DIFFUSERS, text=TEXT_OLD),
    "diffusers since 0.25": _layout({**_behind("unet.", _PATHS), **_DIFFUSERS_TEXT}, "save_lora_weights", PEFT),
    "peft": _layout(_behind("base_model.model.", _PATHS), "adapter_model.safetensors", PEFT),
    "peft with the adapter's name": _layout(_behind("unet.", _PATHS), "huggingface/diffusers #11790", ADAPTER),
    "SimpleTuner": _layout(_behind("unet.base_model.model.", _PATHS), "bghira/SimpleTuner #779", DIFFUSERS),
    "SimpleTuner, SDXL": _layout(_behind("unet.", _PATHS), "Comfy-Org/ComfyUI #12452"),
    "ComfyUI": _layout({**_COMFY, **_COMFY_TEXT}, "Comfy-Org/ComfyUI comfy_extras/nodes_lora_extract.py"),
    "ComfyUI in peft's endings": _layout(_COMFY, "Comfy-Org/ComfyUI comfy/lora.py", PEFT),
    "a checkpoint's prefix": _layout(_behind("model.", _COMFY), "the same, behind model."),
    "sd-scripts, DoRA": _layout(
        {**_SGM_ATTENTION, **_SGM_CONV, **_KOHYA_TEXT}, "LyCORIS locon.py, wd_on_out", DORA),
    "LyCORIS DoRA of inputs": _layout({**_SGM_ATTENTION, **_SGM_CONV}, "the same, wd_on_out=False", DORA_INPUTS),
    "LyCORIS LoKr with DoRA": _layout(_SGM_ATTENTION, "LyCORIS lokr.py, weight_decompose", DORA_LOKR),
    "diffusers, DoRA": _layout(
        {**_behind("unet.", _PATHS), **_DIFFUSERS_TEXT}, "peft tuners/lora/dora.py", DORA_PEFT),
    "peft, DoRA": _layout(_behind("base_model.model.", _PATHS), "the same", DORA_PEFT),
    "LyCORIS full": _layout({**_SGM_ATTENTION, **_SGM_CONV, **_KOHYA_TEXT}, "LyCORIS full.py", FULL),
    "ComfyUI's whole differences": _layout({**_COMFY, **_COMFY_TEXT}, "comfy_extras/nodes_lora_extract.py", FULL),
    **{
        f"{first}, {second}": _layout(
            {f"{first}{_Q_TEXT}.q_proj": ("text_encoder", f"{_Q_TEXT}.q_proj"),
             f"{second}{_OUT_TEXT}.out_proj": ("text_encoder_2", f"{_OUT_TEXT}.out_proj")}, "tools", style)
        for first, second, style in (
            ("te1.", "te2.", KOHYA), ("te.", "lora_te2.", PEFT), ("lora_te1.", "clip_g.", KOHYA),
            ("transformer.", "te2.", PEFT),
        )
    },
    **{
        f"the authors' {prefix}": _layout(
            {f"{prefix}{_Q_TEXT}.q_proj": ("text_encoder", f"{_Q_TEXT}.q_proj")}, "keys of a checkpoint")
        for prefix in ("conditioner.embedders.0.transformer.", "cond_stage_model.transformer.")
    },
    "a denoiser called transformer": _layout(_behind("transformer.", _PATHS), "PEFT-saved by diffusers' scripts", PEFT),
    "a denoiser called lora_unet": _layout(_behind("lora_unet.", _PATHS), "dots for kohya's underscores"),
    "clip_l and clip_g": _layout(
        _renamed("text_encoders.", "", _COMFY_TEXT), "Comfy-Org/ComfyUI comfy/lora.py"),
}  # fmt: skip

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "a magnitude alone": (
        (f"unet.mid_block.attentions.0.{_T}.0.attn1.to_k.lora_magnitude_vector",), "one of its two matrices"),
    "LyCORIS IA3": (
        (f"lora_unet_up_blocks_2_attentions_2_{_T}_0_attn1_to_k.weight",
         f"lora_unet_up_blocks_2_attentions_2_{_T}_0_attn1_to_k.on_input"), "IA3"),
    "LyCORIS GLoRA": (("lora_unet_mid_block_attentions_0_proj_in.a1.weight",), "GLoRA"),
    "LyCORIS Diag-OFT": (("lora_unet_mid_block_attentions_0_proj_in.oft_blocks",), "OFT"),
    "LyCORIS full, of another shape": (("lora_unet_conv_in.diff",), "and this model needs [16, 4, 3, 3]"),
    "LyCORIS, biases of another shape": (("lora_unet_conv_in.diff_b",), "and this model needs [16]"),
    "LyCORIS, a bias that is not there": (
        (f"lora_unet_mid_block_attentions_0_{_T}_0_attn1_to_k.diff_b",), "for a bias that"),
    "LyCORIS, norms of another shape": (("lora_unet_mid_block_resnets_0_norm1.w_norm",), "and this model needs [16]"),
    "LyCORIS LoHa, cut": (("lora_unet_conv_in.hada_w1_a",), "LoHa 'lora_unet_conv_in' lacks hada_w1_b"),
    "OneTrainer, with an embedding": (("bundle_emb.<ink>.clip_l",), "a textual inversion"),
    "peft, biases": (("base_model.model.conv_in.lora_B.bias",), "biases"),
    "peft, embeddings": (("text_encoder.text_model.embeddings.token_embedding.lora_embedding_A",), "embeddings"),
    "Flux, sd-scripts": (("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight",), "no layer of this model"),
    "Flux, diffusers": (("transformer.single_transformer_blocks.0.attn.to_k.lora_A.weight",), "no part of an SDXL"),
    "Flux, LyCORIS": (("lycoris_single_transformer_blocks_32_attn_to_q.lokr_w1",
                       "lycoris_single_transformer_blocks_32_attn_to_q.lokr_w2"), "no layer of this model"),
    "SD3": (("lora_unet_joint_blocks_0_context_block_attn_qkv.lora_down.weight",), "no layer of this model"),
    "SD 1.5, sd-scripts": (
        (f"lora_unet_down_blocks_0_attentions_0_{_T}_0_attn1_to_q.lora_down.weight",), "no layer of this model"),
    "SD 1.5, diffusers": (
        (f"unet.down_blocks.0.attentions.0.{_T}.0.attn1.to_q.lora_A.weight",
         f"unet.down_blocks.0.attentions.0.{_T}.0.attn1.to_q.lora_B.weight"), "the unet has no"),
    "Wan": (("diffusion_model.blocks.0.self_attn.q.lora_A.weight",), "no layer of this model"),
    "Stability's control-lora": (("input_blocks.1.0.in_layers.2.up",), "no part of an SDXL"),
    "a textual inversion": (("clip_l", "clip_g"), "no part of an SDXL"),
    "an IP-Adapter": (("image_proj.latents", "ip_adapter.1.to_k_ip.weight"), "no part of an SDXL"),
    "a whole checkpoint": (("model.diffusion_model.input_blocks.0.0.weight",), "no layer of this model"),
    "a VAE": (("decoder.conv_in.weight",), "no part of an SDXL"),
    "OpenCLIP's names": (
        ("lora_te2_transformer_resblocks_0_attn_in_proj.lora_down.weight",), "no layer of this model"),
}  # fmt: skip
"""Keys of what is no LoRA for SDXL, one of which the sentence names, and what it says of it."""
