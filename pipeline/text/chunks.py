"""Splits a prompt's tokens into chunks of a CLIP encoder's context, each with a start and an end of its own.

Chunks are filled one after another, as compel does; the web UI's search for a comma to end a chunk at is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from contract.loras import normal
from contract.markup import WeightedPrompt
from pipeline.text.textual_inversion import TextualInversion, words

_PLACE = 0  # the id of a token whose embedding is replaced; never an end, which the pooled embedding is looked up by


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a prompt as one encoder reads it, in C chunks of T. `count` is the number of its own tokens."""

    ids: torch.Tensor  # [C, T]
    weights: torch.Tensor  # [C, T], fp32: 1 for start, end and padding
    parts: torch.Tensor  # [C, T]: the index of the token's part; -1 for start, end and padding
    vectors: tuple[tuple[int, int, torch.Tensor], ...]  # chunk, token, and the embeddings [n, D] from there on
    count: int


@dataclass(slots=True)
class _Chunk:
    """The tokens of one chunk without start and end."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    vectors: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def row(self, tokenizer: Any, room: int) -> list[int]:
        """Return its ids with start, end and padding."""
        padding = [tokenizer.pad_token_id] * (room - len(self.ids))
        return [tokenizer.bos_token_id, *self.ids, tokenizer.eos_token_id, *padding]


class _Chunks(list[_Chunk]):
    """The chunks that are filled one after another, with `room` for so many tokens each."""

    def __init__(self, room: int) -> None:
        super().__init__([_Chunk()])
        self.room = room

    def begin(self) -> None:
        self.append(_Chunk())

    def add(self, ids: list[int], vectors: torch.Tensor | None, weight: float, part: int) -> None:
        """Add tokens, or places of vectors, which stay together."""
        while ids:
            left = self.room - len(self[-1].ids)
            if not left or (vectors is not None and left < len(ids)):
                self.begin()
                continue
            last = self[-1]
            if vectors is not None:
                last.vectors.append((1 + len(last.ids), vectors))
            fitting, ids = ids[:left], ids[left:]
            last.ids += fitting
            last.weights += [weight] * len(fitting)
            last.parts += [part] * len(fitting)


def split(
    tokenizer: Any,
    prompt: str | WeightedPrompt,
    chunks: int = 1,
    embeddings: Sequence[TextualInversion] = (),
    key: str = "",
) -> Tokens:
    """Split the prompt into at least so many chunks; missing ones are empty. `key` names the encoder in files."""
    marked = WeightedPrompt(((prompt, 1.0),)) if isinstance(prompt, str) else prompt
    filled = _Chunks(tokenizer.model_max_length - 2)
    for number, (text, weight) in enumerate((*marked.parts, ("", 1.0))):
        for _ in range(marked.breaks.count(number)):
            filled.begin()
        for ids, vectors in _pieces(tokenizer, text, embeddings, key):
            filled.add(ids, vectors, weight, number)
    count = sum(len(chunk.ids) for chunk in filled)
    while len(filled) < chunks:
        filled.begin()

    def padded(values: Sequence[float], fill: float) -> list[float]:
        return [fill, *values, *[fill] * (filled.room + 1 - len(values))]

    return Tokens(
        torch.tensor([item.row(tokenizer, filled.room) for item in filled]),
        torch.tensor([padded(item.weights, 1.0) for item in filled]),
        torch.tensor([padded(item.parts, -1) for item in filled]),
        tuple((number, at, vectors) for number, item in enumerate(filled) for at, vectors in item.vectors),
        count,
    )


def _pieces(
    tokenizer: Any, text: str, embeddings: Sequence[TextualInversion], key: str
) -> Iterator[tuple[list[int], torch.Tensor | None]]:
    """Yield ids of the text, and in their place the vectors of each embedding that it names."""

    def tokens(part: str) -> list[int]:
        ids: list[int] = tokenizer(part, add_special_tokens=False, verbose=False).input_ids
        return ids

    by_name, end = {embedding.name: embedding.vectors[key] for embedding in embeddings}, 0
    pattern = words(by_name)
    for match in pattern.finditer(text) if pattern else ():
        yield tokens(text[end : match.start()]), None
        vectors = by_name[normal(match[1])]
        yield [_PLACE] * len(vectors), vectors
        end = match.end()
    yield tokens(text[end:]), None
