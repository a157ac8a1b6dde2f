"""Computes a request's conditioning: encodes its prompts, and reports what was truncated."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from contract import prompts
from contract.image import ImageParameters
from contract.markup import WeightedPrompt
from pipeline.backends.backend import ImageBackend
from pipeline.backends.phases import KEYS, TEXT
from pipeline.extensions.adapted import AdaptedModel
from pipeline.extensions.adapters import AdapterCache, ScaledAdapter, same
from pipeline.families.family import ImageModel, Prepare
from pipeline.request_state import ImageState
from pipeline.sampling import denoise
from pipeline.text.encode import Embedding, Encoder, PromptFields, RequestPrompts
from pipeline.text.textual_inversion import EmbeddingFolder


class Told(NamedTuple):
    """A request's conditioning, what people should know of it, and the embeddings [R, T, D] that it was made of."""

    conditioning: denoise.Conditioning
    warnings: list[str]
    hidden: torch.Tensor


class Conditioner:
    def __init__(
        self, model: ImageModel, encoder: Encoder, prepare: Prepare, embeddings: EmbeddingFolder | None = None
    ) -> None:
        """`embeddings` are those that prompts may name."""
        self._model = model
        self.encoder = encoder
        self._prepare = prepare
        self._embeddings = embeddings

    def __call__(self, wanted: Sequence[ImageParameters], works: Sequence[ImageState], bucket: int = 0) -> list[Told]:
        """The conditioning of each request: all plain prompts go through the encoders in one batch.

        `bucket` is as for `Encoder.encode`.
        """
        return self.conditions(wanted, bucket, [work.prompts for work in works])

    def conditions(
        self,
        wanted: Sequence[ImageParameters],
        bucket: int = 0,
        read: Sequence[RequestPrompts] | None = None,
        *,
        of: Hashable = None,
    ) -> list[Told]:
        """The same from parameters alone, or with the prompts `read` from them. `of` is as for `Encoder.encode`."""
        own = [self.read(one) for one in wanted] if read is None else read
        flat = [prompt for one in own for prompt in one.prompts]
        known = dict(zip(flat, self.encoder.encode(flat, bucket, of=of), strict=True))
        return [
            self._condition(one, [known[prompt] for prompt in found.prompts])
            for one, found in zip(wanted, own, strict=True)
        ]

    def read(self, wanted: ImageParameters) -> RequestPrompts:
        """The prompts of a checked request. Raises `Invalid` for what the model's encoders cannot read."""
        family = self._model.family
        prompts.check_known(wanted.values(prompts.FIELDS), family.prompt_fields)
        negative = family.negative(self._model, wanted) if family.rows(self._model, wanted) == 2 else None

        def parse(text: str | None) -> str | WeightedPrompt | None:
            return None if text is None else prompts.read(text, wanted.prompt_weighting)

        fields = PromptFields(
            prompts.read(wanted.prompt, wanted.prompt_weighting),
            parse(negative),
            parse(wanted.prompt_2),
            None if negative is None else parse(wanted.negative_prompt_2),
            wanted.clip_skip or 0,
        )
        if self._embeddings is not None:
            fields = replace(fields, embeddings=self._embeddings.named_in(fields.texts))
        return self.encoder.read(fields)

    def _condition(self, wanted: ImageParameters, found: list[Embedding]) -> Told:
        read: list[torch.Tensor] = []

        def prepare(hidden: torch.Tensor) -> torch.Tensor:
            read.append(hidden)
            return self._prepare(hidden)

        conditioning = self._model.family.condition(self._model, wanted, found, prepare)
        fields = ("negative_prompt", "prompt")[-len(found) :]
        warnings = [
            f"{name}: only the first {self.encoder.tokens} tokens were read; left out: {embedding.dropped!r}"
            for name, embedding in zip(fields, found, strict=True)
            if embedding.dropped
        ]
        return Told(conditioning, warnings, read[0])


class AdaptedConditioner(Conditioner):
    """The same for requests with LoRAs: one by one, each with its own encoders and projections."""

    def __init__(self, adapted: AdaptedModel, adapters: AdapterCache, backend: ImageBackend) -> None:
        """`backend` computes what the denoiser reads of the text, and encodes prompts where LoRAs change no encoder."""
        model, parts = adapted.model, adapted.parts
        family = model.family
        text = family.text_encoder(model, None if {*parts} - {family.denoiser} else backend.phases[TEXT])
        super().__init__(model, Encoder(text), self._prepared)
        self._adapted = adapted
        self._adapters = adapters
        self._backend = backend
        self._uses: tuple[ScaledAdapter, ...] = ()  # of the request under way

    def __call__(self, wanted: Sequence[ImageParameters], works: Sequence[ImageState], bucket: int = 0) -> list[Told]:
        """As `Conditioner`; also loads the requests' LoRAs. Raises `ModelError`, naming the LoRA."""
        made = []
        for one, work in zip(wanted, works, strict=True):
            assert work.taken is not None
            work.uses = self._uses = self._adapters.uses(work.taken)
            with self._adapted.every(work.uses):
                made += self.conditions([one], bucket, [work.prompts], of=same(work.uses))
        self._uses = ()
        return made

    def _prepared(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        if not self._backend.packs:  # the denoiser is a twin, and inside `every`
            found = self._backend.phases[KEYS](hidden)
            return found
        with self._backend.adapt([self._uses] * hidden.shape[0], apart=False):
            found = self._backend.phases[KEYS](hidden)
        return found
