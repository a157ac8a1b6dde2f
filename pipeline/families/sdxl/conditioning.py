"""The conditioning of SDXL: both text encoders' embeddings, picture size, and guidance scale."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from contract.errors import Invalid
from contract.image import ImageParameters
from contract.markup import A1111, COMPEL, MAX_CHUNKS, WeightedPrompt
from core.transfers import to_device
from pipeline.families.family import Embed, ImageModel, Prepare
from pipeline.families.sdxl.parts import KEYS, text_encoders, tokenizers
from pipeline.sampling.denoise import Conditioning
from pipeline.text import weighting
from pipeline.text.chunks import Tokens, split
from pipeline.text.encode import Embedding, MarkedPrompt, Prompt, PromptFields, RequestPrompts
from pipeline.text.textual_inversion import TextualInversion, words

_NO_PART = -2
_CACHED_LENGTH = 1000  # characters


@dataclass(frozen=True, slots=True)
class Reading:
    """The options of `embed`, where they differ from the usual.

    `attention_masks` [B, T], one an encoder, are 1 for visible tokens; None: all are visible. `clip_skip` is as
    in `MarkedPrompt`. `vectors` of each encoder: row, token, and the token embeddings [n, D] put there.
    """

    attention_masks: Sequence[torch.Tensor] | None = None
    clip_skip: int = 0
    vectors: tuple[tuple[tuple[int, int, torch.Tensor], ...], ...] = ((), ())

    @property
    def usual(self) -> bool:
        return self.attention_masks is None and not self.clip_skip and not any(self.vectors)


_USUAL = Reading()


def embed(
    model: ImageModel, ids: Sequence[torch.Tensor], reading: Reading = _USUAL
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode each encoder's token ids [B, T] to penultimate layers side by side [B, T, D], and pooled text [B, P]."""
    masks = (
        [None] * len(ids)
        if reading.attention_masks is None
        else [mask.to(model.device) for mask in reading.attention_masks]
    )
    encoders = text_encoders(model)
    with ExitStack() as stack:
        for encoder, vectors in zip(encoders, reading.vectors, strict=False):
            if vectors:
                handle = encoder.get_input_embeddings().register_forward_hook(partial(_place, vectors))
                stack.callback(handle.remove)
        outputs = [
            encoder(part.to(model.device), attention_mask=mask, output_hidden_states=True)
            for encoder, part, mask in zip(encoders, ids, masks, strict=True)
        ]
    layer = -(reading.clip_skip + 2)
    return torch.cat([output.hidden_states[layer] for output in outputs], dim=-1), outputs[-1][0]


def _place(
    vectors: Sequence[tuple[int, int, torch.Tensor]],
    module: Any,
    inputs: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> torch.Tensor:
    """A forward hook of token embeddings [B, T, D]."""
    output = output.clone()
    for row, at, values in vectors:
        output[row, at : at + len(values)] = values.to(output)
    return output


class CLIPPair:
    """The `TextEncoder` of SDXL, and of its refiner, which has the second encoder only and reads the first one's texts.

    Follows SDXL (Podell et al., 2023, section 2.1) as diffusers implements it: penultimate hidden states of both
    encoders concatenated, pooled output of the second. Longer prompts are read in chunks, whose hidden states follow
    one another; the pooled output is the first chunk's.
    """

    def __init__(self, model: ImageModel, compute: Embed | None = None) -> None:
        """`compute` is how token ids become embeddings; default: `embed` of this model."""
        self._model = model
        self._compute = compute or partial(embed, model)
        self._tokenizers = tokenizers(model)
        self._keys = KEYS[-len(self._tokenizers) :]
        self.tokens = int(self._tokenizers[0].model_max_length)
        self._cached = lru_cache(maxsize=1024)(split)
        for tokenizer in self._tokenizers:
            split(tokenizer, "")  # forgets the padding and truncation of its file, before other threads use it

    def read(self, fields: PromptFields) -> RequestPrompts:
        max_skip = min(encoder.config.num_hidden_layers for encoder in text_encoders(self._model)) - 1
        if fields.clip_skip > max_skip:
            raise Invalid("clip_skip", f"must be at most {max_skip} with this model's text encoders")
        pairs = [("prompt", fields.clip_skip)]
        if fields.negative_prompt is not None:
            pairs.insert(0, ("negative_prompt", 0))  # as in diffusers
        chunks = max(self._chunks(fields, name) for name, _ in pairs)
        return RequestPrompts(tuple(self._prompt(fields, name, chunks, skip) for name, skip in pairs), chunks)

    def _chunks(self, fields: PromptFields, name: str) -> int:
        """Count the chunks of a prompt, over both encoders. Raises `Invalid`."""
        count = 1
        for field, text, tokenizer, key in zip(*self._texts(fields, name), self._tokenizers, self._keys, strict=True):
            own = fields.embeddings
            tokens = split(tokenizer, text, 1, own, key) if own else self._split(tokenizer, text)
            if len(tokens.ids) > MAX_CHUNKS:
                room = self.tokens - 2
                raise Invalid(
                    field,
                    f"has {tokens.count} tokens in {len(tokens.ids)} chunks of {room}; at most {MAX_CHUNKS} chunks, "
                    f"{MAX_CHUNKS * room} tokens, are read",
                )
            count = max(count, len(tokens.ids))
        return count

    def _split(self, tokenizer: Any, text: str | WeightedPrompt) -> Tokens:
        """Split a prompt, of which no long one is kept: it is read at its check, and encoded later on the lane."""
        length = len(text) if isinstance(text, str) else sum(len(part) for part, _ in text.parts)
        return (self._cached if length <= _CACHED_LENGTH else split)(tokenizer, text)

    def _prompt(self, fields: PromptFields, name: str, chunks: int, clip_skip: int) -> Prompt:
        _, texts = self._texts(fields, name)
        first = texts[0]
        named = tuple(embedding for embedding in fields.embeddings if any(_names(embedding, text) for text in texts))
        if isinstance(first, str) and {*texts} == {first} and chunks == 1 and not clip_skip and not named:
            return first
        return MarkedPrompt(texts, chunks, clip_skip, named)

    def _texts(self, fields: PromptFields, name: str) -> tuple[tuple[str, ...], tuple[str | WeightedPrompt, ...]]:
        """Return `_texts` of as many encoders as there are."""
        names, texts = _texts(fields, name)
        return names[: len(self._keys)], texts[: len(self._keys)]

    @torch.inference_mode()
    def plain(self, prompts: Sequence[str]) -> list[Embedding]:
        """Encode prompts that fit into one chunk."""
        # Not padded by the tokenizer: padding is a state of it, and `read` uses it on other threads.
        ids = [torch.cat([self._split(tokenizer, prompt).ids for prompt in prompts]) for tokenizer in self._tokenizers]
        joined, pooled = self._compute(ids)
        # Clones: a view would keep the whole batch alive for as long as one of its prompts is cached.
        return [Embedding(joined[row].clone(), pooled[row].clone()) for row in range(len(prompts))]

    @torch.inference_mode()
    def marked(self, prompt: MarkedPrompt) -> Embedding:
        """Run one forward of all chunks, with an empty one for compel's weights; another without some parts."""
        chunked = [
            split(tokenizer, text, prompt.chunks, prompt.embeddings, key)
            for tokenizer, text, key in zip(self._tokenizers, prompt.texts, self._keys, strict=True)
        ]
        count = len(chunked[0].ids)
        reading = Reading(None, prompt.clip_skip, tuple(tokens.vectors for tokens in chunked))
        syntaxes = {text.syntax for text in prompt.texts if isinstance(text, WeightedPrompt)}
        ids = [tokens.ids for tokens in chunked]
        if COMPEL in syntaxes:
            ids = [
                torch.cat([tokens, split(tokenizer, "").ids])
                for tokens, tokenizer in zip(ids, self._tokenizers, strict=True)
            ]
        both, pooled = self._compute(ids) if reading.usual else embed(self._model, ids, reading)
        both, pooled = both.clone(), pooled[0].clone()
        hidden = both[:count].flatten(0, 1)
        if syntaxes:
            without = self._without(prompt, chunked, reading) if COMPEL in syntaxes else []
            hidden = self._weighted(prompt, chunked, both, without)
        return Embedding(hidden.to(both.dtype), pooled)

    def _without(self, prompt: MarkedPrompt, chunked: Sequence[Tokens], reading: Reading) -> Sequence[torch.Tensor]:
        """Return for each k, [C, T, D], the embedding without each encoder's k-th part below 1."""
        numbers = [
            weighting.downweighted_parts(text, tokens) for text, tokens in zip(prompt.texts, chunked, strict=True)
        ]
        rows = max(map(len, numbers))
        if not rows:
            return []
        # An encoder with fewer such parts sees all tokens in the rows that are left; nothing reads them.
        padded = [values + [_NO_PART] * (rows - len(values)) for values in numbers]
        masks = [
            torch.cat([(tokens.parts != number).long() for number in values])
            for values, tokens in zip(padded, chunked, strict=True)
        ]
        count = len(chunked[0].ids)
        vectors = tuple(
            tuple((k * count + row, at, values) for k in range(rows) for row, at, values in tokens.vectors)
            for tokens in chunked
        )
        hidden, _ = embed(
            self._model, [tokens.ids.repeat(rows, 1) for tokens in chunked], Reading(masks, reading.clip_skip, vectors)
        )
        return [hidden[k * count : (k + 1) * count] for k in range(rows)]

    def _weighted(
        self, prompt: MarkedPrompt, chunked: Sequence[Tokens], both: torch.Tensor, without: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the weighted embedding [C · T, D] in fp32; the last chunk of compel's `both` is empty."""
        count, sides = len(chunked[0].ids), []
        widths = [encoder.config.hidden_size for encoder in text_encoders(self._model)]
        parts = zip(*(tensor.split(widths, dim=-1) for tensor in (both, *without)), strict=True)
        for text, tokens, (states, *without_parts) in zip(prompt.texts, chunked, parts, strict=True):
            weights = tokens.weights.flatten()[:, None].to(both.device)
            hidden = states[:count].flatten(0, 1)
            if isinstance(text, str):
                sides.append(hidden.float())
            elif text.syntax == A1111:
                sides.append(weighting.scaled(hidden, weights))
            else:
                numbers = weighting.downweighted_parts(text, tokens)
                shares = [weighting.share(text.parts[number][1]) for number in numbers]
                rows = torch.stack([hidden, *(other.flatten(0, 1) for other in without_parts[: len(numbers)])])
                sides.append(weighting.apply(rows, states[count].repeat(count, 1), weights, shares))
        return torch.cat(sides, dim=-1)


def _texts(fields: PromptFields, name: str) -> tuple[tuple[str, str], tuple[str | WeightedPrompt, ...]]:
    """Return the fields that each encoder reads of a prompt, and their texts."""
    first, second = getattr(fields, name), getattr(fields, f"{name}_2")
    # As in diffusers an empty text for the second encoder counts as none.
    return (name, f"{name}_2" if second else name), (first, second or first)


def _names(embedding: TextualInversion, text: str | WeightedPrompt) -> bool:
    pattern = words([embedding.name])
    return pattern is not None and pattern.search(text if isinstance(text, str) else text.text) is not None


def condition(
    model: ImageModel, parameters: ImageParameters, embeddings: Sequence[Embedding], prepare: Prepare
) -> Conditioning:
    """Return the UNet's constant inputs of R rows: where there is one embedding too few, the negative one is zero.

    kv: [R, T, width], packed keys and values; pooled: [R, P]; time_ids: [R, 6]; time_cond: [1, G], the guidance
    embedding of distilled models (LCM).
    """
    rows = model.family.rows(model, parameters)
    hidden = torch.stack([embedding.hidden for embedding in embeddings])
    pooled = torch.stack([embedding.pooled for embedding in embeddings if embedding.pooled is not None])
    if len(embeddings) < rows:
        hidden = torch.cat([torch.zeros_like(hidden), hidden])
        pooled = torch.cat([torch.zeros_like(pooled), pooled])
    tensors = {
        "kv": prepare(hidden),
        "pooled": pooled,
        "time_ids": time_ids(parameters.width, parameters.height, rows, pooled),
    }
    width = model.denoiser.config.time_cond_proj_dim
    if width is not None:
        tensors["time_cond"] = guidance_embedding(parameters.guidance_scale, width, pooled)
    return Conditioning(tensors, parameters.guidance_scale)


def example(
    model: ImageModel, width: int, rows: int, generator: torch.Generator, chunks: int
) -> dict[str, torch.Tensor]:
    """Return random conditioning of `rows` rows of so many chunks, shaped as by `condition`."""
    config = model.denoiser.config
    pooled = text_encoders(model)[-1].config.projection_dim
    shapes = {"kv": (chunks * tokenizers(model)[0].model_max_length, width), "pooled": (pooled,), "time_ids": (6,)}
    if config.time_cond_proj_dim is not None:
        shapes["time_cond"] = (config.time_cond_proj_dim,)
    return {
        name: torch.randn((rows, *shape), device=model.device, dtype=model.dtype, generator=generator)
        for name, shape in shapes.items()
    }


def time_ids(width: int, height: int, rows: int, reference: torch.Tensor) -> torch.Tensor:
    """Return SDXL's size and crop conditioning for an uncropped picture, [rows, 6] (Podell et al., 2023, section 2.2):
    original size, crop, target size.
    """
    ids = torch.tensor([[height, width, 0, 0, height, width]], dtype=reference.dtype)
    return to_device(ids.repeat(rows, 1), reference.device)


def guidance_embedding(scale: float, width: int, reference: torch.Tensor) -> torch.Tensor:
    """Return the sinusoidal embedding of the guidance scale that distilled models read, [1, width].

    As diffusers' `get_guidance_scale_embedding` for w = scale - 1 (Meng et al., 2023; Luo et al., 2023).
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half) * -(torch.log(torch.tensor(10000.0)) / (half - 1)))
    angles = torch.tensor([(scale - 1) * 1000.0])[:, None] * frequencies[None, :]
    embedding = torch.cat([angles.sin(), angles.cos()], dim=1)
    return to_device(F.pad(embedding, (0, width % 2)).to(reference.dtype), reference.device)
