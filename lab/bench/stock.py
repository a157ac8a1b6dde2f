"""Measures diffusers' own SDXL pipeline on a GPU: eager, and compiled by torch, one image at a time and in batches.

The model has random weights in bf16, UNet and VAE channels last, and 20 Euler steps with guidance, as in
`lab.bench.engine`. Compiled rows compile the UNet and the VAE's decoder for static shapes, with fused projections of
queries, keys and values.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from lab.bench.harness import command, models, record
from pipeline.checkpoints import sdxl, tiny

MODES = {"eager": "", "compiled": "default", "autotuned": "max-autotune-no-cudagraphs"}
"""By row the mode of torch.compile."""


def compile_(pipeline: Any, mode: str) -> None:
    """Compile the network and the decoder of a pipeline in place."""
    pipeline.fuse_qkv_projections()
    pipeline.unet = torch.compile(pipeline.unet, mode=mode, fullgraph=True, dynamic=False)
    pipeline.vae.decode = torch.compile(pipeline.vae.decode, mode=mode, dynamic=False)


def seconds(pipeline: Any, side: int, batch: int) -> float:
    """Seconds of one batch, from prompts to pixels on the host."""
    started = time.perf_counter()
    pipeline(
        [f"stock {image}: a small red boat on a lake" for image in range(batch)], height=side, width=side,
        num_inference_steps=models.STEPS, guidance_scale=models.GUIDANCE,
        generator=[torch.Generator().manual_seed(image) for image in range(batch)],
    )  # fmt: skip
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("stock", __doc__)
    parser.add_argument("--modes", default=",".join(MODES), help="default: %(default)s")
    parser.add_argument("--batches", default="8,1", help="images of a batch; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="batches of a row, after one that warms up")
    options = parser.parse_args(arguments)
    names, batches = command.names(options.modes, MODES, "--modes"), [int(text) for text in options.batches.split(",")]
    rows: list[dict[str, Any]] = []
    with record.alone(), torch.inference_mode():
        for name in names:
            for batch in batches:
                torch.compiler.reset()
                source = models.model(tiny.TINY if options.tiny else sdxl.NAME, options.device)
                pipeline = models.stock_pipeline(source)
                if MODES[name]:
                    compile_(pipeline, MODES[name])
                first_s = seconds(pipeline, source.native, batch)
                taken = sum(seconds(pipeline, source.native, batch) for _ in range(options.rounds))
                rate = batch * options.rounds / taken
                rows.append({"name": name, "batch": batch, "images_s": round(rate, 4), "first_s": round(first_s, 2)})
                record.progress(f"{name}, batches of {batch}: {rate:.3f} images/s, the first took {first_s:.1f} s")
                record.publish("stock", {"rows": rows}, options.results, verbose=len(rows) == len(names) * len(batches))
    return 0


if __name__ == "__main__":
    sys.exit(main())
