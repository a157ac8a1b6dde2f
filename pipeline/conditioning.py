"""Computes a request's conditioning: encodes its prompts, and reports what was truncated."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from contract import markup
from contract.image import ImageParameters
from pipeline import denoise
from pipeline.adapted import AdaptedModel
from pipeline.adapters import AdapterCache, same
from pipeline.encode import Embedding, Encoder, Prompt
from pipeline.families.family import ImageModel, Prepare
from pipeline.request_state import ImageState

Told = tuple[denoise.Conditioning, list[str]]
"""With what people should know of it."""


class Conditioner:
    def __init__(self, model: ImageModel, encoder: Encoder, prepare: Prepare) -> None:
        self._model = model
        self.encoder = encoder
        self._prepare = prepare

    def __call__(self, wanted: Sequence[ImageParameters], works: Sequence[ImageState], bucket: int = 0) -> list[Told]:
        """The conditioning of each request: all prompts go through the encoders in one batch.

        `bucket` is as for `Encoder.encode`.
        """
        return self.conditions(wanted, bucket)

    def conditions(self, wanted: Sequence[ImageParameters], bucket: int = 0, *, of: Hashable = None) -> list[Told]:
        """The same from parameters alone. `of` is as for `Encoder.encode`."""
        prompts = [self._prompts(one) for one in wanted]
        flat = [prompt for own in prompts for prompt in own]
        known = dict(zip(flat, self.encoder.encode(flat, bucket, of=of), strict=True))
        return [
            self._condition(one, [known[prompt] for prompt in own]) for one, own in zip(wanted, prompts, strict=True)
        ]

    def _prompts(self, wanted: ImageParameters) -> list[Prompt]:
        family = self._model.family
        negative = family.negative(self._model, wanted) if family.rows(self._model, wanted) == 2 else None
        texts = [wanted.prompt] if negative is None else [negative, wanted.prompt]
        return [markup.read(text) for text in texts] if wanted.prompt_weighting else [*texts]

    def _condition(self, wanted: ImageParameters, found: list[Embedding]) -> Told:
        conditioning = self._model.family.condition(self._model, wanted, found, self._prepare)
        fields = ("negative_prompt", "prompt")[-len(found) :]
        warnings = [
            f"{name}: only the first {self.encoder.tokens} tokens were read; left out: {embedding.dropped!r}"
            for name, embedding in zip(fields, found, strict=True)
            if embedding.dropped
        ]
        return conditioning, warnings


class AdaptedConditioner(Conditioner):
    """The same for requests with LoRAs: one by one, each with its own encoders and projections."""

    def __init__(self, adapted: AdaptedModel, adapters: AdapterCache, prepare: Prepare) -> None:
        model = adapted.model
        super().__init__(model, Encoder(model.family.text_encoder(model)), prepare)
        self._adapted = adapted
        self._adapters = adapters

    def __call__(self, wanted: Sequence[ImageParameters], works: Sequence[ImageState], bucket: int = 0) -> list[Told]:
        """As `Conditioner`; also loads the requests' LoRAs. Raises `ModelError`, naming the LoRA."""
        made = []
        for one, work in zip(wanted, works, strict=True):
            assert work.taken is not None
            work.uses = self._adapters.uses(work.taken)
            with self._adapted.every(work.uses):
                made += self.conditions([one], bucket, of=same(work.uses))
        return made
