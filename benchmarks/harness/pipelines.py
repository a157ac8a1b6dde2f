"""Writes pipelines of diffusers with random weights, of the shapes that are published or of small ones."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

_WORDS = ["<pad>", "</s>", "<unk>", "<s>", *map(chr, range(32, 127))]
_LENGTHS = {"tokenizer": 77, "tokenizer_2": 77, "tokenizer_3": 512}
_GGUF_BLOCK = 32  # values that share a scale


def tokenizer(length: int) -> Any:
    """A tokenizer of single characters, which ends each text with `</s>`."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(_WORDS)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", bos_token="<s>",
        model_max_length=length,
    )  # fmt: skip


def _clip(kind: str, width: int, layers: int, activation: str, small: bool) -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        hidden_size=32 if small else width, intermediate_size=64 if small else 4 * width,
        num_attention_heads=4 if small else width // 64, num_hidden_layers=2 if small else layers,
        projection_dim=32 if small else width, hidden_act=activation, bos_token_id=3, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def _t5(small: bool) -> Any:
    from transformers import T5Config, T5EncoderModel

    whole: dict[str, Any] = {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24}
    sizes = {"d_model": 32, "d_ff": 64, "num_heads": 2, "num_layers": 2} if small else whole
    return T5EncoderModel(T5Config(vocab_size=32128, d_kv=64, feed_forward_proj="gated-gelu", pad_token_id=0, **sizes))


def _vae(scale: float, shift: float, small: bool) -> Any:
    from diffusers import AutoencoderKL

    widths = (8, 8, 8, 8) if small else (128, 256, 512, 512)
    return AutoencoderKL(
        block_out_channels=widths, layers_per_block=1 if small else 2, latent_channels=16, scaling_factor=scale,
        norm_num_groups=4 if small else 32, shift_factor=shift, use_quant_conv=False, use_post_quant_conv=False,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, sample_size=1024,
    )  # fmt: skip


def _sd3(small: bool) -> Any:
    """Stable Diffusion 3 medium: 2.0B parameters, 28 steps with guidance."""
    import diffusers

    sizes = {"num_layers": 2, "num_attention_heads": 2, "caption_projection_dim": 128, "joint_attention_dim": 32,
             "pooled_projection_dim": 64, "sample_size": 8}  # fmt: skip
    whole = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "joint_attention_dim": 4096,
             "pooled_projection_dim": 2048, "sample_size": 128}  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), vae=_vae(1.5305, 0.0609, small),
        text_encoder=_clip("CLIPTextModelWithProjection", 768, 12, "quick_gelu", small),
        text_encoder_2=_clip("CLIPTextModelWithProjection", 1280, 32, "gelu", small), text_encoder_3=_t5(small),
        **{name: tokenizer(length) for name, length in _LENGTHS.items()},
        transformer=diffusers.SD3Transformer2DModel(pos_embed_max_size=192, **(sizes if small else whole)),
    )  # fmt: skip


def _flux(small: bool, *, guided: bool = False) -> Any:
    """FLUX.1 schnell: 11.9B parameters, four steps; `guided` is FLUX.1 dev, which reads the guidance as a number."""
    import diffusers

    sizes: dict[str, Any] = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
             "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32,
             "axes_dims_rope": (4, 4, 8)}  # fmt: skip
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=_vae(0.3611, 0.1159, small),
        text_encoder=_clip("CLIPTextModel", 768, 12, "quick_gelu", small), text_encoder_2=_t5(small),
        tokenizer=tokenizer(77), tokenizer_2=tokenizer(512),
        transformer=diffusers.FluxTransformer2DModel(guidance_embeds=guided, **(sizes if small else {})),
    )  # fmt: skip


SHAPES: dict[str, Callable[[bool], Any]] = {
    "sd3-medium": _sd3, "flux-schnell": _flux, "flux-dev": partial(_flux, guided=True),
}  # fmt: skip
STEPS = {"sd3-medium": 28, "flux-schnell": 4, "flux-dev": 28}


def save(shape: str, folder: Path, device: str, *, small: bool) -> Path:
    """Write such a pipeline, in bf16 on a GPU; returns its folder. A part that another one's folder has is linked."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            pipeline = SHAPES[shape](small)
    finally:
        torch.set_default_dtype(dtype)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder / shape, max_shard_size="8GB")
    return folder / shape


def save_gguf(folder: Path, device: str) -> Path:
    """Write the pipeline's transformer to a file in GGUF, its matrices in 4 bits (Q4_0); returns the file."""
    from safetensors.torch import load_file

    gguf: Any = importlib.import_module("gguf")

    path = folder / "transformer-q4_0.gguf"
    writer = gguf.GGUFWriter(os.fspath(path), "diffusers")
    for shard in sorted((folder / "transformer").glob("*.safetensors")):
        for name, tensor in load_file(shard, device=device).items():
            if tensor.ndim == 2 and tensor.shape[1] % _GGUF_BLOCK == 0:
                blocks = _q4_0(tensor).cpu().numpy()
                writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
            else:
                writer.add_tensor(name, tensor.float().cpu().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _q4_0(matrix: torch.Tensor) -> torch.Tensor:
    """Bytes of a matrix in GGUF's Q4_0, [rows, columns / 32 * 18]: a scale in fp16, and 32 values of 4 bits."""
    blocks = matrix.float().reshape(-1, _GGUF_BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -8
    values = (blocks / torch.where(scale == 0, 1.0, scale) + 8.5).clamp(0, 15).to(torch.uint8)
    packed = values[:, : _GGUF_BLOCK // 2] | values[:, _GGUF_BLOCK // 2 :] << 4
    return torch.cat([scale.half().view(torch.uint8), packed], 1).reshape(len(matrix), -1)
