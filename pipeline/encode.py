"""Caches the embeddings of prompts; a family's text encoders compute them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from contract.markup import WeightedPrompt


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A prompt's embedding. `dropped` is the part of the prompt beyond the encoders' context, if any."""

    hidden: torch.Tensor  # [T, D]
    pooled: torch.Tensor | None = None  # [P]: of the whole prompt, in families that have one
    dropped: str = ""


Prompt = str | WeightedPrompt


class TextEncoder(Protocol):
    """A family's text encoders. `tokens` is the most that they read of a prompt."""

    tokens: int

    def plain(self, prompts: Sequence[str]) -> list[Embedding]:
        """The embeddings of prompts, in one batch."""
        ...

    def weighted(self, prompt: WeightedPrompt) -> Embedding:
        """The embedding of a weighted prompt, in batches whose sizes follow from it."""
        ...


class Encoder:
    """Encodes prompts in batches and caches the last `capacity` of them (LRU)."""

    def __init__(self, text: TextEncoder, capacity: int = 256) -> None:
        self._text = text
        self._capacity = capacity
        self._known: OrderedDict[tuple[Prompt, int, Hashable], Embedding] = OrderedDict()
        self.hits = 0
        self.misses = 0

    @property
    def tokens(self) -> int:
        """The most tokens that are read of a prompt."""
        return self._text.tokens

    def encode(self, prompts: Sequence[Prompt], bucket: int = 0, *, of: Hashable = None) -> list[Embedding]:
        """An embedding for each prompt, in order; uncached prompts go through the encoders in one batch.

        With `bucket` > 0 prompts go through `bucket` at a time, padded, and are cached separately: the last bits of an
        embedding depend on the batch size. A weighted prompt is encoded alone in either case. `of` identifies the
        encoders' state where it varies: embeddings of one state are not used for another.
        """
        unknown = list(dict.fromkeys(p for p in prompts if (p, bucket, of) not in self._known))
        self.misses += len(unknown)
        self.hits += len(prompts) - len(unknown)
        fresh: dict[Prompt, Embedding] = {p: self._text.weighted(p) for p in unknown if isinstance(p, WeightedPrompt)}
        plain = [p for p in unknown if isinstance(p, str)]
        size = bucket or max(1, len(plain))
        for start in range(0, len(plain), size):
            chunk = plain[start : start + size]
            padded = chunk + [""] * (bucket - len(chunk))
            fresh |= zip(chunk, self._text.plain(padded), strict=False)
        found = [fresh.get(p) or self._known[p, bucket, of] for p in prompts]
        for prompt, embedding in zip(prompts, found, strict=True):
            self._known[prompt, bucket, of] = embedding
            self._known.move_to_end((prompt, bucket, of))
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return found
