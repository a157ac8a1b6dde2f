"""The quantization schemes, by name, and the classes of their layers.

A scheme is a module with classes of layers, a line here, and a line of `contract.precision`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from contract.precision import Scheme as Name
from core.quant.dynamic import Int8DynamicConv2d, Int8DynamicLinear
from core.quant.fp4 import Fp4Linear
from core.quant.fp8 import Fp8Conv2d, Fp8Linear
from core.quant.int4 import Int4Linear
from core.quant.linear import Int8Conv2d, Int8Linear, ScaledConv2d, ScaledLinear, ScaledWeights
from core.quant.sparse import SparseInt8Linear
from core.quant.w4a8 import W4A8Linear


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme: the classes that replace linear layers and convolutions, if it has any for these."""

    name: Name
    linear: type[ScaledLinear]
    conv: type[ScaledConv2d] | None = None

    @property
    def static(self) -> bool:
        """Return whether inputs have static scales, from calibration."""
        return self.linear.STATIC

    def quantize(self, layer: nn.Module, inverse: Tensor | None, rows: Tensor | None = None) -> ScaledWeights:
        """The quantized layer with inputs scaled by `inverse` [K], if they have static scales.

        `rows` [n, K] of inputs choose what is pruned of a sparse one. Raises ValueError for an unsupported layer.
        """
        if isinstance(layer, nn.Conv2d):
            if self.conv is None:
                raise ValueError(f"{self.name} has no convolutions")
            return self.conv.of(layer, inverse)
        assert isinstance(layer, nn.Linear)
        if issubclass(self.linear, SparseInt8Linear):
            return self.linear.of(layer, inverse, rows)
        return self.linear.of(layer, inverse)


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", Int8Linear, Int8Conv2d),
        Scheme("fp8", Fp8Linear, Fp8Conv2d),
        Scheme("int8-dynamic", Int8DynamicLinear, Int8DynamicConv2d),
        Scheme("int8-sparse", SparseInt8Linear, Int8Conv2d),
        Scheme("w4a16", Int4Linear),
        Scheme("w4a8", W4A8Linear),
        Scheme("nvfp4", Fp4Linear),
    )
}
LAYERS: dict[str, type[ScaledLinear] | type[ScaledConv2d]] = {
    kind.__name__: kind for scheme in SCHEMES.values() for kind in (scheme.linear, scheme.conv) if kind is not None
}
"""Classes of layers by the name that a stored model has for them."""
