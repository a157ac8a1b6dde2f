"""Measures SDXL and an 8B Llama on one GPU and one engine: each modality's throughput alone and together.

    python -m benchmarks.h200.cohost [--seconds N] [--out folder]

UNet graphs run on one stream, decoding on a high-priority one. A share is the rate together divided by the rate alone;
shares of compute-bound and memory-bound work may add up to more than one. Weights are random.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import provenance, record
from benchmarks.h200 import sources
from benchmarks.h200.timing import Clocks, table
from benchmarks.loop import Loop
from benchmarks.traces import Order
from contract.plan import AUTO, DeepCache
from core.batching.engine import Engine
from core.batching.request import Request
from llm.lane import StreamLane
from llm.load import load
from llm.parameters import TextParameters
from llm.quantized import quantize
from llm.runner import TextRunner
from llm.tiny import LLAMA_8B
from pipeline.backends.backend import Widths
from pipeline.backends.graphs import GraphBackend
from pipeline.runner import ImageRunner

WARM_S, CONTEXT, WRITTEN = 3.0, 512, 256


def pictures() -> ImageRunner:
    source = sources.model()
    variant = sources.variant(source, "int8", sources.ranges(source))
    runner = ImageRunner(GraphBackend(variant, Widths(16, 8, (2, 4, 8, 12, 16))), max_requests=64)
    runner.prepare(measure_s=60.0)
    return runner


def texts(in_flight: int) -> TextRunner:
    lane = StreamLane("text", torch.device("cuda"))

    def make() -> TextRunner:
        plain = load(LLAMA_8B, precision="bf16", device="cuda")
        draw = torch.Generator().manual_seed(0)
        read = [tuple(torch.randint(3, plain.vocabulary, (256,), generator=draw).tolist()) for _ in range(4)]
        model = quantize(plain, read, scheme="int8")
        del plain
        pages = in_flight * (CONTEXT // 16 + 1)
        return TextRunner(model, lane=lane, max_requests=in_flight, context=CONTEXT, kv="int8", pages=pages)

    runner = lane.call(make)
    runner.prepare(measure_s=3.0)
    return runner


def measure(loops: dict[str, Loop], seconds: float) -> dict[str, Any]:
    with Clocks() as clocks:
        for loop in loops.values():
            loop.start()
        time.sleep(WARM_S)
        for loop in loops.values():
            loop.counts = True
        time.sleep(seconds)
        for loop in loops.values():
            loop.counts = False
    closing = [threading.Thread(target=loop.close) for loop in loops.values()]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    found: dict[str, Any] = clocks.summary()
    if "image" in loops:
        found["images_s"] = round(loops["image"].steps / sources.STEPS / seconds, 3)
        found["image_p99_s"] = round(float(np.percentile(loops["image"].ended or [0.0], 99)), 2)
    if "text" in loops:
        found["tokens_s"] = round(loops["text"].tokens / seconds, 1)
        found["tpot_p50_p99_s"] = [round(float(t), 4) for t in np.percentile(loops["text"].gaps or [0.0], [50, 99])]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--texts", type=int, default=64, help="answers in flight")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    options = parser.parse_args()
    image, text = pictures(), texts(options.texts)
    print(f"{torch.cuda.memory_allocated() / 2**30:.1f} GiB held", flush=True)
    side, most = image.model.native, text.model.vocabulary
    results: dict[str, Any] = {}
    rows = []
    number = iter(range(10**9))

    def write(i: int) -> Request:
        draw = torch.Generator().manual_seed(i)
        prompt = tuple(torch.randint(3, most, (CONTEXT - WRITTEN - 1,), generator=draw).tolist())
        return Request(f"t{next(number)}", "text", TextParameters(prompt, WRITTEN, temperature=0, ignore_end=True))

    def drawn_with(cached: DeepCache | None) -> Callable[[int], Request]:
        order = Order(side, sources.STEPS, cached)
        return lambda i: order.request(f"p{next(number)}", i)

    with Engine([image, text]) as engine:
        alone = measure({"text": Loop(engine, write, options.texts)}, options.seconds)
        print("text alone", alone, flush=True)
        for name, cached in (("int8", None), ("int8+deepcache", AUTO)):
            draw = drawn_with(cached)
            one = measure({"image": Loop(engine, draw, 16)}, options.seconds)
            print(name, "alone", one, flush=True)
            both = measure(
                {"image": Loop(engine, draw, 16), "text": Loop(engine, write, options.texts)}, options.seconds
            )
            shares = both["images_s"] / one["images_s"], both["tokens_s"] / alone["tokens_s"]
            results[name] = {"text_alone": alone, "image_alone": one, "together": both, "sum": round(sum(shares), 3)}
            print(name, "together", both, "shares", shares, flush=True)
            tpot = both["tpot_p50_p99_s"]
            rows.append(
                (name, one["images_s"], both["images_s"], alone["tokens_s"], both["tokens_s"], f"{sum(shares):.3f}",
                 f"{1e3 * tpot[0]:.1f}, {1e3 * tpot[1]:.1f}")
            )  # fmt: skip
            rooms = (*provenance.GPU_IMAGES, *provenance.GPU_TEXTS, "benchmarks/h200/cohost.py")
            record.write("cohost", results, options.out, rooms=rooms)
    table(("", "images/s alone", "together", "tokens/s alone", "together", "sum of shares", "TPOT p50, p99 ms"), rows)
    image.close()
    text.close()


if __name__ == "__main__":
    main()
