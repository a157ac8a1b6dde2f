"""Encodes prompts by the first layers of a language model, as image networks read them: at once, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.ops.ops import Lowering, bind
from llm.families import family
from llm.families.network import Decoder, hidden_states

MULTIPLE = 32  # of a batch's width in tokens: each width is a program, or a graph, of its own


class PromptEncoder:
    """Hidden states of prompts on any lowering.

    A prompt's states do not depend on the other rows; in programs of CPU kernels not by a bit.
    """

    def __init__(self, lowering: Lowering, network: Any, *, layers: int = -1) -> None:
        """Use so many first layers; -1: all but the last, which is transformers' `hidden_states[-2]`.

        Raises ValueError for a model that is not of the family, or has layers that the lowering does not support.
        """
        family.check(network)
        decoder = Decoder.of(network)
        if decoder.embedding_scale != 1 or any(layer.window or layer.cap for layer in decoder.layers):
            raise ValueError(f"prompts are not encoded by models with the attention of {network.config.model_type}")
        self._lowering, self._network = lowering, network
        self._weight = decoder.embed_tokens.weight.detach()
        self._angles = family.angles(network, MULTIPLE, self._weight.device)[0]
        walk = bind(hidden_states, decoder.layers[:layers])
        lowering.prepare(walk, (1, 1, self._weight.shape[1]), (1, 1, self._angles.shape[1]), (1,))
        self._run = lowering.lower(walk, "prompts")

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Token ids of each prompt to its hidden states [tokens, C]."""
        lengths = [len(prompt) for prompt in prompts]
        width = -(-max(lengths) // MULTIPLE) * MULTIPLE
        tokens = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], dtype=torch.int32)
        counts, device = torch.tensor(lengths, dtype=torch.int32), self._weight.device
        states = self.states(tokens.to(device), counts.to(device))
        return [state[:length] for state, length in zip(states, lengths, strict=True)]

    def states(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Tokens int32 [B, T], of which each prompt's first `lengths` [B] count, to hidden states [B, T, C]."""
        rows, width = tokens.shape
        if width > len(self._angles):
            self._angles = family.angles(self._network, width, self._weight.device)[0]
        x = F.embedding(tokens, self._weight).to(self._lowering.dtype)
        return self._run(x, self._angles[:width].expand(rows, -1, -1), lengths)[0]
