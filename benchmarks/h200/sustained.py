"""Finds the fastest tiles at the GPU's power limit and writes the table of `tiles.py`.

`python -m benchmarks.h200.sustained [--out folder]` runs every tile of SDXL's largest products at 16 rows until the
clocks have settled, and merges the winners, and those of `linear.json` and `conv.json` in the same folder for fewer
rows, into the device's table beside `tiles.py`. A short run at full clock favours other tiles than a server sees.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance, record
from benchmarks.h200.kernels import BF16, CONVS, INT8, LINEARS, draw
from benchmarks.h200.timing import Clocks
from core.kernels.cuda import conv, linear, tiles

Run = Callable[[int], Any]
ROWS = 16


def rate(run: Run, flop: float, seconds: float) -> tuple[float, dict[str, float]]:
    """Milliseconds of one run, and the clocks, after `seconds` of repeated runs."""
    for i in range(2):
        run(i)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph, count = torch.cuda.CUDAGraph(), max(4, int(0.01 / (flop / 1e15)))
    with torch.cuda.graph(graph):
        for i in range(count):
            run(i % 2)
    repeats = max(1, int(seconds / (count * flop / 1e15)))
    for _ in range(repeats):
        graph.replay()
    with Clocks() as clocks:
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats / count, clocks.summary()


def linear_run(kernel: str, n: int, k: int, rows: int) -> Callable[[tiles.Tile], Run]:
    xs, w, s = [draw(INT8, rows, k) for _ in range(2)], draw(INT8, n, k), torch.full((n,), 1e-4, device="cuda")
    b, inverse = torch.zeros(n, device="cuda"), torch.full((1,), 20.0, device="cuda")
    residual = torch.randn(rows, n, device="cuda", dtype=BF16) if n in (640, 1280) else None
    if kernel == "geglu":
        return lambda tile: lambda i: linear.linear_geglu_int8(xs[i], w, s, b, inverse, tile=tile)
    return lambda tile: lambda i: linear.linear_int8(xs[i], w, s, b, None, residual, tile=tile)


def conv_run(kernel: str, n: int, c: int, side: int, stride: int) -> Callable[[tiles.Tile], Run]:
    xs, b = [draw(INT8, ROWS, side, side, c) for _ in range(2)], torch.zeros(n, device="cuda")
    if kernel == "upsample":
        w4, s4 = draw(INT8, 4, n, 2, 2, c), torch.full((4, n), 1e-5, device="cuda")
        return lambda tile: lambda i: conv.upsample_conv3x3_int8(xs[i], w4, s4, b, tile=tile)
    w, s = draw(INT8, n, 3, 3, c), torch.full((n,), 1e-5, device="cuda")
    residual = torch.randn(ROWS, side, side, n, device="cuda", dtype=BF16) if stride == 1 else None
    return lambda tile: lambda i: conv.conv3x3_int8(xs[i], w, s, b, None, residual, stride, tile=tile)


def merge(table: dict[str, Any], found: dict[str, Any]) -> None:
    for kernel, shapes in found.items():
        for shape, winners in shapes.items():
            table.setdefault(kernel, {}).setdefault(shape, {}).update(winners)


def write(table: dict[str, Any], path: Path) -> None:
    """One line a shape."""
    kernels = []
    for kernel, shapes in table.items():
        lines = ",\n".join(f'  "{shape}": {json.dumps(winners)}' for shape, winners in shapes.items())
        kernels.append(f' "{kernel}": {{\n{lines}\n }}')
    path.write_text("{\n" + ",\n".join(kernels) + "\n}\n")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    parser.add_argument("--seconds", type=float, default=0.15)
    options = parser.parse_args()
    torch.manual_seed(0)
    work: list[tuple[str, int, int, int, Callable[[], Callable[[tiles.Tile], Run]]]] = [
        (kernel, n, k, ROWS * tokens, lambda a=(kernel, n, k, ROWS * tokens): linear_run(*a))  # type: ignore[misc]
        for kernel, n, k, tokens in LINEARS
    ]
    for kernel, n, c, side, stride in CONVS:
        out = 2 * side if kernel == "upsample" else side // stride
        depth, shape = (4 if kernel == "upsample" else 9) * c, (kernel, n, c, side, stride)
        work.append((kernel, n, depth, ROWS * out * out, lambda a=shape: conv_run(*a)))  # type: ignore[misc]
    found: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for kernel, n, depth, count, make in work:
        run, flop, results = make(), 2.0 * count * n * depth, {}
        for tile in tiles.candidates(n, gated=kernel == "geglu"):
            if tile.rows * tile.columns >= 128 * 128:
                results[tile] = rate(run(tile), flop, options.seconds)
        best = min(results, key=lambda t: results[t][0])
        winner = [best.blocks, best.columns, best.cluster, best.turns]
        found.setdefault(kernel, {}).setdefault(f"{n},{depth}", {})[str(tiles.bucket(count))] = winner
        rows[f"{kernel} {count}x{n}x{depth}"] = {str(t): result for t, result in results.items()}
        ms, clocks = results[best]
        print(
            f"{kernel} {count}x{n}x{depth}",
            winner,
            f"{ms:.4f} ms",
            f"{flop / ms / 1e9:.0f} TFLOP/s",
            clocks,
            flush=True,
        )
    device = "_".join(torch.cuda.get_device_name().lower().split())
    table = dict(tiles.table(torch.cuda.get_device_name()))
    for kind in ("linear", "conv"):
        path = options.out / f"{kind}.json"
        if path.is_file():
            merge(table, json.loads(path.read_text())[kind]["tiles"])
    merge(table, found)
    options.out.mkdir(parents=True, exist_ok=True)
    rooms = (*provenance.QUANTIZATION, "benchmarks/h200/sustained.py")
    record.write("sustained", {"table": found, "rows": rows}, options.out, rooms=rooms)
    for path in (options.out / f"{device}.json", Path(tiles.__file__).with_name(f"{device}.json")):
        write(table, path)


if __name__ == "__main__":
    main()
