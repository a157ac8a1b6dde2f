"""SDXL's conditioning: both text encoders' embeddings, picture size, and guidance scale."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from contract.image import ImageParameters
from contract.markup import WeightedPrompt
from core.transfers import to_device
from pipeline import weighting
from pipeline.denoise import Conditioning
from pipeline.encode import Embedding
from pipeline.families.family import Embed, ImageModel, Prepare
from pipeline.families.sdxl.parts import text_encoders, tokenizers


def embed(
    model: ImageModel, ids: Sequence[torch.Tensor], seen: Sequence[torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] of each encoder to their penultimate layers side by side [B, T, D], and pooled text [B, P].

    `seen` [B, T] of each encoder is the attention mask, 1 for visible tokens; default: all are visible.
    """
    masks = [None] * len(ids) if seen is None else [mask.to(model.device) for mask in seen]
    first, second = (
        encoder(part.to(model.device), attention_mask=mask, output_hidden_states=True)
        for encoder, part, mask in zip(text_encoders(model), ids, masks, strict=True)
    )
    return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1), second[0]


class CLIPPair:
    """`TextEncoder` of SDXL.

    Follows SDXL (Podell et al., 2023, section 2.1) as diffusers implements it: penultimate hidden states of both
    encoders concatenated, pooled output of the second.
    """

    def __init__(self, model: ImageModel, compute: Embed | None = None) -> None:
        """`compute` is how token ids become embeddings; default: `embed` of this model."""
        self._model = model
        self._compute = compute or partial(embed, model)
        self._tokenizers = tokenizers(model)
        self.tokens = int(self._tokenizers[0].model_max_length)

    @torch.inference_mode()
    def plain(self, prompts: Sequence[str]) -> list[Embedding]:
        ids, dropped = [], [""] * len(prompts)
        for tokenizer in self._tokenizers:
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
    def weighted(self, prompt: WeightedPrompt) -> Embedding:
        read = [weighting.tokens(tokenizer, prompt) for tokenizer in self._tokenizers]
        empty = [weighting.tokens(tokenizer, WeightedPrompt(())) for tokenizer in self._tokenizers]
        both, pooled = self._compute([torch.stack([one.ids, none.ids]) for one, none in zip(read, empty, strict=True)])
        both, pooled = both.clone(), pooled[0].clone()
        numbers = weighting.lowered(prompt, read)
        hidden = both[:1]
        if numbers:
            seen = [torch.stack([(one.parts != number).long() for number in numbers]) for one in read]
            without, _ = embed(self._model, [one.ids.expand(len(numbers), -1) for one in read], seen)
            hidden = torch.cat([hidden, without])
        widths = [encoder.config.hidden_size for encoder in text_encoders(self._model)]
        weights = torch.cat([one.weights[:, None].expand(-1, n) for one, n in zip(read, widths, strict=True)], dim=-1)
        shares = [weighting.share(prompt.parts[number][1]) for number in numbers]
        made = weighting.apply(hidden, both[1], weights.to(both.device), shares)
        return Embedding(made.to(both.dtype), pooled, next((one.dropped for one in read if one.dropped), ""))


def condition(
    model: ImageModel, wanted: ImageParameters, found: Sequence[Embedding], prepare: Prepare, rows: int
) -> Conditioning:
    """The UNet's constant inputs for `rows` rows: where there is one embedding too few, the negative one is zero.

    kv: [R, T, width], packed keys and values; pooled: [R, P]; time_ids: [R, 6]; time_cond: [1, G], the guidance
    embedding of distilled models (LCM).
    """
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


def example(model: ImageModel, width: int, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random conditioning of `rows` rows, as `condition` makes it."""
    config = model.denoiser.config
    pooled = text_encoders(model)[1].config.projection_dim
    shapes = {"kv": (tokenizers(model)[0].model_max_length, width), "pooled": (pooled,), "time_ids": (6,)}
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
