"""Computes a request's conditioning for the UNet: embeddings, keys and values, size, guidance; reports truncated
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from contract import markup
from contract.image import ImageParameters
from pipeline import denoise
from pipeline.adapted import AdaptedModel
from pipeline.adapters import AdapterCache, same
from pipeline.encode import Embedding, Encoder, Prompt
from pipeline.load import ImageModel
from pipeline.request_state import ImageState

Told = tuple[denoise.Conditioning, list[str]]
"""With what people should know of it."""


class Conditioner:
    def __init__(self, model: ImageModel, encoder: Encoder, keys: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`keys` makes keys and values of embeddings, as `unet_opt.deepcache.SplitUNet`: [B, T, D] to [B, T, width]."""
        self._model = model
        self.encoder = encoder
        self._keys = keys

    def __call__(
        self, wanted: Sequence[ImageParameters], works: Sequence[ImageState], bucket: int = 0, *, of: Hashable = None
    ) -> list[Told]:
        """The conditioning of each request: all prompts go through the encoders in one batch.

        `bucket` and `of` are as for `Encoder.encode`.
        """
        prompts = [self._prompts(one, work.rows) for one, work in zip(wanted, works, strict=True)]
        flat = [prompt for own in prompts for prompt in own]
        known = dict(zip(flat, self.encoder.encode(flat, bucket, of=of), strict=True))
        return [
            self._condition(one, work.rows, [known[prompt] for prompt in own])
            for one, work, own in zip(wanted, works, prompts, strict=True)
        ]

    def _prompts(self, wanted: ImageParameters, rows: int) -> list[Prompt]:
        negative = wanted.negative_prompt
        if negative is None and not self._model.force_zeros:
            negative = ""
        texts = [wanted.prompt] if rows == 1 or negative is None else [negative, wanted.prompt]
        return [markup.read(text) for text in texts] if wanted.prompt_weighting else [*texts]

    def _condition(self, wanted: ImageParameters, rows: int, found: list[Embedding]) -> Told:
        if len(found) < rows:
            found = [self.encoder.zero, *found]
        hidden = torch.stack([embedding.hidden for embedding in found])
        pooled = torch.stack([embedding.pooled for embedding in found])
        width = self._model.unet.config.time_cond_proj_dim
        conditioning = denoise.Conditioning(
            kv=self._keys(hidden),
            pooled=pooled,
            time_ids=denoise.time_ids(wanted.width, wanted.height, rows, pooled),
            time_cond=None if width is None else denoise.guidance_embedding(wanted.guidance_scale, width, pooled),
        )
        fields = ("negative_prompt", "prompt")[-len(found) :] if len(found) > 1 else ("prompt",)
        limit = self._model.tokenizers[0].model_max_length
        warnings = [
            f"{name}: only the first {limit} tokens were read; left out: {embedding.dropped!r}"
            for name, embedding in zip(fields, found, strict=True)
            if embedding.dropped
        ]
        return conditioning, warnings


class AdaptedConditioner(Conditioner):
    """The same for requests with LoRAs: one by one, each with its own encoders and projections."""

    def __init__(
        self, adapted: AdaptedModel, adapters: AdapterCache, keys: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__(adapted.model, Encoder(adapted.model), keys)
        self._adapted = adapted
        self._adapters = adapters

    def __call__(
        self, wanted: Sequence[ImageParameters], works: Sequence[ImageState], bucket: int = 0, *, of: Hashable = None
    ) -> list[Told]:
        """As `Conditioner`; also loads the requests' LoRAs. Raises `ModelError`, naming the LoRA."""
        made = []
        for one, work in zip(wanted, works, strict=True):
            assert work.taken is not None
            work.uses = self._adapters.uses(work.taken)
            with self._adapted.every(work.uses):
                made += super().__call__([one], [work], bucket, of=same(work.uses))
        return made
