"""The transformer of Z-Image, written down once: the whole of it, and what a step on cached features computes anew.

The layout is that of diffusers' ZImageTransformer2DModel (Z-Image, Tongyi, 2025): a single stream of image tokens and
text tokens, RMSNorm before and after each part, modulated by the time. Text tokens pass their own refiner, which reads
no time and no image: once a prompt. Caching is first-block caching (ParaAttention's FBCache) decided by the plan: a
shallow step computes the first block anew and adds what the blocks behind it added in the last deep step.
"""

from __future__ import annotations

from typing import Any, TypeVar

from core.ops.ops import Ops

A = TypeVar("A")
MULTIPLE = 32  # of a sequence's tokens: shorter ones end in pad tokens
PATCH = "2-1"  # of 2×2 latents in one frame


def modulations(ops: Ops[A], model: Any, time: A) -> tuple[A, A]:
    """Compute from the time [B, 256] four vectors [B, 4·C] for each modulated block, and the head's [B, C]."""
    enter, _, leave = model.t_embedder.mlp
    hidden = ops.linear(time, enter, act="silu")
    blocks = ops.biases(ops.linear(hidden, leave), *(block.adaLN_modulation[0] for block in modulated(model)))
    head = model.all_final_layer[PATCH].adaLN_modulation[1]
    return blocks, ops.biases(ops.linear(hidden, leave, act="silu"), head)


def modulated(model: Any) -> list[Any]:
    """Return the blocks that read the time, in the order in which they run."""
    return [*model.noise_refiner, *model.layers]


def embed_text(ops: Ops[A], model: Any, hidden: A) -> A:
    """Project a prompt's hidden states [B, T, D] to tokens [B, T, C]."""
    norm, layer = model.cap_embedder
    return ops.linear(ops.rms_norm(hidden, norm, to=(layer,)), layer)


def refine_text(ops: Ops[A], model: Any, x: A, angles: A) -> A:
    """Refine the text tokens [B, T, C] for the stream."""
    for block in model.context_refiner:
        x = _block(ops, block, x, angles, None, None)
    return x


def deep(
    ops: Ops[A], model: Any, patches: A, pads: A | None, blocks: A, head: A, angles: A, text: A, lengths: A,
    image_angles: A,
) -> tuple[A, A, A]:  # fmt: skip
    """Compute the output [B, S, patch], and the image's tokens [B, S, C] behind the first block and the last.

    `patches` [B, S, patch]; `pads` [B, P, C] fill the image's tokens up; `blocks` and `head` are `modulations` with 1 +
    scales and tanh of gates; `text` [B, T, C] is refined; `lengths` [B] count tokens of image, pads and text; `angles`
    are of all of these, `image_angles` of image and pads.
    """
    first, count = _first(ops, model, patches, pads, blocks, angles, text, lengths, image_angles)
    x = first
    for number, block in list(enumerate(modulated(model)))[len(model.noise_refiner) + 1 :]:
        x = _block(ops, block, x, angles, _vectors(ops, blocks, number, block), lengths)
    image, last = ops.tokens(first, count), ops.tokens(x, count)
    return _head(ops, model, last, head), image, last


def shallow(
    ops: Ops[A], model: Any, patches: A, pads: A | None, blocks: A, head: A, angles: A, text: A, lengths: A,
    image_angles: A, rest: A,
) -> A:  # fmt: skip
    """Compute the output on `rest` [B, S, C]: what the blocks behind the first one added in the last deep step."""
    first, count = _first(ops, model, patches, pads, blocks, angles, text, lengths, image_angles)
    return _head(ops, model, ops.add(ops.tokens(first, count), rest), head)


def _first(
    ops: Ops[A], model: Any, patches: A, pads: A | None, blocks: A, angles: A, text: A, lengths: A, image_angles: A
) -> tuple[A, int]:
    """Compute the stream behind the first block, and the number of patches."""
    x = ops.linear(patches, model.all_x_embedder[PATCH])
    x = x if pads is None else ops.join(x, pads)
    for number, block in enumerate(model.noise_refiner):
        x = _block(ops, block, x, image_angles, _vectors(ops, blocks, number, block), None)
    block, number = model.layers[0], len(model.noise_refiner)
    x = _block(ops, block, ops.join(x, text), angles, _vectors(ops, blocks, number, block), lengths)
    return x, ops.shape(patches)[1]


def _block(ops: Ops[A], block: Any, x: A, angles: A, vectors: tuple[A, ...] | None, lengths: A | None) -> A:
    """Run a ZImageTransformerBlock: self-attention with QK-norm and rotary positions, SwiGLU, each between RMSNorms."""
    scale, gate, scale_2, gate_2 = vectors or (None,) * 4
    attn, ff = block.attention, block.feed_forward
    q, k, v, out = attn.to_q, attn.to_k, attn.to_v, attn.to_out[0]
    qkv = ops.linear(ops.rms_norm(x, block.attention_norm1, scale=scale, to=(q, k, v)), q, k, v)
    norms = None if attn.norm_q is None else (attn.norm_q, attn.norm_k)
    qkv = ops.rotate(qkv, angles, heads=attn.heads, norms=norms, interleaved=True)
    width = q.out_features
    parts = (ops.columns(qkv, at * width, width) for at in range(3))
    h = ops.linear(ops.attend(*parts, heads=attn.heads, lengths=lengths, to=(out,)), out)
    x = ops.rms_norm(h, block.attention_norm2, scale=gate, residual=x)
    h = ops.rms_norm(x, block.ffn_norm1, scale=scale_2, to=(ff.w3, ff.w1))
    h = ops.linear(ops.gated(h, ff.w3, ff.w1, act="silu", to=ff.w2), ff.w2)
    return ops.rms_norm(h, block.ffn_norm2, scale=gate_2, residual=x)


def _vectors(ops: Ops[A], blocks: A, number: int, block: Any) -> tuple[A, ...]:
    """Return scale and gate of attention, scale and gate of the feed-forward, [B, C] each."""
    width = block.dim
    return tuple(ops.columns(blocks, (4 * number + at) * width, width) for at in range(4))


def _head(ops: Ops[A], model: Any, x: A, scale: A) -> A:
    last = model.all_final_layer[PATCH]
    x = ops.layer_norm(x, last.norm_final, scale=scale, to=(last.linear,))
    return ops.linear(x, last.linear)
