"""Runs diffusers' and transformers' own modules of a Z-Image over batches of one length, as a compiler likes them.

`ZImageTransformer2DModel.forward` takes a list of latents and a list of captions and pads them one after another in
Python. Here all rows have as many tokens, counted with padding; values are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MULTIPLE = 32  # to which the transformer pads captions and pictures
PATCH = 2


class RealRotaryProcessor:
    """`ZSingleStreamAttnProcessor` with rotations in real numbers, [S, D / 2, 2], which compile and fuse."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        """[B, S, C] to [B, S, C]; no mask: all rows are as long."""
        assert freqs_cis is not None and attention_mask is None
        query, key, value = (
            project(hidden_states).unflatten(-1, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = _rotate(attn.norm_q(query), freqs_cis), _rotate(attn.norm_k(key), freqs_cis)
        query, key, value = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        out: Tensor = attn.to_out[0](mixed)
        return out


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """[B, S, H, D] by `turns` [S, D / 2, 2]: cosines and sines for neighbouring pairs of channels."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turns[:, None].unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def turns(transformer: Any, ids: Tensor) -> Tensor:
    """Cosines and sines [S, D / 2, 2] of positions [S, 3]."""
    return torch.view_as_real(transformer.rope_embedder(ids.cpu())).to(ids.device)


def positions(caption: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Positions [caption, 3] of a caption with its padding, and [S, 3] of patches with theirs, which stands at 0."""
    steps = torch.arange(1, caption + 1)
    text = torch.stack((steps, torch.zeros_like(steps), torch.zeros_like(steps)), dim=1)
    grid = torch.cartesian_prod(torch.tensor([caption + 1]), torch.arange(rows), torch.arange(columns))
    return text, F.pad(grid, (0, 0, 0, -len(grid) % MULTIPLE))


class ZImageBatch(nn.Module):
    """A transformer and its text encoder over captions of one padded length and latents of one size, as one module, so
    that one compiled graph holds both.
    """

    def __init__(self, transformer: Any, text: Any) -> None:
        super().__init__()
        self.transformer, self.text = transformer, text
        for module in transformer.modules():
            if hasattr(module, "set_processor"):
                module.set_processor(RealRotaryProcessor())
        self._turns: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def turns(self, caption: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Rotations of captions and of patches, kept; `rows` and `columns` count patches."""
        key = (caption, rows, columns)
        if key not in self._turns:
            device = self.transformer.x_pad_token.device
            text, grid = (turns(self.transformer, ids).to(device) for ids in positions(*key))
            self._turns[key] = text, grid
        return self._turns[key]

    def forward(
        self,
        latents: Tensor,
        t: Tensor,
        ids: Tensor,
        lengths: Tensor,
        cap_turns: Tensor,
        x_turns: Tensor,
    ) -> Tensor:
        """Noisy latents [B, C, h, w], t = 1 - sigma [B] and ids [B, L] of `lengths` [B] to the transformer's output,
        [B, C, h, w]. L is a multiple of 32, and no row's length would fit the next smaller one.
        """
        transformer = self.transformer
        adaln = transformer.t_embedder(t * transformer.t_scale)
        patches = patchify(latents)
        count = patches.shape[1]
        x = transformer.all_x_embedder["2-1"](patches)
        missing = x_turns.shape[0] - count
        if missing:
            x = torch.cat((x, transformer.x_pad_token.to(x.dtype).expand(len(x), missing, -1)), dim=1)
        for layer in transformer.noise_refiner:
            x = layer(x, None, x_turns, adaln)
        caption = transformer.cap_embedder(read(self.text, ids))
        padding = torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None]
        caption = torch.where(padding[:, :, None], transformer.cap_pad_token, caption)
        for layer in transformer.context_refiner:
            caption = layer(caption, None, cap_turns)
        both, both_turns = torch.cat((x, caption), dim=1), torch.cat((x_turns, cap_turns))
        for layer in transformer.layers:
            both = layer(both, None, both_turns, adaln)
        prediction: Tensor = transformer.all_final_layer["2-1"](both[:, :count], c=adaln)
        return unpatchify(prediction, latents.shape)


def read(text: Any, ids: Tensor) -> Tensor:
    """`hidden_states[-2]` of a `Qwen3Model`, [B, L, C], of ids padded at the right: no token sees what follows it."""
    x = text.embed_tokens(ids)
    turned = text.rotary_emb(x, torch.arange(ids.shape[1], device=ids.device)[None])
    for layer in text.layers[:-1]:
        x = layer(x, attention_mask=None, position_embeddings=turned)
    states: Tensor = x
    return states


def patchify(latents: Tensor) -> Tensor:
    """[B, C, h, w] to patches [B, h · w / 4, 4 · C], channels last within a patch."""
    b, c, h, w = latents.shape
    split = latents.view(b, c, h // PATCH, PATCH, w // PATCH, PATCH)
    return split.permute(0, 2, 4, 3, 5, 1).reshape(b, -1, PATCH * PATCH * c)


def unpatchify(patches: Tensor, shape: torch.Size) -> Tensor:
    """Undoes `patchify` for latents of `shape`."""
    b, c, h, w = shape
    split = patches.view(b, h // PATCH, w // PATCH, PATCH, PATCH, c)
    return split.permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)
