"""Schemes: the list is the contract's, and every scheme's layers mean the layers that they replace."""

from __future__ import annotations

import pytest
import torch

from contract import precision
from contract.precision import IMAGE_SCHEMES as IMAGES
from core.quant.convert import quantize_
from core.quant.linear import ScaledConv2d, ScaledLinear
from core.quant.schemes import LAYERS, SCHEMES, Scheme
from core.quant.statistics import StatisticsError
from tests.core.quant.blocks import LAYERS as BLOCKS
from tests.core.quant.blocks import block, inputs, observed, recipe


def test_the_lists_are_one() -> None:
    assert tuple(SCHEMES) == precision.SCHEMES
    assert all(name == scheme.name for name, scheme in SCHEMES.items())
    kinds = [kind for scheme in SCHEMES.values() for kind in (scheme.linear, scheme.conv) if kind is not None]
    assert len(LAYERS) == len({*kinds}), "a stored model knows layers by the names of their classes"
    for name, kind in LAYERS.items():
        assert kind.__name__ == name and issubclass(kind, (ScaledLinear, ScaledConv2d))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_calibration_is_wanted_where_inputs_have_static_scales(scheme: Scheme) -> None:
    assert scheme.linear.STATIC == scheme.static == precision.is_calibrated(scheme.name)
    assert scheme.conv is None or scheme.static == scheme.conv.STATIC
    assert (scheme.name in IMAGES) == (scheme.conv is not None)
    model = block()
    if scheme.static:
        with pytest.raises(StatisticsError, match="there are no statistics"):
            quantize_(model, recipe(), None, scheme=scheme.name)
    else:
        assert quantize_(model, recipe(), None, scheme=scheme.name).changed == list(BLOCKS)


@pytest.mark.parametrize("scheme", [SCHEMES[name] for name in IMAGES], ids=IMAGES)
def test_a_quantized_model_is_near_the_model_in_every_type(scheme: Scheme) -> None:
    model = block()
    with torch.inference_mode():
        wanted = model(inputs(99, 8))
    quantize_(model, recipe(), observed(model), scheme=scheme.name)
    for name in BLOCKS:
        kind = scheme.conv if name == "conv" else scheme.linear
        layer = model.get_submodule(name)
        assert type(layer) is kind and (layer.inverse is not None) == scheme.static
    pruned = 0.5 if scheme.linear.SPARSE else 0.0  # half of random weights are a third of what they compute
    for dtype, most in ((torch.float32, 0.08 + pruned), (torch.bfloat16, 0.1 + pruned)):
        with torch.inference_mode():
            found = model.to(dtype)(inputs(99, 8).to(dtype))
        assert found.dtype == dtype and (found.float() - wanted).norm() < most * wanted.norm()
