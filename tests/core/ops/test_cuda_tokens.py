"""The GPU lowering of decoders on layers alone: few rows and many, what is joined and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.core.kernels.cuda.device import CUDA, DEVICE, DTYPE, ints

# isort: split
from core.kernels.cuda.fused_kernels import SplitSums
from core.kernels.cuda.stream_kernel import MOST_ROWS
from core.kernels.kv_cache import KVCache
from core.ops.cuda_tokens import CudaTokenOps, Residual
from core.ops.reference import TorchOps
from core.quant.dynamic import Int8DynamicLinear
from core.quant.fp8 import Fp8Linear
from core.quant.int4 import Int4Linear
from core.quant.linear import Int8Linear, quantize
from core.quant.schemes import SCHEMES

SLACK = 2e-2 if CUDA else 1e-5


class Block(nn.Module):
    """A residual block in small: norm, gated layer, product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 32)
        self.norm, self.last = nn.RMSNorm(32, eps=1e-5), nn.RMSNorm(32, eps=1e-5)
        self.up, self.gate, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.head = nn.Linear(32, 70, bias=False)
        nn.init.normal_(self.norm.weight, 1, 0.3)
        self.to(DEVICE, DTYPE).requires_grad_(False)


def ops() -> CudaTokenOps:
    cache = KVCache(layers=1, kv_heads=1, head_dim=16, pages=1, sequences=1, context=16, dtype=DTYPE, device=DEVICE,
                    turned=True)  # fmt: skip
    return CudaTokenOps(DTYPE, cache, torch.zeros(16, 16, device=DEVICE))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=SLACK, atol=SLACK * float(wanted.abs().max()))


@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS + 1])
def test_few_rows_and_many_compute_the_same(rows: int) -> None:
    block, token, plain = Block(), ops(), TorchOps()
    tokens = (torch.arange(rows, device=DEVICE) % 50).int()
    x = token.embed(tokens, block.embedding)
    a = token.rms_norm(x, block.norm, to=(block.up, block.gate))
    b = token.gated(a, block.up, block.gate, act="silu", to=block.down)
    x_after = token.linear(b, block.down, residual=x)
    assert isinstance(x_after, Residual)
    logits = token.head(token.rms_norm(x_after, block.last, to=(block.head,)), block.head)
    wanted = block.embedding(tokens)
    a_wanted = block.norm(wanted)
    wanted = wanted + block.down(plain.gated(a_wanted, block.up, block.gate, act="silu", to=block.down))
    close(a, a_wanted)
    close(x_after.x, wanted)
    close(logits, block.head(block.last(wanted)))
    assert logits.dtype == torch.float32 and logits.shape == (rows, 70)


@pytest.mark.parametrize("scheme", ["w4a16", "w4a8", "nvfp4"])
def test_layers_in_4_bits_are_joined_and_compute_what_they_do_alone(scheme: str) -> None:
    token, plain = ops(), TorchOps()
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPE)
    block = Block()
    inverse = 127 / x.float().abs().amax(0)
    for name, scales in (("up", inverse), ("gate", inverse), ("down", torch.full((48,), 60.0, device=DEVICE))):
        setattr(block, name, SCHEMES[scheme].linear.of(getattr(block, name).float(), scales))
    words = block.up.weight.clone()
    token.pack("gated", (block.up, block.gate))
    assert torch.equal(block.up.weight, words)
    assert block.up.weight.untyped_storage().data_ptr() == block.gate.weight.untyped_storage().data_ptr()
    a = quantize(x, block.up.inverse) if scheme == "w4a8" else (x * block.up.inverse).to(DTYPE)
    sums = token.linear(a, block.up, block.gate)
    assert isinstance(sums, SplitSums)
    close(sums.whole(), torch.cat([block.up(x), block.gate(x)], dim=-1))
    b = token.gated(a, block.up, block.gate, act="silu", to=block.down)
    wanted = plain.gated(x, block.up, block.gate, act="silu", to=block.down)
    whole = block.down.read(wanted)
    assert b.dtype == whole.dtype and (b.float() - whole.float()).abs().max() <= (1 if scheme == "w4a8" else SLACK)
    stream = Residual(x.clone())
    token.linear(b, block.down, residual=stream)
    assert stream.sums is not None
    close(stream.sums.whole(), block.down(wanted).float())


def test_only_picked_rows_reach_the_head() -> None:
    block, token = Block(), ops()
    x = token.embed(torch.arange(9, device=DEVICE).int(), block.embedding)
    whole = token.rms_norm(x, block.last, to=(block.head,))
    x.output_rows = ints([7, 2])
    assert torch.equal(token.rms_norm(x, block.last, to=(block.head,)), whole[[7, 2]])


def test_logits_land_where_they_are_wanted() -> None:
    block, token = Block(), ops()
    out = torch.full((3, 70), 5.0, device=DEVICE)
    a = torch.randn(3, 32, device=DEVICE).to(DTYPE)
    assert token.head(a, block.head, out) is out
    close(out, block.head(a))


def test_joined_weights_are_held_once_and_counted() -> None:
    block, token = Block(), ops()
    before = block.up.weight.clone()
    token.pack("gated", (block.up, block.gate))
    token.pack("head", (block.head,))
    assert block.up.weight.untyped_storage().data_ptr() == block.gate.weight.untyped_storage().data_ptr()
    assert torch.equal(block.up.weight, before)
    assert token.weight_bytes == (2 * 48 + 70) * 32 * DTYPE.itemsize
    token.head(torch.ones(2, 32, device=DEVICE, dtype=DTYPE), block.head)
    token.pack("head", (Int8DynamicLinear.of(block.head, None),))
    assert token.weight_bytes == (2 * 48 + 70) * 32 * DTYPE.itemsize + 70 * 32


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_in_int8_is_that_of_its_module_in_any_company(bias: bool) -> None:
    block, token = Block(), ops()
    layer = nn.Linear(32, 70, bias=bias).to(DEVICE, DTYPE)
    head = Int8DynamicLinear.of(layer, None)
    x = token.embed((torch.arange(MOST_ROWS + 5, device=DEVICE) % 50).int(), block.embedding)
    a = token.rms_norm(x, block.last, to=(head,))
    assert isinstance(a, Tensor) and a.dtype == DTYPE
    logits = token.head(a, head)
    expected = head(a.float())
    step = expected.abs().max() / 127  # a level of an input may be the neighbouring one
    assert (logits - expected).abs().max() < step and logits.dtype == torch.float32
    for rows in (1, 3, 70):
        assert torch.equal(token.head(a[:rows].contiguous(), head), logits[:rows])
    a[1] = torch.nan  # which a step's most likely tokens then tell
    assert token.head(a[:3], head).isfinite().all(-1).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="Int8DynamicLinear"):
        token.pack("linear", (head,))
    with pytest.raises(ValueError, match="head of Int4Linear"):
        token.pack("head", (Int4Linear.of(layer.float(), None),))


def test_layers_that_are_no_product_are_refused() -> None:
    token, first = ops(), nn.Linear(32, 16)
    ones = torch.ones(32)
    eight, four, other = Int8Linear.of(first, ones), Int4Linear.of(first, None), Int4Linear.of(first, None)
    other.scale = other.scale.bfloat16()
    for others, said in (
        ((first, eight), "quantized in different ways"),
        ((eight, Int8Linear.of(first, 2 * ones)), "quantized in different ways"),
        ((eight, Fp8Linear.of(first, ones)), "quantized in different ways"),
        ((four, other), "a scale of different types"),
        ((nn.Conv2d(32, 16, 1),), "layers of Conv2d are not known"),
    ):
        with pytest.raises(ValueError, match=said):
            token.pack("linear", others)
