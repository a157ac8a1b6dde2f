"""How this folder's Triton kernels are compiled and chained: once for any number of rows, and early where asked.

While decoding, a microsecond or two pass between a kernel's end and the next one's beginning, as long as the smaller
ones take. A kernel that is launched early (CUDA's programmatic dependent launch) is on its multiprocessors by then, and
waits there for what went before. Knows Triton's decorator and Hopper's instructions; knows nothing of what is computed.
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


LATE, EAGER = 1, 2  # when a kernel lets the next one come: once it has waited itself, or at once; 0 is never


@kernel()
def enter(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a kernel does before it reads what others write, or writes: wait until all those before it have ended.

    Everybody waits, and nobody ends before he has waited, so that all kernels before have ended, not the last one only.
    """
    if EARLY == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if EARLY > 0:
        tl.extra.cuda.gdc_wait()
    if EARLY == 1:
        tl.extra.cuda.gdc_launch_dependents()


def options(early: int) -> dict[str, Any]:
    """Launch options: only where they are wanted, since the interpreter knows none of them."""
    return {"launch_pdl": True} if early else {}
