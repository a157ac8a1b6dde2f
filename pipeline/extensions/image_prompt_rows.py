"""Gathers the keys and values of image prompts for the rows of a step batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from core.transfers import to_device
from pipeline.extensions.image_prompts import ImagePromptLease, RequestImagePrompt
from pipeline.request_state import ImageState


def prompts_of(state: ImageState, field: str) -> tuple[RequestImagePrompt, ...]:
    """The image prompts of a request whose text is encoded, under this field."""
    lease: ImagePromptLease | None = state.extensions.get(field)
    return () if lease is None else lease.prompts


class _Place(NamedTuple):
    """A prompt's keys and values [R, T, width] in the batch: its rows begin at `first`."""

    slot: int
    first: int
    keys: Tensor


class ImagePromptRows:
    """Batches image prompts by their place in each request, and keeps the last batch.

    A row without a prompt at some place gets a token whose values are zeros, which add nothing, and a length of 0.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._last: tuple[tuple[object, ...], list[_Place], list[tuple[Tensor, Tensor]]] | None = None

    def gather(
        self, works: Sequence[ImageState], rows: int, least: tuple[int, ...] = ()
    ) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
        """For each place keys and values [rows, T, width], and lengths int32 [rows]; empty if no prompt acts.

        With `least` there are at least so many places, each of so many tokens, whichever act: where bits depend on it.
        """
        places, first = [], 0
        for work in works:
            for slot, prompt in enumerate(prompts_of(work, self._field)):
                if prompt.acts[work.step]:
                    places.append(_Place(slot, first, prompt.keys[work.rows]))
            first += work.rows
        if not places and not least:
            return []
        key = (rows, least, *((place.slot, place.first, id(place.keys)) for place in places))
        if self._last is None or self._last[0] != key:
            # The parts are kept with the result, so that no other object can take over their identity.
            self._last = (key, places, self._gathered(works, places, rows, least))
        return self._last[2]

    def clear_cache(self) -> None:
        """Release the last batch."""
        self._last = None

    def _gathered(
        self, works: Sequence[ImageState], places: Sequence[_Place], rows: int, least: tuple[int, ...]
    ) -> list[tuple[Tensor, Tensor]]:
        example = next(prompt.keys[1] for work in works for prompt in prompts_of(work, self._field))
        tokens = dict(enumerate(least))
        for place in places:
            tokens[place.slot] = max(tokens.get(place.slot, 1), place.keys.shape[1])
        found = []
        for slot in range(max(tokens) + 1):
            whole = example.new_zeros((rows, tokens.get(slot, 1), example.shape[2]))
            lengths = torch.zeros(rows, dtype=torch.int32)
            for _, first, keys in (place for place in places if place.slot == slot):
                own = slice(first, first + len(keys))
                whole[own, : keys.shape[1]].copy_(keys)
                lengths[own] = keys.shape[1]
            found.append((whole, to_device(lengths, whole.device)))
        return found
