"""Control networks with random weights for the tests' models, and what diffusers draws with them."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from contract.control import Control
from contract.image import ImageParameters
from pipeline.checkpoints.load import ImageModel
from tests.pipeline.worlds import stock, stock_options, stock_parts

_EMBEDDING = (4, 8, 8, 12)  # channels of the picture's embedding, for 8 pixels a latent


def controlnet(model: ImageModel, seed: int = 0, **changes: Any) -> Any:
    """A ControlNet of the model's shape whose convolutions at its ends are not zero, as after training."""
    from diffusers import ControlNetModel

    kept = ("down_block_types", "block_out_channels", "layers_per_block", "transformer_layers_per_block",
            "attention_head_dim", "cross_attention_dim", "use_linear_projection", "addition_embed_type",
            "addition_time_embed_dim", "projection_class_embeddings_input_dim", "norm_num_groups")  # fmt: skip
    config = {name: model.denoiser.config[name] for name in kept}
    torch.manual_seed(seed)
    net = ControlNetModel(**{**config, "conditioning_embedding_out_channels": _EMBEDDING, **changes}).eval()
    return filled(net)


def union(model: ImageModel, seed: int = 0, **changes: Any) -> Any:
    """A ControlNet-Union of the model's shape."""
    from diffusers import ControlNetUnionModel

    width = model.denoiser.config.block_out_channels[0]
    config = dict(controlnet(model).config) | {
        "conditioning_embedding_out_channels": _EMBEDDING, "num_control_type": 4, "num_trans_channel": width,
        "num_proj_channel": width, "num_trans_head": 4,
    }  # fmt: skip
    known = inspect.signature(ControlNetUnionModel).parameters
    torch.manual_seed(seed)
    made = ControlNetUnionModel(**{name: value for name, value in config.items() if name in known} | changes)
    return filled(made.eval())


def adapter(model: ImageModel, seed: int = 0, **changes: Any) -> Any:
    """A T2I-Adapter of the model's shape, whose maps are as large as those that they are added to."""
    from diffusers import T2IAdapter

    channels = [*model.denoiser.config.block_out_channels]
    channels += channels[-1:] if len(channels) > 2 else []
    config = {"channels": channels, "num_res_blocks": 1, "downscale_factor": 16, "adapter_type": "full_adapter_xl"}
    torch.manual_seed(seed)
    return T2IAdapter(**{**config, **changes}).eval()


def filled(net: Any) -> Any:
    """The network with noise in place of weights that are zero before training."""
    for parameter in net.parameters():
        if parameter.ndim > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.5 / parameter[0].numel() ** 0.5)
    return net


def save(net: Any, folder: Path, name: str) -> Path:
    """Write it as a folder in diffusers' format; its path."""
    net.save_pretrained(folder / name)
    return folder / name


def drawn(side: int, seed: int = 0) -> bytes:
    """White lines on black, [side, side, 3]."""
    from PIL import ImageDraw

    image = Image.new("RGB", (side, side))
    points = np.random.default_rng(seed).integers(0, side, (4, 2)).tolist()
    ImageDraw.Draw(image).line([tuple(point) for point in points], fill="white", width=2)
    return image.tobytes()


def control(model: str, side: int, seed: int = 0, **options: Any) -> Control:
    return Control(model=model, image=drawn(side, seed), **options)


@functools.cache
def _pipeline(kind: str, shape: str, nets: tuple[Any, ...]) -> Any:
    import diffusers

    made = getattr(diffusers, kind)(
        **stock_parts(shape), controlnet=nets[0] if len(nets) == 1 else [*nets], add_watermarker=False,
        force_zeros_for_empty_prompt=stock(shape).config.force_zeros_for_empty_prompt,
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


@functools.cache
def stock_union(shape: str, net: Any, one: ImageParameters) -> np.ndarray:
    """What diffusers draws of it with this ControlNet-Union, which reads all of its controls, [H, W, 3] in levels."""
    made = _pipeline("StableDiffusionXLControlNetUnionPipeline", shape, (net,))(
        **stock_options(one),
        control_image=[Image.frombytes("RGB", (one.width, one.height), control.image) for control in one.control],
        control_mode=[control.mode for control in one.control],
        controlnet_conditioning_scale=[control.strength for control in one.control],
        control_guidance_start=[control.start for control in one.control],
        control_guidance_end=[control.end for control in one.control],
    ).images[0]
    return np.asarray(made).astype(int)


@functools.cache
def stock_adapted(shape: str, net: Any, one: ImageParameters) -> np.ndarray:
    """What diffusers draws of it with this T2I-Adapter and its only control, [H, W, 3] in levels."""
    import diffusers

    (control,) = one.control
    force = stock(shape).config.force_zeros_for_empty_prompt
    kind = diffusers.StableDiffusionXLAdapterPipeline
    pipeline = kind(**stock_parts(shape), adapter=net, force_zeros_for_empty_prompt=force)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        **stock_options(one),
        image=Image.frombytes("RGB", (one.width, one.height), control.image),
        adapter_conditioning_scale=control.strength,
        adapter_conditioning_factor=control.end,
    ).images[0]
    return np.asarray(made).astype(int)


@functools.cache
def stock_controlled(shape: str, nets: tuple[Any, ...], one: ImageParameters) -> np.ndarray:
    """What diffusers draws of it with these ControlNets, one for each control, [H, W, 3] in levels."""
    return np.asarray(controlled(shape, nets, one)).astype(int)


def controlled(shape: str, nets: tuple[Any, ...], one: ImageParameters, **more: Any) -> Any:
    """What diffusers' pipeline gives for it with these ControlNets, one for each control, and `more` options."""
    size = (one.width, one.height)
    pictures = [Image.frombytes("RGB", size, control.image) for control in one.control]
    shown: Any = pictures[0] if len(nets) == 1 else pictures
    options: dict[str, Any] = {"image": shown}
    kind = "StableDiffusionXLControlNetPipeline"
    if one.edit is not None:
        kind = "StableDiffusionXLControlNetImg2ImgPipeline"
        options = {"control_image": shown, "image": Image.frombytes("RGB", size, one.edit.image)}
        options["strength"] = one.edit.strength
        if one.edit.mask is not None:
            kind = "StableDiffusionXLControlNetInpaintPipeline"
            options["mask_image"] = Image.frombytes("L", size, one.edit.mask)

    def each(name: str) -> Any:
        values = [getattr(control, name) for control in one.control]
        return values[0] if len(nets) == 1 else values

    options |= {
        "controlnet_conditioning_scale": each("strength"), "control_guidance_start": each("start"),
        "control_guidance_end": each("end"),
    }  # fmt: skip
    return _pipeline(kind, shape, nets)(**stock_options(one) | options | more).images[0]
