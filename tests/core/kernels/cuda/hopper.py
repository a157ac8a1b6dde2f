"""Compiles Triton kernels for Hopper without one: the interpreter runs what the compiler refuses.

`errors` runs scripts in a process in which kernels are compiled, not interpreted; they call `made`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from typing import Any

from tests.core.quant.stage import ROOT


def made(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], wanted: str = "", *, stack: int = 0, **options: int
) -> None:
    """Compile for sm_90 and assert that no register is spilled and that the PTX contains `wanted`.

    `types` of the arguments that are passed; those in neither are None. Pointers are multiples of 16, and numbers whose
    type ends in ":16". `stack`: bytes that a thread may spill nevertheless.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    absent = {name: None for name in names if name not in types and name not in constants}
    signature = {name: types.get(name, "constexpr").removesuffix(":16") for name in names}
    values = {(names.index(name),): value for name, value in {**constants, **absent}.items()}
    even = {name for name, kind in types.items() if kind.startswith("*") or kind.endswith(":16")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in even}
    source = ASTSource(kernel, signature, values, aligned)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    spilled = stack_bytes(code["cubin"])
    assert ".local" not in code["ptx"] and spilled <= stack, f"{kernel.__name__}: {spilled} bytes of registers spilled"
    assert wanted in code["ptx"], f"{kernel.__name__}: no {wanted}"


def stack_bytes(cubin: bytes) -> int:
    """Of a thread, in a compiled program: where the assembler spills registers to."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return sum(map(int, re.findall(r"STACK:(\d+)", told)))


def errors(scripts: Mapping[str, str]) -> dict[str, str]:
    """Run the scripts in one process in the repository's root with a real compiler; the errors of those that failed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.kernels.cuda.hopper"], cwd=ROOT, env=environment, input=json.dumps(scripts),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    found = {}
    for name, script in json.load(sys.stdin).items():
        try:
            exec(script, {"made": made})
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
