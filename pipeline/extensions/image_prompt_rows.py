"""Image prompts in the denoiser's steps: their keys and values for the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from contract.image_prompt import ImagePrompt
from core.transfers import to_device
from pipeline.backends.phases import DEEP
from pipeline.extensions.asset_cache import Asset
from pipeline.extensions.extension import StepBatch, Steps

if TYPE_CHECKING:
    from pipeline.backends.backend import BatchGroup, ImageBackend
    from pipeline.request_state import ImageState


class RequestImagePrompt(NamedTuple):
    """The keys and values [R, T, width] of a request's image prompt, by the request's rows; `acts`: in which steps they
    are read.
    """

    name: str
    digest: str  # of the adapter's and the encoder's files
    keys: Mapping[int, Tensor]
    acts: tuple[bool, ...]


@dataclass(slots=True, eq=False)
class ImagePromptLease:
    """A request's adapters until its prompts are encoded, then what they made; and the tokens of each prompt."""

    files: list[Asset[Any]]
    pairs: Mapping[str, tuple[Asset[Any], Asset[Any]]]  # the same by the adapters' names, each with its encoder
    tokens: tuple[int, ...]
    prompts: tuple[RequestImagePrompt, ...] = ()


class _Place(NamedTuple):
    """A prompt's keys and values [R, T, width] in the batch: its rows begin at `first`."""

    slot: int
    first: int
    keys: Tensor


class ImagePromptSteps(Steps):
    """Batches image prompts by their place in each request, and keeps the last batch.

    A row without a prompt at some place gets a token whose values are zeros, which add nothing, and a length of 0.
    """

    def __init__(self, field: str) -> None:
        super().__init__(field, ImagePrompt.SHARE)
        self._last: tuple[tuple[object, ...], list[_Place], list[tuple[Tensor, Tensor]]] | None = None

    def charged_rows(self, states: Sequence[ImageState], backend: ImageBackend, total: int, ahead: int = 0) -> int:
        """Count all rows of a forward, whichever have one."""
        acts = any(
            prompt.acts[state.step + ahead] and state.plan[state.step + ahead]
            for state, lease in self._leases(states) for prompt in lease.prompts
        )  # fmt: skip
        return total if acts else 0

    def group(self, lease: ImagePromptLease) -> tuple[int, ...]:
        return lease.tokens

    def relaunches(self, states: Sequence[ImageState], group: BatchGroup) -> bool:
        return group.phase == DEEP and self.field in dict(group.extensions)

    def evaluate(self, batch: StepBatch) -> Mapping[str, list[Any]]:
        """Gather for each place keys and values [rows, T, width], and lengths int32 [rows].

        Where bits depend on it there are as many places, each of as many tokens, as the group says, whichever act.
        """
        least = dict(batch.group.extensions).get(self.field, ())
        places, first = [], 0
        for state in batch.states:
            for slot, prompt in enumerate(self._prompts(state)):
                if prompt.acts[state.step]:
                    places.append(_Place(slot, first, prompt.keys[state.rows]))
            first += state.rows
        if not places and not least:
            return {}
        key = (batch.rows, least, *((place.slot, place.first, id(place.keys)) for place in places))
        if self._last is None or self._last[0] != key:
            # The parts are kept with the result, so that no other object can take over their identity.
            self._last = (key, places, self._gathered(batch, places, least))
        return {"images": self._last[2]}

    def clear_cache(self) -> None:
        self._last = None

    def _prompts(self, state: ImageState) -> tuple[RequestImagePrompt, ...]:
        lease: ImagePromptLease | None = state.extensions.get(self.field)
        return () if lease is None else lease.prompts

    def _gathered(
        self, batch: StepBatch, places: Sequence[_Place], least: tuple[int, ...]
    ) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
        example = next(prompt.keys[1] for state in batch.states for prompt in self._prompts(state))
        tokens = dict(enumerate(least))
        for place in places:
            tokens[place.slot] = max(tokens.get(place.slot, 1), place.keys.shape[1])
        gathered = []
        for slot in range(max(tokens) + 1):
            whole = example.new_zeros((batch.rows, tokens.get(slot, 1), example.shape[2]))
            lengths = torch.zeros(batch.rows, dtype=torch.int32)
            for _, first, keys in (place for place in places if place.slot == slot):
                own = slice(first, first + len(keys))
                whole[own, : keys.shape[1]].copy_(keys)
                lengths[own] = keys.shape[1]
            gathered.append((whole, to_device(lengths, whole.device)))
        return gathered
