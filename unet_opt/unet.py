"""The UNet of SDXL, written down once: deep, DeepCache's shallow end, and the text's keys and values.

The layout is that of diffusers' UNet2DConditionModel (Podell et al., 2023), whose modules hold the weights. DeepCache
(Ma et al., 2023) in the variant of NVIDIA's MLPerf v4.0 submission: a shallow step computes conv_in, the last up block
(or only its last residual block) and the head anew; that block's input from below, and the skips of all but conv_in,
are features of the last deep step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from core.ops.ops import Ops
from unet_opt.modules import Attention, DownPath, Level, ResBlock, Transformer, TransformerBlock, UNet

A = TypeVar("A")


def deep(
    ops: Ops[A], unet: UNet, sample: A, time: A, added: A, kv: A, residuals: Sequence[A] = (),
    adapters: Sequence[A] = (), images: Sequence[tuple[A, A]] = (), prompted: A | None = None,
) -> tuple[A, ...]:  # fmt: skip
    """Compute the model's output, then the features: what each residual block of the last up block reads.

    `sample` [B, h, w, C]; `time` [B, T] and `added` [B, P]: what the time and the added embedding read; `kv` [B, T, n]:
    `text_keys`. The features are the last up block's input, the skips of all its blocks but the last, and the input of
    its last residual block. `residuals` are what a ControlNet (Zhang et al., 2023) adds to each skip, in the order in
    which the down path makes them, and to the mid block's output; `adapters` what a T2I-Adapter (Mou et al., 2023) adds
    within the down path, and behind the mid block (`adapter_shapes`). `images` are keys and values of image prompts, as
    `kv` with the strength in the values, and how many of each row's tokens count [B]: what attention gives of them is
    added to the text's (IP-Adapter; Ye et al., 2023). `prompted` [B] is 0 for rows that have none.
    """
    times, text = embed_times(ops, unet, time, added), read_text(ops, unet, kv, images, prompted)
    joints = _joints(ops, unet, sample)
    slots = [skip for _, skip in reversed(joints)]
    skips = down(ops, unet, ops.conv(sample, unet.conv_in, out=slots[0]), times, text, slots[1:], adapters)
    h = middle(ops, unet, skips[-1], times, text, joints[0][0])
    for more in adapters[len(unet.down_blocks) :]:
        h = ops.place(ops.add(h, more), joints[0][0])
    if residuals:
        aligned = zip(skips, residuals[:-1], slots, strict=True)
        skips = [ops.place(ops.add(skip, more), slot) for skip, more, slot in aligned]
        h = ops.place(ops.add(h, residuals[-1]), joints[0][0])
    at = 0
    for block in unet.up_blocks[:-1]:
        for pair in _pairs(block):
            at += 1
            doubled = pair[0] is block.resnets[-1] and block.upsamplers
            h = _step(ops, pair, ops.cat(h, skips.pop()), times, text, None if doubled else joints[at][0])
        for sampler in block.upsamplers or ():
            h = ops.upsample(h, sampler.conv, target=skips[-1], out=joints[at][0])
    features = [h, *skips[:0:-1]]
    eps, last = _end(ops, unet, h, skips, joints[at:], times, text)
    return (eps, *features, last)


def shallow(
    ops: Ops[A], unet: UNet, sample: A, time: A, added: A, kv: A | None, *features: A, residual: A | None = None
) -> tuple[A]:  # fmt: skip
    """Compute the model's output [B, h, w, C] from features of an earlier deep step.

    Either from all but the last of them: the whole block, or from the last alone: its last residual block. `kv` is read
    by a last up block with attention only, which SDXL's has not. `residual` is the first of the deep step's: the
    others are in the features.
    """
    times = embed_times(ops, unet, time, added)
    text = None if kv is None else read_text(ops, unet, kv)
    joints = _joints(ops, unet, sample)[-len(features) :]
    head = ops.conv(sample, unet.conv_in, out=joints[-1][1])
    if residual is not None:
        head = ops.place(ops.add(head, residual), joints[-1][1])
    h = ops.place(features[0], joints[0][0])
    skips = [ops.place(skip, slot) for skip, (_, slot) in zip(features[1:], joints, strict=False)]
    eps, _ = _end(ops, unet, h, [head, *skips[::-1]], joints, times, text)
    return (eps,)


def text_keys(ops: Ops[A], attentions: Sequence[Attention], hidden: A) -> A:
    """Compute keys and values of all cross-attention layers, [B, T, D] to [B, T, n], once for each prompt.

    `attentions` are `cross_attentions`.
    """
    return ops.linear(hidden, *(layer for attn in attentions for layer in (attn.to_k, attn.to_v)))


def cross_attentions(unet: DownPath) -> tuple[Attention, ...]:
    """Return the cross-attention layers in the order of `text_keys`, which is that of diffusers' `attn_processors`.

    Reads nothing but the network: `torch.compile` traces this, and guards on whatever global state it reads.
    """
    blocks = (*unet.down_blocks, *getattr(unet, "up_blocks", ()), unet.mid_block)
    transformers = [t for block in blocks for t in getattr(block, "attentions", None) or () if t is not None]
    return tuple(layer.attn2 for transformer in transformers for layer in transformer.transformer_blocks)


Times = Callable[[ResBlock], A]
"""What a residual block adds of the time."""


class Keys(NamedTuple, Generic[A]):
    """The input of a cross-attention layer: keys and values [B, T, C] of the text, and of image prompts, with their
    lengths; `prompted` [B] is 0 for rows without one.
    """

    k: A
    v: A
    images: Sequence[tuple[A, A, A]] = ()
    prompted: A | None = None


Text = Callable[[Attention], Keys[A]]
"""What a cross-attention layer reads."""


def down(
    ops: Ops[A], unet: DownPath, h: A, times: Times[A], text: Text[A], slots: Sequence[A | None] = (),
    adapters: Sequence[A] = (),
) -> list[A]:  # fmt: skip
    """Compute the skips of the down path behind `conv_in`, whose output h is the first. `slots` are of the others;
    `adapters` are added to what the blocks make, before a block with attention halves it (as diffusers has it).
    """
    at, skips, more = iter(slots), [h], iter(adapters)
    for block in unet.down_blocks:
        adapter, slot, added = next(more, None), None, hasattr(block, "attentions")
        for pair in _pairs(block):
            slot = next(at, None)
            h = _step(ops, pair, h, times, text, slot)
            skips.append(h)
        if adapter is not None and added:
            h = skips[-1] = ops.place(ops.add(h, adapter), slot)
        for sampler in block.downsamplers or ():
            slot = next(at, None)
            h = ops.conv(h, sampler.conv, out=slot)
            skips.append(h)
        if adapter is not None and not added:
            h = skips[-1] = ops.place(ops.add(h, adapter), slot)
    return skips


def adapter_shapes(unet: DownPath) -> list[tuple[int, int]]:
    """Return for each map that an adapter may add its channels, and how many times its sides are halved."""
    shapes = []
    for level, block in enumerate(unet.down_blocks):
        halved = not hasattr(block, "attentions") and bool(block.downsamplers)
        shapes.append((block.resnets[-1].out_channels, level + halved))
    return [*shapes, (unet.mid_block.resnets[-1].out_channels, len(unet.down_blocks) - 1)]


def middle(ops: Ops[A], unet: DownPath, h: A, times: Times[A], text: Text[A], out: A | None = None) -> A:
    """Run the mid block."""
    mid = unet.mid_block
    h = resnet(ops, mid.resnets[0], h, times(mid.resnets[0]))
    for attention_, resnet_ in zip(mid.attentions, mid.resnets[1:], strict=True):
        h = h if attention_ is None else transformer(ops, attention_, h, text)
        h = resnet(ops, resnet_, h, times(resnet_), out if resnet_ is mid.resnets[-1] else None)
    return h


def resnet(ops: Ops[A], block: ResBlock, x: A, time: A | None = None, out: A | None = None) -> A:
    """Run a ResnetBlock2D: GroupNorm, SiLU, convolution, + time, the same again, + x or its 1×1 convolution."""
    h = ops.group_norm(x, block.norm1, silu=True, to=(block.conv1,))
    h = ops.conv(h, block.conv1, bias=time)
    h = ops.group_norm(h, block.norm2, silu=True, to=(block.conv2,))
    x = x if block.conv_shortcut is None else ops.linear(x, block.conv_shortcut)
    return ops.conv(h, block.conv2, residual=x, out=out)


def attention(ops: Ops[A], attn: Attention, x: A, h: A) -> A:
    """Add self-attention of the normalized h to x."""
    qkv = ops.linear(h, attn.to_q, attn.to_k, attn.to_v)
    width = attn.inner_dim
    q, k, v = (ops.columns(qkv, at * width, width) for at in range(3))
    out = attn.to_out[0]
    return ops.linear(ops.attend(q, k, v, heads=attn.heads, to=(out,)), out, residual=x)


def transformer(ops: Ops[A], model: Transformer, x: A, text: Text[A] | None, out: A | None = None) -> A:
    """Run a Transformer2DModel over the pixels of a map."""
    h = ops.group_norm(x, model.norm, to=(model.proj_in,))
    h = ops.linear(h, model.proj_in)
    for block in model.transformer_blocks:
        h = _transformer_block(ops, block, h, text)
    return ops.linear(h, model.proj_out, residual=x, out=out)


def _transformer_block(ops: Ops[A], block: TransformerBlock, x: A, text: Text[A] | None) -> A:
    """Run a BasicTransformerBlock: self-attention, cross-attention, gated feed-forward."""
    self_attn, cross, enter, leave = block.attn1, block.attn2, block.ff.net[0].proj, block.ff.net[2]
    h = ops.layer_norm(x, block.norm1, to=(self_attn.to_q, self_attn.to_k, self_attn.to_v))
    x = attention(ops, self_attn, x, h)
    h = ops.layer_norm(x, block.norm2, to=(cross.to_q,))
    assert text is not None
    x = _cross(ops, cross, x, ops.linear(h, cross.to_q), text(cross))
    h = ops.layer_norm(x, block.norm3, to=(enter,))
    return ops.linear(ops.gated(h, enter, act="gelu", to=leave), leave, residual=x)


def _cross(ops: Ops[A], attn: Attention, x: A, q: A, keys: Keys[A]) -> A:
    """Add attention to the text, and to each image prompt, to x.

    With image prompts the sum may exceed what the layer behind it was calibrated for: its scales know texts alone.
    """
    out = attn.to_out[0]
    h = ops.attend(q, keys.k, keys.v, heads=attn.heads, to=() if keys.images else (out,))
    for k, v, lengths in keys.images:
        h = ops.add(h, ops.attend(q, k, v, heads=attn.heads, lengths=lengths))
    return ops.linear(h, out, residual=x, within=keys.prompted)


def _step(
    ops: Ops[A], pair: tuple[ResBlock, Transformer | None], x: A, times: Times[A], text: Text[A] | None, out: A | None
) -> A:  # fmt: skip
    """Run a residual block, and the transformer behind it, if there is one."""
    block, attention_ = pair
    if attention_ is None:
        return resnet(ops, block, x, times(block), out)
    x = resnet(ops, block, x, times(block))
    return transformer(ops, attention_, x, text, out)


def _end(
    ops: Ops[A], unet: UNet, h: A, skips: list[A], joints: Sequence[tuple[A | None, A | None]], times: Times[A],
    text: Text[A] | None,
) -> tuple[A, A]:  # fmt: skip
    """Run the last up block from where so many skips are left, and the head; also return the last block's input."""
    last = h
    for number, pair in enumerate(list(_pairs(unet.up_blocks[-1]))[-len(skips) :], 1):
        last = h
        slot = joints[number][0] if number < len(joints) else None
        h = _step(ops, pair, ops.cat(h, skips.pop()), times, text, slot)
    h = ops.group_norm(h, unet.conv_norm_out, silu=True, to=(unet.conv_out,))
    return ops.conv(h, unet.conv_out), last


def embed_times(ops: Ops[A], unet: DownPath, time: A, added: A, kind: A | None = None) -> Times[A]:
    """Compute what each residual block adds of time, size and pooled text: all blocks' projections are one product.

    `kind` [B, C] is added to the embedding of the time (ControlNet-Union).
    """
    first, second = unet.time_embedding, getattr(unet, "add_embedding", None)
    hidden = ops.linear(time, first.linear_1, act="silu")
    emb = ops.linear(hidden, first.linear_2, act=None if second else "silu")
    emb = emb if kind is None else ops.add(emb, kind)
    if second is not None:
        hidden = ops.linear(added, second.linear_1, act="silu")
        emb = ops.linear(hidden, second.linear_2, residual=emb, act="silu")
    projections = {id(r): r.time_emb_proj for r in resnets(unet)}
    projected, starts, at = ops.biases(emb, *projections.values()), {}, 0
    for key, layer in projections.items():
        starts[key] = at
        at += layer.out_features
    return lambda block: ops.columns(projected, starts[id(block)], block.out_channels)


def read_text(
    ops: Ops[A], unet: DownPath, kv: A, images: Sequence[tuple[A, A]] = (), prompted: A | None = None
) -> Text[A]:  # fmt: skip
    """Return a function from a cross-attention layer to its part of `text_keys`, and of the `images` of `deep`."""
    starts, at = {}, 0
    for attn in cross_attentions(unet):
        starts[id(attn)] = at
        at += 2 * attn.inner_dim

    def keys_of(attn: Attention) -> Keys[A]:
        start, width = starts[id(attn)], attn.inner_dim

        def unpack(packed: A) -> tuple[A, A]:
            return ops.columns(packed, start, width), ops.columns(packed, start + width, width)

        return Keys(*unpack(kv), [(*unpack(packed), lengths) for packed, lengths in images], prompted)

    return keys_of


def resnets(unet: DownPath) -> list[ResBlock]:
    """Return all residual blocks, in the order in which they run; a ControlNet has no up blocks."""
    blocks = (*unet.down_blocks, unet.mid_block, *getattr(unet, "up_blocks", ()))
    return [r for block in blocks for r in block.resnets]


def _pairs(block: Level) -> Iterator[tuple[ResBlock, Transformer | None]]:
    attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
    return zip(block.resnets, attentions, strict=True)


def skip_channels(unet: DownPath) -> list[int]:
    """Return the channels of the skips, in the order in which the down path makes them."""
    channels = [unet.conv_in.out_channels]
    for block in unet.down_blocks:
        channels += [r.out_channels for r in block.resnets]
        channels += [block.resnets[-1].out_channels for _ in block.downsamplers or ()]
    return channels


def _joints(ops: Ops[A], unet: UNet, sample: A) -> list[tuple[A | None, A | None]]:
    """Return the slots of what each residual block of the up path concatenates, from below and from the skip."""
    skips, hidden = skip_channels(unet), unet.mid_block.resnets[-1].out_channels
    joints = []
    for level, block in enumerate(unet.up_blocks):
        for resnet_ in block.resnets:
            joints.append(ops.joint(sample, (hidden, skips.pop()), len(unet.up_blocks) - 1 - level))
            hidden = resnet_.out_channels
    return joints
