"""Computes a request's conditioning: encodes its prompts, and reports what was truncated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from contract import prompts
from contract.image import ImageParameters
from contract.markup import WeightedPrompt
from pipeline.families.family import ImageModel, Prepare
from pipeline.request_state import ImageState
from pipeline.sampling import denoise
from pipeline.text.encode import Embedding, Encoder, PromptFields, RequestPrompts
from pipeline.text.textual_inversion import TextualInversion

NamedIn = Callable[[Mapping[str, str]], tuple[TextualInversion, ...]]
"""The embeddings that texts name, by the request's field. Raises `Invalid`."""


class ConditionedRequest(NamedTuple):
    """The conditioning of a request, its warnings, and the embeddings [R, T, D] that it was made of."""

    conditioning: denoise.Conditioning
    warnings: list[str]
    hidden: torch.Tensor


class Conditioner:
    def __init__(
        self, model: ImageModel, encoder: Encoder, prepare: Prepare, named_in: NamedIn = lambda texts: ()
    ) -> None:
        """`named_in` finds the embeddings that prompts name."""
        self._model = model
        self.encoder = encoder
        self._prepare = prepare
        self._named_in = named_in

    def __call__(
        self, parameters: Sequence[ImageParameters], states: Sequence[ImageState], bucket: int = 0
    ) -> list[ConditionedRequest]:
        """Return the conditioning of each request: all plain prompts go through the encoders in one batch.

        `bucket` is as for `Encoder.encode`.
        """
        return self.conditions(parameters, bucket, [state.prompts for state in states])

    def conditions(
        self,
        parameters: Sequence[ImageParameters],
        bucket: int = 0,
        read: Sequence[RequestPrompts] | None = None,
        *,
        of: Hashable = None,
    ) -> list[ConditionedRequest]:
        """Return the same from parameters alone, or with their prompts `read`. `of` is as for `Encoder.encode`."""
        request_prompts = [self.read(item) for item in parameters] if read is None else read
        all_prompts = [prompt for item in request_prompts for prompt in item.prompts]
        embeddings = dict(zip(all_prompts, self.encoder.encode(all_prompts, bucket, of=of), strict=True))
        return [
            self._condition(item, [embeddings[prompt] for prompt in encoded.prompts])
            for item, encoded in zip(parameters, request_prompts, strict=True)
        ]

    def read(self, parameters: ImageParameters) -> RequestPrompts:
        """Return the prompts of a checked request. Raises `Invalid` for what the model's encoders cannot read."""
        family = self._model.family
        prompts.check_known(parameters.values(prompts.FIELDS), family.prompt_fields)
        negative = family.negative(self._model, parameters) if family.rows(self._model, parameters) == 2 else None

        def parse(text: str | None) -> str | WeightedPrompt | None:
            return None if text is None else prompts.read(text, parameters.prompt_weighting)

        fields = PromptFields(
            prompts.read(parameters.prompt, parameters.prompt_weighting),
            parse(negative),
            parse(parameters.prompt_2),
            None if negative is None else parse(parameters.negative_prompt_2),
            parameters.clip_skip or 0,
        )
        return self.encoder.read(replace(fields, embeddings=self._named_in(fields.texts)))

    def _condition(self, parameters: ImageParameters, embeddings: list[Embedding]) -> ConditionedRequest:
        hidden_states: list[torch.Tensor] = []

        def prepare(hidden: torch.Tensor) -> torch.Tensor:
            hidden_states.append(hidden)
            return self._prepare(hidden)

        conditioning = self._model.family.condition(self._model, parameters, embeddings, prepare)
        fields = ("negative_prompt", "prompt")[-len(embeddings) :]
        warnings = [
            f"{name}: only the first {self.encoder.tokens} tokens were read; left out: {embedding.dropped!r}"
            for name, embedding in zip(fields, embeddings, strict=True)
            if embedding.dropped
        ]
        return ConditionedRequest(conditioning, warnings, hidden_states[0])
