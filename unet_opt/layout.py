"""Rejects, by name, UNets and VAEs that the walks of `unet_opt` would compute differently from diffusers."""

from __future__ import annotations

from typing import Any

_SUPPORTED: dict[str, tuple[Any, ...]] = {
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
_CONTROL = ("addition_embed_type", "act_fn", "resnet_time_scale_shift", "only_cross_attention", "class_embed_type",
            "num_class_embeds", "encoder_hid_dim_type", "upcast_attention", "mid_block_scale_factor",
            "mid_block_type")  # fmt: skip
_SHARED_CONFIG = ("cross_attention_dim", "addition_embed_type", "addition_time_embed_dim",
          "projection_class_embeddings_input_dim", "flip_sin_to_cos", "freq_shift")  # fmt: skip
_DECODER: dict[str, tuple[Any, ...]] = {"act_fn": ("silu", "swish"), "norm_type": ("group",)}
_TINY: dict[str, tuple[Any, ...]] = {
    "act_fn": ("relu",), "upsample_fn": ("nearest",), "upsampling_scaling_factor": (2,), "out_channels": (3,),
    "scaling_factor": (1.0,), "shift_factor": (0.0, None),
}  # fmt: skip


def check_unet(unet: Any, *, head_multiple: int = 1) -> None:
    """Raise ValueError for a UNet of another layout than SDXL's, or heads of a width that the kernels do not know."""
    config = unet.config
    _check_config("unet", config, _SUPPORTED)
    _check_blocks("unet", {*config.down_block_types, *config.up_block_types} - _BLOCKS)
    _check_modules("unet", unet, head_multiple)
    last, first = unet.up_blocks[-1], unet.down_blocks[0]
    if len(last.resnets) != len(first.resnets) + 1 or (last.upsamplers or ()):
        raise ValueError("unet: its last up block does not mirror its first down block, so it cannot be split")


def check_control(net: Any, unet: Any, scale: int, *, head_multiple: int = 1) -> None:
    """Raise ValueError for a ControlNet of another layout, or of another model than this UNet's, whose latents stand
    for `scale` pixels along a side.
    """
    from unet_opt.unet import cross_attentions, skip_channels

    config = net.config
    _check_config("control", config, {name: _SUPPORTED[name] for name in _CONTROL})
    _check_config("control", config, {"global_pool_conditions": (False,), "conditioning_channels": (3,)})
    _check_blocks("control", {*config.down_block_types} - _BLOCKS)
    _check_modules("control", net, head_multiple)
    for name in _SHARED_CONFIG:
        actual, expected = (getattr(source, name, None) for source in (config, unet.config))
        if actual != expected:
            raise ValueError(f"control: {name} is {actual!r}, and that of the model's unet is {expected!r}")
    for label, channels, expected in (
        ("skips", [layer.out_channels for layer in net.controlnet_down_blocks], skip_channels(unet)),
        ("inputs", [net.conv_in.in_channels], [unet.conv_out.out_channels]),
    ):
        if channels != expected:
            raise ValueError(f"control: its {label} have {channels} channels, and those of the model's unet {expected}")
    pixels = 2 ** (len(config.conditioning_embedding_out_channels) - 1)
    if pixels != scale:
        raise ValueError(f"control: it reads {pixels} pixels for each latent along a side, and the model has {scale}")
    if not cross_attentions(net):
        raise ValueError("control: it has no cross-attention")


def _check_modules(part: str, network: Any, head_multiple: int) -> None:
    for name, module in network.named_modules():
        kind, where = type(module).__name__, f"{part} {name}"
        if kind == "Attention":
            _check_attention(where, module, head_multiple)
        if kind == "BasicTransformerBlock" and type(module.ff.net[0]).__name__ != "GEGLU":
            raise ValueError(f"{where}: its feed-forward is not gated by GEGLU")
        if kind in ("Downsample2D", "Upsample2D") and getattr(module, "conv", None) is None:
            raise ValueError(f"{where}: has no convolution")


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


def _check_config(part: str, config: Any, supported: dict[str, tuple[Any, ...]]) -> None:
    for name, allowed in supported.items():
        if getattr(config, name, allowed[0]) not in allowed:
            raise ValueError(f"{part}: {name} is {getattr(config, name)!r}; supported is {allowed[0]!r}")


def _check_blocks(part: str, unknown: set[str]) -> None:
    if unknown:
        raise ValueError(f"{part}: unsupported blocks: {', '.join(sorted(unknown))}")


def _check_attention(where: str, module: Any, head_multiple: int) -> None:
    _check_width(where, module, head_multiple)
    for option in ("group_norm", "spatial_norm", "norm_cross", "norm_q", "norm_k", "residual_connection"):
        if getattr(module, option, None):
            raise ValueError(f"{where}: {option} is set, which is not supported")
    if module.rescale_output_factor != 1:
        raise ValueError(f"{where}: rescale_output_factor is {module.rescale_output_factor}, not 1")


def _check_width(where: str, module: Any, multiple: int) -> None:
    width = module.inner_dim // module.heads
    if width % multiple:
        raise ValueError(f"{where}: heads of width {width} are no multiple of {multiple}")
