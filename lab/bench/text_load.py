"""Measures whole text requests through the engine: `python -m lab.bench.text_load [--loads 256:128/128,1:128/256:2]`.

A load is so many requests in flight, of so many prompt and answer tokens: random tokens, so that no prompts share
pages, written greedily to their last token, or as `--temperature` says. A request follows another at once until four
times as many have ended, or as many times as the load says; the rate is all tokens that were written by the time from
the first submission to the last end. A load with a rate, `256:780/128:4@30`, submits so many requests a second at
random times (a Poisson process) instead, while no more are in flight, as MLPerf's server scenario does: what then
counts are the times to the first token (TTFT) and per later token (TPOT). Scheduler, runner, lane and detokenizer are
the service's; HTTP and Redis are not in it. Weights are seeded, in INT8, keys and values too (`--kv`). Speculation is
off. `--device cpu --tiny` rehearses it, and with `--host-only` as well no forward is computed: what is left, "CPU ms a
step", is the host's.
"""

from __future__ import annotations

import gc
import random
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from core.batching.engine import Engine, Tick
from core.batching.request import Outcome, Request
from core.batching.runner import Lane
from lab.bench.harness import command, record
from lab.bench.harness.service import percentile
from lab.bench.tables import TABLES
from llm.cache.pages import PAGE
from llm.families import tiny
from llm.parameters import TextParameters
from llm.runner import TextRunner

_LOADS = "256:128/128,64:128/128,1:128/256,256:1000/1000:1"
_WAVES = 4
_WARM_TOKENS = 16
_SPARE_PAGES = 64
_ROWS, _CHUNK = 2048, 512  # a GPU's
_SWITCH_S = 0.0005
_FIRST_TOKEN = 3  # before it are control tokens


@dataclass(frozen=True)
class Load:
    """Requests in flight, the tokens of each one's prompt and answer, requests in multiples of those in flight, and
    arrivals a second; 0: each as soon as another has ended.
    """

    in_flight: int
    given: int
    written: int
    waves: int = _WAVES
    rate: float = 0.0

    @classmethod
    def read(cls, text: str) -> Load:
        """Raises SystemExit for what is none."""
        match = re.fullmatch(r"(\d+):(\d+)/(\d+)(?::(\d+))?(?:@(\d+))?", text)
        if match is None or "0" in match.groups():
            raise SystemExit(f"--loads: {text!r} is no IN_FLIGHT:PROMPT/ANSWER[:WAVES][@RATE] such as 256:128/128")
        flight, given, written, waves, rate = match.groups()
        return cls(int(flight), int(given), int(written), int(waves or _WAVES), float(rate or 0))

    @property
    def context(self) -> int:
        return self.given + self.written

    @property
    def name(self) -> str:
        return f"{self.in_flight} × {self.given}/{self.written}" + (f" @ {self.rate:g}/s" if self.rate else "")


@dataclass(frozen=True)
class Times:
    """Seconds until all requests were answered, each one's until its first token, and its mean between later ones."""

    seconds: float
    first_s: list[float]
    token_s: list[float]


class LoadGenerator:
    """Submits requests to an engine, each as soon as another has ended, or at a load's rate."""

    def __init__(self, engine: Engine, vocabulary: int, temperature: float) -> None:
        self._engine, self._vocabulary, self._temperature = engine, vocabulary, temperature
        self._draw = random.Random(0)
        self._submitted = 0

    def run(self, load: Load, count: int, written: int, rate: float = 0.0) -> Times:
        """Have so many requests answered."""
        free = threading.Semaphore(load.in_flight)
        firsts: dict[str, float] = {}
        token_s: list[float] = []
        prompts = [
            tuple(self._draw.randrange(_FIRST_TOKEN, self._vocabulary) for _ in range(load.given)) for _ in range(count)
        ]
        futures = []
        arrival = started = time.perf_counter()
        for prompt in prompts:
            if rate:
                arrival += self._draw.expovariate(rate)
                time.sleep(max(0.0, arrival - time.perf_counter()))
            free.acquire()
            self._submitted += 1
            submitted = arrival if rate else time.perf_counter()
            parameters = TextParameters(
                prompt, written, temperature=self._temperature, seed=self._submitted, ignore_end=True
            )

            def tell(request: Request, outcome: Outcome, submitted: float = submitted) -> None:
                if outcome.token is not None and outcome.token.tokens:
                    firsts.setdefault(request.id, time.perf_counter() - submitted)

            def ended(_: object, number: str = f"{self._submitted}", submitted: float = submitted) -> None:
                if written > 1 and number in firsts:
                    token_s.append((time.perf_counter() - submitted - firsts[number]) / (written - 1))
                free.release()

            future = self._engine.submit(Request(f"{self._submitted}", "text", parameters, listener=tell))
            future.add_done_callback(ended)
            futures.append(future)
        texts = [future.result() for future in futures]
        seconds = time.perf_counter() - started
        if any(len(text.tokens) != written for text in texts):
            raise record.BenchError("an answer is shorter than it was to be")
        return Times(seconds, list(firsts.values()), token_s)


def leave_out_forwards(runner: TextRunner, sequences: int) -> None:
    """Replace the runner's forwards by those of CUDA graphs that do nothing: their inputs are prepared as on a GPU."""
    import torch

    from llm.backends.fused import FusedBackend

    model, cache = runner.model, runner.execution.cache
    decoder: Any = SimpleNamespace(
        vocabulary=model.vocabulary, group=1, feature_width=0, dtype=torch.float32, ranks=None,
        ops=SimpleNamespace(branches=None), whole=lambda logits: logits,
    )  # fmt: skip
    fused = FusedBackend(model, cache, decoder, sequences=sequences, context=runner.context, rows=runner.limit(None))
    fused.graphs.best.fill_(_FIRST_TOKEN)
    fused.graphs._graph = lambda shape: lambda: None  # type: ignore[method-assign]
    runner.execution = fused
    for _, model_runner in runner._lanes.values():
        model_runner.backend = fused


def run(options: Any, loads: Sequence[Load]) -> dict[str, Any]:
    """Measure all loads, one after another, on one runner."""
    import torch

    from llm.checkpoints.load import load as load_model
    from llm.checkpoints.quantized import quantize
    from llm.lane import StreamLane

    cuda = options.device == "cuda"
    lane = StreamLane("text", torch.device("cuda")) if cuda else Lane("text")
    name = tiny.TINY if options.tiny else options.model

    def loaded() -> Any:
        model = load_model(name, precision="bf16" if cuda else "fp32", device=options.device)
        draw = torch.Generator().manual_seed(0)
        prompts = [torch.randint(_FIRST_TOKEN, model.vocabulary, (256,), generator=draw).tolist() for _ in range(4)]
        return quantize(model, prompts) if cuda else model

    model = lane.call(loaded)
    runner = TextRunner(
        model, lane=lane, max_requests=max(load.in_flight for load in loads), max_rows=_ROWS, chunk=_CHUNK,
        pages=_SPARE_PAGES + max(load.in_flight * -(-(load.context + 1) // PAGE) for load in loads),
        context=max(load.context for load in loads) + PAGE, kv=options.kv if cuda else "float", pace_s=options.pace,
        ahead=options.host_only or None,
    )  # fmt: skip
    if options.host_only:
        leave_out_forwards(runner, max(load.in_flight for load in loads))
    ticks: list[Tick] = []
    results: dict[str, Any] = {}
    try:
        runner.prepare(measure_s=3.0 if cuda else 0.1)
        gc.collect()  # as a worker does before it serves: see workers/boot.py
        gc.freeze()
        sys.setswitchinterval(_SWITCH_S)
        with Engine([runner], on_tick=ticks.append) as engine:
            generator = LoadGenerator(engine, model.vocabulary, options.temperature)
            for load in loads:
                generator.run(load, load.in_flight, min(load.written, _WARM_TOKENS))
                ticks.clear()
                count = load.in_flight * load.waves
                cpu_s = time.process_time()
                times = generator.run(load, count, load.written, load.rate)
                cpu_s = time.process_time() - cpu_s
                results[load.name] = {
                    "in_flight": load.in_flight, "given": load.given, "written": load.written, "requests": count,
                    "tokens_s": round(count * load.written / times.seconds, 1), "seconds": round(times.seconds, 6),
                    "step_ms": round(1e3 * times.seconds / len(ticks), 3),
                    "step_cpu_ms": round(1e3 * cpu_s / len(ticks), 3), "first_p50_s": percentile(times.first_s, 50),
                    "first_p99_s": percentile(times.first_s, 99),
                    "token_p99_ms": round(1e3 * percentile(times.token_s, 99), 3) if times.token_s else None,
                }  # fmt: skip
                record.progress(f"{load.name}: {results[load.name]}")
    finally:
        runner.close()
        lane.close()
    figures = {"loads": results, "model": model.name, "precision": model.precision, "kv": options.kv,
               "temperature": options.temperature}  # fmt: skip
    table = "h200-text-load-server" if any("@" in name for name in results) else "h200-text-load"
    return record.publish(options.name, figures, options.results, table=TABLES[table])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("text_load", __doc__)
    parser.add_argument("--model", default=tiny.LLAMA_8B, help="default: %(default)s")
    parser.add_argument("--loads", default=_LOADS, help="IN_FLIGHT:PROMPT/ANSWER[:WAVES][@RATE],…; %(default)s")
    parser.add_argument("--kv", choices=("int8", "fp8", "float"), default="int8", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds between tokens; default: %(default)s")
    parser.add_argument("--host-only", action="store_true", help="leave out forwards; needs --device cpu")
    parser.add_argument("--name", default="text-load", help="of the file of results; default: %(default)s")
    options = parser.parse_args(arguments)
    with record.alone():
        run(options, [Load.read(text) for text in options.loads.split(",")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
