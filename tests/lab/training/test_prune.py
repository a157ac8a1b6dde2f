"""Pruned language models: a smaller one of the parts that matter, and one whose zeros stay zeros."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lab.training import prune
from lab.training.lm import LENGTH, Corpus
from lab.training.run import TrainingRun
from lab.training.shapes import EMOJI, TrainedLlamaShape


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=48, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


TEXTS = [torch.arange(2, 26), torch.arange(30, 60)]


def test_a_smaller_model_keeps_the_parts_that_do_something() -> None:
    """One layer, two heads of keys and half of the channels do nothing: without them the model is the same."""
    whole = model()
    idle = whole.model.layers[1]
    idle.self_attn.o_proj.weight.zero_()
    idle.mlp.down_proj.weight.zero_()
    for layer in whole.model.layers:
        layer.self_attn.v_proj.weight.view(4, 16, 64)[[0, 2]] = 0.0
        layer.mlp.up_proj.weight[::2] = 0.0
    starts = torch.tensor([[5], [17], [40]])
    texts = [*whole.generate(starts, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)]
    small = prune.smaller(whole, texts, TrainedLlamaShape(64, 2, 4, 2, 24))
    assert (small.config.num_hidden_layers, small.config.intermediate_size) == (2, 24)
    assert small.num_parameters() < 0.5 * whole.num_parameters()
    for text in texts:
        torch.testing.assert_close(small(text[None]).logits, whole(text[None]).logits, rtol=1e-4, atol=1e-4)


def test_zeros_stay_zeros() -> None:
    for method in prune.SPARSE:
        pruned = model()
        prune.sparsify_(pruned, TEXTS, method)
        weight = pruned.model.layers[0].mlp.up_proj.weight
        before = weight != 0
        assert (before.unflatten(1, (-1, 4)).sum(-1) == 2).all(), method
        zeros = prune.Zeros(pruned)
        weight += 1.0
        zeros()
        assert torch.equal(weight != 0, before), method


def test_what_is_pruned_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of another device would choose other zeros."""
    run, kinds = TrainingRun(tmp_path, tmp_path, tmp_path), (prune.SMALL, *prune.SPARSE)
    train_on(torch.stack([torch.arange(2, 26), torch.arange(30, 54)]), monkeypatch)
    first = {kind: prune.start(run, kind).state_dict() for kind in kinds}
    monkeypatch.delattr(prune.lm, "corpus")
    for kind in kinds:
        again = prune.start(run, kind).state_dict()
        assert all(torch.equal(first[kind][name], again[name]) for name in again), kind


def train_on(rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "dense", lambda _: model())
    monkeypatch.setattr(prune.lm, "corpus", lambda *_: Corpus(rows, rows > 0, rows, rows > 0))


def test_training_follows_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of noise teach nothing but the whole model's distributions."""
    shapes = dataclasses.replace(EMOJI, lm_vocab=64)
    run = TrainingRun(tmp_path, tmp_path, tmp_path, shapes=shapes, iterations=60, batch=16)
    rows = torch.randint(1, 64, (64, LENGTH), generator=torch.Generator().manual_seed(0))
    train_on(rows, monkeypatch)
    prune.train(run, prune.SMALL)
    first, *_, last = map(json.loads, (tmp_path / "pruned-small/curve.jsonl").read_text().splitlines())
    assert last["agrees"] > 1.2 * first["agrees"]
