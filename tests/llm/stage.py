"""What the tests of text share: models, the kernels, prompts, and an engine that answers a list of them."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from core.batching.engine import Engine
from core.batching.request import Outcome, Request
from core.kernels.kv_cache import TokenBatch
from llm.backends.attention import cacheless
from llm.backends.step_graphs import StepGraphs
from llm.checkpoints.load import TextModel, load
from llm.drafts.block_drafter import BlockDraft
from llm.drafts.speculate import NO_GUESS, DraftTokens
from llm.families import tiny
from llm.features.adapters import CONFIG, WEIGHTS
from llm.parameters import GeneratedText, TextParameters
from llm.runner import TextRunner
from llm.sequence import SequenceState
from llm.step import Output, StepResult
from tests.core.quant.stage import ROOT
from tests.core.quant.stage import kernels as kernels

LM, DRAFT = ROOT / "models" / "emoji-lm", ROOT / "models" / "emoji-lm-draft"
WORDS = (
    "cat", "dog", "house", "tree", "red", "blue", "happy", "sad", "flag", "moon", "star", "car", "train", "fish",
    "bird", "flower", "rain", "sun", "pizza", "heart", "ball", "robot", "wizard", "crown", "ghost", "bread",
    "guitar", "rocket", "turtle", "key",
)  # fmt: skip
BEGINNINGS = (
    "A man riding a", "Two dogs play with", "A plate of food", "A woman holding an umbrella", "A large white airplane",
    "Several boats are tied", "A train is pulling into the", "Three zebras graze", "The kitchen has", "A vase filled",
)  # fmt: skip


@functools.cache
def emoji() -> TextModel:
    if not (LM / "model.safetensors").is_file():
        pytest.skip("models/emoji-lm is not here")
    return load(str(LM))


@functools.cache
def emoji_draft() -> BlockDraft:
    if not (DRAFT / "model.safetensors").is_file():
        pytest.skip("models/emoji-lm-draft is not here")
    return BlockDraft.read(DRAFT, emoji())


@functools.cache
def small() -> TextModel:
    return load(tiny.TINY)


@functools.cache
def other() -> TextModel:
    """Of the same vocabulary, and of another opinion."""
    network, _ = tiny.make(tiny.SHAPES[tiny.TINY], seed=1)
    network.set_attn_implementation("diptych")
    return replace(small(), name="other", network=network.eval().requires_grad_(False))


def read(execution: Any, texts: Sequence[Sequence[int]], *counts: Sequence[int]) -> list[Tensor]:
    """Logits of every token of these texts: so many of each in the first steps, and then one of each a step."""
    logits: list[list[Tensor]] = [[] for _ in texts]
    steps = itertools.chain(counts, itertools.repeat([1] * len(texts)))
    while any(len(found) < len(text) for found, text in zip(logits, texts, strict=True)):
        ends = [len(found) + count for found, count in zip(logits, next(steps), strict=True)]
        rows = [(s, t) for s, text in enumerate(texts) for t in range(len(logits[s]), min(ends[s], len(text)))]
        tokens, positions, sequences = [texts[s][t] for s, t in rows], [t for _, t in rows], [s for s, _ in rows]
        found = execution.forward(TokenBatch.of(tokens, positions, sequences, [*range(len(rows))])).logits.clone()
        for s, row in zip(sequences, found, strict=True):
            logits[s].append(row)
    return [torch.stack(each) for each in logits]


def step_graphs(channels: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> StepGraphs:
    """The graphs of a model's steps of two sequences, as far as a drafter needs them."""
    model: Any = SimpleNamespace(
        vocabulary=50, group=4, feature_width=channels, dtype=dtype, ranks=None, ops=SimpleNamespace(branches=None)
    )
    return StepGraphs(model, 2, 128, 64, torch.device(device))


def chat(model: TextModel, text: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": text}]
    return tuple(model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def plain(model: TextModel, text: str) -> tuple[int, ...]:
    return (model.tokenizer.bos_token_id, *model.tokenizer(text, add_special_tokens=False)["input_ids"])


def prompts(model: TextModel, count: int) -> list[tuple[int, ...]]:
    """Chats and beginnings of captions, many of which begin alike."""
    made = []
    for i in range(count):
        one, two = WORDS[i % len(WORDS)], WORDS[(7 * i + i // len(WORDS)) % len(WORDS)]
        if i % 3 == 2:
            made.append(plain(model, f"{BEGINNINGS[i % len(BEGINNINGS)]} {two}"))
        else:
            made.append(chat(model, f"{one} and a {two}" if i % 2 else f"draw a {two} {one} please"))
    return made


def prompt_of(model: TextModel, length: int) -> tuple[int, ...]:
    """A prompt of so many tokens."""
    return tuple(itertools.islice(itertools.cycle(prompts(model, 1)[0]), length))


@contextmanager
def by_transformers(model: TextModel) -> Iterator[Any]:
    """The network with transformers' own attention."""
    model.network.set_attn_implementation(cacheless(model.network))
    try:
        with torch.inference_mode():
            yield model.network
    finally:
        model.network.set_attn_implementation("diptych")


def logits(model: TextModel, tokens: Sequence[int]) -> Tensor:
    """What transformers computes after each of these tokens, [T, V]."""
    with by_transformers(model) as network:
        found: Tensor = network(torch.tensor([[*tokens]], device=model.device), use_cache=False).logits[0].float()
    return found


def generated(model: TextModel, given: Sequence[tuple[int, ...]], most: int, **options: Any) -> list[tuple[int, ...]]:
    """What transformers' `generate` answers greedily, up to and with the end token."""
    answers: dict[int, tuple[int, ...]] = {}
    for length in {len(prompt) for prompt in given}:  # of one length each time: nothing has to be padded
        group = [i for i, prompt in enumerate(given) if len(prompt) == length]
        rows = generate(model, [given[i] for i in group], most, **options)[:, length:].tolist()
        answers |= {i: until_end(model, row) for i, row in zip(group, rows, strict=True)}
    return [answers[i] for i in range(len(given))]


def generate(model: TextModel, prompts: Sequence[tuple[int, ...]], most: int, **options: Any) -> Any:
    """What transformers' `generate` returns for prompts of one length."""
    ids = torch.tensor(prompts)
    with by_transformers(model) as network:
        return network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False,
            eos_token_id=sorted(model.ends), pad_token_id=model.tokenizer.pad_token_id, **options,
        )  # fmt: skip


def until_end(model: TextModel, tokens: Sequence[int]) -> tuple[int, ...]:
    """An answer up to and with its first end token."""
    return tuple(tokens[: next((n for n, token in enumerate(tokens, 1) if token in model.ends), len(tokens))])


@contextmanager
def serving(model: TextModel, **options: Any) -> Iterator[tuple[Engine, TextRunner]]:
    """An engine on this model. When it ends nothing may be held, and the pages' books must balance."""
    runner = TextRunner(model, **options)
    try:
        with Engine([runner]) as engine:
            yield engine, runner
        assert runner.held() == 0
        runner.pages.check()
        assert runner.pages.free == runner.pages.capacity
    finally:
        runner.close()


def submit(engine: Engine, parameters: TextParameters, id: str = "a", **options: Any) -> Future[GeneratedText]:
    return engine.submit(Request(id, "text", parameters, **options))


def answers(engine: Engine, wanted: Sequence[TextParameters]) -> list[GeneratedText]:
    """The answers to requests of which none goes on before all are submitted, however slow a machine is at that."""
    submitted = threading.Event()

    def wait(*_: object) -> None:
        submitted.wait()

    try:
        futures = [submit(engine, parameters, f"{i}", listener=wait) for i, parameters in enumerate(wanted)]
    finally:
        submitted.set()
    return [future.result(timeout=300) for future in futures]


def write(
    model: TextModel, requests: Sequence[TextParameters], *, native: bool = True, **options: Any
) -> list[GeneratedText]:
    """Answers of an engine of its own, on the CPU kernels or by torch."""
    with serving(model, kernels=kernels() if native else None, **options) as (engine, _):
        return answers(engine, requests)


def iterations(runner: TextRunner, parameters: TextParameters, *at: int) -> Iterator[tuple[SequenceState, Outcome]]:
    """The iterations of a request that runs alone, without an engine, and is preempted before some of them."""
    request = Request("0", "text", parameters)
    runner.check(request)
    for iteration in itertools.count():
        if iteration in (0, *at):
            if iteration:
                runner.preempt(request)
            assert runner.admit(request) is None
        assert runner.reserve([request]) and runner.rows(request) > 0
        outcome = runner.launch([request]).outcome()[request.id]
        assert outcome.error is None
        yield request.work, outcome
        if outcome.finished:
            break
    runner.release(request)
    assert runner.held() == 0


def preempted(runner: TextRunner, parameters: TextParameters, *at: int) -> GeneratedText:
    """The text of a request that runs alone, without an engine, and is preempted before these iterations."""
    *_, (_, outcome) = iterations(runner, parameters, *at)
    text: GeneratedText = outcome.result
    return text


def save_lora(
    folder: Path, model: TextModel, *, rank: int = 4, seed: int = 0, spread: float = 0.3,
    names: Sequence[str] = ("self_attn.q_proj", "mlp.gate_proj"),
) -> None:  # fmt: skip
    """Write an adapter of layers of a model, by default its queries and gates, as PEFT does."""
    state, generator = {}, torch.Generator().manual_seed(seed)
    for layer in range(model.layers):
        for name in names:
            module = model.network.get_submodule(f"model.layers.{layer}.{name}")
            for matrix, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{matrix}.weight"
                state[key] = torch.randn(shape, generator=generator) * spread
    folder.mkdir(parents=True)
    save_file(state, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))


def greedy(prompt: tuple[int, ...], most: int = 32, **options: Any) -> TextParameters:
    return TextParameters(prompt, most, temperature=0, **options)


def state_of(parameters: TextParameters, matcher: Any = None, vocabulary: int = 262) -> SequenceState:
    """The state of a sequence of the small model."""
    return SequenceState(parameters, small().tokenizer, vocabulary, matcher)


def asking(work: SequenceState, first: int, guess: DraftTokens = NO_GUESS) -> Output:
    """What asks for a next token, by the logits at row `first`."""
    work.row = first
    return Output(work, work.computed, guess, first, StepResult())
