"""Drafts of blocks: the published architecture in plain torch against our walks on each kind of kernels, checkpoints
that do not fit, and what the model writes with them.
"""

from __future__ import annotations

import copy
import json
import math
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.core.kernels.cuda.device import CUDA, DEVICE, DTYPE

# isort: split
from core.kernels.kv_cache import KVCache
from core.ops.packed import PackedLayers
from llm.backends.backend import FUSED
from llm.checkpoints.load import TextModelError, load
from llm.drafts import dflash
from llm.drafts.block_drafter import BlockDraft, BlockDrafter
from llm.drafts.dflash import BlockDecoder, Checkpoint, DFlashNetwork, target_layers
from llm.drafts.draft_forwards import forwards
from llm.drafts.drafter import DraftRequest
from llm.drafts.load_draft import load as load_draft
from llm.drafts.speculator import Speculator
from llm.families import tiny
from tests.llm import stage
from tests.llm.drafts.test_speculate import check_samples

SIZE: dict[str, Any] = {"pages": 24, "sequences": 2, "context": 128}


def network(sources: tuple[int, ...] = (0,)) -> DFlashNetwork:
    """Random weights of two layers for `stage.small()`, of another number of heads, so that everything matters."""
    from transformers import Qwen3Config

    target = stage.small().config
    config = Qwen3Config(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-5,
    )  # fmt: skip
    made = DFlashNetwork(config, sources).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        weight.data = 2 * drawn / math.sqrt(weight.shape[-1]) if weight.ndim > 1 else 1 + drawn / 4
    return made


def published(weights: dict[str, Tensor], config: Any, x: Tensor, features: Tensor) -> Tensor:
    """Normed hidden states of a block's embeddings x [R, C] behind features [T, n · C], as the paper has them."""
    d, context = config.head_dim, len(features)

    def norm(y: Tensor, name: str) -> Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + config.rms_norm_eps) * weights[name]

    angles = torch.arange(context + len(x))[:, None] / config.rope_parameters["rope_theta"] ** (
        torch.arange(0, d, 2) / d
    )

    def rotated(y: Tensor, at: Tensor) -> Tensor:
        lo, hi = y.chunk(2, -1)
        cosine, sine = at.cos()[:, None], at.sin()[:, None]
        return torch.cat([lo * cosine - hi * sine, hi * cosine + lo * sine], -1)

    h = norm(features @ weights["fc.weight"].T, "hidden_norm.weight")
    for i in range(config.num_hidden_layers):
        part = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        a = norm(x, f"layers.{i}.input_layernorm.weight")
        both = torch.cat([h, a])
        q = (a @ part["self_attn.q_proj.weight"].T).unflatten(-1, (-1, d))
        k, v = ((both @ part[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, d)) for name in "kv")
        q = rotated(norm(q, f"layers.{i}.self_attn.q_norm.weight"), angles[context:])
        k = rotated(norm(k, f"layers.{i}.self_attn.k_norm.weight"), angles)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = torch.einsum("hrt,thd->rhd", (torch.einsum("rhd,thd->hrt", q, k) / math.sqrt(d)).softmax(-1), v)
        x = x + y.flatten(1) @ part["self_attn.o_proj.weight"].T
        a = norm(x, f"layers.{i}.post_attention_layernorm.weight")
        gate, up = (a @ part[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ part["mlp.down_proj.weight"].T
    return norm(x, "norm.weight")


@pytest.mark.quick("torch", "kernels")
@pytest.mark.parametrize("kind", ["torch", "kernels", "graphs"])
def test_blocks_are_those_of_the_published_architecture(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences: contexts read in pieces, the last of them with blocks of different lengths."""
    model, made = stage.small(), network((0, 1))
    device = DEVICE if kind == "graphs" else "cpu"
    dtype = DTYPE if kind == "graphs" else torch.float32
    target = copy.deepcopy(model.network).to(device, dtype)
    weights = {name: weight.clone() for name, weight in made.state_dict().items()}
    cache = KVCache(layers=2, kv_heads=2, head_dim=32, dtype=dtype, device=device, turned=kind == "graphs", **SIZE)
    cache.place(0, [3, 9, 4])
    cache.place(1, [8, 2])
    cache.settle()
    logits: list[Any] = []
    drafted = dflash.draft
    monkeypatch.setattr(dflash, "draft", lambda *given: logits.append(drafted(*given)) or logits[-1])
    packed = PackedLayers(stage.kernels(), target) if kind == "kernels" else None
    steps = stage.step_graphs(2 * model.config.hidden_size, dtype, device)
    execution: Any = SimpleNamespace(packed=packed, kind=FUSED if kind == "graphs" else "", step_graphs=steps)
    make = partial(BlockDecoder.of, made.to(device, dtype), target.get_input_embeddings(), target.lm_head)
    mask = 5
    draft = BlockDraft("", Checkpoint(made, 8, mask))
    drafter = BlockDrafter(draft, *forwards(execution, made, cache, make)[::-1], execution, 2)
    generator = torch.Generator().manual_seed(1)
    lengths, counts, last = (20, 9), (4, 2), (40, 77)
    features = [torch.randn(n, 2 * model.config.hidden_size, generator=generator) for n in lengths]
    for ends, guesses in (((17, 8), (0, 0)), (lengths, counts)):
        requests = []
        for row, (stop, count) in enumerate(zip(ends, guesses, strict=True)):
            read = (17, 8)[row] if count else 0
            new = features[row][read:stop].to(device, dtype)
            requests.append(DraftRequest(row, [0] * stop + [last[row]], read, stop, count, None, new))
        drafts = [draft.tokens for draft in drafter.guess(requests)]
    if kind == "graphs":  # which leave them on the device
        drafts = [steps.guesses[:count, row].tolist() for row, count in enumerate(counts)]
    assert [len(draft) for draft in drafts] == [*counts]
    rows = [row for n, count in enumerate(counts) for row in range(8 * n, 8 * n + count + 1)]
    found = logits[-1][rows] if kind == "graphs" else logits[-1].x if kind == "kernels" else logits[-1]
    tokens = [[token, *[mask] * count] for token, count in zip(last, counts, strict=True)]
    embedding, head = model.network.get_input_embeddings().weight, model.network.get_output_embeddings().weight
    states = [published(weights, made.config, embedding[block], x) for block, x in zip(tokens, features, strict=True)]
    wanted = torch.cat(states) @ head.T
    if kind == "kernels" or CUDA:  # of 8 or 16 bits
        assert float(F.cosine_similarity(found.flatten().float().cpu(), wanted.flatten(), dim=0)) > 0.995
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    wanted = torch.cat([own[1:] for own in wanted.split([count + 1 for count in counts])])
    near = wanted.max(-1).values - wanted.gather(1, torch.tensor([*chain(*drafts)])[:, None])[:, 0]
    assert near.max() < (0.1 if kind == "kernels" or CUDA else 1e-3) * wanted.abs().max()


def saved(folder: Path, **config: Any) -> Path:
    """A checkpoint for `stage.small()` as published, but for `config`; None: without the key."""
    made = network()
    fields = made.config.to_diff_dict() | {
        "architectures": ["DFlashDraftModel"], "block_size": 16, "num_target_layers": stage.small().layers,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0]},
    }  # fmt: skip
    fields = {key: value for key, value in (fields | config).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(made.state_dict(), folder / "model.safetensors")
    return folder


def test_a_published_checkpoint_is_read(tmp_path: Path) -> None:
    draft = load_draft(str(saved(tmp_path)), stage.small(), lacks=None)
    assert isinstance(draft, BlockDraft) and draft.features == (1,) and draft.checkpoint[1:] == (16, 7)
    layer = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    names = {"fc", "hidden_norm", "norm", *(f"layers.{i}.{name}" for i in range(2) for name in layer)}
    assert {*draft.checkpoint.network.state_dict()} == {f"{name}.weight" for name in names}
    assert [target_layers(36, 5), target_layers(32, 5), target_layers(6, 1)] == [
        (1, 9, 17, 25, 33), (1, 8, 15, 22, 29), (3,)
    ]  # fmt: skip


def test_angles_are_those_of_a_model_in_bf16(tmp_path: Path) -> None:
    """Rotary frequencies stay fp32, as those of the model do."""
    draft = load_draft(str(saved(tmp_path)), load(tiny.TINY, precision="bf16"), lacks=None)
    assert isinstance(draft, BlockDraft) and draft.checkpoint.network.fc.weight.dtype == torch.bfloat16
    assert draft.checkpoint.network.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architectures must be"),
        ({"block_size": None}, "block_size must be"),
        ({"dflash_config": {"mask_token_id": 10**6, "target_layer_ids": [0]}}, "mask_token_id must be"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 99]}}, "target_layer_ids must be"),
        ({"dflash_config": "none"}, "dflash_config must be"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, "layers must attend"),
        ({"num_target_layers": 36}, "36 layers, where"),
        ({"vocab_size": 99}, "99 words"),
        ({"intermediate_size": 128}, r"layers.0.mlp.down_proj.weight is \(32, 96\), where config.json wants"),
        ({"num_hidden_layers": 3, "layer_types": None}, "layers.2.*missing"),
        ({"num_hidden_layers": "two"}, "config.json"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(TextModelError, match=rf"(?s)draft .*{reason}"):
        load_draft(str(saved(tmp_path, **config)), stage.small(), lacks=None)


def test_samples_follow_the_model() -> None:
    guessing = check_samples(stage.emoji(), "A plate of food", stage.emoji_draft(), 400, temperature=2.0)
    assert guessing.accepted > 50 and guessing.guessed > guessing.accepted + 50


def test_canceled_answers_leave_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some end while their drafts are under way; the rest is what the model writes alone, and no page is left."""
    monkeypatch.setattr(Speculator, "lengths", lambda self, decoding: None)  # load decides nothing
    model = stage.emoji()
    prompts = stage.prompts(model, 12)
    requests = [stage.greedy(prompt, 40, ignore_end=True) for prompt in prompts]
    plain = stage.write(model, requests)
    with stage.serving(model, kernels=stage.kernels(), draft=stage.emoji_draft(), max_requests=8) as (engine, runner):
        futures = [stage.submit(engine, request, f"{i}") for i, request in enumerate(requests)]
        for i in range(0, 12, 3):
            engine.abort(f"{i}")
        done = {i: future.result(timeout=60) for i, future in enumerate(futures) if i % 3}
        assert runner.guessing.accepted > 40
    assert all(text.tokens == plain[i].tokens for i, text in done.items())
