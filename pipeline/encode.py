"""Prompts to embeddings: both of SDXL's text encoders, and a cache of what they said.

Knows tokenizers and text encoders; knows nothing of the UNet that reads the embeddings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pipeline.load import Model


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """What a prompt became. `dropped` is the part of it that was beyond the encoders' reach, if any."""

    hidden: torch.Tensor  # [T, D]: the encoders' penultimate layers side by side
    pooled: torch.Tensor  # [P]: the second encoder's projection
    dropped: str = ""


class Encoder:
    """Encodes prompts in batches and remembers the last `capacity` of them (least recently used go first).

    Follows SDXL (Podell et al., 2023, section 2.1) as diffusers implements it: penultimate hidden states of both
    encoders concatenated, pooled output of the second.
    """

    def __init__(self, model: Model, capacity: int = 256) -> None:
        self._model = model
        self._capacity = capacity
        self._known: OrderedDict[tuple[str, int], Embedding] = OrderedDict()
        self.hits = 0
        self.misses = 0
        hidden = model.unet.config.cross_attention_dim
        pooled = model.text_encoders[1].config.projection_dim
        tokens = model.tokenizers[0].model_max_length
        self._zero = Embedding(
            torch.zeros(tokens, hidden, device=model.device, dtype=model.dtype),
            torch.zeros(pooled, device=model.device, dtype=model.dtype),
        )

    @property
    def zero(self) -> Embedding:
        """What stands for an absent negative prompt in models that were trained so."""
        return self._zero

    def encode(self, prompts: Sequence[str], bucket: int = 0) -> list[Embedding]:
        """An embedding for each prompt, in order; what is not remembered goes through the encoders in one batch.

        With `bucket` > 0 prompts go through `bucket` at a time, padded, and are remembered apart from others: the
        last bits of an embedding depend on the size of the batch that it came from.
        """
        unknown = list(dict.fromkeys(p for p in prompts if (p, bucket) not in self._known))
        self.misses += len(unknown)
        self.hits += len(prompts) - len(unknown)
        fresh: dict[str, Embedding] = {}
        size = bucket or max(1, len(unknown))
        for start in range(0, len(unknown), size):
            chunk = unknown[start : start + size]
            padded = chunk + [""] * (bucket - len(chunk))
            fresh |= zip(chunk, self._forward(padded), strict=False)
        found = [fresh.get(p) or self._known[p, bucket] for p in prompts]
        for prompt, embedding in zip(prompts, found, strict=True):
            self._known[prompt, bucket] = embedding
            self._known.move_to_end((prompt, bucket))
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return found

    @torch.inference_mode()
    def _forward(self, prompts: Sequence[str]) -> list[Embedding]:
        hidden, pooled, dropped = [], None, [""] * len(prompts)
        for tokenizer, encoder in zip(self._model.tokenizers, self._model.text_encoders, strict=True):
            length = tokenizer.model_max_length
            ids = tokenizer(
                list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
            ).input_ids
            for row, prompt in enumerate(prompts):
                whole = tokenizer(prompt, verbose=False, return_offsets_mapping=True)
                if len(whole.input_ids) > length and not dropped[row]:
                    # The prompt's own letters, from the first token that had to make room for the end token.
                    dropped[row] = prompt[whole.offset_mapping[length - 1][0] :].strip()
            output = encoder(ids.to(self._model.device), output_hidden_states=True)
            hidden.append(output.hidden_states[-2])
            pooled = output[0]  # of the second encoder: its projected text embedding
        assert pooled is not None
        joined = torch.cat(hidden, dim=-1)  # [B, T, D]
        # Clones: a view would keep the whole batch alive for as long as one of its prompts is remembered.
        return [Embedding(joined[row].clone(), pooled[row].clone(), text) for row, text in enumerate(dropped)]
