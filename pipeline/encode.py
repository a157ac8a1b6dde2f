"""Encodes prompts with both of SDXL's text encoders, and caches the embeddings.

weighting.py applies prompt weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from contract.markup import WeightedPrompt
from pipeline import weighting

if TYPE_CHECKING:
    from pipeline.load import ImageModel


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A prompt's embedding. `dropped` is the part of the prompt beyond the encoders' context, if any."""

    hidden: torch.Tensor  # [T, D]: the encoders' penultimate layers side by side
    pooled: torch.Tensor  # [P]: the second encoder's projection
    dropped: str = ""


Prompt = str | WeightedPrompt
Embed = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


def embed(
    model: ImageModel, ids: Sequence[torch.Tensor], seen: Sequence[torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] of each encoder to their penultimate layers side by side [B, T, D], and pooled text [B, P].

    `seen` [B, T] of each encoder is the attention mask, 1 for visible tokens; default: all are visible.
    """
    masks = [None] * len(ids) if seen is None else [mask.to(model.device) for mask in seen]
    first, second = (
        encoder(part.to(model.device), attention_mask=mask, output_hidden_states=True)
        for encoder, part, mask in zip(model.text_encoders, ids, masks, strict=True)
    )
    return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1), second[0]


class Encoder:
    """Encodes prompts in batches and caches the last `capacity` of them (LRU).

    Follows SDXL (Podell et al., 2023, section 2.1) as diffusers implements it: penultimate hidden states of both
    encoders concatenated, pooled output of the second.
    """

    def __init__(self, model: ImageModel, capacity: int = 256, compute: Embed | None = None) -> None:
        """`compute` is how token ids become embeddings; default: `embed` of this model."""
        self._model = model
        self._compute = compute or partial(embed, model)
        self._capacity = capacity
        self._known: OrderedDict[tuple[Prompt, int, Hashable], Embedding] = OrderedDict()
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
        """The zero embedding for an absent negative prompt, in models trained with it."""
        return self._zero

    def encode(self, prompts: Sequence[Prompt], bucket: int = 0, *, of: Hashable = None) -> list[Embedding]:
        """An embedding for each prompt, in order; uncached prompts go through the encoders in one batch.

        With `bucket` > 0 prompts go through `bucket` at a time, padded, and are cached separately: the last bits of an
        embedding depend on the batch size. A weighted prompt is encoded alone in either case, in batches whose sizes
        follow from it. `of` identifies the encoders' state where it varies: embeddings of one state are not used for
        another.
        """
        unknown = list(dict.fromkeys(p for p in prompts if (p, bucket, of) not in self._known))
        self.misses += len(unknown)
        self.hits += len(prompts) - len(unknown)
        fresh: dict[Prompt, Embedding] = {p: self._weighted(p) for p in unknown if isinstance(p, WeightedPrompt)}
        plain = [p for p in unknown if isinstance(p, str)]
        size = bucket or max(1, len(plain))
        for start in range(0, len(plain), size):
            chunk = plain[start : start + size]
            padded = chunk + [""] * (bucket - len(chunk))
            fresh |= zip(chunk, self._forward(padded), strict=False)
        found = [fresh.get(p) or self._known[p, bucket, of] for p in prompts]
        for prompt, embedding in zip(prompts, found, strict=True):
            self._known[prompt, bucket, of] = embedding
            self._known.move_to_end((prompt, bucket, of))
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return found

    @torch.inference_mode()
    def _forward(self, prompts: Sequence[str]) -> list[Embedding]:
        ids, dropped = [], [""] * len(prompts)
        for tokenizer in self._model.tokenizers:
            length = tokenizer.model_max_length
            padded = tokenizer(
                list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
            )
            ids.append(padded.input_ids)
            full = padded.attention_mask.all(1).tolist()
            for row, prompt in enumerate(prompts):
                if not full[row] or dropped[row]:
                    continue
                whole = tokenizer(prompt, verbose=False, return_offsets_mapping=True)
                if len(whole.input_ids) > length:
                    # The prompt's own text, from the first token that was dropped for the end token.
                    dropped[row] = prompt[whole.offset_mapping[length - 1][0] :].strip()
        joined, pooled = self._compute(ids)
        # Clones: a view would keep the whole batch alive for as long as one of its prompts is cached.
        return [Embedding(joined[row].clone(), pooled[row].clone(), text) for row, text in enumerate(dropped)]

    @torch.inference_mode()
    def _weighted(self, prompt: WeightedPrompt) -> Embedding:
        model = self._model
        read = [weighting.tokens(tokenizer, prompt) for tokenizer in model.tokenizers]
        empty = [weighting.tokens(tokenizer, WeightedPrompt(())) for tokenizer in model.tokenizers]
        both, pooled = self._compute([torch.stack([one.ids, none.ids]) for one, none in zip(read, empty, strict=True)])
        both, pooled = both.clone(), pooled[0].clone()
        numbers = weighting.lowered(prompt, read)
        hidden = both[:1]
        if numbers:
            seen = [torch.stack([(one.parts != number).long() for number in numbers]) for one in read]
            without, _ = embed(model, [one.ids.expand(len(numbers), -1) for one in read], seen)
            hidden = torch.cat([hidden, without])
        widths = [encoder.config.hidden_size for encoder in model.text_encoders]
        weights = torch.cat([one.weights[:, None].expand(-1, n) for one, n in zip(read, widths, strict=True)], dim=-1)
        shares = [weighting.share(prompt.parts[number][1]) for number in numbers]
        made = weighting.apply(hidden, both[1], weights.to(both.device), shares)
        return Embedding(made.to(both.dtype), pooled, next((one.dropped for one in read if one.dropped), ""))
