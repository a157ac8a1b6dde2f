"""Embeddings are pooled from transformers' own hidden states: alone, beside answers, in chunks, after preemption."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.errors import Invalid
from llm.cache.pages import PAGE
from llm.checkpoints.load import TextModel, TextModelError, load
from llm.families import tiny
from llm.features.pooling import PooledStates, Pooling, embedding
from llm.parameters import GeneratedText, TextParameters
from llm.runner import TextRunner
from tests.llm import stage

MEAN = Pooling(mean=True)


def embed(prompt: tuple[int, ...]) -> TextParameters:
    return TextParameters(prompt, 0, embed=True)


def states(model: TextModel, prompt: tuple[int, ...]) -> Tensor:
    """What transformers' layers return, [T, C]."""
    with stage.by_transformers(model) as network:
        found: Tensor = network.model(torch.tensor([[*prompt]]), use_cache=False).last_hidden_state[0].float()
    return found


def vector(pooled: bytes) -> Tensor:
    return torch.frombuffer(bytearray(pooled), dtype=torch.float32)


def assert_transformers_own(model: TextModel, prompt: tuple[int, ...], text: GeneratedText) -> None:
    expected = states(model, prompt)
    expected = expected.mean(0) if model.pooling.mean else expected[-1]
    torch.testing.assert_close(vector(text.pooled), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("name", "kernels", "pooling"),
    [("llama", True, Pooling()), ("llama", True, MEAN), ("llama", False, MEAN), ("emoji", True, Pooling())],
)
def test_they_are_transformers_own_beside_answers(name: str, pooling: Pooling, kernels: bool) -> None:
    """Prompts of several chunks among answers with guesses; the answers are what they are without."""
    model = replace(stage.small() if name == "llama" else stage.emoji(), pooling=pooling)
    prompts = stage.prompts(model, 4)
    prompts += [stage.prompt_of(model, 100), prompts[0][:1]]
    requests = [item for prompt in prompts for item in (embed(prompt), stage.greedy(prompt, 6))]
    options: dict[str, Any] = {"native": kernels, "chunk": 48, "max_rows": 80, "draft": "lookup"}
    texts, (alone,) = (stage.write(model, each, **options) for each in (requests, requests[-2:-1]))
    for prompt, text, answer in zip(prompts, texts[::2], texts[1::2], strict=True):
        assert_transformers_own(model, prompt, text)
        assert (text.tokens, answer.pooled) == ((), b"")
    if name == "llama":
        assert [answer.tokens for answer in texts[1::2]] == stage.generated(model, prompts, 6)
    if kernels:
        assert alone.pooled == texts[-2].pooled


@pytest.mark.parametrize("pooling", [Pooling(), MEAN])
def test_a_preempted_prompt_goes_on_where_it_was(pooling: Pooling) -> None:
    """Preempted after each number of iterations, and once more: bit for bit as if it never was."""
    model = replace(stage.small(), pooling=pooling)
    prompt = stage.prompt_of(model, 5 * PAGE + 1)
    found: set[bytes] = set()
    for chunk, after in itertools.product((20, 33), range(4)):
        runner = TextRunner(model, kernels=stage.kernels(), chunk=chunk)
        text = stage.preempted(runner, embed(prompt), after, after + 2)
        found.add(text.pooled)
        assert_transformers_own(model, prompt, text)
        runner.close()
    assert len(found) == 1


@pytest.mark.parametrize("pooling", [Pooling(), MEAN])
def test_the_last_tokens_prefix_is_found_and_the_states_of_a_mean_are_computed(pooling: Pooling) -> None:
    model = replace(stage.small(), pooling=pooling)
    prompt = stage.prompt_of(model, 3 * PAGE + 2)
    with stage.serving(model, kernels=stage.kernels()) as (engine, _):
        stage.answers(engine, [stage.greedy(prompt, 2)])
        found, again = (stage.answers(engine, [embed(prompt)])[0] for _ in range(2))
    assert found.cached == again.cached == (0 if pooling.mean else 3 * PAGE)
    assert found.pooled == again.pooled
    assert_transformers_own(model, prompt, found)


def test_a_prompt_may_fill_the_context() -> None:
    model = stage.small()
    prompt = stage.prompt_of(model, 4 * PAGE)
    text, _ = stage.write(model, [embed(prompt), stage.greedy(prompt, 0)], context=4 * PAGE)
    with pytest.raises(Invalid, match="context of 64"):
        stage.write(model, [embed((*prompt, 5))], context=4 * PAGE)
    assert_transformers_own(model, prompt, text)


def test_states_that_are_not_finite_fail_their_request_alone() -> None:
    model = stage.small()
    prompts = [*stage.prompts(model, 2), (5, 7, 200)]
    hook = model.network.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: output.masked_fill((inputs[0] == 200)[..., None], torch.nan)
    )
    with stage.serving(model) as (engine, _):
        futures = [stage.submit(engine, embed(prompt), f"{i}") for i, prompt in enumerate(prompts)]
        errors = [future.exception(timeout=60) for future in futures]
    hook.remove()
    assert errors[:2] == [None, None] and isinstance(errors[2], FloatingPointError)


def test_a_shortened_embedding_has_length_one_again() -> None:
    pooled = torch.tensor([3.0, 4.0, 12.0]).numpy().tobytes()
    assert vector(embedding(pooled, Pooling(), 2)).tolist() == pytest.approx([0.6, 0.8])
    assert vector(embedding(pooled, Pooling(), None)).tolist() == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert vector(embedding(pooled, Pooling(normalize=False), 2)).tolist() == [3, 4]
    assert torch.equal(PooledStates().plus(torch.ones(2, 3)).plus(torch.zeros(2, 3)).mean(), torch.full((3,), 0.5))


def modules(folder: Path, *types: str, **config: object) -> None:
    path = "sentence_transformers.models."
    entries = [{"idx": i, "name": f"{i}", "path": f"{i}_{kind}", "type": path + kind} for i, kind in enumerate(types)]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


LAST, MEANS = {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, {"pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("types", "config", "expected"),
    [
        (("Transformer", "Pooling", "Normalize"), LAST, Pooling()),
        (("Transformer", "Pooling"), MEANS, Pooling(mean=True, normalize=False)),
        (("Transformer", "Pooling", "Normalize"), {"pooling_mode": "mean"}, MEAN),
        (("Transformer", "Normalize"), {}, Pooling()),
        (("Transformer", "Pooling"), {"pooling_mode": "cls"}, "pooling by 'cls'"),
        (("Transformer", "Pooling"), LAST | MEANS, "pooling by 'lasttoken and mean'"),
        (("Transformer", "Pooling", "Dense", "Normalize"), LAST, "type Dense"),
    ],
)
def test_sentence_transformers_files_are_read(
    types: tuple[str, ...], config: dict[str, object], expected: Pooling | str, tmp_path: Path
) -> None:
    assert Pooling.read(tmp_path) == Pooling()
    modules(tmp_path, *types, **config)
    found = Pooling.read(tmp_path)
    assert found == expected if isinstance(expected, Pooling) else expected in found.reason


@pytest.mark.parametrize("damage", ["{", "{}", "[1]", '[{"type": "a.Pooling", "path": "none"}]'])
def test_damaged_files_are_named(damage: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(damage)
    with pytest.raises(ValueError, match=r"\.json"):
        Pooling.read(tmp_path)


def test_a_model_without_a_head_only_embeds(tmp_path: Path) -> None:
    """As Qwen3-Embedding-8B is published: the layers alone, under their own names."""
    network, tokenizer = tiny.make(replace(tiny.SHAPES[tiny.QWEN3_TINY], tied=False))
    network.model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(TextModelError, match="missing keys"):
        load(str(tmp_path))
    modules(tmp_path, "Transformer", "Pooling", "Normalize", **LAST)
    model = load(str(tmp_path))
    prompt = stage.prompts(model, 1)[0]
    (text,) = stage.write(model, [embed(prompt)])
    with pytest.raises(Invalid, match="embeddings only"):
        stage.write(model, [stage.greedy(prompt)])
    expected = network.eval().model(torch.tensor([prompt])).last_hidden_state[0, -1]
    torch.testing.assert_close(vector(text.pooled), expected, rtol=1e-3, atol=1e-4)
    shutil.rmtree(tmp_path / "1_Pooling")
    with pytest.raises(TextModelError, match="1_Pooling"):
        load(str(tmp_path))


def test_a_model_that_pools_otherwise_gives_none() -> None:
    with pytest.raises(Invalid, match="no embeddings: it asks"):
        stage.write(replace(stage.small(), pooling=Pooling(reason="it asks for pooling by 'cls'")), [embed((5, 6))])
