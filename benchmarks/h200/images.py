"""Images a second of the whole of SDXL at 1024²: prompts in, pixels on the host, in 8 bits, with and without DeepCache.

`python -m benchmarks.h200.images [--out folder]`. One request batch is 8 pictures of 20 Euler steps with guidance: both
text encoders over 16 prompts, keys and values, 20 UNet forwards of 16 rows, the VAE, and the copy of the bytes to the
host. Tokenizing and PNG are not in it. Weights are random (`sources.py`). Knows graphs and clocks, no kernels.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200 import sources
from benchmarks.h200.decoder import FusedDecoder
from benchmarks.h200.network import FusedUNet
from benchmarks.h200.timing import Clocks, table
from benchmarks.h200.unet import KINDS, calibrate, captured, sigmas

PICTURES = 8


class Pipeline:
    """Every stage as a CUDA graph over static tensors."""

    def __init__(self, model: FusedUNet, decoder: FusedDecoder, encoders: list[Any]) -> None:
        rows = 2 * PICTURES
        g = torch.Generator("cuda").manual_seed(7)
        self.tokens = torch.randint(0, 49000, (rows, 77), device="cuda")
        self.tokens[:, -1] = 49407
        self.noise = torch.randn(PICTURES, 4, 128, 128, generator=g, device="cuda")
        self.x = self.noise.clone()
        self.timestep = torch.zeros(rows, device="cuda")
        self.now, self.change = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
        self.host = torch.empty(PICTURES, 3, 1024, 1024, dtype=torch.uint8, pin_memory=True)
        ids = sources.inputs(rows)["ids"]

        def encode() -> tuple[list[Tensor], Tensor]:
            small = encoders[0](self.tokens, output_hidden_states=True)
            large = encoders[1](self.tokens, output_hidden_states=True)
            text = torch.cat([small.hidden_states[-2], large.hidden_states[-2]], dim=-1)
            return model.contexts(text), large.text_embeds

        self.encode, (contexts, pooled) = captured(encode)

        def step(forward: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
            def run() -> Tensor:
                scaled = (self.x / (self.now.square() + 1).sqrt()).repeat(2, 1, 1, 1)
                without, given = forward(scaled, model.times(self.timestep, pooled, ids)).float().chunk(2)
                return self.x.add_((without + 8.0 * (given - without)) * self.change)

            return run

        self.deep, _ = captured(step(lambda x, times: model.forward(x, times, contexts)))
        self.shallow, _ = captured(step(model.shallow))
        self.decode, self.pixels = captured(lambda: decoder.forward(self.x).mul(255).round().to(torch.uint8))

    def __call__(self, interval: int) -> None:
        """One batch; every `interval`-th step is deep."""
        steps, levels = sigmas()
        self.encode.replay()
        self.x.copy_(self.noise).mul_((levels[0] ** 2 + 1) ** 0.5)
        for i, (t, now, after) in enumerate(zip(steps, levels, levels[1:], strict=False)):
            self.timestep.fill_(t)
            self.now.fill_(now)
            self.change.fill_(after - now)
            (self.deep if i % interval == 0 else self.shallow).replay()
        self.decode.replay()
        self.host.copy_(self.pixels, non_blocking=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    parser.add_argument("--kinds", default="int8,fp8")
    parser.add_argument("--batches", type=int, default=4)
    options = parser.parse_args()
    source = sources.unet().to(memory_format=torch.channels_last)
    model, decoder = FusedUNet(source), FusedDecoder(sources.vae().to(memory_format=torch.channels_last))
    encoders = sources.text_encoders()
    calibrate(model, sources.inputs(4, seed=9)["latents"], sources.inputs(8))
    decoder.precision.observing = True
    decoder.forward(torch.randn(2, 4, 128, 128, device="cuda") * 0.8)
    decoder.precision.observing = False
    for layer in decoder.layers():
        for kind in (torch.int8, torch.float8_e4m3fn):
            layer.prepare(kind)
    results: dict[str, Any] = {}
    lines = []
    for name in options.kinds.split(","):
        model.precision.kind = decoder.precision.kind = KINDS[name]
        torch.cuda.reset_peak_memory_stats()
        pipeline = Pipeline(model, decoder, encoders)
        for interval in (1, 2):
            pipeline(interval)
            torch.cuda.synchronize()
            with Clocks() as clocks:
                begun = time.perf_counter()
                for _ in range(options.batches * interval):
                    pipeline(interval)
                torch.cuda.synchronize()
                seconds = (time.perf_counter() - begun) / (options.batches * interval)
            peak = torch.cuda.max_memory_allocated() / 2**30
            found = {"s_a_batch": seconds, "images_s": PICTURES / seconds, "peak_gib": peak, **clocks.summary()}
            found["finite"] = float(torch.isfinite(pipeline.x).all())
            results[f"{name} interval {interval}"] = found
            lines.append((name, interval, f"{seconds:.3f}", f"{PICTURES / seconds:.3f}", str(clocks.summary())))
        del pipeline
    table(("8 pictures, 20 steps", "interval", "s", "images/s", "clocks"), lines)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "images": results}
    (options.out / "images.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
