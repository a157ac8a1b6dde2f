"""Tokens per second of one list of requests: transformers one at a time, in padded batches, and with its own continuous
batching; then ours, in INT8, and with speculative decoding. All in turns, in one process, on one thread pool.

In fp32 on a CPU, in bf16 on a GPU. Prompts and answers are of mixed lengths, answers of fixed ones: every rung writes
the same number of tokens. Exactness is left to the tests.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core.batching.runner import Lane
from core.config import Settings
from lab.bench.harness import provenance, record
from lab.bench.harness.turns import LeftOut, alternate
from lab.bench.tables import TABLES
from llm.backends.attention import cacheless
from llm.cache.pages import PAGE

RUNGS = (
    "transformers-generate", "transformers-static-batch", "transformers-generate_batch", "diptych", "diptych-int8",
    "diptych-speculative", "diptych-user", "diptych-user-speculative",
)  # fmt: skip
USER = ("diptych-user", "diptych-user-speculative")  # one user's chats, one after the other, each to its own end
STATIC_BATCH = 16
_ONE_AT_A_TIME = 8  # of the requests: a rate needs no more, and the slowest rung would take most of the time
_WARM_TOKENS = 8
_LONGEST = 48  # tokens of a chat's answer
_MODELS = Path(__file__).resolve().parents[2] / "models"
_OPENINGS = (
    "A man riding a brown horse", "Two dogs play with", "A plate of food with rice and", "A train is pulling into",
    "A woman holding an umbrella walks down", "Several boats are tied to a dock near", "The kitchen has a white stove",
    "A small child sits on", "A black cat is sleeping on top of a wooden", "Three zebras graze in a field of",
)  # fmt: skip
_CHATS = (
    "red apple", "two cats and a dog", "draw a rocket on navy", "smiling face", "a big tree left of a small house",
    "pizza please", "three blue fish", "crying cat", "snowman with hat", "a car behind a bus, yellow", "unicorn",
    "birthday cake on pink", "show me a dragon", "one owl and two mice", "a small star above a big moon", "four balls",
)  # fmt: skip


@dataclass(frozen=True)
class BenchmarkJob:
    """A prompt's tokens, and how many are to be written."""

    prompt: tuple[int, ...]
    tokens: int


Write = Callable[[Sequence[BenchmarkJob]], int | None]
"""Writes the answers of all jobs. Returns the number of tokens where the jobs do not tell it."""


def run(
    settings: Settings,
    *,
    model: str,
    draft: str = "",
    requests: int = 64,
    turns: int = 3,
    results: Path | None = None,
    rungs: Sequence[str] = RUNGS,
) -> dict[str, Any]:
    """Measure the rungs in turns and report the median turn. `draft` is a model's folder; empty: look-up."""
    unknown = [name for name in rungs if name not in RUNGS]
    if unknown:
        raise record.BenchError(f"--rungs: there is no {', '.join(unknown)}; there are {', '.join(RUNGS)}")
    with record.alone(), ExitStack() as stack:
        bench = _Bench(settings, model, draft, stack)
        jobs = bench.jobs(requests)
        measured, left_out = _take_turns(bench, jobs, rungs, turns)
        acceptance = bench.acceptance()
    medians = {name: round(statistics.median(rates), 1) for name, rates in measured.items()}
    result = {
        "tokens_per_s": medians, "acceptance": acceptance,
        "spread": {name: [round(min(rates), 1), round(max(rates), 1)] for name, rates in measured.items()},
        "left_out": left_out, "model": bench.model.name,
        "parameters": sum(weight.numel() for weight in bench.model.network.parameters()), "draft": bench.draft,
        "requests": requests, "tokens": sum(job.tokens for job in jobs), "static_batch": STATIC_BATCH,
        "resident_mib": record.resident_mib(),
    }  # fmt: skip
    name = f"text-{bench.model.name.removeprefix('random:')}"
    return record.publish(name, result, results, artifacts=provenance.EMOJI_LM, table=TABLES["text"])


def _take_turns(
    bench: _Bench, jobs: Sequence[BenchmarkJob], rungs: Sequence[str], turns: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Tokens per second of each rung in each turn; and the rungs that do not run here, each with the reason.

    One more turn, of few tokens, comes first: it warms up and does not count.
    """
    left_out: dict[str, str] = {}

    def measure(name: str, write: Write, turn: int) -> float:
        selected = jobs[:_ONE_AT_A_TIME] if name == "transformers-generate" else jobs
        selected = bench.chats() if name in USER else selected
        if not turn and name not in USER:
            selected = [replace(job, tokens=_WARM_TOKENS) for job in selected[:_ONE_AT_A_TIME]]
        started = time.perf_counter()
        tokens = write(selected) or sum(job.tokens for job in selected)
        seconds = time.perf_counter() - started
        record.progress(f"turn {turn} of {turns}: {name} took {seconds:.1f} s")
        return tokens / seconds

    rates = alternate({name: bench.writes[name] for name in rungs}, turns + 1, measure, left_out)
    return {name: warm_and_counted[1:] for name, warm_and_counted in rates.items()}, left_out


class _Bench:
    """The rungs on one model, each of ours with an engine of its own on the one lane."""

    def __init__(self, settings: Settings, name: str, draft: str, stack: ExitStack) -> None:
        import torch

        from llm.checkpoints.load import TextModelError, load
        from llm.drafts.load_draft import load as load_draft
        from llm.lane import StreamLane
        from workers.devices import device_of

        logging.getLogger("transformers").setLevel(logging.ERROR)
        self._device = device_of(settings)
        self._cuda = self._device != "cpu"
        self._lane = StreamLane("rungs", torch.device(self._device)) if self._cuda else Lane("rungs")
        self._stack = stack

        def loaded(name: str) -> Any:
            if settings.threads:
                torch.set_num_threads(settings.threads)
            return load(name, precision="bf16" if self._cuda else "fp32", device=self._device)

        try:
            self.model = self._lane.call(lambda: loaded(name))
            guide: Any = self._lane.call(lambda: load_draft(draft or "lookup", self.model, lacks=None))
        except TextModelError as error:
            raise record.BenchError(str(error)) from error
        self.draft = "lookup" if guide == "lookup" else guide.name
        self._stock = self._lane.call(lambda: loaded(name)).network
        self._stock.set_attn_implementation(cacheless(self._stock))
        self._kernels = None if self._cuda else self._lane.call(lambda: self._library(settings))
        self._speculating: Any = None
        self.writes: dict[str, Write] = {
            "transformers-generate": lambda jobs: self._generate(jobs, 1),
            "transformers-static-batch": lambda jobs: self._generate(jobs, STATIC_BATCH),
            "transformers-generate_batch": self._generate_batch,
            "diptych": self._ours(lambda: self.model),
            "diptych-int8": self._ours(self._quantized),
            "diptych-speculative": self._ours(lambda: self.model, guide),
            "diptych-user": self._ours(lambda: self.model, user=True),
            "diptych-user-speculative": self._ours(lambda: self.model, guide, user=True),
        }

    @staticmethod
    def _library(settings: Settings) -> Any:
        from core.kernels.cpu.library import KernelsUnavailable, library

        try:
            return library(settings.compiled_kernels) if settings.kernels else None
        except KernelsUnavailable as error:
            logging.getLogger(__name__).warning("without our own kernels: %s", error)
            return None

    def jobs(self, count: int) -> list[BenchmarkJob]:
        """Beginnings of captions of mixed lengths, and mixed numbers of tokens to write."""
        draw = random.Random(0)
        tokenizer, batch = self.model.tokenizer, []
        for i in range(count):
            text = " . ".join(draw.sample(_OPENINGS, draw.choice((1, 1, 2, 4))))
            ids = tokenizer(f"{text} {i}", add_special_tokens=False)["input_ids"]
            batch.append(BenchmarkJob((tokenizer.bos_token_id, *ids), draw.choice((16, 24, 32, 48, 64, 96, 128))))
        context = self.model.context
        return [replace(job, prompt=job.prompt[: context - job.tokens]) for job in batch]

    def chats(self) -> list[BenchmarkJob]:
        """Short prompts as chats."""
        chats = [[{"role": "user", "content": text}] for text in _CHATS]
        prompts = self.model.tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        return [BenchmarkJob(tuple(ids), _LONGEST) for ids in prompts]

    def acceptance(self) -> float | None:
        """The share of guesses that were right."""
        runner = self._speculating
        return (
            round(runner.guessing.accepted / runner.guessing.guessed, 3)
            if runner is not None and runner.guessing.guessed
            else None
        )

    # -- transformers ----------------------------------------------------------------------------------------------

    def _generate(self, jobs: Sequence[BenchmarkJob], size: int) -> None:
        """Generate in batches of so many, padded at the left, each until its longest answer is written."""
        import torch

        def write(batch: Sequence[BenchmarkJob]) -> None:
            width = max(len(job.prompt) for job in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, job in enumerate(batch):
                ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
                mask[row, width - len(job.prompt) :] = 1
            with torch.inference_mode():
                self._stock.generate(
                    ids.to(self._device), attention_mask=mask.to(self._device), do_sample=False,
                    max_new_tokens=max(job.tokens for job in batch),
                    eos_token_id=None, pad_token_id=0,
                )  # fmt: skip

        for start in range(0, len(jobs), size):
            batch = jobs[start : start + size]
            self._lane.call(lambda batch=batch: write(batch))  # type: ignore[misc]

    def _generate_batch(self, jobs: Sequence[BenchmarkJob]) -> None:
        """transformers' own continuous batching, by the manager behind `generate_batch`.

        That takes one length for all; the manager takes each request's own, as ours does, so that nothing is written
        that nobody asked for.
        """
        from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

        # Its own choice takes all memory there is, and a mask of the square of that.
        pages = sum(-(-(len(job.prompt) + job.tokens) // PAGE) + 1 for job in jobs)
        options = {
            "generation_config": GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1),
            "continuous_batching_config": ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=pages, max_batch_tokens=256
            ),
            "warmup": False,
        }

        def write() -> None:
            with self._stock.continuous_batching_context_manager(**options) as manager:
                for job in jobs:
                    manager.add_request(list(job.prompt), max_new_tokens=job.tokens)
                written: list[int] = []
                while len(written) < len(jobs):
                    output = manager.get_result(timeout=1)
                    if output is None and not manager.is_running():
                        raise RuntimeError("its thread ended")
                    if output is not None and output.is_finished():
                        written.append(len(output.generated_tokens))
                if sum(written) != sum(job.tokens for job in jobs):
                    raise RuntimeError(f"it wrote {sum(written)} tokens, not all")

        implementation = self._stock.config._attn_implementation
        try:
            self._lane.call(write)
        except Exception as error:  # an experiment of theirs: whatever it raises is the answer
            raise LeftOut(f"{type(error).__name__}: {error}") from error
        finally:
            self._stock.set_attn_implementation(implementation)

    # -- ours ------------------------------------------------------------------------------------------------------

    def _quantized(self) -> Any:
        from llm.checkpoints.quantized import quantize

        if self._kernels is None and not self._cuda:
            raise LeftOut("INT8 does not run here without our kernels")
        return quantize(self.model, [job.prompt for job in self.jobs(16)])

    def _ours(self, model: Callable[[], Any], guide: Any = None, *, user: bool = False) -> Write:
        """Submit all jobs at once, or a user's in turn, to an engine, which is built when it is first needed."""
        from core.batching.engine import Engine
        from core.batching.request import Request
        from core.kernels.kv_cache import Kind
        from llm.parameters import TextParameters
        from llm.runner import TextRunner

        engines: list[Engine] = []
        turn = 0

        def start() -> Engine:
            served = self._lane.call(model)
            kv: Kind = "int8" if self._cuda and served.precision == "int8" else "float"
            runner = self._lane.call(
                lambda: TextRunner(served, lane=self._lane, kernels=self._kernels, draft=guide, kv=kv)
            )
            runner.prepare(measure_s=10.0)
            if guide is not None:
                self._speculating = runner
            return self._stack.enter_context(Engine([runner]))

        def write(jobs: Sequence[BenchmarkJob]) -> int | None:
            nonlocal turn
            turn += 1
            if not engines:
                engines.append(start())
            parameters = [TextParameters(job.prompt, job.tokens, temperature=0, ignore_end=not user) for job in jobs]
            requests = [Request(f"{turn}-{number}", "text", request) for number, request in enumerate(parameters)]
            if user:
                return sum(len(engines[0].submit(request).result().tokens) for request in requests)
            for future in [engines[0].submit(request) for request in requests]:
                future.result()
            return None

        return write


def embedded() -> list[tuple[str, str]]:
    """(model, draft) pairs that are measured by default: the embedded model, and a seeded Llama of 100 million."""
    from llm.families.tiny import LLAMA_100M

    return [(str(_MODELS / "emoji-lm"), str(_MODELS / "emoji-lm-draft")), (LLAMA_100M, "")]
