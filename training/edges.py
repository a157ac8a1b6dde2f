"""Canny's edges of whole batches on the training device, equal to `pipeline.extensions.canny`'s pixel by pixel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.extensions.canny import HIGH, LOW, TAN_22

_EVERY = 8  # rounds of growing between two looks at whether anything still grows, for which the host waits


@torch.no_grad()
def edges(pixels: Tensor, rounds: int | None = None) -> Tensor:
    """Edges, 1.0 or 0.0, float32 [B, 3, H, W], of pixels [B, 3, H, W] in -1..1.

    With `rounds` a chain of weak pixels is followed so far and no farther, and the host never waits for the device.
    """
    levels = ((pixels.float() + 1) * 127.5).round().clamp(0, 255)
    padded = F.pad(levels, (1, 1, 1, 1), mode="replicate").long()
    rows = padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]
    columns = padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]
    dx, dy = rows[..., 2:] - rows[..., :-2], columns[..., 2:, :] - columns[..., :-2, :]
    norms = dx.abs() + dy.abs()
    # The first of the largest, as numpy's argmax: on a GPU torch's own may be any.
    channel = (norms * 4 + torch.arange(3, 0, -1, device=norms.device)[:, None, None]).argmax(dim=1, keepdim=True)
    dx, dy, norm = (tensor.gather(1, channel)[:, 0] for tensor in (dx, dy, norms))
    weak = _peaks(dx, dy, norm) & (norm > LOW)
    return _grown(weak & (norm > HIGH), weak, rounds).float()[:, None].expand(-1, 3, -1, -1)


def _peaks(dx: Tensor, dy: Tensor, norm: Tensor) -> Tensor:
    """The mask of where the norm [B, H, W] is largest along the gradient; beyond the picture it is 0."""
    padded = F.pad(norm, (1, 1, 1, 1))
    height, width = norm.shape[1:]

    def at(row: int, column: int) -> Tensor:
        return padded[:, 1 + row : 1 + row + height, 1 + column : 1 + column + width]

    x, y = dx.abs(), dy.abs() << 15
    flat = x * TAN_22
    across = (norm > at(0, -1)) & (norm >= at(0, 1))
    along = (norm > at(-1, 0)) & (norm >= at(1, 0))
    rising = (norm > at(-1, 1)) & (norm > at(1, -1))
    falling = (norm > at(-1, -1)) & (norm > at(1, 1))
    diagonal = torch.where((dx ^ dy) < 0, rising, falling)
    return torch.where(y < flat, across, torch.where(y > flat + (x << 16), along, diagonal))


def _grown(strong: Tensor, weak: Tensor, rounds: int | None) -> Tensor:
    """The strong pixels [B, H, W], and the weak ones that a chain of neighbours connects with them."""
    mask, allowed = strong.float()[:, None], weak.float()[:, None]
    while True:
        before = mask
        for _ in range(_EVERY if rounds is None else rounds):
            mask = F.max_pool2d(mask, 3, stride=1, padding=1) * allowed
        if rounds is not None or torch.equal(mask, before):
            return mask[:, 0] > 0
