"""Transformer blocks of Z-Image, Qwen3 and CLIP as programs of kernel calls: diffusers' and transformers' results."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from core.kernels.cpu.program import Weights, pack_float
from core.kernels.cpu.token_program import TokenProgram
from tests.core.quant.stage import Watched, check_close, kernels, normal


def packed(*layers: nn.Linear, geglu: bool = False, plus: float = 0.0) -> Weights:
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias.detach() for layer in layers]
    return pack_float(kernels(), weight[:, None], torch.cat(biases) + plus, geglu=geglu)


def columns(layer: nn.Linear, part: int, parts: int, **options: Any) -> Weights:
    made = nn.Linear(1, 1)
    made.weight, made.bias = (nn.Parameter(x.detach().chunk(parts)[part]) for x in (layer.weight, layer.bias))
    return packed(made, **options)


def scattered(module: nn.Module, seed: int) -> nn.Module:
    """Random parameters, also of norms, in place."""
    for index, parameter in enumerate(module.parameters()):
        parameter.data = normal(seed + index, *parameter.shape, scale=0.2) + (parameter.dim() == 1)
    return module.eval().requires_grad_(False)


def z_image_block(p: TokenProgram, x: Tensor, block: Any, time: Tensor, angles: Tensor, lengths: Tensor) -> None:
    """In place on x [images · tokens, channels]; time [images, 64]."""
    linear = functools.partial(p.product, grid=(1, 1, len(x)))
    attention, mlp, modulation = block.attention, block.feed_forward, block.adaLN_modulation[0]
    images, heads, width = len(time), attention.heads, x.shape[1]
    scales, gates = (
        [
            p.product(time, columns(modulation, part + 2 * j, 4, plus=1.0 - part), grid=(1, 1, images), act=act)
            for j in range(2)
        ]
        for part, act in ((0, None), (1, "tanh"))
    )

    def norm(y: Tensor, norm: Any, **options: Any) -> Tensor:
        return p.rms_norm(y, norm.weight, norm.eps, None, **options)

    qkv = linear(
        norm(x, block.attention_norm1, row_scale=scales[0]), packed(attention.to_q, attention.to_k, attention.to_v)
    )
    q, k, v = qkv.split(width, dim=1)
    p.rotate_heads(
        q, k, angles, heads=heads, q_norm=attention.norm_q.weight, k_norm=attention.norm_k.weight,
        eps=attention.norm_q.eps, interleaved=True,
    )  # fmt: skip
    scale = 1 / math.sqrt(width // heads)
    y = p.attention(q, k, v, images=images, heads=heads, scale=scale, inverse=None, lengths=lengths)
    norm(linear(y, packed(attention.to_out[0])), block.attention_norm2, row_scale=gates[0], residual=x, out=x)
    y = linear(norm(x, block.ffn_norm1, row_scale=scales[1]), packed(mlp.w3, mlp.w1, geglu=True), act="silu")
    norm(linear(y, packed(mlp.w2)), block.ffn_norm2, row_scale=gates[1], residual=x, out=x)


def test_z_images_block() -> None:
    """Two images with texts of different lengths behind their tokens, and each alone with the same bits."""
    from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock

    lengths, heads, d = [9, 13], 2, 48
    images, tokens, width = len(lengths), max(lengths), heads * d
    block = scattered(ZImageTransformerBlock(0, width, heads, heads, 1e-5, qk_norm=True), 0)
    given_, time, turns = normal(1, images, tokens, width), normal(2, images, width), normal(3, images, tokens, d // 2)
    real = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    wanted = block(given_, real, torch.polar(torch.ones_like(turns), turns), time)

    def run(which: slice, count: int) -> Tensor:
        p, x = Watched(), given_[which, :count].flatten(0, 1).clone()
        angles = torch.cat([turns.cos(), turns.sin()], -1)[which, :count].flatten(0, 1).contiguous()
        z_image_block(p, x, block, time[which], angles, torch.tensor(lengths[which], dtype=torch.int32))
        p.run()
        return x.view(-1, count, width)

    together = run(slice(None), tokens)
    for image, length in enumerate(lengths):
        check_close(together[image, :length], wanted[image, :length], relative=2e-5)
        assert torch.equal(run(slice(image, image + 1), length)[0], together[image, :length])


def test_qwen3s_layer() -> None:
    """As a text encoder: causal, without a cache, with fewer heads of keys."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    images, tokens, heads, kv_heads, d, width = 2, 11, 4, 2, 32, 48
    config = Qwen3Config(
        hidden_size=width, intermediate_size=64, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=d,
        num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    layer: Any = scattered(Qwen3DecoderLayer(config, 0), 0)
    given_, numbers = normal(1, images, tokens, width), torch.arange(tokens)[None]
    cosines, sines = Qwen3RotaryEmbedding(config)(given_, numbers)
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    wanted = layer(given_, attention_mask=mask, position_embeddings=(cosines, sines))

    p, x = Watched(), given_.flatten(0, 1).clone()
    linear = functools.partial(p.product, grid=(1, 1, len(x)))
    attention, mlp = layer.self_attn, layer.mlp
    y = p.rms_norm(x, layer.input_layernorm.weight, config.rms_norm_eps, None)
    qkv = linear(y, packed(attention.q_proj, attention.k_proj, attention.v_proj))
    q, k, v = qkv.split([heads * d, kv_heads * d, kv_heads * d], dim=1)
    p.rotate_heads(
        q, k, torch.cat([cosines[0, :, : d // 2], sines[0, :, : d // 2]], 1), heads=heads, kv_heads=kv_heads,
        positions=torch.arange(tokens, dtype=torch.int32).repeat(images), q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight, eps=config.rms_norm_eps,
    )  # fmt: skip
    y = p.attention(
        q, k, v, images=images, heads=heads, kv_heads=kv_heads, scale=attention.scaling, inverse=None, causal=True
    )
    linear(y, packed(attention.o_proj), residual=x, out=x)
    y = p.rms_norm(x, layer.post_attention_layernorm.weight, config.rms_norm_eps, None)
    linear(
        linear(y, packed(mlp.up_proj, mlp.gate_proj, geglu=True), act="silu"), packed(mlp.down_proj), residual=x, out=x
    )
    p.run()
    check_close(x, wanted.flatten(0, 1), relative=1e-5)


def test_clips_text_model_of_one_layer() -> None:
    """Embeddings with positions, causal attention, quick GELU, LayerNorms."""
    from transformers import CLIPTextConfig, CLIPTextModel

    images, tokens, heads, width = 2, 9, 2, 32
    config = CLIPTextConfig(
        vocab_size=50, hidden_size=width, intermediate_size=64, num_hidden_layers=1, num_attention_heads=heads,
        max_position_embeddings=tokens, eos_token_id=49, attn_implementation="eager",
    )  # fmt: skip
    whole: Any = scattered(CLIPTextModel(config), 0)
    ids = torch.randint(0, 50, (images, tokens), generator=torch.Generator().manual_seed(0))
    wanted = whole(ids).last_hidden_state
    model = getattr(whole, "text_model", whole)

    p = Watched()
    x = p.embed(
        model.embeddings.token_embedding.weight, ids.flatten().int(),
        positions=model.embeddings.position_embedding.weight,
    )  # fmt: skip
    linear, layer = functools.partial(p.product, grid=(1, 1, len(x))), model.encoder.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    qkv = linear(p.layer_norm(x, layer.layer_norm1, None), packed(attention.q_proj, attention.k_proj, attention.v_proj))
    q, k, v = qkv.split(width, dim=1)
    y = p.attention(q, k, v, images=images, heads=heads, scale=(width // heads) ** -0.5, inverse=None, causal=True)
    linear(y, packed(attention.out_proj), residual=x, out=x)
    y = linear(p.layer_norm(x, layer.layer_norm2, None), packed(mlp.fc1), act="quick_gelu")
    linear(y, packed(mlp.fc2), residual=x, out=x)
    out = p.layer_norm(x, model.final_layer_norm, None)
    p.run()
    check_close(out, wanted.flatten(0, 1), relative=2e-5)
