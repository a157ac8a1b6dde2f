"""The text model at the size of Llama-3.1-8B on one GPU: right first, then tokens a second, beside transformers.

    python -m benchmarks.h200.text [--out folder] [--minutes N] [--parts a,b]

Seeded random weights: speed does not depend on them. All of ours runs through `llm.execution` and `llm.runner`. A
step's figures are of static batches whose pages hold random numbers: tokens a second of an `in`/`out` setting are its
prompts read in full, as measured, and `out` steps as long as the one at the mean context, in + out/2, which is what
they come to, attention being linear in context; nothing else is shortened. Parts run in order of importance, each
guarded; results are written after each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance, record
from benchmarks.h200 import text_kernels, text_peers
from benchmarks.h200.timing import Clocks, sustained, table
from core.kernels.kv_cache import TokenBatch
from llm.pages import PAGE
from llm.tiny import LLAMA_8B

ROOMS = (*provenance.GPU_TEXTS, *(f"benchmarks/h200/text{part}.py" for part in ("", "_kernels", "_peers")))
BANDWIDTH = 4.8e12  # bytes a second, by the datasheet
SETTINGS = ((128, 128), (1000, 1000))
BATCHES = (1, 64, 256)
KINDS = ("int8", "fp8", "bf16")
KV: dict[str, Any] = {"int8": "int8", "fp8": "fp8", "bf16": "float"}


class Bench:
    """What all parts share: models, results, and the time that is left."""

    def __init__(self, out: Path, minutes: float, name: str) -> None:
        self.out, self.name = out, name
        self.until = time.monotonic() + 60 * minutes
        self.results: dict[str, Any] = {"model": name}
        self.models: dict[str, Any] = {}
        self.rows: list[tuple[Any, ...]] = []
        self.cost: dict[tuple[str, int, int], float] = {}  # ms of a step: kind, batch, context
        self.reading: dict[tuple[str, int], float] = {}  # prompt tokens a second: kind, length

    def part(self, name: str, run: Callable[[], Any]) -> None:
        """Run it, whatever it raises, unless time is up; write what there is."""
        if time.monotonic() > self.until:
            print(f"== {name}: left out, time is up", flush=True)
            self.results.setdefault("left_out", []).append(name)
            return
        started = time.monotonic()
        torch.cuda.reset_peak_memory_stats()
        try:
            with Clocks() as clocks:
                found = run()
            self.results[name] = found
            self.results.setdefault("clocks", {})[name] = clocks.summary()
        except Exception as error:
            traceback.print_exc()
            self.results.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:500]
        self.results.setdefault("seconds", {})[name] = round(time.monotonic() - started, 1)
        self.results.setdefault("peak_gib", {})[name] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        record.write("text", self.results, self.out, rooms=ROOMS)
        print(f"== {name}: {time.monotonic() - started:.1f} s", json.dumps(self.results.get(name))[:1500], flush=True)
        torch.cuda.empty_cache()

    # -- models ------------------------------------------------------------------------------------------------------

    def build(self) -> dict[str, Any]:
        from llm.load import load
        from llm.quantized import quantize

        times = {}
        started = time.monotonic()
        model = self.models["bf16"] = load(self.name, precision="bf16", device="cuda")
        torch.cuda.synchronize()
        times["bf16_s"] = round(time.monotonic() - started, 1)
        spread = _activations(model)
        read = [self.prompt(256, seed) for seed in range(4)]
        for scheme in ("int8", "fp8"):
            started = time.monotonic()
            self.models[scheme] = quantize(model, read, scheme=scheme)
            torch.cuda.synchronize()
            times[f"{scheme}_s"] = round(time.monotonic() - started, 1)
        return {**times, "activations": spread, "parameters": sum(p.numel() for p in model.network.parameters())}

    def prompt(self, length: int, seed: int) -> tuple[int, ...]:
        draw = torch.Generator().manual_seed(seed)
        most = int(self.models["bf16"].vocabulary)
        return tuple(torch.randint(3, most, (length,), generator=draw).tolist())

    def execution(self, kind: str, sequences: int, context: int, *, kv: Any = None, fill: bool = False) -> Any:
        """The real one, each sequence in pages of its own."""
        from llm.execution import FUSED, TextExecution

        each = -(-context // 16)
        made = TextExecution(
            self.models[kind], pages=each * sequences, sequences=sequences, context=context, kv=kv or KV[kind]
        )
        if made.kind != FUSED:
            raise RuntimeError(f"{kind} runs on {made.kind}")
        order = torch.randperm(each * sequences, generator=torch.Generator().manual_seed(0)).tolist()
        for s in range(sequences):
            made.cache.place(s, order[s * each : (s + 1) * each])
        if fill:
            _fill(made.cache)
        return made

    # -- right first -------------------------------------------------------------------------------------------------

    def numerics(self) -> dict[str, Any]:
        """Logits of two texts, read in one chunk each, beside transformers' own bf16 forward; and equal bits."""
        texts = [self.prompt(128, seed) for seed in (100, 101)]
        network = self.models["bf16"].network
        network.set_attn_implementation("sdpa")
        with torch.inference_mode():
            wanted = [network(torch.tensor([t], device="cuda"), use_cache=False).logits[0].float() for t in texts]
        network.set_attn_implementation("diptych")
        found: dict[str, Any] = {"transformers, same layers": {kind: self._same(kind, texts, wanted) for kind in KINDS}}
        for kind, kv in (*KV.items(), ("int8", "float"), ("fp8", "float")):
            run = self.execution(kind, 2, 256, kv=kv)
            cosines, agreed = [], []
            for s, (text, theirs) in enumerate(zip(texts, wanted, strict=True)):
                rows = range(len(text))
                made = run(TokenBatch.of(list(text), list(rows), [s] * len(text), list(rows)))
                cosines.append(torch.cosine_similarity(made, theirs, dim=-1).mean().item())
                agreed.append((made.argmax(-1) == theirs.argmax(-1)).float().mean().item())
            # The same by decoding: the last tokens one by one, in a graph and without.
            one = [run(TokenBatch.of([t[-1] for t in texts], [127, 127], [0, 1], [0, 1])).clone() for _ in range(2)]
            plain = run._fused.model(run._fused._rows(*_columns([t[-1] for t in texts], [127, 127], [0, 1])))
            alone = run(TokenBatch.of([texts[1][-1]], [127], [1], [0]))
            theirs = torch.stack([w[-1] for w in wanted])
            found[f"{kind}, kv {kv}"] = {
                "cosine": round(sum(cosines) / 2, 5), "top1": round(sum(agreed) / 2, 4),
                "decoded_cosine": round(torch.cosine_similarity(one[0], theirs, dim=-1).mean().item(), 5),
                "graph_equals_eager": torch.equal(one[0], plain), "repeats": torch.equal(one[0], one[1]),
                "alone_equals_together": torch.equal(alone[0], one[0][1]),
            }  # fmt: skip
        found["crowd"] = {kind: self._crowd(kind) for kind in KINDS}
        return found

    def _same(self, kind: str, texts: Sequence[tuple[int, ...]], bf16: Sequence[Any]) -> dict[str, float]:
        """transformers' own forward of our quantized layers (bf16: of the layers in fp32) beside its bf16, and ours
        beside it, with keys and values in bf16."""
        network = self.models[kind].network
        network.set_attn_implementation("sdpa")
        if kind == "bf16":
            for parameter in network.parameters():
                parameter.data = parameter.data.float()
        with torch.inference_mode():
            theirs = [network(torch.tensor([t], device="cuda"), use_cache=False).logits[0].float() for t in texts]
        if kind == "bf16":
            for parameter in network.parameters():
                parameter.data = parameter.data.bfloat16()
        network.set_attn_implementation("diptych")
        run, ours = self.execution(kind, 2, 256, kv="float"), []
        for s, text in enumerate(texts):
            rows = list(range(len(text)))
            ours.append(run(TokenBatch.of(list(text), rows, [s] * len(text), rows)).clone())

        def near(a: Sequence[Any], b: Sequence[Any]) -> float:
            return round(torch.cosine_similarity(torch.cat(list(a)), torch.cat(list(b)), dim=-1).mean().item(), 5)

        return {"theirs_to_bf16": near(theirs, bf16), "ours_to_theirs": near(ours, theirs)}

    def _crowd(self, kind: str) -> dict[str, bool]:
        """One row's bits among 1, 16, 64 and 256, at 300 tokens."""
        run = self.execution(kind, 256, 320, fill=True)
        alone = run(text_kernels.step_of(1, 300)).clone()
        return {str(n): torch.equal(run(text_kernels.step_of(n, 300))[:1], alone) for n in (2, 16, 64, 256)}

    # -- how fast ----------------------------------------------------------------------------------------------------

    def steps(self, kind: str) -> dict[str, Any]:
        """ms of a decode step: the graph's own, and as a server sees it, greedy tokens back on the host each time."""
        from llm.choose import greedy_tokens

        found: dict[str, Any] = {}
        for batch in BATCHES:
            for given, written in SETTINGS:
                context = given + written // 2
                if kind == "bf16" and batch * context > 100_000:
                    continue  # 131 kB a token
                run = self.execution(kind, batch, given + written, fill=True)
                step = text_kernels.step_of(batch, context)
                run(step)
                graph = run._fused.graphs._graph(*text_kernels.graph_size(batch, context))
                device = sustained(graph, 40)
                for _ in range(3):
                    greedy_tokens(run(step), [], run.best)
                started = time.perf_counter()
                for _ in range(20):
                    greedy_tokens(run(step), [], run.best)
                wall = (time.perf_counter() - started) / 20 * 1e3
                read = run._fused.model.ops.weight_bytes + batch * context * _token_bytes(run.cache)
                floor = read / BANDWIDTH * 1e3
                self.cost[kind, batch, context] = wall
                name = f"{batch} rows, {context} tokens"
                found[name] = {
                    "graph_ms": round(device, 3), "step_ms": round(wall, 3), "read_gb": round(read / 1e9, 2),
                    "gb_per_s": round(read / device / 1e6), "share_of_roofline": round(floor / device, 3),
                }  # fmt: skip
                print(kind, name, found[name], flush=True)
                del run, graph
                torch.cuda.empty_cache()
        return found

    def prefill(self, kind: str) -> dict[str, Any]:
        """Prompt tokens a second, in steps of 2,048 tokens as the runner makes them."""
        found = {}
        for length, sequences in ((128, 16), (1000, 2)):
            run = self.execution(kind, sequences, length + 8)
            tokens: list[int] = []
            positions: list[int] = []
            owners: list[int] = []
            for s in range(sequences):
                tokens += self.prompt(length, s)
                positions += range(length)
                owners += [s] * length
            step = TokenBatch.of(tokens, positions, owners, [length * (s + 1) - 1 for s in range(sequences)])
            ms = sustained(lambda run=run, step=step: run(step), 8)  # type: ignore[misc]
            self.reading[kind, length] = len(tokens) / ms * 1e3
            found[f"{sequences} × {length}"] = {"ms": round(ms, 2), "tokens_per_s": round(len(tokens) / ms * 1e3)}
        return found

    def rates(self) -> dict[str, Any]:
        """Tokens a second of static batches, from prompts read and steps made."""
        found: dict[str, Any] = {}
        for (kind, batch, context), ms in self.cost.items():
            for given, written in SETTINGS:
                if context == given + written // 2 and (kind, given) in self.reading:
                    seconds = batch * given / self.reading[kind, given] + written * ms / 1e3
                    found[f"{kind} {given}/{written} batch {batch}"] = round(batch * written / seconds, 1)
                    self.rows.append((f"diptych {kind}", f"{given}/{written}", batch, f"{ms:.2f}",
                                      f"{batch * written / seconds:.0f}"))  # fmt: skip
        return found

    def engine(self, kind: str, requests: int, given: int = 128, written: int = 128) -> dict[str, Any]:
        """All at once to the engine, through scheduler, runner and lane, to whole texts."""
        from core.batching.engine import Engine
        from core.batching.request import Request
        from llm.lane import StreamLane
        from llm.parameters import TextParameters
        from llm.runner import TextRunner

        lane = StreamLane("text", torch.device("cuda"))
        model, context = self.models[kind], given + written
        runner = lane.call(
            lambda: TextRunner(
                model, lane=lane, max_requests=requests, context=context, kv=KV[kind],
                pages=requests * -(-context // 16) + requests,
            )
        )  # fmt: skip
        started = time.perf_counter()
        runner.prepare(measure_s=2.0)
        prepared = time.perf_counter() - started
        try:
            with Engine([runner]) as engine:
                for turn in range(2):  # the first one warms up
                    jobs = [TextParameters(self.prompt(given, turn * 1000 + i), written, temperature=0, ignore_end=True)
                            for i in range(requests)]  # fmt: skip
                    started = time.perf_counter()
                    futures = [engine.submit(Request(f"{turn}-{i}", "text", job)) for i, job in enumerate(jobs)]
                    made = [future.result(timeout=120) for future in futures]
                    seconds = time.perf_counter() - started
        finally:
            runner.close()
            lane.close()
        if any(len(text.tokens) != written for text in made):
            raise RuntimeError("answers are not whole")
        rate = requests * written / seconds
        self.rows.append((f"diptych {kind}, engine", f"{given}/{written}", requests, "", f"{rate:.0f}"))
        costs = {str(rows): round(1e3 * cost, 2) for rows, cost in next(iter(runner.costs().values())).items()}
        return {
            "tokens_per_s": round(rate, 1),
            "seconds": round(seconds, 2),
            "prepared_s": round(prepared, 1),
            "costs_ms": costs,
        }


def _activations(model: Any) -> dict[str, float]:
    """Root mean squares of the last layer's output and the logits of random tokens: finite and spread, or an error."""
    ids = torch.randint(3, model.vocabulary, (1, 64), device="cuda")
    model.network.set_attn_implementation("sdpa")
    with torch.inference_mode():
        made = model.network(ids, use_cache=False, output_hidden_states=True)
    model.network.set_attn_implementation("diptych")
    hidden, logits = made.hidden_states[-1].float(), made.logits.float()
    if not (hidden.isfinite().all() and logits.isfinite().all()) or hidden.std() < 1e-2 or logits.std() < 1e-2:
        raise RuntimeError("activations are not finite and spread")
    return {"hidden_std": round(hidden.std().item(), 3), "logits_std": round(logits.std().item(), 3)}


def _fill(cache: Any) -> None:
    """Random keys and values, of about the spread of real ones."""
    for tensor in (cache.keys, cache.values):
        for layer in tensor:
            if tensor.dtype == torch.int8:
                layer.random_(-127, 128)
            else:
                layer.copy_((50 if tensor.element_size() == 1 else 1) * torch.randn_like(layer, dtype=torch.bfloat16))
    for scales in (cache.key_scales, cache.value_scales):
        if scales is not None:
            scales.uniform_(0.01, 0.03)


def _token_bytes(cache: Any) -> float:
    """Of keys, values and scales of one token."""
    return float(cache.size_bytes / (cache.keys.shape[1] * PAGE))


def _columns(tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]) -> tuple[Any, Any, Any]:
    import numpy as np

    columns = np.array([tokens, positions, sequences], np.int32)
    return columns, np.arange(len(tokens), dtype=np.int32), np.arange(len(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    parser.add_argument("--minutes", type=float, default=7.0, help="parts that have not begun by then are left out")
    parser.add_argument("--parts", default="", help="only those whose names begin so, separated by commas")
    parser.add_argument("--model", default=LLAMA_8B)
    options = parser.parse_args()
    bench = Bench(options.out, options.minutes, options.model)
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("numerics", bench.numerics),
        ("kernels", lambda: text_kernels.check("cuda")),
        ("attention", lambda: text_kernels.attention(bench)),
        ("early", lambda: text_kernels.early(bench)),
        ("steps int8", lambda: bench.steps("int8")),
        ("prefill int8", lambda: bench.prefill("int8")),
        ("steps fp8", lambda: bench.steps("fp8")),
        ("prefill fp8", lambda: bench.prefill("fp8")),
        ("engine int8 64", lambda: bench.engine("int8", 64)),
        ("engine int8 256", lambda: bench.engine("int8", 256)),
        ("generate 64", lambda: text_peers.generate(bench, 64, 128, 128, 24)),
        ("generate 1", lambda: text_peers.generate(bench, 1, 128, 128, 24)),
        ("sampling", lambda: text_kernels.sampling(bench)),
        ("products", lambda: text_kernels.products("cuda")),
        ("steps bf16", lambda: bench.steps("bf16")),
        ("prefill bf16", lambda: bench.prefill("bf16")),
        ("generate 256", lambda: text_peers.generate(bench, 256, 128, 128, 16)),
        ("generate 64 long", lambda: text_peers.generate(bench, 64, 1000, 1000, 12)),
        ("rates", bench.rates),
        ("generate_batch", lambda: text_peers.generate_batch(bench, 64, 128, 64, 60)),
        ("tiles", lambda: text_kernels.tiles("cuda", bench.until)),
    ]
    bench.part("build", bench.build)
    wanted = tuple(part for part in options.parts.split(",") if part)
    for name, run in parts:
        if not wanted or name.startswith(wanted) or name == "rates":
            bench.part(name, run)
    bench.until = math.inf
    if "rates" not in bench.results:
        bench.part("rates", bench.rates)
    table(("rung", "in/out", "batch", "ms a step", "tokens/s"), bench.rows)
    print(json.dumps({name: bench.results.get(name) for name in ("failed", "left_out", "seconds")}))
    os._exit(0)  # whatever a thread of transformers still does


if __name__ == "__main__":
    main()
