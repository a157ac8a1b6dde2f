"""Measures GPU time by medians between events, over several input sets to defeat caches, and clocks by nvidia-smi."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def milliseconds(run: Callable[[int], Any], *, sets: int = 1, warm: int = 3, repeats: int = 10) -> float:
    """Median device time of `run(i)`, with i cycling over `sets` sets of inputs.

    The device sleeps until everything is submitted; otherwise short kernels would be timed by their launches.
    """
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


def sustained(run: Callable[[], Any], repeats: int) -> float:
    """Mean device time of `repeats` consecutive runs, as on a busy server after the clocks have settled."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats


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
        busy = [s for s in self.samples if s[1] > 200] or self.samples
        if not busy:
            return {}
        mean = [round(statistics.mean(column), 1) for column in zip(*busy, strict=True)]
        return {"sm_mhz": mean[0], "power_w": mean[1], "celsius": max(s[2] for s in busy), "samples": len(busy)}


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows with columns aligned."""
    text = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    for row in text:
        print(
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
        )
