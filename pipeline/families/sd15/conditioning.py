"""The conditioning of Stable Diffusion 1.x: the last layer of CLIP's text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from contract.image import ImageParameters
from pipeline.families.family import Embed, ImageModel, Prepare
from pipeline.sampling.denoise import Conditioning
from pipeline.text.encode import Embedding, MarkedPrompt, PromptFields, RequestPrompts, read_plain


def embed(model: ImageModel, ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor]:
    """Encode token ids [B, T] to the normalized output of the last layer, [B, T, D]."""
    (tokens,) = ids
    return (model.parts["text_encoder"](tokens.to(model.device))[0],)


class CLIPText:
    """The `TextEncoder` of Stable Diffusion 1.x."""

    def __init__(self, model: ImageModel, compute: Embed | None = None) -> None:
        """`compute` is how token ids become embeddings; default: `embed` of this model."""
        self._compute = compute or partial(embed, model)
        self._tokenizer = model.parts["tokenizer"]
        self.tokens = int(self._tokenizer.model_max_length)

    def read(self, fields: PromptFields) -> RequestPrompts:
        return read_plain(fields)

    @torch.inference_mode()
    def plain(self, prompts: Sequence[str]) -> list[Embedding]:
        options = {"padding": "max_length", "max_length": self.tokens, "truncation": True, "return_tensors": "pt"}
        (hidden,) = self._compute([self._tokenizer(list(prompts), **options).input_ids])
        return [
            Embedding(row.clone(), dropped=self._dropped(prompt)) for row, prompt in zip(hidden, prompts, strict=True)
        ]

    def marked(self, prompt: MarkedPrompt) -> Embedding:
        raise NotImplementedError("such requests are rejected: Family.prompt_fields")

    def _dropped(self, prompt: str) -> str:
        """Return the prompt's own text from the first token that was dropped for the end token."""
        encoding = self._tokenizer(prompt, verbose=False, return_offsets_mapping=True)
        is_truncated = len(encoding.input_ids) > self.tokens
        return prompt[encoding.offset_mapping[self.tokens - 1][0] :].strip() if is_truncated else ""


def condition(
    model: ImageModel, parameters: ImageParameters, embeddings: Sequence[Embedding], prepare: Prepare
) -> Conditioning:
    """Return the conditioning: kv [R, T, width], packed keys and values."""
    hidden = torch.stack([embedding.hidden for embedding in embeddings])
    return Conditioning({"kv": prepare(hidden)}, parameters.guidance_scale)


def example(
    model: ImageModel, width: int, rows: int, generator: torch.Generator, chunks: int
) -> dict[str, torch.Tensor]:
    """Return random conditioning of `rows` rows, shaped as by `condition`; prompts have one chunk."""
    shape = (rows, model.parts["tokenizer"].model_max_length, width)
    return {"kv": torch.randn(shape, device=model.device, dtype=model.dtype, generator=generator)}
