"""Builds small pipelines of diffusers with random weights, as diffusers' `save_pretrained` writes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.guiders import AdaptiveProjectedMixGuidance
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

_WORDS = [chr(code) for code in range(32, 127)] + ["\n"]
_MARKS = ["<pad>", "</s>", "<unk>", "<s>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
_MARKS += ["<|image_pad|>", "[CLS]", "[SEP]"]
_VOCABULARY = 128
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(length: int = 512) -> Any:
    """A tokenizer of single characters, which ends each text with `</s>`."""
    words = {word: number for number, word in enumerate([*_MARKS, *_WORDS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", bos_token="<s>",
        additional_special_tokens=_MARKS[4:], model_max_length=length,
    )  # fmt: skip
    wrapped.chat_template = _CHAT
    return wrapped


def clip(kind: type, width: int = 32) -> Any:
    config = transformers.CLIPTextConfig(
        hidden_size=width, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, projection_dim=width,
        vocab_size=_VOCABULARY, bos_token_id=3, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return kind(config)


def t5() -> Any:
    config = transformers.T5Config(
        d_model=32, d_ff=37, d_kv=8, num_heads=4, num_layers=2, vocab_size=_VOCABULARY, pad_token_id=0
    )
    return transformers.T5EncoderModel(config)


def gemma(width: int = 8) -> Any:
    config = transformers.Gemma2Config(
        head_dim=4, hidden_size=width, intermediate_size=8, num_attention_heads=2, num_hidden_layers=2,
        num_key_value_heads=2, sliding_window=2, vocab_size=_VOCABULARY, attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    return transformers.Gemma2Model(config)


def vae(channels: int = 4, blocks: tuple[int, ...] = (4,)) -> Any:
    return diffusers.AutoencoderKL(
        sample_size=32, block_out_channels=blocks, layers_per_block=1, latent_channels=channels, norm_num_groups=1,
        down_block_types=("DownEncoderBlock2D",) * len(blocks), up_block_types=("UpDecoderBlock2D",) * len(blocks),
        use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0609, scaling_factor=1.5035,
    )  # fmt: skip


def flow(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


def flux(kind: type = diffusers.FluxPipeline) -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    return kind(
        scheduler=flow(), vae=vae(1), text_encoder=clip(transformers.CLIPTextModel), tokenizer=tokenizer(77),
        text_encoder_2=t5(), tokenizer_2=tokenizer(), transformer=transformer,
    )  # fmt: skip


def flux2_klein() -> Any:
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
    )  # fmt: skip
    config = transformers.Qwen3Config(
        intermediate_size=8, hidden_size=8, num_hidden_layers=28, num_attention_heads=2, num_key_value_heads=2,
        head_dim=4, vocab_size=_VOCABULARY, max_position_embeddings=512,
    )  # fmt: skip
    decoder = diffusers.AutoencoderKLFlux2(
        sample_size=32, down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,), layers_per_block=1, latent_channels=1, norm_num_groups=1, use_quant_conv=False,
        use_post_quant_conv=False,
    )  # fmt: skip
    return diffusers.Flux2KleinPipeline(
        scheduler=flow(), vae=decoder, text_encoder=transformers.Qwen3ForCausalLM(config), tokenizer=tokenizer(),
        transformer=transformer,
    )  # fmt: skip


def qwen_encoder() -> Any:
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default", "rope_theta": 1_000_000.0}
    text = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "rope_scaling": rope, "rope_parameters": rope, "vocab_size": _VOCABULARY,
    }  # fmt: skip
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, vision_start_token_id=6, vision_end_token_id=7, vision_token_id=8,
        image_token_id=8,
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen_image(kind: type = diffusers.QwenImagePipeline, **more: Any) -> Any:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, guidance_embeds=False, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    decoder = diffusers.AutoencoderKLQwenImage(
        base_dim=24, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    return kind(
        scheduler=flow(), vae=decoder, text_encoder=qwen_encoder(), tokenizer=tokenizer(1024), transformer=transformer,
        **more,
    )  # fmt: skip


def qwen_image_edit_plus() -> Any:
    """The processor of pictures needs torchvision."""
    processor = transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56}),
        tokenizer(1024), transformers.Qwen2VLVideoProcessor(), chat_template=_CHAT,
    )  # fmt: skip
    return qwen_image(diffusers.QwenImageEditPlusPipeline, processor=processor)


def hunyuan_image() -> Any:
    transformer = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=(1, 1), text_embed_dim=16, text_embed_2_dim=32, rope_axes_dim=(4, 4),
    )  # fmt: skip
    decoder = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 64, 64, 64), layers_per_block=1,
        spatial_compression_ratio=8, sample_size=128, scaling_factor=1.0,
    )  # fmt: skip
    guider = partial(AdaptiveProjectedMixGuidance, adaptive_projected_guidance_start_step=1)  # with momentum
    return diffusers.HunyuanImagePipeline(
        scheduler=flow(), vae=decoder, text_encoder=qwen_encoder(), tokenizer=tokenizer(1024), text_encoder_2=t5(),
        tokenizer_2=tokenizer(256), transformer=transformer, guider=guider(),
        ocr_guider=guider(),
    )  # fmt: skip


def hunyuan_image_refiner() -> Any:
    transformer = diffusers.HunyuanImageTransformer2DModel(
        in_channels=16, out_channels=8, num_attention_heads=4, attention_head_dim=8, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=(1, 1, 1), text_embed_dim=16, rope_axes_dim=(2, 2, 4), guidance_embeds=True,
    )  # fmt: skip
    decoder = diffusers.AutoencoderKLHunyuanImageRefiner(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 64, 64, 64), layers_per_block=1,
        spatial_compression_ratio=8, temporal_compression_ratio=1, scaling_factor=1.0,
    )  # fmt: skip
    return diffusers.HunyuanImageRefinerPipeline(
        scheduler=flow(), vae=decoder, text_encoder=qwen_encoder(), tokenizer=tokenizer(1024), transformer=transformer,
    )  # fmt: skip


def stable_diffusion_3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    encoders = {f"text_encoder{k}": clip(transformers.CLIPTextModelWithProjection) for k in ("", "_2")}
    return diffusers.StableDiffusion3Pipeline(
        scheduler=flow(), vae=vae(), transformer=transformer, **encoders, text_encoder_3=t5(),
        tokenizer=tokenizer(77), tokenizer_2=tokenizer(77), tokenizer_3=tokenizer(),
    )  # fmt: skip


def pixart_sigma() -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, caption_channels=32,
        in_channels=4, cross_attention_dim=24, out_channels=8, attention_bias=True,
        activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_single",
        norm_elementwise_affine=False, norm_eps=1e-6,
    )  # fmt: skip
    return diffusers.PixArtSigmaPipeline(
        scheduler=diffusers.DDIMScheduler(), vae=vae(4, (8, 8, 8, 8)), text_encoder=t5(), tokenizer=tokenizer(),
        transformer=transformer,
    )  # fmt: skip


def sana() -> Any:
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8,
        sample_size=32,
    )  # fmt: skip
    blocks = ("ResBlock", "EfficientViTBlock")
    decoder = diffusers.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=blocks,
        decoder_block_types=blocks, encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)), encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), downsample_block_type="conv", upsample_block_type="interpolate",
        decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.41407,
    )  # fmt: skip
    return diffusers.SanaPipeline(
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=decoder, text_encoder=gemma(), tokenizer=tokenizer(), transformer=transformer,
    )  # fmt: skip


def lumina2() -> Any:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=4, patch_size=2, in_channels=4, hidden_size=8, num_layers=2, num_attention_heads=1,
        num_kv_heads=1, multiple_of=16, norm_eps=1e-5, axes_dim_rope=(4, 2, 2), cap_feat_dim=8,
    )  # fmt: skip
    return diffusers.Lumina2Pipeline(
        scheduler=flow(), vae=vae(4, (8, 8, 8, 8)), text_encoder=gemma(), tokenizer=tokenizer(), transformer=transformer
    )


def hunyuan_dit() -> Any:
    transformer = diffusers.HunyuanDiT2DModel(
        sample_size=16, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, in_channels=4,
        cross_attention_dim=32, cross_attention_dim_t5=32, pooled_projection_dim=16, hidden_size=24,
        activation_fn="gelu-approximate",
    )  # fmt: skip
    encoder = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=_VOCABULARY
        )
    )
    return diffusers.HunyuanDiTPipeline(
        scheduler=diffusers.DDPMScheduler(), vae=vae(4, (8, 8, 8, 8)), text_encoder=encoder, tokenizer=tokenizer(77),
        text_encoder_2=t5(), tokenizer_2=tokenizer(256), transformer=transformer, safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def chroma() -> Any:
    transformer = diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_hidden_dim=32, approximator_layers=1,
        approximator_num_channels=16,
    )  # fmt: skip
    return diffusers.ChromaPipeline(
        scheduler=flow(), vae=vae(1), text_encoder=t5(), tokenizer=tokenizer(), transformer=transformer
    )


BUILDERS: dict[str, Callable[[], Any]] = {
    "flux": flux, "flux_kontext": partial(flux, diffusers.FluxKontextPipeline), "flux2_klein": flux2_klein,
    "qwen_image": qwen_image, "stable_diffusion_3": stable_diffusion_3, "pixart_sigma": pixart_sigma, "sana": sana,
    "lumina2": lumina2, "hunyuan_dit": hunyuan_dit, "hunyuan_image": hunyuan_image, "chroma": chroma,
}  # fmt: skip
EDITORS: dict[str, Callable[[], Any]] = {
    "qwen_image_edit_plus": qwen_image_edit_plus, "hunyuan_image_refiner": hunyuan_image_refiner,
}  # fmt: skip
"""Those that draw from a picture alone."""


def save(name: str, folder: Path) -> Path:
    """Write a pipeline with seeded random weights; returns its folder."""
    torch.manual_seed(0)
    pipeline = {**BUILDERS, **EDITORS}[name]()
    pipeline.save_pretrained(folder / name)
    return folder / name


def cached(folder: Path, name: str, cache: Path) -> Path:
    """Put a pipeline where huggingface_hub keeps what it downloaded; returns its folder there."""
    kept, commit = cache / f"models--{name.replace('/', '--')}", "0" * 40
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(folder, kept / "snapshots" / commit))
