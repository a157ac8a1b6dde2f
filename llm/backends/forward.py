"""The results of one forward of a text model, and the tokens that it reads where the host does not know them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from core.kernels.kv_cache import TokenBatch, on_device


class Forward(NamedTuple):
    """The results of a forward of T rows, L of them with logits. The backend's next forward may overwrite them."""

    logits: Tensor  # fp32 [L, V]; of a rank that is asked for the most likely tokens alone, only its part
    best: Tensor | None = None  # int64 [L]: `sample.likeliest` of the logits, where it is computed with them
    states: Tensor | None = None  # [S, C], of the batch's `state_rows`, after the last norm
    features: Tensor | None = None  # [T, layers · C]: the inputs of captured layers
    tokens: Tensor | None = None  # int32 [T]: the rows' tokens, all known, where a drafter guesses on the device
    recorded: bool = False  # whether features and tokens lie where a drafter's graphs read them


class LatestTokens:
    """Each sequence's latest token, on the model's device: the host may not know it yet, and stages -1 in its place."""

    def __init__(self, table: Tensor) -> None:
        """`table`: int32 [sequences + 1], the last one for padding rows."""
        self.table = table

    def filled(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with these tokens in place of -1. Waits for the device if there are any."""
        if not bool((batch.tokens < 0).any()):
            return batch
        latest = self.table.cpu()[batch.sequences.long()].clamp_(min=0)  # -1 where the logits were NaN
        return replace(batch, tokens=torch.where(batch.tokens < 0, latest, batch.tokens))

    def keep(self, batch: TokenBatch, tokens: Tensor) -> None:
        """Make these tokens [L], on the model's device, the latest of the output rows' sequences."""
        owners = on_device(batch.sequences[batch.output_rows.long()].long(), self.table.device)
        self.table[owners] = tokens.int()
