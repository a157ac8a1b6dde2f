"""Weights that are read layer by layer are those of transformers' loader, whole or sliced, and a rank reads its own."""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from contract.parallel import parse
from contract.precision import SCHEMES, Scheme
from core.quant import store
from llm.backends.attention import NAME
from llm.checkpoints.load import TextModel, TextModelError, load, variant
from llm.checkpoints.quantized import make
from llm.checkpoints.weight_files import meta_network
from llm.families import tiny
from llm.parallel.shards import Rank, shard_

SIZE: dict[str, Any] = {
    "vocab_size": 300, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}), "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 8}), "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 8}),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}),
}  # fmt: skip


def written(folder: Path, kind: str, dtype: torch.dtype, shards: int, **sizes: Any) -> Path:
    """A model in so many files; its norms are fp32 whatever its matrices are."""
    shutil.rmtree(folder, ignore_errors=True)
    name, options = KINDS[kind]
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZE, **options, **sizes)).to(dtype)
    for name, weight in network.named_parameters():
        if name.endswith("bias") or "norm" in name:
            weight.data = torch.randn(weight.shape)
    size = sum(weight.numel() * weight.element_size() for weight in network.parameters())
    network.save_pretrained(folder, max_shard_size=size // shards + 1)
    tiny.tokenizer(64).save_pretrained(folder)
    return folder


def whole(folder: Path, precision: str, rank: Rank | None = None, digest: str | None = None) -> Any:
    """The network that is read whole, quantized, then sliced."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME)
    if precision in SCHEMES:
        store.load_(network, folder / variant(precision), source=digest)
    if rank is not None:
        shard_(network, rank)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network


def compare(model: TextModel, expected: Any) -> None:
    for kind in ("named_parameters", "named_buffers", "named_modules"):
        ours, theirs = (dict(getattr(network, kind)()) for network in (model.network, expected))
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items() if kind != "named_modules" else ():
            assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    assert model.network.config.to_dict() == expected.config.to_dict()
    assert model.network.generation_config.to_dict() == expected.generation_config.to_dict()
    ids = torch.arange(3, 40)[None]
    if model.network.config.num_hidden_layers == 2 and model.network.config.num_attention_heads == 4:
        for network in (model.network, expected):
            network.set_attn_implementation("eager")
        with torch.inference_mode():
            assert torch.equal(model.network(ids).logits, expected(ids).logits)


@given(
    kind=st.sampled_from(sorted(KINDS)), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shards=st.integers(1, 4), width=st.sampled_from([32, 48]), inner=st.sampled_from([64, 96]),
    kv_heads=st.sampled_from([1, 2, 4]), tied=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16", "int8", "fp8", "w4a16", "int8-sparse"]),
    parallel=st.sampled_from(["tp2", "pp2", "tp2pp2"]),
)  # fmt: skip
@example("gemma3", torch.bfloat16, 3, 32, 64, 2, True, "int8", "tp2pp2")
@example("llama-biases", torch.bfloat16, 2, 32, 64, 1, False, "bf16", "tp2")
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_layers_are_those_of_a_model_that_is_read_whole(
    tmp_path: Path, kind: str, dtype: torch.dtype, shards: int, width: int, inner: int, kv_heads: int, tied: bool,
    precision: str, parallel: str,
) -> None:  # fmt: skip
    folder = written(
        tmp_path / "model", kind, dtype, shards, hidden_size=width, intermediate_size=inner, num_hidden_layers=2,
        num_key_value_heads=kv_heads, tie_word_embeddings=tied,
    )  # fmt: skip
    assert len(list(folder.glob("*.safetensors"))) >= min(2, shards)
    if precision in SCHEMES:
        make(load(str(folder)), [tuple(range(3, 40))], folder, scheme=cast(Scheme, precision))
    assert meta_network(folder, torch.float32, NAME) is not None
    split = parse(parallel)
    for rank in (None, *(Rank(number, split) for number in range(split.ranks if precision != "int8-sparse" else 0))):
        model = load(str(folder), precision=precision, rank=rank)
        compare(model, whole(folder, precision, rank))
        if rank is None:
            assert (model.network.lm_head.weight is model.network.model.embed_tokens.weight) == (
                tied and precision not in SCHEMES
            )


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The folder and the key of each tensor that is read."""
    read: list[tuple[str, str]] = []
    real = safetensors.safe_open

    class Recorded:
        def __init__(self, path: Path, *arguments: Any, **options: Any) -> None:
            self.path, self.file = Path(path), real(path, *arguments, **options)

        def __enter__(self) -> Recorded:
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, key: str) -> torch.Tensor:
            read.append((self.path.parent.name, key))
            return self.file.get_tensor(key)

    monkeypatch.setattr(safetensors, "safe_open", Recorded)
    return read


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = written(
        tmp_path_factory.mktemp("quantized") / "model", "llama", torch.bfloat16, 3, hidden_size=32,
        intermediate_size=64, num_hidden_layers=4, num_key_value_heads=2,
    )  # fmt: skip
    make(load(str(folder)), [tuple(range(3, 40))], folder)
    return folder


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_rank_reads_nothing_of_other_stages_and_a_variant_nothing_of_the_model(
    precision: str, quantized: Path, keys: list[tuple[str, str]]
) -> None:
    folder = variant("int8") if precision == "int8" else quantized.name
    stored = {key for file in (quantized if precision == "fp32" else quantized / folder).glob("*.safetensors")
              for key in load_file(file)}  # fmt: skip
    for number, layers, ends in ((1, (0, 1), ("model.embed_tokens",)), (0, (2, 3), ("model.norm", "lm_head"))):
        keys.clear()
        load(str(quantized), precision=precision, rank=Rank(number, parse("pp2")))
        own = tuple(f"model.layers.{layer}." for layer in layers) + ends
        assert sorted(keys) == sorted((folder, key) for key in stored if key.startswith(own))


def test_errors_name_the_file_and_the_key(quantized: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(quantized, tmp_path / "model")
    shard = next(path for path in folder.glob("*.safetensors") if "model.norm.weight" in load_file(path))
    tensors = load_file(shard)
    for changes, message in (
        ({"model.norm.weight": torch.zeros(31)}, "model.norm.weight is F32 [31], not F16 or BF16 or F32 [32]"),
        ({"model.extra": torch.zeros(1)}, "1 unexpected keys, the first is model.extra"),
    ):
        save_file({**tensors, **changes}, shard, {"format": "pt"})
        with pytest.raises(TextModelError) as raised:
            load(str(folder))
        assert message in str(raised.value) and str(shard if "not F16" in message else folder) in str(raised.value)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(TextModelError, match=f"{shard.name}: cannot be read"):
        load(str(folder), rank=Rank(0, parse("pp2")))


def test_a_variant_of_scales_alone_is_quantized_from_the_models_weights(quantized: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(quantized, tmp_path / "model")
    manifest = store.read_manifest(folder / variant("int8"))
    store.save(load(str(folder), precision="int8").network, folder / variant("int8"), manifest, weights=False)
    compare(load(str(folder), precision="int8"), whole(folder, "int8", digest=manifest.source))


def test_impossible_numbers_of_a_variant_are_refused_by_layer(quantized: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(quantized, tmp_path / "model")
    make(load(str(folder)), [tuple(range(3, 40))], folder, scheme="int8-sparse")
    where = folder / variant("int8-sparse")
    layer = "model.layers.3.mlp.up_proj"
    tensors = load_file(where / store.WEIGHTS)
    tensors[f"{layer}.metadata"].zero_()
    save_file(tensors, where / store.WEIGHTS)
    document = json.loads((where / store.MANIFEST).read_text())
    document["sha256"] = hashlib.sha256((where / store.WEIGHTS).read_bytes()).hexdigest()
    (where / store.MANIFEST).write_text(json.dumps(document))
    with pytest.raises(TextModelError, match=f"layer {layer}: metadata does not name two places"):
        load(str(folder), precision="int8-sparse")


def peak_bytes(task: Callable[[], object]) -> int:
    """The most resident memory that a task takes beyond what the process has before it."""
    status = Path("/proc/self/status")
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be taken again, uncounted, or count as the peak
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    except OSError:
        pytest.skip("this system does not measure a process's peak memory anew")

    def read(field: str) -> int:
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(field))

    before = read("VmRSS:")
    result = task()
    assert result is not None
    return read("VmHWM:") - before


@pytest.mark.quick("tp4-bf16")
@pytest.mark.parametrize(("parallel", "precision"), [("tp4", "bf16"), ("pp4", "fp32")])
def test_a_rank_takes_the_memory_of_its_part_and_a_layer(parallel: str, precision: str, tmp_path: Path) -> None:
    layers, sizes = 8, {"hidden_size": 512, "intermediate_size": 4096, "num_key_value_heads": 4}
    folder = written(tmp_path / "model", "llama", torch.bfloat16, 1, num_hidden_layers=layers, **sizes)

    def part() -> TextModel:
        return load(str(folder), precision=precision, rank=Rank(0, parse(parallel)))

    size = sum(weight.nbytes for weight in part().network.parameters())
    layer = 4 * size // layers
    assert size // 2 < peak_bytes(part) < size + layer + 2**23
