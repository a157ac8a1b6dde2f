"""LoRA adapters of text models: PEFT's folders, read into the low-rank branches of a model's layers (Hu et al., 2021).

Requests with different adapters, and without any, share each forward (S-LoRA; Sheng et al., 2023): `TextBackend.pack`
prepares an adapter for the kernels that run the model.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from core.ops.branches import LowRank, PackedAdapter, branch
from core.peft_config import LayerPatterns, Targets, check_fields

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TARGETS = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
_KEY = re.compile(rf"base_model\.model\.((?:[\w]+\.)*(?:{_TARGETS}))\.lora_([AB])\.weight")


class AdapterSource(Protocol):
    """The adapters that requests of one model may name."""

    def asset_names(self) -> list[str]:
        """The names that requests may use now."""
        ...

    def check(self, name: str) -> None:
        """Read an adapter if it is not in memory. Raises `Invalid`, naming the field, for one that cannot be used."""
        ...

    def acquire(self, name: str, *, wait: bool) -> TextAdapter | None:
        """Reserve a checked adapter until `release`; None: not yet, as of `AssetCache.take`. Raises `Invalid`."""
        ...

    def release(self, adapter: TextAdapter) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class TextAdapter:
    """An adapter, packed for the kernels that run its model. `key`, negative, identifies its contents: keys and values
    are shared among requests with equal keys only.
    """

    packed: PackedAdapter
    key: int
    lease: Any = None


def factors(config: Any, state: Mapping[str, Tensor], network: Any) -> dict[str, LowRank]:
    """The branches by the names of a network's layers, of an adapter's configuration and tensors.

    Raises ValueError, naming the field or the tensor, for an adapter of another kind or another model.
    """
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} is no object")
    check_fields(config, CONFIG)
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        if (match := _KEY.fullmatch(key)) is None:
            raise ValueError(f"{key[:200]!a} is of no layer that adapters are supported for ({_TARGETS})")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise ValueError(f"{WEIGHTS} is empty")
    targets = Targets(CONFIG, config)
    for layer in pairs:
        targets.check(layer)
    alphas, ranks = (LayerPatterns(f"{CONFIG}: {name}", config.get(name)) for name in ("alpha_pattern", "rank_pattern"))
    return {
        layer: _factor(
            {**config, "lora_alpha": alphas.value(layer, config.get("lora_alpha")),
             "r": ranks.value(layer, config.get("r"))},
            layer, pair, network,
        )
        for layer, pair in pairs.items()
    }  # fmt: skip


def _factor(config: Mapping[str, Any], layer: str, pair: Mapping[str, Tensor], network: Any) -> LowRank:
    """`config` has the layer's own `lora_alpha` and `r`."""
    try:
        module = network.get_submodule(layer)
        sizes = int(module.in_features), int(module.out_features)
    except AttributeError:
        raise ValueError(f"the model has no layer {layer}") from None
    if len(pair) < 2:
        raise ValueError(f"{layer} has one of its two matrices")
    down, up = pair["A"], pair["B"]
    shapes = [*down.shape], [*up.shape]
    rank = len(down) if down.dim() else 0
    if not rank or shapes != ([rank, sizes[0]], [sizes[1], rank]) or not down.dtype == up.dtype:
        raise ValueError(
            f"{layer} has {shapes[0]} and {shapes[1]}, and reads {sizes[0]} channels and writes {sizes[1]}"
        )
    if not (down.is_floating_point() and bool(down.isfinite().all()) and bool(up.isfinite().all())):
        raise ValueError(f"{layer} holds what is no finite number")
    alpha = config["lora_alpha"]
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise ValueError(f"{CONFIG}: lora_alpha must be a number")
    if not abs(alpha) * float(up.abs().max()) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{CONFIG}: lora_alpha is too large: {layer} overflows")
    if config["r"] != rank:
        raise ValueError(f"{layer} is of rank {rank}, which is not what {CONFIG} says")
    return LowRank(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


class TorchAdapter:
    """An adapter whose branches torch computes behind the layers."""

    def __init__(self, factors: Mapping[str, LowRank], device: torch.device, dtype: torch.dtype) -> None:
        self.factors = {
            name: LowRank(pair.down.to(device, dtype), pair.up.to(device, dtype), pair.scale)
            for name, pair in factors.items()
        }

    @property
    def size_bytes(self) -> int:
        return sum(pair.down.nbytes + pair.up.nbytes for pair in self.factors.values())


class AdaptedModules:
    """Adds branches to what a network's layers return, [1, T, C], for rows that have adapters."""

    def __init__(self, network: Any) -> None:
        self._rows: dict[TorchAdapter, Tensor] = {}  # of the step under way
        for name, module in network.named_modules():
            if re.fullmatch(rf".*\.({_TARGETS})", name) and hasattr(module, "in_features"):
                module.register_forward_hook(partial(self._add, name))

    @contextmanager
    def rows(self, adapters: Any, device: torch.device) -> Iterator[None]:
        """Set the adapter of each row of the forwards within; None: no row has any."""
        rows: dict[TorchAdapter, list[int]] = {}
        for row, adapter in enumerate(adapters or ()):
            if adapter is not None:
                rows.setdefault(adapter, []).append(row)
        self._rows = {adapter: torch.tensor(its, device=device) for adapter, its in rows.items()}
        try:
            yield
        finally:
            self._rows = {}

    def _add(self, name: str, module: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        (x,) = inputs
        for adapter, rows in self._rows.items():
            if (factor := adapter.factors.get(name)) is not None:
                output[:, rows] += branch(module, x[:, rows], factor, factor.scale)
