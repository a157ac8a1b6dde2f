"""IP-Adapters and vision encoders with random weights for the tests' models, and what diffusers draws with them."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from contract.image import ImageParameters
from contract.image_prompt import ImagePrompt
from pipeline.checkpoints.load import ImageModel
from pipeline.extensions.ip_adapter_file import ENCODER
from tests.pipeline.worlds import stock, stock_options
from unet_opt.ip_adapter import layer_shapes
from unet_opt.unet import cross_attentions

HIDDEN, EMBEDDING = 32, 24  # channels of the encoder's states, and of its embedding
_SIDE, _PATCH = 32, 8
_RESAMPLED, _INNER = 48, 128  # channels of the resampler, and of its two heads


def encoder(where: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a vision encoder in transformers' format; its folder."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    shape = {"hidden_size": HIDDEN, "intermediate_size": 64, "projection_dim": EMBEDDING, "num_hidden_layers": 3,
             "num_attention_heads": 4, "image_size": _SIDE, "patch_size": _PATCH}  # fmt: skip
    torch.manual_seed(seed)
    network = CLIPVisionModelWithProjection(CLIPVisionConfig(**{**shape, **changes})).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:  # as trained: a picture changes what it sees
                parameter.mul_(4)
    network.save_pretrained(where / ENCODER)
    return where / ENCODER


def state(
    model: ImageModel, seed: int = 0, *, plus: bool, tokens: int = 6, depth: int = 4, like_text: bool = False
) -> dict[str, Tensor]:  # fmt: skip
    """An adapter's tensors, under the keys of the authors' files.

    `like_text`: its layers are near those of the text, from which training begins; else they say ten times as much.
    """
    made = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made) / shape[-1] ** 0.5

    layers = layer_shapes(model.denoiser)
    width = layers[0][1]
    norms = {f"{width}": width, f"{_RESAMPLED}": _RESAMPLED}
    found: dict[str, Tensor] = {}

    def norm(name: str, channels: int) -> None:
        found[f"{name}.weight"] = 1 + 0.1 * torch.randn(norms[str(channels)], generator=made)
        found[f"{name}.bias"] = 0.1 * torch.randn(norms[str(channels)], generator=made)

    def linear(name: str, out: int, given: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = random(out, given), 0.1 * random(out)

    if plus:
        found["latents"] = torch.randn(1, tokens, _RESAMPLED, generator=made)
        linear("proj_in", _RESAMPLED, HIDDEN)
        linear("proj_out", width, _RESAMPLED)
        norm("norm_out", width)
        for number in range(depth):
            at = f"layers.{number}"
            for name in ("0.norm1", "0.norm2", "1.0"):
                norm(f"{at}.{name}", _RESAMPLED)
            found[f"{at}.0.to_q.weight"] = random(_INNER, _RESAMPLED)
            found[f"{at}.0.to_kv.weight"] = random(2 * _INNER, _RESAMPLED)
            found[f"{at}.0.to_out.weight"] = random(_RESAMPLED, _INNER)
            found[f"{at}.1.1.weight"] = random(4 * _RESAMPLED, _RESAMPLED)
            found[f"{at}.1.3.weight"] = random(_RESAMPLED, 4 * _RESAMPLED)
    else:
        linear("proj", 4 * width, EMBEDDING)
        norm("norm", width)
    made_of = {f"image_proj.{key}": tensor for key, tensor in found.items()}
    for number, (shape, attn) in enumerate(zip(layers, cross_attentions(model.denoiser), strict=True)):
        for part, own in (("k", attn.to_k), ("v", attn.to_v)):
            weight = own.weight.detach() * (1 + 0.3 * random(*shape).sign()) if like_text else random(*shape)
            made_of[f"ip_adapter.{2 * number + 1}.to_{part}_ip.weight"] = weight
    return made_of


def save(found: dict[str, Tensor], folder: Path, name: str) -> Path:
    from safetensors.torch import save_file

    save_file({key: tensor.contiguous() for key, tensor in found.items()}, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def picture(seed: int = 0, size: tuple[int, int] = (50, 41)) -> Image.Image:
    """A few coarse colours."""
    coarse = np.random.default_rng(seed).integers(0, 255, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def prompt(model: str, seed: int = 0, size: tuple[int, int] = (50, 41), **options: Any) -> ImagePrompt:
    return ImagePrompt(model=model, image=picture(seed, size).tobytes(), width=size[0], height=size[1], **options)


@functools.cache
def stock_prompted(shape: str, folder: Path, one: ImageParameters, more: Any = None) -> np.ndarray:
    """What diffusers draws of it with its image prompts, of adapters in this folder, [H, W, 3] in levels.

    `more` makes another pipeline of one with the adapters, and says its options.
    """
    return np.asarray(prompted(shape, folder, one, more)).astype(int)


def prompted(shape: str, folder: Path, one: ImageParameters, more: Any = None) -> Any:
    """What that pipeline gives for it."""
    names = tuple(f"{prompt.model}.safetensors" for prompt in one.image_prompts)
    pipeline = (_pipeline if more is None else _pipeline.__wrapped__)(shape, folder, names)
    pipeline.set_ip_adapter_scale([prompt.strength for prompt in one.image_prompts])
    options: dict[str, Any] = {}
    if more is not None:
        pipeline, options = more(pipeline)
    given = stock_options(one) | {"callback_on_step_end": _windows(one)}
    given["ip_adapter_image"] = [_image(prompt) for prompt in one.image_prompts]
    return pipeline(**given | options).images[0]


@functools.cache
def _pipeline(shape: str, folder: Path, names: tuple[str, ...]) -> Any:
    """With these adapters, and a UNet of its own."""
    pipeline = copy.copy(stock(shape))
    pipeline.register_modules(unet=copy.deepcopy(pipeline.unet), image_encoder=None, feature_extractor=None)
    pipeline.load_ip_adapter(str(folder), subfolder="", weight_name=[*names], image_encoder_folder=ENCODER)
    return pipeline


def _image(prompt: ImagePrompt) -> Image.Image:
    return Image.frombytes("RGB", (prompt.width, prompt.height), prompt.image)


def _windows(one: ImageParameters) -> Any:
    """Sets the scales of the next step behind each step of a pipeline, which draws the first one with every prompt."""
    acts = [prompt.acts(one.steps) for prompt in one.image_prompts]

    def after(pipeline: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        if step + 1 < one.steps:
            pipeline.set_ip_adapter_scale(
                [prompt.strength * own[step + 1] for prompt, own in zip(one.image_prompts, acts, strict=True)]
            )
        return given

    return after
