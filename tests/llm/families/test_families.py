"""Models of the families write transformers' own greedy answers: in flight, preempted, by our kernels and by torch."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Llama4ForCausalLM

from llm.backends.backend import KERNELS
from llm.backends.select import select
from llm.checkpoints.load import TextModel, load
from llm.checkpoints.quantized import quantize
from llm.families import tiny
from tests.llm import stage, test_exact
from tests.llm.checkpoints.test_load import config, logits, saved
from tests.llm.test_exact import check, watch

MOST = 16
# Windows of 12 tokens, in all layers, or in some beside full ones, and mixtures of experts.
MIXTURES = (tiny.MIXTRAL_TINY, tiny.QWEN3_MOE_TINY)
FAMILIES = (tiny.MISTRAL_TINY, tiny.GEMMA2_TINY, tiny.GEMMA3_TINY, *MIXTURES)


@functools.cache
def reference(name: str) -> tuple[TextModel, list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The model, 40 prompts, most of them longer than its windows, and transformers' answers."""
    model = load(name)
    prompts = stage.prompts(model, 40)
    assert sum(len(prompt) > 12 for prompt in prompts) > 20
    theirs, _ = tiny.make(tiny.SHAPES[name])  # with transformers' own experts
    theirs.set_attn_implementation("diptych")
    answers = stage.generated(replace(model, network=theirs.eval()), prompts, MOST)
    assert len(set(answers)) > 30 and sum(len({*answer}) > 8 for answer in answers) > 20
    return model, prompts, answers


def answered(name: str, count: int, **options: Any) -> tuple[str, list[tuple[int, ...]]]:
    """The kind of kernels, and answers up to their ends; with few pages they go on behind these, and need more."""
    model, prompts, _ = reference(name)
    few = "pages" in options
    with stage.serving(model, **options) as (engine, runner):
        preempted = watch(runner)
        found = test_exact.answered(model, engine, prompts[:count], MOST, on=few)
        assert bool(preempted) == few
    return runner.execution.kind, found


@pytest.mark.quick(0, 1, 2)
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_in_flight(name: str) -> None:
    model, prompts, expected = reference(name)
    kind, found = answered(name, 40, kernels=stage.kernels(), chunk=16, draft="lookup")
    assert kind == KERNELS
    assert len(check(found, expected, prompts, model)) <= 1


@pytest.mark.parametrize(
    ("name", "kernels"),
    [(name, True) for name in (tiny.MISTRAL_TINY, tiny.GEMMA2_TINY, tiny.GEMMA3_TINY, tiny.QWEN3_MOE_TINY)]
    + [(tiny.GEMMA2_TINY, False)],
)
def test_answers_after_preemption(name: str, kernels: bool) -> None:
    """With few pages, and by the models' own code on our attention."""
    model, prompts, expected = reference(name)
    library = stage.kernels() if kernels else None
    _, found = answered(name, 12, max_requests=8, pages=14, chunk=7, kernels=library)
    assert len(check(found, expected[:12], prompts, model)) <= 1


@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_models_are_torchs(name: str) -> None:
    """In INT8 on our kernels: the logits of the same quantized layers in transformers' own code."""
    model, prompts, _ = reference(name)
    quantized = quantize(model, prompts[:4])
    execution = select(quantized, pages=4, sequences=1, context=64, kernels=stage.kernels())
    assert execution.kind == KERNELS
    found = logits(execution, torch.tensor([prompts[5]]), [len(prompts[5]) - 1, 1])[0]
    expected = stage.logits(quantized, prompts[5])
    # A rounding that falls otherwise is seen by the rows that attend to its own.
    errors = (found - expected).abs().mean(-1)
    assert (errors < 1e-4 * expected.abs().mean()).float().mean() > 0.5 and errors.max() < 0.1
    assert (expected - stage.logits(model, prompts[5])).abs().mean() > 1e-3 * expected.abs().mean()


def test_llama_4_on_torch(tmp_path: Path) -> None:
    """Chunks of 13 tokens, layers without positions whose queries are tempered, routed experts beside a shared one."""
    llama4 = config(
        "llama4_text", intermediate_size=64, intermediate_size_mlp=96, num_hidden_layers=4, head_dim=16,
        attention_chunk_size=13, num_local_experts=4, num_experts_per_tok=1, moe_layers=[1, 3], floor_scale=7,
        attn_scale=0.5, no_rope_layers=[1, 1, 0, 1],
    )  # fmt: skip
    folder = saved(tmp_path / "llama4", llama4)
    model, own = load(str(folder)), Llama4ForCausalLM.from_pretrained(str(folder)).eval()
    reference = replace(model, network=own.requires_grad_(False))
    prompts = stage.prompts(small_prompts := load(tiny.TINY), 12)
    assert small_prompts.vocabulary <= 300 and max(map(len, prompts)) > 26
    expected = stage.generated(reference, prompts, MOST)
    assert len({*expected}) > 8
    options: dict[str, Any]
    for options in ({}, {"pages": 14, "chunk": 7}):
        texts = stage.write(model, [stage.greedy(p, MOST) for p in prompts], native=False, max_requests=8, **options)
        assert len(check([text.tokens for text in texts], expected, prompts, reference)) <= 1


def test_a_row_has_the_same_bits_whatever_is_behind_its_window() -> None:
    """Tokens before the windows of all layers change neither a logit's bits nor what is pooled."""
    model = load(tiny.MISTRAL_TINY)  # two layers of 12: the last row knows 23 tokens
    tail = tuple(range(20, 70))
    one, other = ((1, *before, *tail) for before in ((5, 6, 7), (8, 9, 10)))
    first, second = stage.write(model, [stage.greedy(prompt, 1, logprobs=5) for prompt in (one, other)])
    assert first.logprobs == second.logprobs
