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


LAYOUTS: dict[str, Layout] = {
    "sd-scripts": Layout({**_SGM_ATTENTION, **_KOHYA_TEXT}, {"": KOHYA}, "kohya-ss/sd-scripts networks/lora.py"),
    "sd-scripts, c3lier": Layout({**_SGM_ATTENTION, **_SGM_CONV}, {"": KOHYA}, "the same, conv_dim"),
    "all of sgm's layers": Layout({**_SGM_CONV, **_SGM_ENDS}, {"": KOHYA}, "huggingface/diffusers #14005"),
    "diffusers' names with underscores": Layout(_UNDERSCORED, {"": KOHYA}, "LCM-LoRA, OneTrainer"),
    "OneTrainer": Layout({**_UNDERSCORED, **_KOHYA_TEXT, **_PROJECTION}, {"": KOHYA}, "huggingface/diffusers #8237"),
    "one text encoder's old prefix": Layout(
        {"lora_te_text_model_encoder_layers_0_mlp_fc1": ("text_encoder", "text_model.encoder.layers.0.mlp.fc1")},
        {"": KOHYA}, "kohya-ss/sd-scripts before SDXL"),
    "underscores in peft's endings": Layout(_UNDERSCORED, {"": PEFT}, "Nerogar/OneTrainer #1544"),
    "LyCORIS LoHa": Layout(_SGM_ATTENTION, {"": LOHA}, "KohakuBlueleaf/LyCORIS lycoris/modules/loha.py"),
    "LyCORIS LoHa of convolutions": Layout(_SGM_CONV, {"": LOHA}, "the same, without use_tucker"),
    "LyCORIS LoHa, Tucker": Layout(
        {**_SGM_CONV, **_SGM_ATTENTION}, {"": LOHA, **{name: LOHA_TUCKER for name in _SGM_CONV if name.endswith(
            ("in_layers_2", "out_layers_3", "op", "conv"))}}, "the same, use_tucker"),
    "LyCORIS LoHa of text encoders": Layout(_KOHYA_TEXT, {"": LOHA}, "huggingface/diffusers #3087"),
    "LyCORIS LoKr": Layout(_SGM_ATTENTION, {"": LOKR}, "KohakuBlueleaf/LyCORIS lycoris/modules/lokr.py"),
    "LyCORIS LoKr of convolutions": Layout(_SGM_CONV, {"": LOKR}, "the same"),
    "LyCORIS LoKr, factored": Layout({**_SGM_ATTENTION, **_SGM_CONV}, {"": LOKR_FACTORED}, "the same, decompose_both"),
    "LyCORIS LoKr, Tucker": Layout(
        {"lora_unet_input_blocks_1_0_in_layers_2": ("unet", "down_blocks.0.resnets.0.conv1")}, {"": LOKR_TUCKER},
        "the same, use_tucker"),
    "SimpleTuner's LyCORIS": Layout(
        _renamed("lora_unet_", "lycoris_", _UNDERSCORED), {"": LOKR}, "Comfy-Org/ComfyUI #4476, #5417"),
    "LyCORIS LoCon, Tucker": Layout(
        {"lora_unet_down_blocks_0_resnets_0_conv1": ("unet", "down_blocks.0.resnets.0.conv1"),
         "lora_unet_conv_in": ("unet", "conv_in")}, {"": LOCON_TUCKER}, "huggingface/diffusers #11943"),
    "diffusers 0.17 to 0.21": Layout(
        _behind("unet.", _ATTENTION), {"": PROCESSOR}, "LucianoCirino/efficiency-nodes-comfyui #104"),
    "diffusers 0.17 with text": Layout(
        {**_behind("unet.", _ATTENTION), **_OLDEST_TEXT}, {"": PROCESSOR, "text": TEXT_OLDEST},
        "train_dreambooth_lora"),
    "diffusers before parts": Layout(_ATTENTION, {"": PROCESSOR}, "huggingface/diffusers 0.13, pytorch_lora_weights"),
    "diffusers 0.22": Layout(_behind("unet.", _PATHS), {"": DIFFUSERS}, "train_text_to_image_lora_sdxl"),
    "diffusers 0.22 with text": Layout(
        {**_behind("unet.", _PATHS), **_DIFFUSERS_TEXT}, {"": DIFFUSERS, "text": TEXT_OLD},
        "train_dreambooth_lora_sdxl"),
    "diffusers since 0.25": Layout({**_behind("unet.", _PATHS), **_DIFFUSERS_TEXT}, {"": PEFT}, "save_lora_weights"),
    "peft": Layout(_behind("base_model.model.", _PATHS), {"": PEFT}, "adapter_model.safetensors"),
    "peft with the adapter's name": Layout(_behind("unet.", _PATHS), {"": ADAPTER}, "huggingface/diffusers #11790"),
    "SimpleTuner": Layout(_behind("unet.base_model.model.", _PATHS), {"": DIFFUSERS}, "bghira/SimpleTuner #779"),
    "SimpleTuner, SDXL": Layout(_behind("unet.", _PATHS), {"": KOHYA}, "Comfy-Org/ComfyUI #12452"),
    "ComfyUI": Layout({**_COMFY, **_COMFY_TEXT}, {"": KOHYA}, "Comfy-Org/ComfyUI comfy_extras/nodes_lora_extract.py"),
    "ComfyUI in peft's endings": Layout(_COMFY, {"": PEFT}, "Comfy-Org/ComfyUI comfy/lora.py"),
    "a checkpoint's prefix": Layout(_behind("model.", _COMFY), {"": KOHYA}, "the same, behind model."),
    "sd-scripts, DoRA": Layout(
        {**_SGM_ATTENTION, **_SGM_CONV, **_KOHYA_TEXT}, {"": DORA}, "LyCORIS locon.py, wd_on_out"),
    "LyCORIS DoRA of inputs": Layout({**_SGM_ATTENTION, **_SGM_CONV}, {"": DORA_INPUTS}, "the same, wd_on_out=False"),
    "LyCORIS LoKr with DoRA": Layout(_SGM_ATTENTION, {"": DORA_LOKR}, "LyCORIS lokr.py, weight_decompose"),
    "diffusers, DoRA": Layout(
        {**_behind("unet.", _PATHS), **_DIFFUSERS_TEXT}, {"": DORA_PEFT}, "peft tuners/lora/dora.py"),
    "peft, DoRA": Layout(_behind("base_model.model.", _PATHS), {"": DORA_PEFT}, "the same"),
    "LyCORIS full": Layout({**_SGM_ATTENTION, **_SGM_CONV, **_KOHYA_TEXT}, {"": FULL}, "LyCORIS full.py"),
    "ComfyUI's whole differences": Layout({**_COMFY, **_COMFY_TEXT}, {"": FULL}, "comfy_extras/nodes_lora_extract.py"),
    "clip_l and clip_g": Layout(
        _renamed("text_encoders.", "", _COMFY_TEXT), {"": KOHYA}, "Comfy-Org/ComfyUI comfy/lora.py"),
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
