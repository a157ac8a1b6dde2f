"""What the tests of quantization share: the compiled kernels, calls of them on given tensors, and plain references.

Calls go through `TokenProgram`, as everything does; references are PyTorch in 64 bits.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from core.kernels.cpu.library import KernelsUnavailable, library
from core.kernels.cpu.token_program import TokenProgram

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / ".pytest_cache" / "d" / "kernels"
CANARY = 0xA5

# What properties are drawn for: `@given(...)` reads it from the types of a test's arguments.
Few = Annotated[int, st.integers(1, 3)]
Several = Annotated[int, st.integers(1, 9)]
Many = Annotated[int, st.integers(1, 60)]
Seed = Annotated[int, st.integers(0, 999)]


@functools.cache
def kernels() -> ctypes.CDLL:
    """The real kernels, compiled once for all runs of the tests; skips where this machine has none, with the reason."""
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        with (CACHE / "lock").open("w") as lock:  # one process compiles, and others wait for it
            fcntl.flock(lock, fcntl.LOCK_EX)
            return library(CACHE)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def warm(cache_dir: Path) -> Path:
    """A cache of compiled code and variants of its own that has the compiled kernels: compiling takes many seconds."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    if not (cache_dir / CACHE.name).exists():
        (cache_dir / CACHE.name).symlink_to(CACHE)
    return cache_dir


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for torch and for the kernels, which share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Watched(TokenProgram):
    """A program whose buffers lie between canaries, looked at after each run."""

    def __init__(self) -> None:
        super().__init__(kernels())
        self._walls: list[Tensor] = []

    def buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        memory = torch.full((count + 256,), CANARY, dtype=torch.uint8)
        self._walls += [memory[:128], memory[-128:]]
        found = memory[128:-128].view(dtype).view(shape)
        self._lent[found.data_ptr()] = found.numel()
        return found

    def run(self) -> None:
        super().run()
        assert all((wall == CANARY).all() for wall in self._walls), "a kernel wrote outside of its output"


def called(write: Callable[[TokenProgram], Tensor]) -> Tensor:
    """What a call returns, which `write` writes down."""
    program = Watched()
    out = write(program)
    program.run()
    return out.clone()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TwoLayers(nn.Module):
    """Two layers, whose first input has channels of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(300, 40), nn.Linear(40, 8, bias=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed)) * scale


def whole(seed: int, *shape: int, least: int = -127, most: int = 127) -> Tensor:
    """int8 numbers, the extremes among them."""
    return torch.randint(least, most + 1, shape, generator=seeded(seed)).to(torch.int8)


def as_bytes(levels: Tensor) -> Tensor:
    """int8 levels as the kernels read them: around 128."""
    return (levels.int() + 128).to(torch.uint8)


def as_levels(found: Tensor) -> Tensor:
    return found.int() - 128


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, of the whole."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def check_bytes(found: Tensor, scaled: Tensor) -> None:
    """Bytes are `scaled`, clamped and rounded; where that is a toss-up between two levels, either."""
    wanted = scaled.double().clamp(-127, 127)
    off = (as_levels(found) - wanted).abs()
    assert off.max() <= 0.5 + 1e-3, f"off by {off.max()} levels"


def check(found: Tensor, wanted: Tensor, inverse: Tensor | None = None, *, relative: float = 2e-6) -> None:
    """Floats as `check_close`, and what `inverse` quantizes as `check_bytes`."""
    if inverse is None:
        check_close(found, wanted, relative=relative)
    else:
        check_bytes(found, wanted * inverse.double())


def check_close(found: Tensor, wanted: Tensor, *, relative: float = 2e-6, least: float = 1e-6) -> None:
    """Within `relative` of the largest magnitude."""
    assert found.shape == wanted.shape and found.isfinite().all()
    error = (found.double() - wanted.double()).abs().max()
    assert error <= relative * wanted.abs().max() + least, f"off by {error} of {wanted.abs().max()}"
