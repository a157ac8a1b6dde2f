"""Caches the embeddings of prompts; a family's text encoders compute them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from contract.markup import WeightedPrompt
from pipeline.text.textual_inversion import TextualInversion


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A prompt's embedding. `dropped` is the part of the prompt beyond the encoders' context, if any."""

    hidden: torch.Tensor  # [T, D]
    pooled: torch.Tensor | None = None  # [P]: of the whole prompt, in families that have one
    dropped: str = ""


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """A prompt that is more than one plain text for all encoders: weighted, long, or with fields of its own.

    `chunks` are those of its embedding at least, `clip_skip` how many more of the encoders' last layers are left out.
    """

    texts: tuple[str | WeightedPrompt, ...]  # of each encoder
    chunks: int = 1
    clip_skip: int = 0
    embeddings: tuple[TextualInversion, ...] = ()


Prompt = str | MarkedPrompt


class RequestPrompts(NamedTuple):
    """The prompts of a request: the negative one, if one is encoded, and the prompt. `chunks` are those of each."""

    prompts: tuple[Prompt, ...]
    chunks: int = 1

    @property
    def embeddings(self) -> dict[str, str]:
        """Return the digests of the textual inversions in them, by name."""
        marked = (prompt for prompt in self.prompts if isinstance(prompt, MarkedPrompt))
        return {embedding.name: embedding.digest for prompt in marked for embedding in prompt.embeddings}


@dataclass(frozen=True, slots=True)
class PromptFields:
    """The parsed texts of a request by field; None: not given, and so not read."""

    prompt: str | WeightedPrompt
    negative_prompt: str | WeightedPrompt | None = None  # None: no text is encoded for it
    prompt_2: str | WeightedPrompt | None = None
    negative_prompt_2: str | WeightedPrompt | None = None
    clip_skip: int = 0
    embeddings: tuple[TextualInversion, ...] = ()

    @property
    def texts(self) -> dict[str, str]:
        """Return the texts without marks, of the fields that are given."""
        fields = {name: getattr(self, name) for name in TEXTS}
        return {
            name: text.text if isinstance(text, WeightedPrompt) else text
            for name, text in fields.items()
            if text is not None
        }


TEXTS = ("negative_prompt", "negative_prompt_2", "prompt", "prompt_2")


class TextEncoder(Protocol):
    """The text encoders of a family. `tokens` is the most that they read at once."""

    tokens: int

    def read(self, fields: PromptFields) -> RequestPrompts:
        """Return the prompts of a request. Raises `Invalid` for what these encoders cannot read."""
        ...

    def plain(self, prompts: Sequence[str]) -> list[Embedding]:
        """Return the embeddings of prompts, in one batch."""
        ...

    def marked(self, prompt: MarkedPrompt) -> Embedding:
        """Return the embedding of one prompt, in batches whose sizes follow from it."""
        ...


def read_plain(fields: PromptFields) -> RequestPrompts:
    """Read the prompts of a request for encoders that read plain texts only."""
    texts = [text for text in (fields.negative_prompt, fields.prompt) if text is not None]
    return RequestPrompts(tuple(text if isinstance(text, str) else text.text for text in texts))


class Encoder:
    """Encodes prompts in batches and caches the last `capacity` of them (LRU)."""

    def __init__(self, text: TextEncoder, capacity: int = 256) -> None:
        self._text = text
        self._capacity = capacity
        self._cache: OrderedDict[tuple[Prompt, int, Hashable], Embedding] = OrderedDict()
        self.read = lru_cache(maxsize=1024)(text.read)  # admission asks again and again
        self.hits = 0
        self.misses = 0

    @property
    def tokens(self) -> int:
        """Return the most tokens that are read at once."""
        return self._text.tokens

    def clear_cache(self) -> None:
        """Release all embeddings, while nothing is encoded."""
        self._cache.clear()

    def encode(self, prompts: Sequence[Prompt], bucket: int = 0, *, of: Hashable = None) -> list[Embedding]:
        """Return an embedding for each prompt, in order; uncached prompts go through the encoders in one batch.

        With `bucket` > 0 prompts go through `bucket` at a time, padded, and are cached separately: the last bits of an
        embedding depend on the batch size. A marked prompt is encoded alone in either case. `of` identifies the
        encoders' state where it varies: embeddings of one state are not used for another.
        """
        uncached = list(dict.fromkeys(p for p in prompts if (p, bucket, of) not in self._cache))
        self.misses += len(uncached)
        self.hits += len(prompts) - len(uncached)
        computed: dict[Prompt, Embedding] = {p: self._text.marked(p) for p in uncached if isinstance(p, MarkedPrompt)}
        plain = [p for p in uncached if isinstance(p, str)]
        size = bucket or max(1, len(plain))
        for start in range(0, len(plain), size):
            chunk = plain[start : start + size]
            padded = chunk + [""] * (bucket - len(chunk))
            computed |= zip(chunk, self._text.plain(padded), strict=False)
        embeddings = [computed.get(p) or self._cache[p, bucket, of] for p in prompts]
        for prompt, embedding in zip(prompts, embeddings, strict=True):
            self._cache[prompt, bucket, of] = embedding
            self._cache.move_to_end((prompt, bucket, of))
        while len(self._cache) > self._capacity:
            self._cache.popitem(last=False)
        return embeddings
