"""EAGLE-3 heads: drafts against the network unrolled as in training, text as without, and what does not fit."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from tests.core.kernels.cuda.device import CUDA, DEVICE, DTYPE

# isort: split
from core.kernels.kv_cache import KVCache
from llm.backends.select import select
from llm.checkpoints.load import TextModelError, load
from llm.drafts import load_draft
from llm.drafts.draft_forwards import FusedForwards, ProgramForwards
from llm.drafts.drafter import DraftRequest
from llm.drafts.eagle import EagleDecoder, EagleNetwork, unrolled
from llm.drafts.eagle_drafter import EagleDraft, EagleDrafter
from llm.drafts.speculate import DraftTokens
from llm.drafts.speculator import Speculator
from llm.families import tiny
from tests.llm import stage

WORDS, STEPS = 100, 4
SIZE: dict[str, Any] = {"pages": 12, "sequences": 2, "context": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded head for the small model, as published."""
    model, path = stage.small(), tmp_path_factory.mktemp("eagle")
    fields = {
        **LlamaConfig().to_dict(), "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": WORDS,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, "num_hidden_layers": 1,
        "hidden_size": model.config.hidden_size, "vocab_size": model.vocabulary, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": model.context,
    }  # fmt: skip
    torch.manual_seed(3)
    network = EagleNetwork(LlamaConfig(**fields), (0, 1, 1))
    for weight in network.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.2)
    chosen = torch.randperm(model.vocabulary)[:WORDS].sort().values
    network.d2t.copy_(chosen - torch.arange(WORDS))
    network.t2d[chosen] = True
    save_file({key: tensor.contiguous() for key, tensor in network.state_dict().items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return path


def loaded(folder: Path) -> EagleDraft:
    draft = load_draft.load(str(folder), stage.small(), lacks=None)
    assert isinstance(draft, EagleDraft) and draft.features == (0, 1, 1)
    return draft


def drawn(count: int) -> tuple[list[int], Tensor]:
    """Tokens, and features of all but the last."""
    model, generator = stage.small(), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.vocabulary, (count,), generator=generator).tolist()
    return tokens, torch.randn(count - 1, 3 * model.config.hidden_size, generator=generator)


def drafter_of(draft: EagleDraft, kernels: Any) -> EagleDrafter:
    """A drafter beside a model with two sequences."""
    execution = select(stage.small(), **SIZE, kernels=kernels, features=draft.features)
    execution.cache.place(0, [3, 5])
    execution.cache.place(1, [7, 9])
    return draft(execution, **SIZE, rows=64, kv="float", kernels=kernels)


def request(row: int, tokens: list[int], read: int, stop: int, count: int, features: Tensor) -> DraftRequest:
    """`features` are those of all positions."""
    return DraftRequest(row, tokens[: stop + 1], read, stop, count, None, features[read:stop])


def chains(network: EagleNetwork, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
    """For each position what the unrolled network drafts behind it, [T, STEPS]: logits [T, STEPS, V] and tokens."""
    words = torch.arange(WORDS) + network.d2t
    embedding = stage.small().network.get_input_embeddings()
    scores = torch.zeros(len(tokens) - 1, STEPS, WORDS)
    with torch.inference_mode():
        for end in range(1, len(tokens)):  # its own drafts are what later steps read
            ids = [*tokens[: end + 1]]
            for step in range(STEPS):
                states = unrolled(
                    network,
                    torch.cat([features[None, :end], torch.zeros(1, step, features.shape[1])], 1),
                    embedding(torch.tensor([ids[1:]])),
                    step + 1,
                )
                scores[end - 1, step] = network.lm_head(network.norm(states[-1][0, -1]))
                ids.append(int(words[scores[end - 1, step].argmax()]))
    return scores, words[scores.argmax(-1)]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", '{"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": "two"}', ""),
        ("model.safetensors", "no weights", ""),
        ("model.safetensors", None, "no weights that can be read"),
    ],
)
def test_damaged_files_are_refused_by_name(
    name: str, content: str | None, reason: str, folder: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(folder, tmp_path / "head") / name
    damaged.unlink() if content is None else damaged.write_text(content)
    with pytest.raises(TextModelError, match=f"draft .*{reason or name}"):
        load_draft.load(str(damaged.parent), stage.small(), lacks=None)


def test_the_heads_angles_are_those_of_a_model_in_bf16(folder: Path) -> None:
    """Rotary frequencies stay fp32: rounded to bf16, angles of far positions are off by several percent."""
    target = load(tiny.TINY, precision="bf16")
    draft = load_draft.load(str(folder), target, lacks=None)
    assert isinstance(draft, EagleDraft) and draft.network.fc.weight.dtype == torch.bfloat16
    frequencies = draft.network.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, loaded(folder).network.rotary_emb.inv_freq)


def test_chains_are_those_of_the_unrolled_network(folder: Path) -> None:
    """By torch, and by the fused kernels' own loop as torch runs it; read in parts, of two sequences at once."""
    draft, (tokens, features) = loaded(folder), drawn(13)
    _, expected = chains(draft.network, tokens, features)
    drafter = drafter_of(draft, None)
    for first, last, counts in ((0, 5, [0, 0]), (5, 6, [4, 2]), (6, 9, [1, 3]), (9, 12, [4, 4])):
        made = drafter.guess([request(row, tokens, first, last, counts[row], features) for row in (0, 1)])
        assert [draft.tokens for draft in made] == [expected[last - 1, :count].tolist() for count in counts]


def test_programs_of_kernels_draft_alike(folder: Path) -> None:
    """In INT8: alone or among others the same, and mostly what the network in floats drafts first."""
    draft, (tokens, features) = loaded(folder), drawn(33)
    _, expected = chains(draft.network, tokens, features)
    drafter = drafter_of(draft, stage.kernels())
    assert isinstance(drafter._forwards, ProgramForwards)
    right = 0
    for p in range(32):
        requests = [request(row, tokens, p, p + 1, count, features) for row, count in ((0, STEPS), (1, 2))]
        one, two = drafter.guess(requests)
        (alone,) = drafter.guess(requests[:1])
        assert one.tokens == alone.tokens and two.tokens == alone.tokens[:2]
        right += alone.tokens[0] == int(expected[p, 0])
    assert right > 24


@pytest.mark.long
def test_graphs_run_the_same_loop(folder: Path) -> None:
    """The fused form's padding and its fixed steps."""
    draft, model = loaded(folder), stage.small()
    tokens, features = drawn(6)
    scores, expected = chains(draft.network, tokens, features)
    cache = KVCache(layers=1, kv_heads=2, head_dim=16, dtype=DTYPE, device=DEVICE, turned=True, **SIZE)
    cache.place(0, [3, 5])
    cache.place(1, [7, 9])
    network, embedding = draft.network.to(DEVICE, DTYPE), copy.deepcopy(model.network.get_input_embeddings())
    decoder = EagleDecoder.of(network, embedding.to(DEVICE, DTYPE), lambda layer: layer)
    execution: Any = SimpleNamespace(step_graphs=stage.step_graphs(features.shape[1], DTYPE, DEVICE))
    drafter = EagleDrafter(draft, decoder, FusedForwards(network, cache), execution)
    assert drafter.graphs is not None
    for first, last, count in ((0, 2, 2), (2, 5, 4)):
        (draft_tokens,) = drafter.guess([request(0, tokens, first, last, count, features.to(DEVICE, DTYPE))])
        assert draft_tokens.tokens == DraftTokens.on_device(count).tokens
        made = execution.step_graphs.guesses[:count, 0].tolist()
        if CUDA:  # in 16 bits; what follows a guess depends on it
            word = (torch.arange(WORDS) + draft.network.d2t.cpu()).tolist().index(made[0])
            likely = scores[last - 1, 0]
            assert likely.max() - likely[word] < 0.1 * likely.abs().max()
        else:
            assert made == expected[last - 1, :count].tolist()


@pytest.mark.quick("True-options0", "False-options1")
@pytest.mark.parametrize(
    ("on_kernels", "options"), [(True, {}), (False, {}), (True, {"chunk": 7, "pages": 30, "max_requests": 6})]
)
def test_texts_are_those_without_drafts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, on_kernels: bool, options: dict[str, Any]
) -> None:
    """Greedy ones; and seeded ones whatever runs beside them, and however often they are preempted."""
    monkeypatch.setattr(Speculator, "lengths", lambda self, decoding: None)  # load decides nothing
    model, kernels = stage.small(), stage.kernels() if on_kernels else None
    wanted = [stage.greedy(prompt, 40, ignore_end=True) for prompt in stage.prompts(model, 6)]
    seeded = [replace(each, temperature=1.0, seed=i) for i, each in enumerate(wanted)]
    expected = stage.write(model, wanted, native=on_kernels)
    with stage.serving(model, kernels=kernels, draft=loaded(folder)) as (engine, _):
        expected += [stage.answers(engine, [one])[0] for one in seeded]
    with stage.serving(model, kernels=kernels, draft=loaded(folder), **options) as (engine, runner):
        texts = stage.answers(engine, wanted + seeded)
        assert runner.guessing.guessed > 100
    assert [text.tokens for text in texts] == [text.tokens for text in expected]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fc.weight": torch.zeros(3, 5)}, r"fc\.weight is \(3, 5\), where config.json wants \(32, 96\)"),
        ({"midlayer.hidden_norm.weight": None}, r"midlayer\.hidden_norm\.weight is missing"),
        ({"d2t": torch.full((WORDS,), 10**6)}, "d2t leads out of the"),
        ({"hidden_size": 64}, "is for a model of width 64"),
        ({"draft_vocab_size": 10**6}, "draft_vocab_size must be"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 9]}}, "must be layers of"),
    ],
)
def test_heads_that_do_not_fit_are_refused(folder: Path, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    weights, fields = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for key, value in change.items():
        into = weights if key in weights else fields
        if value is None:
            del into[key]
        else:
            into[key] = value
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(TextModelError, match=reason):
        load_draft.load(str(tmp_path), stage.small(), lacks=None)
