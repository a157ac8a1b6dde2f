"""Compiled code for static shapes: runs eagerly at first, compiled as soon as compilation in the background is done.

One executable per (phase, rows, size).
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.threads import lower_priority, started

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutableKey:
    """Key of an executable. `size` is whatever else fixes its shapes, such as (height, width) of the latents.

    `chunks` fix shapes, too, those of texts, and hardly its cost. `variant`: what else is launched, such as LoRAs.
    """

    phase: str
    rows: int
    size: Hashable
    chunks: int = 1
    variant: Hashable = None

    @property
    def shape(self) -> Hashable:
        """All that a recording is distinguished by within its phase."""
        return self.rows, self.size, self.chunks, self.variant


def compiler() -> str | None:
    """The C++ compiler for CPU code generation, or None: then there is no compiled code on a CPU."""
    for candidate in (os.environ.get("CXX", ""), "g++", "clang++"):
        if candidate and shutil.which(candidate):
            return candidate
    return None


def _keep_in(cache: Path) -> None:
    """Set Inductor's cache folder, unless the user has; torch's default is a temporary folder."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    cache.mkdir(parents=True, exist_ok=True)
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)


class CompiledCache:
    """Looks up the fastest way to run a phase, and compiles requested shapes in the background.

    Compiled code is kept in `cache` between starts (Inductor's and AOTAutograd's caches; valid only for the same
    versions of torch, compiler and processor, which they check themselves). A phase that does not compile stays eager,
    and the reason is logged.
    """

    def __init__(self, phases: dict[str, Callable[..., Any]], *, compiled: bool, cache: Path | None = None) -> None:
        self._eager = phases
        self._compiled: dict[ExecutableKey, Callable[..., Any]] = {}
        self._wanted: set[ExecutableKey] = set()
        self._failed: dict[str, str] = {}
        self._jobs: deque[tuple[ExecutableKey, Callable[[Callable[..., Any]], Any]]] = deque()
        self._thread: threading.Thread | None = None
        self._pending = 0
        self._idle = threading.Condition()
        self.enabled = compiled
        if not compiled:
            return
        if compiler() is None:
            log.warning("no C++ compiler (CXX, g++, clang++) was found: images are generated in eager mode")
            self.enabled = False
            return
        if cache is not None:
            _keep_in(cache)
        # Every bucket is one entry of a function's cache; beyond the limit, torch would silently fall back to eager.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        torch._inductor.config.compile_threads = 1  # the other cores are serving

    def eager(self, phase: str) -> Callable[..., Any]:
        return self._eager[phase]

    def find(self, key: ExecutableKey) -> Callable[..., Any] | None:
        """The compiled executable for exactly this shape, or None."""
        return self._compiled.get(key)

    def buckets(self, phase: str, size: Hashable) -> Sequence[int]:
        """The numbers of rows for which this phase is compiled at this size, ascending."""
        return sorted(key.rows for key in list(self._compiled) if key.phase == phase and key.size == size)

    def want(self, key: ExecutableKey, example: Callable[[Callable[..., Any]], Any]) -> None:
        """Request an executable. `example(fn)` runs fn on inputs of the right shapes, on the background thread."""
        if not self.enabled or key in self._wanted or key.phase in self._failed:
            return
        self._wanted.add(key)
        with self._idle:
            self._pending += 1
            self._jobs.append((key, example))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="compile", daemon=True)
                self._thread = thread if started(thread) else None  # then the next request starts it

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until all requested shapes are compiled or have failed."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending == 0, timeout_s)

    def close(self) -> None:
        """Drop queued compilations; the running one ends by itself."""
        with self._idle:
            self._pending -= len(self._jobs)
            self._jobs.clear()
            self._idle.notify_all()

    @property
    def failed(self) -> dict[str, str]:
        """Phases that did not compile, and why."""
        return dict(self._failed)

    def _run(self) -> None:
        lower_priority("compiling")  # which the compiler's processes inherit
        while True:
            with self._idle:
                if not self._jobs:
                    # Ends rather than waits: a thread that computed keeps a team of OpenMP threads (see Lane).
                    self._thread = None
                    return
                key, example = self._jobs.popleft()
            try:
                self._build(key, example)
            except Exception as error:
                reason = (str(error).strip().splitlines() or [""])[0][:300]
                self._failed[key.phase] = f"{type(error).__name__}: {reason}"
                log.warning("%s does not compile and stays eager (%s)", key.phase, self._failed[key.phase])
                log.debug("%s does not compile", key.phase, exc_info=error)
            finally:
                with self._idle:
                    self._pending -= 1
                    self._idle.notify_all()

    def _build(self, key: ExecutableKey, example: Callable[[Callable[..., Any]], Any]) -> None:
        started = time.monotonic()
        function = torch.compile(self._eager[key.phase], dynamic=False, fullgraph=True)
        with torch.inference_mode():
            example(function)
            example(function)  # the second call uses the code that the first one made, or shows that it cannot
        self._compiled[key] = function
        log.info("compiled %s at %d rows, %s, in %.1f s", key.phase, key.rows, key.size, time.monotonic() - started)
