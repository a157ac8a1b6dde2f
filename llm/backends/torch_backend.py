"""Runs a model by transformers' own network, with attention on the paged cache: what our kernels do not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.kernels.kv_cache import KVCache, TokenBatch
from core.ops.branches import LowRank
from llm.backends.attention import PagedContext
from llm.backends.backend import TORCH, TextBackend
from llm.backends.forward import Forward
from llm.checkpoints.load import TextModel
from llm.features.adapters import AdaptedModules, TorchAdapter
from llm.parallel.ranks import RankGroup


class TorchBackend(TextBackend):
    """A model on torch, on any device; with a group, a rank's part of it."""

    kind = kernels = TORCH

    def __init__(
        self, model: TextModel, cache: KVCache, *, group: RankGroup | None = None, features: tuple[int, ...] = ()
    ) -> None:
        super().__init__(model, cache)
        self.group = group
        self._adapted: AdaptedModules | None = None
        self._captured = features

    def pack(self, factors: Mapping[str, LowRank]) -> TorchAdapter:
        return TorchAdapter(factors, self.model.device, self.model.dtype)

    def forward(self, batch: TokenBatch) -> Forward:
        self.cache.settle()
        batch = self.latest.filled(batch).to(self.model.device)
        if batch.adapters is not None and self._adapted is None:
            self._adapted = AdaptedModules(self.model.network)
        adapted = nullcontext() if self._adapted is None else self._adapted.rows(batch.adapters, self.model.device)
        with torch.inference_mode(), adapted, self._captures(batch.state_rows) as captured:
            logits = self._logits(batch)
            features = [captured.inputs[layer] for layer in self._captured]
            return Forward(logits, None, captured.states, torch.cat(features, -1) if features else None)

    def _logits(self, batch: TokenBatch) -> Tensor:
        """The logits of transformers' network, or of a rank's part of it, which gives none before the last stage."""
        network, group = self.model.network, self.group
        inputs = {"position_ids": batch.positions.long()[None], "paged": PagedContext.of(self.cache, batch)}
        if group is None or group.rank.first:
            inputs["input_ids"] = batch.tokens.long()[None]
        else:
            x = torch.empty(1, len(batch.tokens), network.config.hidden_size, dtype=self.model.dtype)
            inputs["inputs_embeds"] = group.receive(x.to(self.model.device))
        if group is not None and not group.rank.last:
            group.send(network.model(use_cache=False, **inputs).last_hidden_state)
            return torch.empty(0, self.model.vocabulary, device=self.model.device)
        output = network(use_cache=False, logits_to_keep=batch.output_rows.long(), **inputs)
        logits: Tensor = output.logits[0].float()
        return logits

    @contextmanager
    def _captures(self, rows: Tensor | None) -> Iterator[_Captured]:
        """Keep these rows of what the layers return, since a model with a head returns its logits alone; and of all
        rows what the captured layers are given.
        """
        base, hooks, captured = self.model.network.base_model, [], _Captured({}, [])

        def keep(module: Any, args: Any, output: Any) -> None:
            if rows is not None:
                captured.outputs.append(output.last_hidden_state[0, rows.long()])

        def capture(layer: int, module: Any, args: Any, kwargs: Any) -> None:
            captured.inputs[layer] = (args[0] if args else kwargs["hidden_states"])[0]

        if rows is not None:
            hooks.append(base.register_forward_hook(keep))
        for layer in self._captured:
            hooks.append(base.layers[layer].register_forward_pre_hook(partial(capture, layer), with_kwargs=True))
        try:
            yield captured
        finally:
            for hook in hooks:
                hook.remove()


class _Captured(NamedTuple):
    """The inputs of layers, by their numbers, and the states that were asked for, of the forward under way."""

    inputs: dict[int, Tensor]
    outputs: list[Tensor]

    @property
    def states(self) -> Tensor | None:
        return self.outputs[-1] if self.outputs else None
