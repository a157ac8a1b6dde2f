"""How this folder's Triton kernels are compiled and chained: once for any number of rows, and early where asked.

While decoding, a few microseconds pass between a kernel's end and the next one's first bytes, as long as a small
product itself takes. A kernel that is launched early (CUDA's programmatic dependent launch) is on its multiprocessors
by then, and has asked for weights, which nobody writes; then it waits for all that went before. Knows Triton's
decorator and Hopper's instructions; knows nothing of what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.quant.kernels.cuda.language import tl, triton


def kernel(*free: str) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` that compiles nothing anew for special values (1, multiples of 16) of the arguments named.

    The function itself where there is no Triton; it then cannot be launched.
    """

    def made(function: Callable[..., None]) -> Any:
        return function if triton is None else triton.jit(function, do_not_specialize=list(free))

    return made


@kernel()
def let_next(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a kernel does first: the next one may come onto multiprocessors that have room."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@kernel()
def wait(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a kernel does before it reads what others write, or writes: those before it have ended.

    Everybody waits, and nobody ends before he has waited, so that all kernels before have ended.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()


@kernel()
def enter(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both, for kernels that have nothing to ask for before."""
    let_next(EARLY)
    wait(EARLY)


@kernel()
def fetch(rows, BYTES: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bring the first bytes of rows, a multiple of 16 at pointers that are such, from memory into the L2."""
    if EARLY:
        size = tl.full(rows.shape, BYTES, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [rows.to(tl.int64), size],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def options(early: bool) -> dict[str, Any]:
    """Launch options: only where they are wanted, since the interpreter knows none of them."""
    return {"launch_pdl": True} if early else {}
