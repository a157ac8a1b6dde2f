"""No kernel reads or writes one byte outside of what it was given."""

from __future__ import annotations

import signal

from tests.children import in_fork
from tests.core.kernels.cpu import walls
from tests.core.quant.stage import kernels


def test_no_kernel_touches_what_is_not_its_own() -> None:
    library = kernels()
    assert in_fork(lambda: walls.check(library)) == 0, "a kernel touched what is not its own, or failed"


def test_the_walls_stand() -> None:
    library = kernels()
    assert in_fork(lambda: walls.touch(library)) == -signal.SIGSEGV
