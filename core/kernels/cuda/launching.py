"""Compiles and launches this folder's Triton kernels: once for any number of rows, with programmatic dependent launch
on request.

In decode, a microsecond or two pass between a kernel's end and the next one's start, as long as the smaller kernels
take. A kernel launched early (CUDA's programmatic dependent launch) is on its multiprocessors by then, and waits there
for the previous one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.kernels.cuda.language import tl, triton


def kernel(*free: str) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` that does not specialize on values (1, multiples of 16) of the arguments named.

    Returns the function itself without Triton; it then cannot be launched.
    """

    def made(function: Callable[..., None]) -> Any:
        return function if triton is None else triton.jit(function, do_not_specialize=list(free))

    return made


LATE, EAGER = 1, 2  # when a kernel lets the next one start: after its own wait, or at once; 0 is never


@kernel()
def enter(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until all previous kernels have ended: called before a kernel reads others' results, or writes.

    Every kernel waits, and none ends before it has waited, so that all previous kernels have ended, not only the last
    one.
    """
    if EARLY == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if EARLY > 0:
        tl.extra.cuda.gdc_wait()
    if EARLY == 1:
        tl.extra.cuda.gdc_launch_dependents()


def options(early: int) -> dict[str, Any]:
    """Launch options: only where needed, since the interpreter supports none of them."""
    return {"launch_pdl": True} if early else {}
