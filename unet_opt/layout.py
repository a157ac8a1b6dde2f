"""Rejects, by name, UNets and VAEs that the walks of `unet_opt` would compute differently from diffusers."""

from __future__ import annotations

from typing import Any

_WANTED: dict[str, tuple[Any, ...]] = {
    "addition_embed_type": ("text_time", None),
    "act_fn": ("silu", "swish"),
    "time_embedding_type": ("positional",),
    "resnet_time_scale_shift": ("default",),
    "attention_type": ("default",),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "only_cross_attention": (False,),
    "dual_cross_attention": (False,),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "encoder_hid_dim_type": (None,),
    "center_input_sample": (False,),
    "time_embedding_act_fn": (None,),
    "timestep_post_act": (None,),
    "upcast_attention": (False, None),
    "resnet_out_scale_factor": (1.0,),
    "mid_block_scale_factor": (1.0,),
    "resnet_skip_time_act": (False,),
    "cross_attention_norm": (None,),
    "time_embedding_dim": (None,),
}
_BLOCKS = {"DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"}
_DECODER: dict[str, tuple[Any, ...]] = {"act_fn": ("silu", "swish"), "norm_type": ("group",)}
_TINY: dict[str, tuple[Any, ...]] = {
    "act_fn": ("relu",), "upsample_fn": ("nearest",), "upsampling_scaling_factor": (2,), "out_channels": (3,),
    "scaling_factor": (1.0,), "shift_factor": (0.0, None),
}  # fmt: skip


def check_unet(unet: Any, *, head_multiple: int = 1) -> None:
    """Raise ValueError for a UNet of another layout than SDXL's, or heads of a width that the kernels do not know."""
    config = unet.config
    _check_config("unet", config, _WANTED)
    _check_blocks("unet", {*config.down_block_types, *config.up_block_types} - _BLOCKS)
    for name, module in unet.named_modules():
        kind, where = type(module).__name__, f"unet {name}"
        if kind == "Attention":
            _check_attention(where, module, head_multiple)
        if kind == "BasicTransformerBlock" and type(module.ff.net[0]).__name__ != "GEGLU":
            raise ValueError(f"{where}: its feed-forward is not gated by GEGLU")
        if kind in ("Downsample2D", "Upsample2D") and getattr(module, "conv", None) is None:
            raise ValueError(f"{where}: has no convolution")
    last, first = unet.up_blocks[-1], unet.down_blocks[0]
    if len(last.resnets) != len(first.resnets) + 1 or (last.upsamplers or ()):
        raise ValueError("unet: its last up block does not mirror its first down block, so it cannot be split")


def check_decoder(vae: Any, *, head_multiple: int = 1) -> None:
    """Raise ValueError for a decoder of another layout than SDXL's, or heads of a width unknown to the kernels."""
    if getattr(vae.config, "up_block_types", None) is None or not hasattr(vae.decoder, "conv_norm_out"):
        raise ValueError(f"vae: is a {type(vae).__name__}; supported is AutoencoderKL")
    _check_blocks("vae", {*vae.config.up_block_types} - {"UpDecoderBlock2D"})
    _check_config("vae", vae.config, _DECODER)
    for name, module in vae.decoder.named_modules():
        if type(module).__name__ == "Attention":
            _check_width(f"vae decoder.{name}", module, head_multiple)


def check_tiny_decoder(vae: Any) -> None:
    """Raise ValueError for a decoder of another layout than TAESD's."""
    if getattr(vae.config, "num_decoder_blocks", None) is None or not hasattr(vae.decoder, "layers"):
        raise ValueError(f"vae-tiny: is a {type(vae).__name__}; supported is AutoencoderTiny")
    _check_config("vae-tiny", vae.config, _TINY)
    widths = [*vae.config.decoder_block_out_channels]
    if len({*widths}) != 1:  # nothing in the layout changes the number of channels
        raise ValueError(f"vae-tiny: decoder_block_out_channels is {widths}; supported is one width")


def _check_config(part: str, config: Any, wanted: dict[str, tuple[Any, ...]]) -> None:
    for name, allowed in wanted.items():
        if getattr(config, name, allowed[0]) not in allowed:
            raise ValueError(f"{part}: {name} is {getattr(config, name)!r}; supported is {allowed[0]!r}")


def _check_blocks(part: str, unknown: set[str]) -> None:
    if unknown:
        raise ValueError(f"{part}: unsupported blocks: {', '.join(sorted(unknown))}")


def _check_attention(where: str, module: Any, head_multiple: int) -> None:
    _check_width(where, module, head_multiple)
    for what in ("group_norm", "spatial_norm", "norm_cross", "norm_q", "norm_k", "residual_connection"):
        if getattr(module, what, None):
            raise ValueError(f"{where}: {what} is set, which is not supported")
    if module.rescale_output_factor != 1:
        raise ValueError(f"{where}: rescale_output_factor is {module.rescale_output_factor}, not 1")


def _check_width(where: str, module: Any, multiple: int) -> None:
    width = module.inner_dim // module.heads
    if width % multiple:
        raise ValueError(f"{where}: heads of width {width} are no multiple of {multiple}")
