"""Measures each phase of SDXL at each width as a CUDA graph, to compare two versions of the code in one run.

    python -m benchmarks.h200.phases --out new.json [--against old.json]

Medians of windows of consecutive replays. Weights are random: speeds are real, images are not. `--against` prints the
ratio of each phase to an earlier file's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200 import sources
from benchmarks.h200.timing import sustained, table
from contract.plan import BLOCK
from core.cuda_graphs import CapturedGraph, CudaRecorder
from pipeline.families.sdxl.conditioning import embed
from pipeline.families.sdxl.parts import tokenizers
from pipeline.phases import on_gpu

ROWS = (16, 14, 12, 8, 4, 2)
WINDOWS, WINDOW_MS = 5, 150.0


def measured(run: Callable[[], Any]) -> float:
    """Milliseconds of one replay: the median over windows."""
    graph = CapturedGraph(run, (), {}, CudaRecorder(torch.device("cuda")))
    once = sustained(graph, 3)
    repeats = max(2, round(WINDOW_MS / once))
    return statistics.median(sustained(graph, repeats) for _ in range(WINDOWS))


@torch.inference_mode()
def phases() -> dict[str, float]:
    """Milliseconds by phase and width, INT8."""
    source = sources.model()
    model = sources.variant(source, "int8", sources.ranges(source, 1))
    unet, decoder, _, _ = on_gpu(model, max(ROWS))
    found: dict[str, float] = {}
    for rows in ROWS:
        given = sources.inputs(source, rows)
        conditions = {"text_embeds": given["pooled"], "time_ids": given["ids"].to(torch.bfloat16)}
        sample, time, kv = given["latents"].to(torch.bfloat16), given["timestep"], unet.prepare_text(given["text"])
        _, *features = unet.deep(sample, time, kv, added_cond_kwargs=conditions)
        kept = tuple(part.clone() for part in unet.kept(features, BLOCK))
        found[f"deep {rows}"] = measured(lambda: unet.deep(sample, time, kv, added_cond_kwargs=conditions))  # noqa: B023
        found[f"shallow {rows}"] = measured(
            lambda: unet.shallow(BLOCK, kept, sample, time, added_cond_kwargs=conditions)  # noqa: B023
        )
    text = sources.inputs(source, 2)["text"]
    found["keys 2"] = measured(lambda: unet.prepare_text(text))
    for rows in (1, 2, 4):
        latents = torch.randn(rows, 4, 128, 128, device="cuda")
        found[f"vae {rows}"] = measured(lambda: decoder(latents))  # noqa: B023
    ids = [torch.zeros(2, t.model_max_length, dtype=torch.long, device="cuda") for t in tokenizers(model)]
    found["text 2"] = measured(lambda: embed(model, ids))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    found = phases()
    options.out.write_text(json.dumps(found, indent=1))
    before = json.loads(options.against.read_text()) if options.against else {}
    rows = [(name, f"{ms:.3f}", f"{ms / before[name]:.3f}" if name in before else "") for name, ms in found.items()]
    table(("phase", "ms", "ratio"), rows)


if __name__ == "__main__":
    main()
