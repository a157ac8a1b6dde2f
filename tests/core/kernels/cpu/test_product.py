"""The product: exact in integers, within rounding of 64-bit PyTorch in floats, for linear layers and convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.kernels.cpu.arguments import ACTIVATIONS, Activation
from core.kernels.cpu.program import Program, Weights, pack_float, pack_int8
from tests.core.quant.stage import Many, Several, as_bytes, called, check, kernels, normal, threads, whole

few = settings(max_examples=80)
KINDS = ("int8", "int8 by row", "fp32", "bf16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of random numbers. Channels are times four, which INT8 needs; floats take one more."""

    kind: str
    images: int
    height: int
    width: int
    fours: int
    n: int
    taps: int
    stride: int = 1
    before: int = 1
    upsample: bool = False
    cut: tuple[int, int] = (0, 0)  # of an upsampled map
    row_bias: bool = False
    residual: bool = False
    act: Activation | None = None
    bytes: bool = False
    seed: int = 0

    @property
    def int8(self) -> bool:
        return self.kind.startswith("int8")

    @property
    def channels(self) -> int:
        return 4 * self.fours + (not self.int8)

    @property
    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"grid": (self.images, self.height, self.width)}
        if self.taps > 1:
            found |= {"stride": self.stride, "before": self.before, "upsample": self.upsample}
            found |= {"cut": self.cut} if self.upsample else {}
        return found

    def input(self) -> tuple[Tensor, Tensor]:
        """As the kernels read it, and in 64 bits, [images, channels, height, width]."""
        shape = (self.images * self.height * self.width, self.channels)
        levels = whole(self.seed, *shape) if self.int8 else normal(self.seed, *shape)
        exact = levels.double().view(self.images, self.height, self.width, self.channels).permute(0, 3, 1, 2)
        return as_bytes(levels) if self.int8 else levels, exact

    def weight(self) -> Tensor:
        shape = (self.n, self.taps, self.channels)
        made = whole(self.seed + 1, *shape) if self.int8 else normal(self.seed + 1, *shape)
        return made.bfloat16() if self.kind == "bf16" else made

    def packed(self, scale: Tensor | None = None, bias: Tensor | None = None, *, geglu: bool = False) -> Weights:
        if not self.int8:
            return pack_float(kernels(), self.weight(), bias, geglu=geglu)
        scale = torch.ones(self.n) if scale is None else scale
        return pack_int8(kernels(), self.weight(), scale, bias, geglu=geglu, by_row=self.kind == "int8 by row")

    def sums(self, x: Tensor) -> Tensor:
        """Σ a · w as plain PyTorch has it, [rows, n] in 64 bits."""
        exact = self.weight().double()
        if self.taps == 1:
            return x.permute(0, 2, 3, 1).reshape(-1, self.channels) @ exact[:, 0].t()
        if self.upsample:
            sides = (2 * side - less for side, less in zip(x.shape[2:], self.cut, strict=True))
            x = F.interpolate(x, size=tuple(sides), mode="nearest")
        x = F.pad(x, (self.before, 1, self.before, 1))
        y = F.conv2d(x, exact.view(self.n, 3, 3, self.channels).permute(0, 3, 1, 2), stride=self.stride)
        return y.permute(0, 2, 3, 1).reshape(-1, self.n)


# In 64 bits.
EXACT: dict[Activation | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x, "silu": F.silu, "gelu": F.gelu, "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "tanh": torch.tanh,
    "relu": F.relu,
}  # fmt: skip
acts = st.sampled_from([*EXACT])

Product = Annotated[Case, st.builds(
    Case, st.sampled_from(KINDS), images=st.integers(1, 3), height=st.integers(1, 7), width=st.integers(1, 9),
    fours=st.integers(1, 12), n=st.integers(1, 140), taps=st.sampled_from((1, 9)), stride=st.sampled_from((1, 2)),
    before=st.sampled_from((0, 1)), upsample=st.booleans(), cut=st.tuples(*2 * [st.integers(0, 1)]),
    row_bias=st.booleans(), residual=st.booleans(), act=acts, bytes=st.booleans(), seed=st.integers(0, 99),
).filter(lambda case: case.taps == 1 or min(case.height, case.width) > 1)]  # fmt: skip


@few
@given(...)
def test_sums_of_bytes_are_exact(case: Product) -> None:
    case = dataclasses.replace(case, kind="int8")
    a, x = case.input()
    found = called(lambda p: p.product(a, case.packed(), **case.options))
    assert torch.equal(found.double(), case.sums(x))


@settings(max_examples=160)
@given(...)
def test_scale_bias_what_is_added_and_the_way_out(case: Product) -> None:
    """Floats are written over the residual."""
    a, x = case.input()
    a_scale = normal(7, len(a)).exp() if case.kind == "int8 by row" else None
    scale = normal(2, case.n).abs() / 1e3 if case.int8 else torch.ones(case.n)
    scaled = x if a_scale is None else x * a_scale.double().view(case.images, 1, case.height, case.width)
    bias, row_bias = normal(3, case.n), normal(4, case.images, case.n + 3)[:, 1:-2]  # a slice of something wider
    wanted = case.sums(scaled) * scale.double() + bias.double()
    residual = normal(5, *wanted.shape) if case.residual else None
    inverse = normal(6, case.n, scale=20) if case.bytes else None
    if case.row_bias:
        wanted = wanted + row_bias.double().repeat_interleave(len(wanted) // case.images, 0)
    wanted = EXACT[case.act](wanted if residual is None else wanted + residual.double())

    def write(p: Program) -> Tensor:
        return p.product(
            a, case.packed(scale, bias), a_scale=a_scale, act=case.act, row_bias=row_bias if case.row_bias else None,
            residual=residual, inverse=inverse, out=None if case.bytes else residual, **case.options,
        )  # fmt: skip

    check(called(write), wanted, inverse)


@few
@given(...)
def test_geglu(
    kind: Annotated[str, st.sampled_from(KINDS)], rows: Many, fours: Several, pairs: Several, floats: bool,
    act: Annotated[Activation | None, acts],
) -> None:  # fmt: skip
    """Hidden · act(gate), by default GELU, in diffusers' order: the first half of the columns is hidden."""
    case = Case(kind, 1, 1, rows, fours, 32 * pairs, 1)
    a, x = case.input()
    bias, inverse = normal(3, case.n), None if floats else normal(6, case.n // 2, scale=20)
    scale = normal(2, case.n).abs() / 1e4 if case.int8 else torch.ones(case.n)
    a_scale = normal(7, rows).exp() if kind == "int8 by row" else None
    scaled = x if a_scale is None else x * a_scale.double()
    hidden, gate = (case.sums(scaled) * scale.double() + bias.double()).chunk(2, dim=-1)
    weights = case.packed(scale, bias, geglu=True)
    found = called(lambda p: p.product(a, weights, a_scale=a_scale, inverse=inverse, act=act, **case.options))
    check(found, hidden * EXACT[act or "gelu"](gate), inverse)


@pytest.mark.parametrize("n", [4, 16, 32, 48, 64, 80])  # every way in which vectors stand side by side
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taps", [1, 9])
def test_a_rows_bits_depend_neither_on_its_companions_nor_its_place_nor_threads(kind: str, n: int, taps: int) -> None:
    case = Case(kind, 5, 3, 5, 6, n, taps)
    a, pixels = case.input()[0], case.height * case.width
    weights = case.packed(normal(2, n).abs() / 1e3 if case.int8 else None, normal(3, n))
    scales = normal(7, len(a)).exp() if kind == "int8 by row" else None

    def run(rows: slice, images: int, height: int = case.height, width: int = case.width) -> Tensor:
        own, grid = None if scales is None else scales[rows].contiguous(), (images, height, width)
        return called(lambda p: p.product(a[rows].contiguous(), weights, grid=grid, a_scale=own, act="silu"))

    together = run(slice(None), 5)
    for image in range(5):
        rows = slice(image * pixels, (image + 1) * pixels)
        assert torch.equal(run(rows, 1), together[rows])
    for count in range(1, 10) if taps == 1 else ():  # in tiles of every height
        assert torch.equal(run(slice(count), count, 1, 1), together[:count])
    with threads(2):
        assert torch.equal(run(slice(None), 5), together)


@pytest.mark.parametrize(
    ("act", "relative", "least"),
    [
        ("silu", 1e-6, 1e-30),
        ("gelu", 0, 3e-7),
        ("quick_gelu", 6e-6, 1e-30),
        ("gelu_tanh", 3e-6, 1e-14),
        ("tanh", 5e-7, 0),
        ("relu", 0, 0),
    ],
)
def test_activations_over_their_whole_range(act: Activation, relative: float, least: float) -> None:
    """Also tanh of small gates to seven digits; NaN stays NaN."""
    small = torch.logspace(-30, -1, 400)
    x = torch.cat(
        [torch.linspace(-40, 40, 8001), small, -small, torch.tensor([-1e10, -1e4, 0.0, 1e4, 1e10, torch.nan])]
    )
    weights = pack_float(kernels(), torch.ones(1, 1, 1), None)
    found = called(lambda p: p.product(x[:, None], weights, grid=(1, 1, len(x)), act=act))[:, 0].double()
    wanted = EXACT[act](x.double())
    assert found[-1].isnan()
    allowed = relative * wanted.abs() + least * x.abs().double().clamp_min(1) + 1e-38 * x.abs().double()
    assert ((found - wanted).abs() <= allowed)[:-1].all()


def test_extremes_of_bytes_do_not_overflow() -> None:
    """All inputs and weights at ±127 over as many inputs as SDXL's widest convolution has."""
    levels, weight = torch.full((6, 2560 * 4), 127.0), torch.full((16, 1, 2560 * 4), -127, dtype=torch.int8)
    weights = pack_int8(kernels(), weight, torch.ones(16), None)
    found = called(lambda p: p.product(as_bytes(levels), weights, grid=(1, 1, 6)))
    assert (found == -127.0 * 127 * 2560 * 4).all()


def convolved(*grid: int, **options: Any) -> dict[str, Any]:
    """A convolution of pictures of this size."""
    case = Case("fp32", *grid, 1, 8, 9)  # type: ignore[arg-type]
    return {"a": case.input()[0], "weights": case.packed(), "grid": grid, **options}


def gated(**options: Any) -> dict[str, Any]:
    return {"a": torch.zeros(8, 5), "weights": Case("fp32", 1, 1, 1, 1, 32, 1).packed(geglu=True), **options}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"a": torch.zeros(8, 8)}, "a: must be torch.uint8"),
        ({"a": torch.zeros(8, 16, dtype=torch.uint8)[:, ::2]}, "a: its memory layout is not the kernels'"),
        ({"grid": (1, 3, 3)}, r"a: must be torch.uint8 \[9, 8\]"),
        ({"residual": torch.zeros(8, 19)}, r"residual: must be torch.float32 \[8, 20\]"),
        ({"residual": torch.zeros(20, 8).t()}, "residual: its memory layout is not the kernels'"),
        ({"row_bias": torch.zeros(1, 20)}, r"row_bias: must be torch.float32 \[2, 20\]"),
        ({"inverse": torch.zeros(16)}, r"inverse: must be torch.float32 \[20\]"),
        ({"out": torch.zeros(8, 20, dtype=torch.uint8)}, "out: must be torch.float32"),
        ({"out": torch.zeros(8, 20), "inverse": torch.ones(20)}, "out: must be torch.uint8"),
        ({"a_scale": torch.ones(8)}, "weights by row, and no others, need scales of the input's rows"),
        ({"stride": 2}, "a linear layer has no stride"),
        ({"upsample": True}, "a linear layer has no stride and doubles nothing"),
        (lambda: convolved(1, 1, 4, before=0, stride=2), "1 pictures of 1×4 do not fit"),
        (lambda: convolved(1, 4, 4, stride=3), "stride 3 and padding 1 are unknown"),
        (lambda: convolved(1, 4, 4, before=2), "stride 1 and padding 2 are unknown"),
        (lambda: convolved(1, 4, 4, cut=(1, 0)), "1 rows and 0 columns cannot be cut from a map"),
        (lambda: convolved(1, 4, 4, upsample=True, cut=(0, 2)), "0 rows and 2 columns cannot be cut"),
        (lambda: gated(residual=torch.zeros(8, 32)), "nothing else is added to GEGLU"),
        (lambda: gated(row_bias=torch.zeros(2, 32)), "nothing else is added to GEGLU"),
    ],
)
def test_a_product_refuses_what_does_not_fit(changes: Any, said: str) -> None:
    options: dict[str, Any] = {"a": torch.zeros(8, 8, dtype=torch.uint8), "grid": (2, 2, 2)}
    options["weights"] = Case("int8", 1, 1, 1, 2, 20, 1).packed()
    options |= changes() if callable(changes) else changes
    with pytest.raises(ValueError, match=said):
        Program(kernels()).product(**options)


def test_every_activation_is_tested() -> None:
    assert EXACT.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize(
    ("weight", "options", "said"),
    [
        (torch.zeros(8, 1, 8, dtype=torch.int8), {"scale": torch.ones(7)}, r"scale of shape \[7\] does not fit 8"),
        (torch.zeros(8, 1, 8, dtype=torch.int8), {"bias": torch.ones(9)}, r"bias of shape \[9\] does not fit 8"),
        (torch.zeros(8, 1, 6, dtype=torch.int8), {}, "6 input channels do not fit the kernels: no multiple of 4"),
        (torch.zeros(8, 1, 8), {}, "must be int8, not torch.float32"),
        (torch.zeros(8, 25, 8, dtype=torch.int8), {}, "one tap or nine"),
        (torch.zeros(0, 1, 8, dtype=torch.int8), {}, "one tap or nine"),
        (torch.zeros(48, 1, 8, dtype=torch.int8), {"geglu": True}, "GEGLU of 48 columns"),
        (torch.zeros(1, 1, 2**18, dtype=torch.int8), {}, "sums could overflow"),
    ],
)
def test_weights_that_the_kernels_cannot_read_are_refused(weight: Tensor, options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pack_int8(kernels(), weight, **{"scale": torch.ones(len(weight)), "bias": None, **options})


def test_weights_elsewhere_are_refused() -> None:
    with pytest.raises(ValueError, match="weights are on meta, not on the CPU"):
        pack_float(kernels(), torch.zeros(8, 1, 8, device="meta"), torch.ones(8))
