"""The fused UNet: equal to diffusers in floats, to the quantized modules in 8 bits, at any width, deep and shallow.

On a GPU the kernels run, elsewhere their plain twins.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from core.ops.cuda import CudaLowering
from core.ops.cuda_branches import AdaptableLayers
from tests.core.quant.stage import check_close, error, normal
from tests.unet_opt.shapes import UNETS, Inputs, deep, in_8_bits, inputs, stock, unet
from unet_opt.deepcache import SplitUNet

CUDA = torch.cuda.is_available()
DEVICE, BASE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)


def placed(given: Inputs) -> Inputs:
    """On the device; what the UNet multiplies in its base type."""
    sample, timestep, hidden, pooled, ids, cond = given
    typed = (part if part is None else part.to(DEVICE, BASE) for part in (sample, hidden, pooled, ids, cond))
    sample, hidden, pooled, ids, cond = typed  # type: ignore[assignment]
    return Inputs(sample, timestep.to(DEVICE), hidden, pooled, ids, cond)


def on_fused(of: Any, rows: int) -> SplitUNet:
    return SplitUNet(CudaLowering(BASE, rows), of)


@pytest.mark.quick
@pytest.mark.parametrize("name", UNETS)
@pytest.mark.parametrize("size", [(8, 8), (4, 12)])
def test_in_floats_it_is_diffusers(name: str, size: tuple[int, int]) -> None:
    of = unet(name).to(DEVICE, BASE)
    given = placed(inputs(of, 3, *size))
    wanted = stock(of, given)
    out, *_ = deep(on_fused(of, rows=4), given)
    assert wanted.float().std() > 0.02
    if CUDA:
        assert error(out, wanted) < 0.03
    else:
        check_close(out, wanted, relative=1e-5)


@pytest.mark.quick(
    "three-levels-int8-(9, 7)", "conv1x1-int8-(9, 7)", "distilled-int8-(9, 7)", "three-levels-fp8-(9, 7)"
)
@pytest.mark.parametrize(
    ("name", "scheme", "sides"),
    [(name, "int8", (9, 7)) for name in UNETS]
    + [("three-levels", "int8", (8, 8))]
    + [(name, "fp8", (9, 7)) for name in (UNETS if CUDA else ("three-levels", "distilled", "conv1x1"))],
    ids=str,
)
def test_in_8_bits_it_is_the_quantized_modules(name: str, scheme: str, sides: tuple[int, int]) -> None:
    """But for upsampling convolutions, whose summed taps are rounded once more."""
    of = in_8_bits(name, scheme)
    given = inputs(of, 3, *sides)
    wanted = stock(of, given)
    floats = stock(unet(name), given)
    out, *_ = deep(on_fused(of.to(DEVICE, BASE), rows=3), placed(given))
    # Levels at an edge fall either way, and each moves what follows: within the error of the 8 bits themselves, and of
    # the type that is computed in.
    rounding = error(stock(unet(name).to(DEVICE, BASE), placed(given)).cpu(), floats) if CUDA else 0.0
    assert error(out.cpu(), wanted) < 1.1 * error(wanted, floats) + rounding + 0.005
    assert error(out.cpu(), floats) < 1.4 * error(wanted, floats) + rounding + 0.005


@pytest.mark.parametrize("scheme", ["floats", "int8"])
def test_rows_are_the_same_in_any_company(scheme: str) -> None:
    of = unet("three-levels") if scheme == "floats" else in_8_bits("three-levels", scheme)
    one, given = on_fused(of.to(DEVICE, BASE), rows=8), placed(inputs(of, 6, 8, 8))
    together = deep(one, given)[0].clone()
    alone = torch.cat([deep(one, given.rows([row]))[0].clone() for row in range(6)])
    assert error(alone, together) < (0.02 if CUDA or scheme == "int8" else 1e-5)


@pytest.mark.quick("int8")
@pytest.mark.parametrize("scheme", ["floats", "int8", "fp8"])
def test_a_network_with_anothers_weights_is_that_network(scheme: str) -> None:
    """Once these are copied to where its kernels read; a network that differs in more is refused."""
    one, other = (unet("three-levels") if scheme == "floats" else in_8_bits("three-levels", scheme) for _ in range(2))
    for tensor in (*other.parameters(), *other.buffers()):
        tensor.data = tensor.view(torch.int8).roll(1).view(tensor.dtype) if tensor.itemsize == 1 else tensor * 1.1
    one, other = one.to(DEVICE, BASE), other.to(DEVICE, BASE)
    split, given = SplitUNet(CudaLowering(BASE, 3, one), one), placed(inputs(one, 3, 8, 8))
    own = deep(split, given)[0].clone()
    expected = deep(on_fused(copy.deepcopy(other), rows=3), given)[0].clone()
    with torch.inference_mode():
        for read, theirs in split.lowering.counterparts(other).pairs:
            read.copy_(theirs)
    split.lowering.fix_layers()
    found = deep(split, given)[0]
    assert torch.equal(found, expected) and not torch.equal(found, own)
    with pytest.raises(ValueError, match="different layers"):
        split.lowering.counterparts(unet("conv1x1").to(DEVICE, BASE))
    if scheme != "floats":
        with pytest.raises(ValueError, match="different layers"):
            split.lowering.counterparts(unet("three-levels").to(DEVICE, BASE))


def test_adapters_of_another_model_are_packed_for_its_scales() -> None:
    """Whichever model's are in place."""
    one, other = (in_8_bits("three-levels").to(DEVICE, BASE) for _ in range(2))
    for name, buffer in other.named_buffers():
        if name.endswith("inverse"):
            buffer.mul_(1.5)
    lowerings = [CudaLowering(BASE, 2, each) for each in (one, other)]
    for lowering, each in zip(lowerings, (one, other), strict=True):
        deep(SplitUNet(lowering, each), placed(inputs(each, 2, 8, 8)))
    own, expected = (_scales(lowering.adaptable()) for lowering in lowerings)
    found = _scales(lowerings[0].counterparts(copy.deepcopy(other)).adaptable)
    assert torch.equal(found, expected) and not torch.equal(found, own)


def _scales(layers: AdaptableLayers) -> Tensor:
    return torch.cat([inverse for inverse in layers._inverses if inverse is not None])


def test_image_prompts_meet_no_new_layer() -> None:
    """Nor does a step without any, once all walks have run without."""
    of = unet("three-levels").to(DEVICE, BASE)
    split, fresh, strict = (SplitUNet(CudaLowering(BASE, 2, of), of) for _ in range(3))
    given = placed(inputs(of, 2, 8, 8))
    deep(split, given)
    split.lowering.fix_layers()
    lengths = torch.full((2,), 4, dtype=torch.int32, device=DEVICE)
    prompts = [(normal(1, 2, 4, split.text_width).to(DEVICE, BASE), lengths)]

    def drawn(network: SplitUNet) -> Tensor:
        with torch.inference_mode():
            kv = network.prepare_text(given.hidden)
            return network.deep(given.of_denoiser(kv), images=prompts)[0].clone()

    assert torch.equal(drawn(split), drawn(fresh))
    strict.lowering.fix_layers()
    with pytest.raises(RuntimeError, match="new layer"):
        drawn(strict)


def test_what_does_not_fit_is_refused_by_name() -> None:
    of = unet("plain").to(DEVICE, BASE)
    with pytest.raises(ValueError, match="3 rows, and there is room for 2"):
        deep(on_fused(of, rows=2), placed(inputs(of, 3, 8, 8)))
    of.register_to_config(act_fn="gelu")
    with pytest.raises(ValueError, match="act_fn"):
        on_fused(of, rows=1)
