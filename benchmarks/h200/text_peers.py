"""Measures transformers on the same weights in bf16, in the same run: `generate` in a static batch, and
`generate_batch`.

Called by `benchmarks.h200.text`.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch


def generate(bench: Any, batch: int, given: int, written: int, steps: int) -> dict[str, Any]:
    """`generate` in bf16 with a dynamic cache, as one static batch, for `steps` tokens per request."""
    network = bench.models["bf16"].network
    network.set_attn_implementation("sdpa")
    ids = torch.tensor([bench.prompt(given, i) for i in range(batch)], device="cuda")
    try:
        seconds = {}
        for tokens in (2, 1, steps):
            torch.cuda.synchronize()
            started = time.perf_counter()
            with torch.inference_mode():
                network.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                    do_sample=False, eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
            torch.cuda.synchronize()
            seconds[tokens] = time.perf_counter() - started
    finally:
        network.set_attn_implementation("diptych")
    step = (seconds[steps] - seconds[1]) / (steps - 1)
    rate = batch * written / (seconds[1] + (written - 1) * step)
    bench.rows.append(("transformers generate, bf16", f"{given}/{written}", batch, f"{step * 1e3:.2f}", f"{rate:.0f}"))
    return {"step_ms": round(step * 1e3, 2), "prompts_s": round(seconds[1], 3), "steps_measured": steps,
            "tokens_per_s": round(rate, 1)}  # fmt: skip


def generate_batch(bench: Any, requests: int, given: int, written: int, limit_s: float) -> dict[str, Any]:
    """Its continuous batching in bf16, with default settings except the cache sizes."""
    from transformers.generation.configuration_utils import GenerationConfig

    network = bench.models["bf16"].network
    prompts = [list(bench.prompt(given, i)) for i in range(requests)]
    done: list[Any] = []

    def write() -> None:
        try:
            with torch.no_grad():
                config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=written)
                network.set_attn_implementation("sdpa")
                for _ in range(2):  # the first one warms up
                    started = time.perf_counter()
                    made = network.generate_batch(prompts, generation_config=config, persistent_manager=True)
                    seconds = time.perf_counter() - started
            done.append((sum(len(out.generated_tokens) for out in made.values()), seconds))
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(limit_s)
    network.set_attn_implementation("diptych")
    if not done:
        raise RuntimeError(f"it was not done within {limit_s:.0f} s")
    if isinstance(done[0], Exception):
        raise done[0]
    tokens, seconds = done[0]
    if tokens != requests * written:
        raise RuntimeError(f"it wrote {tokens} tokens, not {requests * written}")
    bench.rows.append(("transformers generate_batch", f"{given}/{written}", requests, "", f"{tokens / seconds:.0f}"))
    return {"tokens": tokens, "seconds": round(seconds, 2), "tokens_per_s": round(tokens / seconds, 1)}
