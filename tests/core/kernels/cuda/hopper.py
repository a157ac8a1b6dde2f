"""Compiles Triton kernels for Hopper without one: the interpreter runs what the compiler refuses.

`check` runs a script in a process in which kernels are compiled, not interpreted; the script calls `made`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from tests.core.quant.stage import ROOT


def made(kernel: Any, types: dict[str, str], constants: dict[str, Any], wanted: str = "", **options: int) -> None:
    """Compile for sm_90 and assert that no register is spilled and that the PTX contains `wanted`.

    `types` of the arguments that are passed; those in neither are None. Pointers are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    absent = {name: None for name in names if name not in types and name not in constants}
    signature = {name: types.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in {**constants, **absent}.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "").startswith("*")}
    source = ASTSource(kernel, signature, values, aligned)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert ".local" not in code, f"{kernel.__name__}: registers were spilled"
    assert wanted in code, f"{kernel.__name__}: no {wanted}"


def check(script: str) -> None:
    """Run the script in the repository's root with a real compiler. Fails with its error."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    start = "from tests.core.kernels.cuda.hopper import made\n"
    done = subprocess.run(
        [sys.executable, "-c", start + script], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
