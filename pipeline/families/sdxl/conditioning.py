"""SDXL's conditioning: both text encoders' embeddings, picture size, and guidance scale."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True, slots=True)
class Reading:
    """How `embed` reads tokens, where it differs from the usual.

    `seen` [B, T] of each encoder is the attention mask, 1 for visible tokens; None: all are visible. `clip_skip` is as
    in `MarkedPrompt`. `vectors` of each encoder: row, token, and the token embeddings [n, D] put there.
    """

    seen: Sequence[torch.Tensor] | None = None
    clip_skip: int = 0
    vectors: tuple[tuple[tuple[int, int, torch.Tensor], ...], ...] = ((), ())

    @property
    def usual(self) -> bool:
        return self.seen is None and not self.clip_skip and not any(self.vectors)


_USUAL = Reading()


def embed(model: ImageModel, ids: Sequence[torch.Tensor], how: Reading = _USUAL) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] of each encoder to their penultimate layers side by side [B, T, D], and pooled text [B, P]."""
    masks = [None] * len(ids) if how.seen is None else [mask.to(model.device) for mask in how.seen]
    encoders = text_encoders(model)
    with ExitStack() as stack:
        for encoder, vectors in zip(encoders, how.vectors, strict=False):
            if vectors:
                handle = encoder.get_input_embeddings().register_forward_hook(partial(_place, vectors))
                stack.callback(handle.remove)
        made = [
            encoder(part.to(model.device), attention_mask=mask, output_hidden_states=True)
            for encoder, part, mask in zip(encoders, ids, masks, strict=True)
        ]
    layer = -(how.clip_skip + 2)
    return torch.cat([one.hidden_states[layer] for one in made], dim=-1), made[-1][0]


def _place(
    vectors: Sequence[tuple[int, int, torch.Tensor]], module: Any, given: tuple[torch.Tensor, ...], made: torch.Tensor
) -> torch.Tensor:
    """A forward hook of token embeddings [B, T, D]."""
    made = made.clone()
    for row, at, own in vectors:
        made[row, at : at + len(own)] = own.to(made)
    return made


class CLIPPair:
    """`TextEncoder` of SDXL, and of its refiner, which has the second encoder only and reads the first one's texts.

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
        for tokenizer in self._tokenizers:
            split(tokenizer, "")  # forgets the padding and truncation of its file, before other threads use it

    def read(self, fields: PromptFields) -> RequestPrompts:
        most = min(encoder.config.num_hidden_layers for encoder in text_encoders(self._model)) - 1
        if fields.clip_skip > most:
            raise Invalid("clip_skip", f"must be at most {most} with this model's text encoders")
        pairs = [("prompt", fields.clip_skip)]
        if fields.negative_prompt is not None:
            pairs.insert(0, ("negative_prompt", 0))  # as in diffusers
        chunks = max(self._chunks(fields, name) for name, _ in pairs)
        return RequestPrompts(tuple(self._prompt(fields, name, chunks, skip) for name, skip in pairs), chunks)

    def _chunks(self, fields: PromptFields, name: str) -> int:
        """The chunks of a prompt, over both encoders. Raises `Invalid`."""
        most = 1
        for field, text, tokenizer, key in zip(*self._texts(fields, name), self._tokenizers, self._keys, strict=True):
            found = split(tokenizer, text, 1, fields.embeddings, key)
            if len(found.ids) > MAX_CHUNKS:
                each = self.tokens - 2
                raise Invalid(
                    field,
                    f"has {found.count} tokens in {len(found.ids)} chunks of {each}; at most {MAX_CHUNKS} chunks, "
                    f"{MAX_CHUNKS * each} tokens, are read",
                )
            most = max(most, len(found.ids))
        return most

    def _prompt(self, fields: PromptFields, name: str, chunks: int, clip_skip: int) -> Prompt:
        _, texts = self._texts(fields, name)
        first = texts[0]
        own = tuple(one for one in fields.embeddings if any(_names(one, text) for text in texts))
        if isinstance(first, str) and {*texts} == {first} and chunks == 1 and not clip_skip and not own:
            return first
        return MarkedPrompt(texts, chunks, clip_skip, own)

    def _texts(self, fields: PromptFields, name: str) -> tuple[tuple[str, ...], tuple[str | WeightedPrompt, ...]]:
        """As `_texts`, for as many encoders as there are."""
        names, texts = _texts(fields, name)
        return names[: len(self._keys)], texts[: len(self._keys)]

    @torch.inference_mode()
    def plain(self, prompts: Sequence[str]) -> list[Embedding]:
        """Of prompts that fit into one chunk."""
        # Not padded by the tokenizer: padding is a state of it, and `read` uses it on other threads.
        ids = [torch.cat([split(tokenizer, prompt).ids for prompt in prompts]) for tokenizer in self._tokenizers]
        joined, pooled = self._compute(ids)
        # Clones: a view would keep the whole batch alive for as long as one of its prompts is cached.
        return [Embedding(joined[row].clone(), pooled[row].clone()) for row in range(len(prompts))]

    @torch.inference_mode()
    def marked(self, prompt: MarkedPrompt) -> Embedding:
        """One forward of all chunks, and of an empty one for compel's weights; another of these without some parts."""
        read = [
            split(tokenizer, text, prompt.chunks, prompt.embeddings, key)
            for tokenizer, text, key in zip(self._tokenizers, prompt.texts, self._keys, strict=True)
        ]
        count = len(read[0].ids)
        how = Reading(None, prompt.clip_skip, tuple(one.vectors for one in read))
        syntaxes = {text.syntax for text in prompt.texts if isinstance(text, WeightedPrompt)}
        ids = [one.ids for one in read]
        if COMPEL in syntaxes:
            ids = [
                torch.cat([one, split(tokenizer, "").ids]) for one, tokenizer in zip(ids, self._tokenizers, strict=True)
            ]
        both, pooled = self._compute(ids) if how.usual else embed(self._model, ids, how)
        both, pooled = both.clone(), pooled[0].clone()
        hidden = both[:count].flatten(0, 1)
        if syntaxes:
            without = self._without(prompt, read, how) if COMPEL in syntaxes else []
            hidden = self._weighted(prompt, read, both, without)
        return Embedding(hidden.to(both.dtype), pooled)

    def _without(self, prompt: MarkedPrompt, read: Sequence[Tokens], how: Reading) -> Sequence[torch.Tensor]:
        """Of each k, [C, T, D]: the embedding without each encoder's k-th part below 1."""
        numbers = [weighting.lowered(text, one) for text, one in zip(prompt.texts, read, strict=True)]
        rows = max(map(len, numbers))
        if not rows:
            return []
        # An encoder with fewer such parts sees all tokens in the rows that are left; nothing reads them.
        padded = [own + [_NO_PART] * (rows - len(own)) for own in numbers]
        seen = [
            torch.cat([(one.parts != number).long() for number in own]) for own, one in zip(padded, read, strict=True)
        ]
        count = len(read[0].ids)
        vectors = tuple(
            tuple((k * count + row, at, own) for k in range(rows) for row, at, own in one.vectors) for one in read
        )
        made, _ = embed(self._model, [one.ids.repeat(rows, 1) for one in read], Reading(seen, how.clip_skip, vectors))
        return [made[k * count : (k + 1) * count] for k in range(rows)]

    def _weighted(
        self, prompt: MarkedPrompt, read: Sequence[Tokens], both: torch.Tensor, without: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The weighted embedding [C · T, D] in fp32; `both` [C or C + 1, T, D] has an empty chunk last for compel's."""
        count, sides = len(read[0].ids), []
        widths = [encoder.config.hidden_size for encoder in text_encoders(self._model)]
        parts = zip(*(tensor.split(widths, dim=-1) for tensor in (both, *without)), strict=True)
        for text, one, (own, *others) in zip(prompt.texts, read, parts, strict=True):
            weights = one.weights.flatten()[:, None].to(both.device)
            hidden = own[:count].flatten(0, 1)
            if isinstance(text, str):
                sides.append(hidden.float())
            elif text.syntax == A1111:
                sides.append(weighting.scaled(hidden, weights))
            else:
                numbers = weighting.lowered(text, one)
                shares = [weighting.share(text.parts[number][1]) for number in numbers]
                rows = torch.stack([hidden, *(other.flatten(0, 1) for other in others[: len(numbers)])])
                sides.append(weighting.apply(rows, own[count].repeat(count, 1), weights, shares))
        return torch.cat(sides, dim=-1)


def _texts(fields: PromptFields, name: str) -> tuple[tuple[str, str], tuple[str | WeightedPrompt, ...]]:
    """The fields that each encoder reads of a prompt, and their texts."""
    first, second = getattr(fields, name), getattr(fields, f"{name}_2")
    # As in diffusers an empty text for the second encoder counts as none.
    return (name, f"{name}_2" if second else name), (first, second or first)


def _names(embedding: TextualInversion, text: str | WeightedPrompt) -> bool:
    found = words([embedding.name])
    return found is not None and found.search(text if isinstance(text, str) else text.text) is not None


def condition(model: ImageModel, wanted: ImageParameters, found: Sequence[Embedding], prepare: Prepare) -> Conditioning:
    """The UNet's constant inputs of R rows: where there is one embedding too few, the negative one is zero.

    kv: [R, T, width], packed keys and values; pooled: [R, P]; time_ids: [R, 6]; time_cond: [1, G], the guidance
    embedding of distilled models (LCM).
    """
    rows = model.family.rows(model, wanted)
    hidden = torch.stack([embedding.hidden for embedding in found])
    pooled = torch.stack([embedding.pooled for embedding in found if embedding.pooled is not None])
    if len(found) < rows:
        hidden = torch.cat([torch.zeros_like(hidden), hidden])
        pooled = torch.cat([torch.zeros_like(pooled), pooled])
    tensors = {
        "kv": prepare(hidden),
        "pooled": pooled,
        "time_ids": time_ids(wanted.width, wanted.height, rows, pooled),
    }
    width = model.denoiser.config.time_cond_proj_dim
    if width is not None:
        tensors["time_cond"] = guidance_embedding(wanted.guidance_scale, width, pooled)
    return Conditioning(tensors, wanted.guidance_scale)


def example(
    model: ImageModel, width: int, rows: int, generator: torch.Generator, chunks: int
) -> dict[str, torch.Tensor]:
    """Random conditioning of `rows` rows of so many chunks, as `condition` makes it."""
    config = model.denoiser.config
    pooled = text_encoders(model)[-1].config.projection_dim
    shapes = {"kv": (chunks * tokenizers(model)[0].model_max_length, width), "pooled": (pooled,), "time_ids": (6,)}
    if config.time_cond_proj_dim is not None:
        shapes["time_cond"] = (config.time_cond_proj_dim,)
    return {
        name: torch.randn((rows, *shape), device=model.device, dtype=model.dtype, generator=generator)
        for name, shape in shapes.items()
    }


def time_ids(width: int, height: int, rows: int, like: torch.Tensor) -> torch.Tensor:
    """SDXL's size and crop conditioning for an uncropped picture, [rows, 6] (Podell et al., 2023, section 2.2):
    original size, crop, target size.
    """
    ids = torch.tensor([[height, width, 0, 0, height, width]], dtype=like.dtype)
    return to_device(ids.repeat(rows, 1), like.device)


def guidance_embedding(scale: float, width: int, like: torch.Tensor) -> torch.Tensor:
    """The sinusoidal embedding of the guidance scale that distilled models read, [1, width].

    As diffusers' `get_guidance_scale_embedding` for w = scale - 1 (Meng et al., 2023; Luo et al., 2023).
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half) * -(torch.log(torch.tensor(10000.0)) / (half - 1)))
    angles = torch.tensor([(scale - 1) * 1000.0])[:, None] * frequencies[None, :]
    embedding = torch.cat([angles.sin(), angles.cos()], dim=1)
    return to_device(F.pad(embedding, (0, width % 2)).to(like.dtype), like.device)
