"""Starts the rungs' processes, and finds the stock pipeline's fastest variant."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from core.config import Settings
from core.threads import cores
from lab.bench.harness import provenance
from lab.bench.harness.processes import PREPARED_S, AnsweringProcess
from lab.bench.harness.turns import LeftOut
from lab.bench.harness.variants import BATCHES, BestVariant, Variant
from lab.bench.rungs import ENGINE, STOCK, first_request

COMPILE_S = 300.0  # for torch's compiler
NATIVE, AVX2 = "native", "avx2"
COMMAND = (sys.executable, "-m", "lab.bench.rungs")


@dataclass(frozen=True)
class Launcher:
    """Starts rungs' processes with the settings that all share."""

    settings: Settings
    steps: int
    student: str | None
    environment: Mapping[str, str]
    compile_limit_s: float

    def start(
        self, name: str, stack: ExitStack, variant: Variant | None = None
    ) -> tuple[AnsweringProcess, dict[str, Any]]:
        """A rung's process and what it says once it is prepared. Raises `LeftOut`; then it has ended."""
        threads = variant.threads if variant is not None else self.settings.threads
        environment = {**self.environment, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        request = first_request(name, self.settings, self.steps, self.student, variant)
        with ExitStack() as starting:
            process = starting.enter_context(AnsweringProcess(request, environment, COMMAND))
            compiles = name in ENGINE and ENGINE[name].compile
            try:
                description = process.answer(self.compile_limit_s + PREPARED_S if compiles else PREPARED_S)
            except LeftOut as error:
                raise LeftOut(f"torch.compile {error}" if compiles and "took" in str(error) else str(error)) from None
            stack.push(starting.pop_all())
        return process, description


def best_stock(launcher: Launcher, *, alone: bool = False) -> tuple[Variant, int, list[dict[str, Any]]]:
    """The stock pipeline's fastest variant, in how many processes, and all trials. Raises `LeftOut` if there is none.

    `alone` is for one image at a time.
    """
    from core.graphs import compiler

    limit_s = launcher.compile_limit_s if compiler() is not None else 0.0
    batches: list[dict[str, Any]] = [{"batch": batch} for batch in BATCHES if not alone]
    changes: list[dict[str, Any]] = [
        *batches, {"channels_last": True}, {"bf16": True}, {"channels_last": True}, *batches,
        *([{"compile": True}, *batches] if limit_s > 0 else []),
    ]  # fmt: skip
    search = BestVariant(
        lambda variant, stack: launcher.start(STOCK, stack, variant)[0], changes,
        Variant(threads=launcher.settings.threads or cores()),
    )  # fmt: skip
    variant, count = search.find(processes=not alone, compile_limit_s=limit_s)
    return variant, count, search.trials


def environment_of(settings: Settings, instructions: str = NATIVE) -> dict[str, str]:
    """The environment of the rungs' processes, without this project's settings, which are given to each."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    path = os.pathsep.join(filter(None, (str(provenance.ROOT), environment.get("PYTHONPATH"))))
    environment["PYTHONPATH"] = path
    if instructions == NATIVE:
        return environment
    compiler = settings.compiled_code.expanduser() / "avx2" / "c++"
    compiler.parent.mkdir(parents=True, exist_ok=True)
    path = next(filter(None, map(shutil.which, (environment.get("CXX", ""), "g++", "clang++"))), "no-compiler")
    compiler.write_text(f'#!/bin/sh\nexec {path} -mno-avx512f "$@"\n')
    compiler.chmod(0o755)
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    return environment | limits | {"CXX": str(compiler)}
