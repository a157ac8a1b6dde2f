"""The conditioning of Z-Image: a language model's hidden states of the prompt, as many as it has tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from contract.image import ImageParameters
from pipeline.families.family import Embed, ImageModel, Prepare
from pipeline.families.zimage.parts import TOKENS
from pipeline.sampling.denoise import Conditioning, gather
from pipeline.text.encode import Embedding, MarkedPrompt, PromptFields, RequestPrompts, read_plain


def embed(model: ImageModel, ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor]:
    """Encode token ids [B, T] of prompts of one length to what enters the text encoder's last layer, [B, T, D]."""
    (tokens,) = ids
    output = model.parts["text_encoder"](input_ids=tokens.to(model.device), output_hidden_states=True, use_cache=False)
    return (output.hidden_states[-2],)


class ChatEncoder:
    """The `TextEncoder` of Z-Image: the prompt as a user's message to Qwen3, as in diffusers' `ZImagePipeline`.

    Prompts are encoded one by one, without padding: attention is causal, so that padding at the end, as in diffusers',
    changes nothing, and a prompt's bits do not depend on other prompts.
    """

    tokens = TOKENS

    def __init__(self, model: ImageModel, compute: Embed | None = None) -> None:
        """`compute` is how token ids become embeddings; default: `embed` of this model."""
        self._compute = compute or partial(embed, model)
        self._tokenizer = model.parts["tokenizer"]

    def read(self, fields: PromptFields) -> RequestPrompts:
        return read_plain(fields)

    @torch.inference_mode()
    def plain(self, prompts: Sequence[str]) -> list[Embedding]:
        embeddings = {prompt: self._encode(prompt) for prompt in dict.fromkeys(prompts)}
        return [embeddings[prompt] for prompt in prompts]

    def marked(self, prompt: MarkedPrompt) -> Embedding:
        raise NotImplementedError("such requests are rejected: Family.prompt_fields")

    def _encode(self, prompt: str) -> Embedding:
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        encoding = self._tokenizer(text, verbose=False, return_offsets_mapping=True)
        dropped = ""
        if len(encoding.input_ids) > TOKENS:
            # The template's own words at the end are dropped first, and not told.
            start = text.rfind(prompt)
            end = start + len(prompt)
            dropped = text[max(start, encoding.offset_mapping[TOKENS][0]) : end].strip()
        (hidden,) = self._compute([torch.tensor([encoding.input_ids[:TOKENS]])])
        return Embedding(hidden[0].clone(), dropped=dropped)


def condition(
    model: ImageModel, parameters: ImageParameters, embeddings: Sequence[Embedding], prepare: Prepare
) -> Conditioning:
    """Return the transformer's constant inputs.

    text: [R, T, width], zeros after a row's own tokens; lengths: [R], the number of these. Z-Image guides by
    positive + s · (positive - negative), which is the usual form with a scale of s + 1.
    """
    rows = [prepare(embedding.hidden[None]) for embedding in embeddings]
    lengths = torch.tensor([row.shape[1] for row in rows], device=rows[0].device)
    return Conditioning({"text": gather(rows, 0, 1), "lengths": lengths}, parameters.guidance_scale + 1)


def example(
    model: ImageModel, width: int, rows: int, generator: torch.Generator, chunks: int
) -> dict[str, torch.Tensor]:
    """Return random conditioning of `rows` rows of the longest prompt, shaped as by `condition`; it has one chunk."""
    shape = (rows, TOKENS, width)
    return {
        "text": torch.randn(shape, device=model.device, dtype=model.dtype, generator=generator),
        "lengths": torch.full((rows,), TOKENS, device=model.device),
    }
