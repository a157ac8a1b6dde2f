"""A small network with all that recipes speak of, and what its layers read: for the tests of quantization."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.quant.convert import Recipe, Rule
from core.quant.samples import Samples
from core.quant.statistics import Statistics
from tests.core.quant.stage import normal


class Block(nn.Module):
    """A convolution of two halves of different range, attention-like projections of one input, and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.to_q, self.to_k, self.to_v = nn.Linear(width, 16), nn.Linear(width, 16, bias=False), nn.Linear(width, 48)
        self.out = nn.Linear(48, width)
        self.head = nn.Linear(width, 4)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """[B, width, h, w] to [B, h · w, 4]."""
        h = F.silu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        made = F.scaled_dot_product_attention(self.to_q(h), self.to_k(h), self.to_v(h))
        return self.head(h + self.out(made))  # type: ignore[no-any-return]


def block(seed: int = 0, *, outliers: float = 1.0) -> Block:
    """With random weights; `outliers` is how much two channels of what projections read stand out."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Block().eval().requires_grad_(False)
    made.norm.weight[:2] *= outliers
    made.norm.bias[:2] += 0.5 * outliers
    for layer in (made.to_q, made.to_k, made.to_v):
        layer.weight[:, :2] /= outliers
    return made


def inputs(seed: int, batch: int = 2) -> Tensor:
    x = normal(seed, batch, 32, 6, 6)
    x[:, :16] *= 20  # the first half stands out
    return x


def recipe(*, alpha: float | None = 0.5) -> Recipe:
    return Recipe(
        name="block",
        rules=(
            Rule(r"head", reason="its errors are the answer's"),
            Rule(r"conv", alpha=None),
            Rule(r"to_[qkv]|out", alpha=alpha),
        ),
        shares=lambda name: "qkv" if name.startswith("to_") else name,
        halves=lambda name: 16 if name == "conv" else None,
    )


TWO = Recipe("two", (Rule("first|second", alpha=0.5),))


def observed_two(model: nn.Module, x: Tensor, *, sampled: bool = True) -> Statistics:
    """What two layers read, with rows of it."""
    found = Statistics("two", samples=Samples(["first", "second"], 1000) if sampled else None)
    with found.observe(model, ["first", "second"], 0):
        model(x)
    return found


def squared_error(quantized: nn.Module, model: nn.Module, x: Tensor) -> float:
    """Relative."""
    expected = model(x)
    return float((quantized(x) - expected).square().sum() / expected.square().sum())


LAYERS = ("conv", "to_q", "to_k", "to_v", "out")


def observed(model: nn.Module, layers: Sequence[str] = LAYERS, *, batches: int = 3, steps: int = 2) -> Statistics:
    found = Statistics("digest")
    for batch in range(batches):
        for step in range(steps):
            with found.observe(model, layers, step), torch.inference_mode():
                model(inputs(10 * batch + step))
    return found


def same(a: Statistics, b: Statistics) -> bool:
    tables = zip((a.largest, a.smallest, a.typical), (b.largest, b.smallest, b.typical), strict=True)
    equal = all(x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x) for x, y in tables)
    return equal and (a.model, a.data, a.batches) == (b.model, b.data, b.batches)
