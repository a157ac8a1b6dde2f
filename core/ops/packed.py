"""Packs a model's layers for the CPU kernels, once, shared by the programs of every batch size.

A layer is in INT8 if it was quantized (weights of 4 bits become INT8 again), else in floats. Supports diffusers' and
transformers' plain layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core.kernels.cpu.program import ScratchArena, Weights, pack_float, pack_int8
from core.quant.dynamic import Int8DynamicConv2d, Int8DynamicLinear
from core.quant.grouped import rows_of
from core.quant.linear import Int8Conv2d, Int8Linear, steps
from core.quant.w4a8 import W4A8Linear, in_int8

Int8Layer = Int8Linear | W4A8Linear | Int8Conv2d | Int8DynamicLinear | Int8DynamicConv2d


class PackedLayer(NamedTuple):
    """A packed layer. `inverse` [channels] quantizes its input; None for one in floats, or with dynamic scales.

    `names` and `widths` are those of the modules that it was packed from, and the numbers of their columns; `first` is
    the first of their input channels that it reads.
    """

    weights: Weights
    inverse: Tensor | None
    names: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    first: int = 0


class PackedLayers:
    """Packs layers on first use, and caches them.

    Raises ValueError, naming the layer, for an unsupported one.
    """

    def __init__(self, library: ctypes.CDLL, model: nn.Module, *, half: bool = False) -> None:
        """`half` keeps the weights of layers in floats in bf16, the type in which an INT8 model holds them."""
        self.library = library
        self.blocks = ScratchArena()  # shared by all its programs: they run one at a time
        self._half = half
        self._names = {id(module): name for name, module in model.named_modules()}
        self._routers: dict[nn.Module, Weights] = {}
        self._embeddings: dict[nn.Embedding, Tensor] = {}
        # The modules are kept with the result, so that no other object can take over their identity.
        self._made: dict[tuple[object, ...], tuple[Sequence[nn.Module], PackedLayer]] = {}

    def __call__(self, *modules: nn.Module, geglu: bool = False) -> PackedLayer:
        """One layer, or several side by side that read the same input (queries, keys and values)."""
        return self._once(modules, (geglu,), lambda: self._pack(modules, geglu))

    def stack(self, module: nn.Module, groups: int, *, geglu: bool = False) -> list[PackedLayer]:
        """The groups of a stack of layers, each packed apart. With `geglu` the gates' rows come first in each."""
        assert isinstance(module.weight, Tensor)
        size = len(module.weight) // groups
        order = torch.arange(size).roll(size // 2 if geglu else 0)

        def make(group: int) -> PackedLayer:
            return self._pack([rows_of(module, order + group * size)], geglu)

        return [self._once([module], (group, geglu), partial(make, group)) for group in range(groups)]

    def router(self, module: nn.Module) -> Weights:
        """A router's weight [experts, channels], as precise as it is."""
        if module not in self._routers:
            assert isinstance(module.weight, Tensor)
            self._routers[module] = pack_float(self.library, module.weight.detach().float()[:, None], None)
        return self._routers[module]

    def columns(self, module: nn.Module, first: int, count: int, *, bias: bool) -> PackedLayer:
        """The part of a layer in floats that reads input channels `first` to `first + count`."""

        def make() -> PackedLayer:
            weight = _float_weight(module)[:, :, first : first + count]
            return PackedLayer(self._packed(weight, _biases([module]) if bias else None), None, first=first)

        return self._once([module], (first, count, bias), make)

    def embedding(self, module: nn.Embedding) -> Tensor:
        """The layer's weight [n, channels], which may be shared with a layer that `release` drops."""
        return self._embeddings.setdefault(module, module.weight.detach())

    def inverse(self, *modules: nn.Module) -> Tensor | None:
        """The factor that quantizes the input of these layers, which read it side by side; None for floats."""
        if not modules:
            return None
        try:
            return _inverse(modules)
        except ValueError as error:
            raise ValueError(f"layer {self._names.get(id(modules[0]), '?')}: {error}") from error

    @property
    def size_bytes(self) -> int:
        """Bytes of all packed weights."""
        return sum(layer.weights.packed.nbytes for _, layer in self._made.values())

    @property
    def all(self) -> list[PackedLayer]:
        """All packed layers. Thread-safe."""
        return [layer for _, layer in list(self._made.values())]

    def release(self) -> None:
        """Drop the original weights of all packed layers: the model's own forward cannot be used afterwards."""
        for modules, _ in self._made.values():
            for module in modules:
                weight = module.weight
                assert isinstance(weight, Tensor)
                weight.data = weight.new_empty(0)

    def _once(
        self, modules: Sequence[nn.Module], how: tuple[object, ...], make: Callable[[], PackedLayer]
    ) -> PackedLayer:
        key = (*(id(module) for module in modules), *how)
        if key not in self._made:
            names = tuple(self._names.get(id(module), "?") for module in modules)
            try:
                widths = tuple(len(module.weight) for module in modules if isinstance(module.weight, Tensor))
                self._made[key] = (modules, make()._replace(names=names, widths=widths))
            except ValueError as error:
                raise ValueError(f"layer {names[0]}: {error}") from error
        return self._made[key][1]

    def _pack(self, modules: Sequence[nn.Module], geglu: bool) -> PackedLayer:
        quantized, inverse = _quantized(modules), _inverse(modules)
        if not quantized:
            weight = torch.cat([_float_weight(module) for module in modules])
            return PackedLayer(self._packed(weight, _biases(modules), geglu=geglu), None)
        weight = torch.cat([_levels(in_int8(m)) for m in quantized])
        scale = torch.cat([m.scale for m in quantized])
        by_row = inverse is None
        packed = pack_int8(self.library, weight, scale, _biases(modules), geglu=geglu, by_row=by_row)
        return PackedLayer(packed, inverse)

    def _packed(self, weight: Tensor, bias: Tensor | None, *, geglu: bool = False) -> Weights:
        return pack_float(self.library, weight.bfloat16() if self._half else weight, bias, geglu=geglu)


def _quantized(modules: Sequence[nn.Module]) -> list[Int8Layer]:
    return [m for m in modules if isinstance(m, Int8Layer)]


def _inverse(modules: Sequence[nn.Module]) -> Tensor | None:
    static = [m.inverse for m in _quantized(modules) if m.STATIC]
    kinds = {m.STATIC if isinstance(m, Int8Layer) else None for m in modules}
    if len(kinds) > 1 or any(not torch.equal(inverse, static[0]) for inverse in static):
        raise ValueError("it and what reads the same input must all be quantized, and by the same scales, or none")
    return static[0].contiguous() if static else None


def _biases(modules: Sequence[nn.Module]) -> Tensor:
    """Concatenated, [n]; zeros for a layer without one."""
    biases = []
    for module in modules:
        assert isinstance(module, nn.Linear | nn.Conv2d | Int8Layer)
        bias = torch.zeros(module.weight.shape[0]) if module.bias is None else module.bias.detach().float()
        biases.append(bias)
    return torch.cat(biases)


def _float_weight(module: nn.Module) -> Tensor:
    """[n, taps, channels]. Raises ValueError for anything but a plain layer in floats."""
    if not isinstance(module, (nn.Linear, nn.Conv2d)):
        raise ValueError(f"the kernels do not support {type(module).__name__} here, only plain float layers")
    weight = module.weight.detach().float()
    if isinstance(module, nn.Conv2d):
        steps(module)
        weight = weight.permute(0, 2, 3, 1)
    return _taps(weight)


def _levels(layer: Int8Layer) -> Tensor:
    """The weight of a quantized layer as `_taps`, without sparsity."""
    return _taps(layer.levels.view(*layer.weight.shape[:-1], -1))


def _taps(weight: Tensor) -> Tensor:
    """[n, channels] or [n, height, width, channels] to [n, taps, channels]."""
    if weight.dim() == 4 and weight.shape[1:3] not in ((1, 1), (3, 3)):
        raise ValueError(f"convolutions of {weight.shape[1]}×{weight.shape[2]} are unknown to the kernels")
    return weight.reshape(weight.shape[0], -1, weight.shape[-1])
