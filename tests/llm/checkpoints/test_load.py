"""Any model of the family runs, by our kernels where they know it, with transformers' logits; others are refused."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from contract.precision import PRECISIONS
from llm.backends.backend import KERNELS, TORCH, TextBackend
from llm.backends.select import select
from llm.checkpoints.load import TextModelError, load
from llm.families import tiny
from tests.llm import stage

SIZE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CACHE: dict[str, Any] = {"pages": 12, "sequences": 3, "context": 256}
MIXED: dict[str, Any] = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
WINDOWED: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 1}
GEMMA: dict[str, Any] = {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 24}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def config(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **{**SIZE, **changes})


FAMILY: dict[str, tuple[Any, str]] = {
    "llama": (config("llama", head_dim=32), KERNELS),
    "llama-with-biases": (config("llama", attention_bias=True, mlp_bias=True), KERNELS),
    "llama-3.1-positions": (config("llama", rope_parameters=LLAMA3), KERNELS),
    "llama-tied-one-kv-head": (config("llama", num_key_value_heads=1, tie_word_embeddings=True), KERNELS),
    "llama-narrow-heads": (config("llama", head_dim=24), TORCH),
    "mistral": (config("mistral", sliding_window=None), KERNELS),
    "qwen2": (config("qwen2"), KERNELS),
    "qwen3": (config("qwen3", head_dim=32), KERNELS),
    "olmo": (config("olmo"), TORCH),
    "mistral-window": (config("mistral", sliding_window=17), KERNELS),
    "qwen2-window": (config("qwen2", **WINDOWED, sliding_window=9), KERNELS),
    "qwen3-window": (config("qwen3", **WINDOWED, head_dim=32, sliding_window=16), KERNELS),
    "gemma2": (config("gemma2", **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=5.0), KERNELS),
    "gemma3": (config("gemma3_text", **GEMMA, sliding_window_pattern=2), KERNELS),
    "cohere2": (config("cohere2", sliding_window=7), TORCH),
    "ministral": (config("ministral", **MIXED, head_dim=16), TORCH),
    "mixtral": (config("mixtral", sliding_window=7, num_local_experts=4), KERNELS),
    "olmo3": (config("olmo3", **MIXED), TORCH),
    "phi3": (config("phi3", sliding_window=7), TORCH),
    "qwen3-moe": (
        config("qwen3_moe", use_sliding_window=True, sliding_window=7, num_experts=4, num_experts_per_tok=2,
               moe_intermediate_size=48), KERNELS),
    "starcoder2": (config("starcoder2", sliding_window=7), TORCH),
}  # fmt: skip


def saved(folder: Path, config: Any) -> Path:
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    for name, weight in network.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    network.save_pretrained(folder)
    tiny.tokenizer(256).save_pretrained(folder)
    return folder


def logits(execution: TextBackend, ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Of all tokens [S, T, V]: read in chunks, all sequences in each forward, in pages that lie in no order."""
    count, length = ids.shape
    order = torch.randperm(execution.cache.keys.shape[1], generator=torch.Generator().manual_seed(1)).tolist()
    each = -(-length // 16)
    for s in range(count):
        execution.cache.place(s, order[s * each : (s + 1) * each])
    return torch.stack(stage.read(execution, ids.tolist(), *([size] * count for size in chunks)))


@pytest.mark.quick("mixtral", "qwen3", "gemma2", "phi3", "llama", "cohere2", "olmo3")
@pytest.mark.parametrize("name", FAMILY)
def test_logits_are_transformers(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, kind = FAMILY[name]
    model = load(str(saved(tmp_path / name, config)))
    ids = torch.randint(6, 300, (3, 43), generator=torch.Generator().manual_seed(2))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        wanted = theirs(ids, use_cache=False).logits
    for kernels, expected in ((None, TORCH), (stage.kernels(), kind)):
        with caplog.at_level(logging.WARNING):
            execution = select(model, kernels=kernels, **CACHE)
        assert execution.kind == expected
        found = logits(execution, ids, [20, 1, 1, 5, 16])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert ("runs on torch: " in caplog.text) == (kind == TORCH)


def test_int8_pages_on_torch_and_on_kernels_agree() -> None:
    model = stage.emoji()
    ids = torch.randint(6, 4096, (2, 40), generator=torch.Generator().manual_seed(3))
    exact, plain, ours = (
        logits(select(model, kv=kv, kernels=kernels, **CACHE), ids, [30, 1, 9])  # type: ignore[arg-type]
        for kv, kernels in (("float", None), ("int8", None), ("int8", stage.kernels()))
    )
    assert 1e-4 < (plain - exact).abs().max() < 0.05 * exact.abs().max()
    # A rounding that falls otherwise here and there is all that differs.
    assert (ours - plain).abs().mean() < 0.25 * (plain - exact).abs().mean()


def test_weights_are_held_once_if_wished() -> None:
    """Packed weights do without the model's own, also in programs that are written later, and where ends are tied."""
    model = load(str(stage.LM))
    ids = torch.randint(6, 4096, (2, 30), generator=torch.Generator().manual_seed(5))
    execution = select(model, kernels=stage.kernels(), **CACHE)
    wanted = logits(execution, ids, [30])
    before = sum(weight.numel() for weight in model.network.parameters())
    execution.release()
    assert sum(weight.numel() for weight in model.network.parameters()) < 0.01 * before
    assert torch.equal(logits(execution, ids, [7, 23]), wanted)


def config_with(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: shutil.rmtree(f), "no such folder"),
        (lambda f: (f / "config.json").unlink(), "holds no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "does not load"),
        (lambda f: (f / "model.safetensors").write_bytes(b"12345678901234"), "does not load"),
        (lambda f: (f / "tokenizer.json").unlink(), ""),
        (lambda f: config_with(f, num_hidden_layers=3), "9 missing keys, the first is model.layers.2."),
        (lambda f: config_with(f, num_hidden_layers=1), "9 unexpected keys"),
        (lambda f: config_with(f, vocab_size=200), ""),
    ],
)  # fmt: skip
def test_damaged_models_are_refused(spoil: Any, said: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", config("llama"))
    spoil(folder)
    with pytest.raises(TextModelError) as caught:
        load(str(folder))
    assert said in str(caught.value) and "model" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (config("smollm3", **MIXED, use_sliding_window=True), {}, "sliding windows, which are not known of smollm3"),
        (config("mistral", sliding_window=17), {"sliding_window": -5}, "a sliding window of -5 tokens"),
        (config("llama"), {"layer_types": ["chunked_attention", "full_attention"]}, "layers of chunked attention"),
        (config("gemma3_text", **GEMMA, attn_logit_softcapping=2.0), {}, "caps the logits of its attention"),
        # EmbeddingGemma
        (config("gemma3_text", **GEMMA, use_bidirectional_attention=True), {}, "attends to later tokens"),
        (config("gpt_oss", head_dim=32, num_local_experts=2, layer_types=["full_attention"] * 2), {}, "sinks"),
        (config("llama", vocab_size=100), {}, "262 words, and the model has room for 100"),
        (config("llama"), {"model_type": "t5", "architectures": ["T5Model"]}, "does not load"),
    ],
)
def test_models_of_other_kinds_are_refused(config: Any, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = config_with(saved(tmp_path / "model", config), **changes)
    with pytest.raises(TextModelError, match=said):
        load(str(folder))


def test_names_devices_and_precisions_that_are_none(tmp_path: Path) -> None:
    for name, options, said in (
        ("no/where/at all", {}, "no such folder, and not a hub id"),
        (str(tmp_path / "none"), {}, "no such folder"),
        (tiny.TINY, {"precision": "fp4"}, f"precision: must be one of {', '.join(PRECISIONS)}, not 'fp4'"),
        (tiny.TINY, {"device": "toaster"}, "no device that torch knows"),
        (tiny.TINY, {"precision": "int8"}, "there is no quantized model"),
    ):
        with pytest.raises(TextModelError, match=said):
            load(name, **options)


def test_seeded_models_are_equal_and_leave_torchs_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = load(tiny.TINY), load(tiny.TINY)
    assert torch.equal(torch.get_rng_state(), before)
    assert one.digest == two.digest and one.ends == {2}
    for a, b in zip(one.network.parameters(), two.network.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bf16_weights_on_kernels() -> None:
    """Weights in half the room: what is computed is fp32 on the rounded weights."""
    model = stage.emoji()
    folder = load(str(stage.LM), precision="bf16")
    ids = torch.randint(6, 4096, (2, 20), generator=torch.Generator().manual_seed(3))
    size = {**CACHE, "kernels": stage.kernels()}
    half = logits(select(folder, **size), ids, [20])
    rounded = replace(model, network=load(str(stage.LM), precision="bf16").network.float())
    torch.testing.assert_close(half, logits(select(rounded, **size), ids, [20]), rtol=1e-4, atol=1e-3)
