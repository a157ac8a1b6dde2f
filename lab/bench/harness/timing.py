"""Times callables, on a GPU between events, with the clocks of the card meanwhile."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from core.cuda_graphs import CapturedGraph, CudaRecorder

Run = Callable[[], Any]


def elapsed_ms(run: Run) -> float:
    """Milliseconds of one call, by the clock."""
    started = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - started)


# -- on a GPU; on a CPU, where that is for rehearsals, one call by the clock -------------------------------------------


def milliseconds(run: Callable[[int], Any], *, sets: int = 1, warm: int = 3, repeats: int = 10) -> float:
    """Median device time of `run(i)`, with i cycling over `sets` sets of inputs to defeat caches.

    The device sleeps until everything is submitted; otherwise short kernels would be timed by their launches.
    """
    if not torch.cuda.is_available():
        return elapsed_ms(lambda: run(0))
    for i in range(max(warm, sets)):
        run(i % sets)
    torch.cuda._sleep(1_000_000 * repeats)  # cycles: half a millisecond a launch
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for i, (start, end) in enumerate(events):
        start.record()
        run(i % sets)
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events))


def sustained(run: Run, repeats: int) -> float:
    """Mean device time of `repeats` consecutive calls, as on a busy server after the clocks have settled, in ms."""
    if not torch.cuda.is_available():
        return elapsed_ms(run)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats


def window_ms(run: Run, *, graph: bool = True, windows: int = 5, window_s: float = 0.15) -> float:
    """Milliseconds of one call, the median over windows of consecutive ones; on a GPU as a CUDA graph."""
    if not torch.cuda.is_available():
        return elapsed_ms(run)
    ready = CapturedGraph(run, (), {}, CudaRecorder(torch.device("cuda"))) if graph else run
    repeats = max(2, round(1000 * window_s / sustained(ready, 3)))
    return statistics.median(sustained(ready, repeats) for _ in range(windows))


class Clocks:
    """Context: samples clock, power and temperature every 200 ms; nothing on a machine without nvidia-smi."""

    _FIELDS = ("clocks.sm", "power.draw", "temperature.gpu")

    def __enter__(self) -> Clocks:
        self.samples: list[list[float]] = []
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi") is None:
            return self
        query = ["nvidia-smi", f"--query-gpu={','.join(self._FIELDS)}", "--format=csv,noheader,nounits", "-lms", "200"]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        return self

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            try:
                self.samples.append([float(part) for part in line.split(",")])
            except ValueError:
                continue

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def summary(self) -> dict[str, float]:
        """Means while the device drew more than 200 W, and the highest temperature."""
        busy = [sample for sample in self.samples if sample[1] > 200] or self.samples
        if not busy:
            return {}
        mean = [round(statistics.mean(column), 1) for column in zip(*busy, strict=True)]
        return {"sm_mhz": mean[0], "power_w": mean[1], "celsius": max(s[2] for s in busy), "samples": len(busy)}
