"""The published layouts of weights of 4 bits against plain loops, written by their published descriptions."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from core.quant.int4_layouts import Layout
from tests.core.quant.published import draw
from tests.core.quant.stage import Few, Seed

few = settings(max_examples=20, deadline=None)


@few
@given(...)
def test_a_layer_is_what_its_published_layout_says(
    method: Literal["awq", "gptq", "compressed-tensors"], rows: Few, groups: Few,
    width: Literal[128, 256], whole: bool, zeros: bool, shifted: bool, half: bool,
    seed: Seed,
) -> None:  # fmt: skip
    n, k = 8 * rows, groups * width
    layout = Layout(method, None if whole else width, zeros or method == "gptq", shifted and method == "gptq")
    parts, weight = draw(layout, n, k, torch.float16 if half else torch.bfloat16, symmetric=not zeros, seed=seed)
    expected = layout.parts(n, k)
    names = {torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16"}
    assert parts.keys() == expected.keys()
    for name, (dtypes, shape) in expected.items():
        assert names[parts[name].dtype] in dtypes and parts[name].shape == shape
    layer = layout.layer(n, k, parts, None)
    assert torch.equal(layer.dense(), weight) and (layer.zero is None) == (not zeros)


def test_groups_by_activation_order_are_refused() -> None:
    layout = Layout("gptq", 128, zeros=True)
    parts, _ = draw(layout, 8, 256, torch.float16, symmetric=True, seed=0)
    order: Tensor = parts["g_idx"]
    parts["g_idx"] = order.flip(0).contiguous()
    with pytest.raises(ValueError, match="desc_act"):
        layout.layer(8, 256, parts, None)


@pytest.mark.parametrize(("method", "n", "k"), [("awq", 12, 128), ("gptq", 12, 128), ("awq", 8, 100)])
def test_sides_that_do_not_fit_are_refused(method: str, n: int, k: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Layout(method, 128, zeros=True).parts(n, k)
