"""Measures a text model over several GPUs: `python -m lab.bench.text_parallel [MODE…] [--model random:llama-8b]`.

A mode is off (one GPU), tp2, tp4, pp2, pp4 or tp2pp2. For each: tokens per second of one user, step by step in graphs;
and of whole requests through the engine (`--loads`, as `lab.bench.text_load`). Weights are random levels in INT8,
drawn on each rank's GPU, keys and values in INT8: a model of 70 billion parameters takes seconds. `exchange` in place
of a mode compares the sums of ranks, with their norm, with NCCL's all-reduce and the norm after it; `tables` prints
what is in --results. `--device cpu --tiny` rehearses it over gloo.
"""

from __future__ import annotations

import faulthandler
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from contract.parallel import ALONE, Parallel, parse
from core.batching.engine import Engine
from core.batching.runner import Lane
from core.kernels.kv_cache import TokenBatch
from core.quant.dynamic import Int8DynamicLinear
from core.quant.linear import LEVELS, Int8Linear
from lab.bench import text_load
from lab.bench.harness import command, record
from llm.backends.attention import NAME, register
from llm.cache.pages import PAGE
from llm.checkpoints.load import TextModel
from llm.families import tiny
from llm.lane import StreamLane
from llm.parallel.followers import Followers
from llm.parallel.ranks import RankGroup
from llm.parallel.shards import Rank, vocabulary_slice
from llm.runner import TextRunner

_REHEARSAL = tiny.LlamaShape(layers=4, heads=8, kv_heads=4, head_dim=16, width=64, tied=False)
_DEVIATION, _RANGE = 0.02, 4.0  # of weights; and of inputs that the levels reach
_STEPS, _CONTEXT = 64, 128  # of one user, and the tokens before
_ROWS = (1, 64, 2048)
_REPEATS = 20  # sums in a graph


def seeded(
    name: str, *, device: str, rank: Rank, symmetric: bool = True, trace_after_s: int = 0, **_: Any
) -> TextModel:  # fmt: skip
    """A rank's part of a model of this shape, with random weights: INT8 on a GPU, fp32 on a CPU.

    Without `symmetric` memory sums are NCCL's. After `trace_after_s` the process prints where its threads are.
    """
    register()
    if trace_after_s:
        faulthandler.dump_traceback_later(trace_after_s)
    if not symmetric:
        RankGroup.open_exchange = lambda *_: None  # type: ignore[method-assign]
    where, parallel = torch.device(device), rank.parallel
    shape = tiny.SHAPES.get(name, _REHEARSAL)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    local = replace(
        shape, layers=shape.layers // parallel.pipeline, heads=shape.heads // parallel.tensor,
        kv_heads=max(1, shape.kv_heads // parallel.tensor), inner=shape.inner // parallel.tensor,
    )  # fmt: skip
    # Always drawn where it is told: on no device.
    huge = type("Huge", (tiny.LlamaShape,), {"large": property(lambda self: True)})
    network, tokenizer = tiny.make(huge(**vars(local)), device="meta", dtype=str(dtype).removeprefix("torch."))
    generator = torch.Generator(where).manual_seed(rank.number)
    for path, module in [*network.named_modules()]:
        if isinstance(module, nn.Linear) and path != "lm_head":
            parent, _, own = path.rpartition(".")
            layer = _linear(module, generator, where, dtype, shape.layers if own in ("o_proj", "down_proj") else 0)
            setattr(network.get_submodule(parent), own, layer)
        elif path.endswith("norm"):
            module.weight = nn.Parameter(torch.ones(module.weight.shape, dtype=dtype, device=where))
    tokens = len(vocabulary_slice(shape.vocabulary, rank)) if rank.last else 0
    if where.type == "cuda":
        weight, scale = _levels(tokens, shape.width, _DEVIATION, generator, where)
        network.lm_head = Int8DynamicLinear(weight, scale, None, None)
    else:
        network.lm_head.weight = nn.Parameter(_normal(tokens, shape.width, generator, where, dtype) * _DEVIATION)
    words = shape.vocabulary if rank.first else 0
    network.model.embed_tokens.weight = nn.Parameter(_normal(words, shape.width, generator, where, dtype))
    network.model.rotary_emb = type(network.model.rotary_emb)(network.config).to(where)
    if not rank.last:
        network.model.norm = nn.Identity()
    network.set_attn_implementation(NAME)
    network = network.eval().requires_grad_(False)
    precision = "int8" if where.type == "cuda" else "fp32"
    return TextModel(name, f"{name}-levels", precision, where, dtype, network, tokenizer, frozenset({2}))


def _normal(rows: int, columns: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device=device).normal_(generator=generator)


def _linear(
    layer: nn.Linear, generator: torch.Generator, device: torch.device, dtype: torch.dtype, layers: int
) -> nn.Module:  # fmt: skip
    """Random weights; those of `layers` that add to the stream are smaller, as `llm.families.tiny` has them."""
    n, k = layer.weight.shape
    deviation = _DEVIATION * ((2 * layers) ** -0.5 if layers else 1)
    if device.type != "cuda":
        layer.weight = nn.Parameter(_normal(n, k, generator, device, dtype) * 10 * deviation)
        return layer
    weight, scale = _levels(n, k, deviation, generator, device)
    inverse = LEVELS / _RANGE
    return Int8Linear(weight, scale / inverse, torch.full((k,), inverse, device=device), None)


def _levels(
    rows: int, columns: int, deviation: float, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Random weights in INT8, and their scales."""
    levels = torch.empty(rows, columns, dtype=torch.int8, device=device).random_(
        -LEVELS, LEVELS + 1, generator=generator
    )
    return levels, torch.full((rows,), deviation / (LEVELS / 3**0.5), device=device)


def measure(options: Any, parallel: Parallel) -> dict[str, Any]:
    """One mode's figures."""
    device = torch.device(options.device)
    loads = [text_load.Load.read(text) for text in options.loads.split(",") if text]
    context = max([_CONTEXT + _STEPS, *(load.context for load in loads)]) + PAGE
    width = max([1, *(load.in_flight for load in loads)])
    followers: Followers | None = None
    arguments: dict[str, Any] = {"symmetric": options.sums == "symmetric", "trace_after_s": options.trace_after}
    started = time.perf_counter()
    if parallel.ranks > 1:
        arguments |= {"name": options.model, "threads": 2 if options.device == "cuda" else 1}
        followers = Followers(parallel, arguments, device=device, loader="lab.bench.text_parallel:seeded")
    own: dict[str, Any] = {name: arguments[name] for name in ("symmetric", "trace_after_s")}
    lane = StreamLane("text", device) if device.type == "cuda" else Lane("text")
    model = lane.call(lambda: seeded(options.model, device=options.device, rank=Rank(0, parallel), **own))
    if followers is not None:
        followers.loaded(model.digest)
    record.progress(f"{parallel}: loaded in {time.perf_counter() - started:.1f} s")
    figures: dict[str, Any] = {"model": options.model, "parallel": str(parallel), "loads": {}}
    runner = lane.call(
        lambda: TextRunner(
            model, lane=lane, max_requests=width, max_rows=options.rows, chunk=min(512, options.rows),
            pages=64 + width * -(-context // PAGE), context=context,
            kv="int8" if model.precision == "int8" else "float", pace_s=1.0, followers=followers,
        )
    )  # fmt: skip
    try:
        group = runner.execution.group
        figures["sums"] = "none" if group is None else group.sums
        runner.prepare(measure_s=0.1)
        figures["ready_s"] = round(time.perf_counter() - started, 1)
        if device.type == "cuda":
            figures["memory_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 1)
        record.progress(f"{parallel}: ready in {figures['ready_s']} s, sums: {figures['sums']}")
        step_ms = lane.call(lambda: _one_user(runner))
        figures |= {"step_ms": round(step_ms, 3), "tokens_s": round(1e3 / step_ms, 1)}
        record.progress(f"{parallel}: one user {figures['tokens_s']} tokens/s")
        with Engine([runner]) as engine:
            generator = text_load.LoadGenerator(engine, model.vocabulary, 0.0)
            for load in loads:
                generator.run(load, load.in_flight, min(load.written, 8))
                count = load.in_flight * load.waves
                seconds = generator.run(load, count, load.written, load.rate).seconds
                figures["loads"][load.name] = round(count * load.written / seconds, 1)
                record.progress(f"{parallel}: {load.name} {figures['loads'][load.name]} tokens/s")
    finally:
        runner.close()
        lane.close()
    return figures


def _one_user(runner: TextRunner) -> float:
    """Milliseconds of a step of one row: of a pipeline each waits for its token, else they follow one another."""
    execution, stages = runner.execution, 1 if runner.execution.group is None else runner.pipeline
    execution.cache.place(0, [*range(1, 1 + -(-(_CONTEXT + _STEPS) // PAGE))])
    cuda = execution.model.device.type == "cuda"

    def step(position: int, token: int) -> Tensor:
        batch = TokenBatch.of([token], [position], [0], [0])
        forward = execution.forward(replace(batch, logits=not cuda))
        return forward.logits.argmax(-1) if forward.best is None else forward.best

    token = 5
    for position in range(_CONTEXT):
        token = int(step(position, token)) if stages > 1 or position == 0 or not cuda else (step(position, -1), -1)[1]
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    best = None
    for position in range(_CONTEXT, _CONTEXT + _STEPS):
        best = step(position, token)
        if stages > 1 or not cuda:
            token = int(best)
    assert best is not None
    int(best)
    return 1e3 * (time.perf_counter() - started) / _STEPS


# -- sums of ranks -----------------------------------------------------------------------------------------------------


def exchange(options: Any) -> dict[str, Any]:
    """Microseconds of a sum over the ranks with its norm: ours, and NCCL's all-reduce with the same norm."""
    import torch.multiprocessing as processes
    from torch.multiprocessing.spawn import spawn

    from llm.parallel.ranks import open_store

    results: dict[str, Any] = {}
    for ranks in (2, 4):
        if options.device == "cuda" and torch.cuda.device_count() < ranks:
            continue
        store = open_store()
        queue = processes.get_context("spawn").SimpleQueue()
        context = spawn(_exchange_rank, (ranks, store.port, options.device, queue), nprocs=ranks, join=False)
        deadline = time.monotonic() + 60
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise record.BenchError(f"sums of {ranks} ranks have not ended in 60 s")
        results[str(ranks)] = queue.get()
    return results


def _exchange_rank(number: int, ranks: int, port: int, device_name: str, queue: Any) -> None:
    from core.kernels.cuda.fused_kernels import SplitSums

    faulthandler.dump_traceback_later(50)
    cuda = device_name == "cuda"
    device, width = torch.device("cuda", number) if cuda else torch.device("cpu"), 4096
    rank = Rank(number, Parallel(ranks))
    dtype = torch.bfloat16 if cuda else torch.float32
    group = RankGroup(rank, device, port)
    group.open_exchange(width, dtype)
    peers, ours = group.peers, group.peers.exchange
    results: dict[str, Any] = {"sums": group.sums}
    for rows in _ROWS if cuda else (1, 4):
        parts = torch.randn(1, rows, width, device=device)
        x, y = torch.zeros(rows, width, dtype=dtype, device=device), parts[0].to(dtype)
        weight, inverse = torch.ones(width, dtype=dtype, device=device), torch.full((width,), 30.0, device=device)
        contenders: dict[str, Callable[[], object]] = {}
        if cuda:
            from core.kernels.cuda.exchange_kernel import ROWS
            from core.kernels.cuda.fused_kernels import add_norm

            def norm(total: Tensor, x: Tensor = x, weight: Tensor = weight, inverse: Tensor = inverse) -> None:
                add_norm(x, weight, 1e-5, inverse, torch.int8, sums=SplitSums(total[None]), sum_out=x)

            def nccl(y: Tensor = y, norm: Callable[[Tensor], None] = norm) -> None:
                group.all_reduce(y)
                norm(y)

            contenders["nccl"] = nccl
            contenders["nccl alone"] = partial(group.all_reduce, y)
            slots = cycle((0, 1))

            def fused(
                parts: Tensor = parts, x: Tensor = x, w: Tensor = weight, i: Tensor = inverse,
                slots: Iterator[int] = slots,
            ) -> None:  # fmt: skip
                assert ours is not None
                ours.add_norm_(x, SplitSums(parts), w, 1e-5, i, torch.int8, slot=next(slots))

            if ours is not None and rows <= ROWS:
                contenders["ours"] = fused

            def summed(y: Tensor = y, norm: Callable[[Tensor], None] = norm) -> None:
                norm(peers.sum(y))

            contenders["ours" if rows > ROWS else "parts"] = summed
        else:
            contenders["gloo"] = partial(peers.sum, y)
        times = {name: _graph_us(run, cuda) for name, run in contenders.items()}
        moved = 2 * (ranks - 1) / ranks * rows * width * dtype.itemsize
        results[str(rows)] = {
            name: {"us": round(us, 2), "gb_s": round(moved / us / 1e3, 1)} for name, us in times.items()
        }
        if number == 0:
            record.progress(f"sums of {ranks} ranks, {rows} rows: {results[str(rows)]}")
    if number == 0:
        queue.put(results)
    faulthandler.cancel_dump_traceback_later()
    group.leave().join()


def _graph_us(run: Callable[[], object], cuda: bool) -> float:
    """Microseconds of a call, of many in one graph."""
    if not cuda:
        started = time.perf_counter()
        for _ in range(_REPEATS):
            run()
        return 1e6 * (time.perf_counter() - started) / _REPEATS

    def repeated() -> None:
        for _ in range(_REPEATS):
            run()

    from core.cuda_graphs import CudaRecorder

    replay, _ = CudaRecorder(torch.device("cuda", torch.cuda.current_device())).record(repeated)
    times = []
    for _ in range(12):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        replay()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1e3 / _REPEATS)
    return float(statistics.median(times[2:]))


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(folder: Any) -> None:
    """Print what was measured."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("text-parallel-*.json"))]
    modes = [result for result in found if "parallel" in result]
    names = sorted({name for result in modes for name in result["loads"]}, key=lambda name: (len(name), name))
    rows = [
        (result["model"].removeprefix("random:"), result["parallel"], result["sums"], result["step_ms"],
         result["tokens_s"], *(result["loads"].get(name) for name in names), result.get("memory_gib"))
        for result in sorted(modes, key=lambda result: (result["model"], parse_mode(result["parallel"])))
    ]  # fmt: skip
    record.table("text over several GPUs", ("model", "ranks", "sums", "step ms", "1 user", *names, "GiB"), rows)
    for result in found:
        for ranks, measured in result.get("exchange", {}).items():
            lines = [
                (count, name, time["us"], time["gb_s"])
                for count, times in measured.items() if isinstance(times, dict) for name, time in times.items()
            ]  # fmt: skip
            record.table(f"sums of {ranks} ranks × 4096, {measured['sums']}", ("rows", "by", "µs", "GB/s"), lines)


def parse_mode(text: str) -> Parallel:
    """A mode of the command line. Raises ValueError."""
    return ALONE if text in ("off", "tp1") else parse(text)


def main() -> None:
    options = command.parser("text_parallel", __doc__)
    options.add_argument("modes", nargs="*", default=["off", "tp2", "tp4", "pp2", "pp4", "tp2pp2"])
    options.add_argument("--model", default=tiny.LLAMA_8B, choices=[tiny.LLAMA_8B, tiny.LLAMA_70B])
    options.add_argument("--loads", default="64:128/128:2,256:128/128:2")
    options.add_argument("--rows", type=int, default=1024, help="of one forward; default: %(default)s")
    options.add_argument("--sums", choices=("symmetric", "nccl"), default="symmetric", help="default: %(default)s")
    options.add_argument("--trace-after", type=int, default=0, help="seconds until all ranks print where they are")
    arguments = options.parse_args()
    faulthandler.enable()
    if arguments.tiny:
        arguments.model, arguments.loads = "rehearsal", "4:16/8:1"
    for mode in arguments.modes:
        if mode == "tables":
            tables(arguments.results)
            continue
        if mode == "exchange":
            record.publish("text-parallel-exchange", {"exchange": exchange(arguments)}, arguments.results)
            continue
        name = f"text-parallel-{arguments.model.removeprefix('random:')}-{mode}"
        record.publish(name, measure(arguments, parse_mode(mode)), arguments.results)


if __name__ == "__main__":
    main()
