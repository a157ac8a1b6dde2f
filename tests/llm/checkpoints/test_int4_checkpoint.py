"""Models that are published in 4 bits: the logits of the weights that they stand for, and files that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from core.kernels.kv_cache import TokenBatch
from core.quant.fp4 import Fp4Linear
from core.quant.fp4_layouts import Fp4Layout
from core.quant.int4 import Int4Linear
from core.quant.int4_layouts import Layout
from llm.backends.backend import TORCH
from llm.backends.select import select
from llm.checkpoints.load import TextModel, TextModelError, load, published
from llm.checkpoints.precision import load as load_by_setting
from llm.families import tiny
from tests.core.quant.published import draw, draw_fp4

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.2, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, attention_bias=True,
)  # fmt: skip
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "actorder": None}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
PUBLISHED: dict[str, tuple[dict[str, Any], Layout | Fp4Layout]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
            Layout("awq", 128, zeros=True)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
             Layout("gptq", 128, zeros=True, shifted=True)),
    "gptq_v2": ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False, "desc_act": True,
                 "checkpoint_format": "gptq_v2"}, Layout("gptq", None, zeros=True)),
    "compressed": ({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS,
                                                  "input_activations": None}}},
                   Layout("compressed-tensors", 128, zeros=False)),
    "nvfp4": ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
               "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP4,
                                             "input_activations": FP4 | {"dynamic": "local"}}}},
              Fp4Layout("compressed-tensors")),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, Fp4Layout("modelopt")),
    "modelopt, alone": ({"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8",
                         "exclude_modules": ["lm_head"]}, Fp4Layout("modelopt")),
}  # fmt: skip


def publish(folder: Path, name: str, *, shard_bytes: int = 2**30) -> Any:
    """Write a model in this layout; the network of plain weights that it stands for."""
    about, layout = PUBLISHED[name]
    torch.manual_seed(0)
    network: Any = AutoModelForCausalLM.from_config(CONFIG).eval().requires_grad_(False)
    for key, vector in network.named_parameters():
        if vector.dim() == 1:
            torch.nn.init.normal_(vector, mean=float("norm" in key), std=0.3)
    tensors = {}
    state = network.state_dict()
    for index, (key, module) in enumerate(network.named_modules()):
        if isinstance(module, torch.nn.Linear) and key != "lm_head":
            if isinstance(layout, Fp4Layout):
                parts, weight = draw_fp4(layout, *module.weight.shape, seed=index)
                parts |= {"k_scale": torch.tensor(1.0)} if name == "modelopt, alone" and key.endswith("k_proj") else {}
            else:
                parts, weight = draw(layout, *module.weight.shape, torch.float16,
                                     symmetric=name in ("gptq", "compressed"), seed=index)  # fmt: skip
            module.weight.copy_(weight)
            del state[f"{key}.weight"]
            tensors |= {f"{key}.{part}": tensor for part, tensor in parts.items()}
    tensors |= {key: tensor.clone() for key, tensor in state.items()}
    folder.mkdir()
    network.config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    config = json.loads((folder / "config.json").read_text())
    if name == "modelopt, alone":
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": about}))
    else:
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": about}))
    tiny.tokenizer(256).save_pretrained(folder)
    save_torch_state_dict(tensors, folder, max_shard_size=shard_bytes)
    return network


def logits(model: TextModel, ids: list[int]) -> torch.Tensor:
    execution = select(model, pages=4, sequences=1, context=64)
    assert execution.kind == TORCH and "precision" in execution.kernels_reason
    execution.cache.place(0, list(range(4)))
    batch = TokenBatch.of(ids, list(range(len(ids))), [0] * len(ids), list(range(len(ids))))
    return execution.forward(batch).logits


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_logits_are_those_of_the_weights_it_stands_for(tmp_path: Path, name: str) -> None:
    network = publish(tmp_path / "model", name, **({"shard_bytes": 2**16} if name == "awq" else {}))
    model, reason = load_by_setting(str(tmp_path / "model"), "auto", device="cpu", lacks=None)
    form = PUBLISHED[name][1]
    scheme, kind = ("nvfp4", Fp4Linear) if isinstance(form, Fp4Layout) else ("w4a16", Int4Linear)
    assert model.ends == {2, 5} and model.precision == scheme and form.method in reason
    layers = [module for module in model.network.modules() if type(module) is kind]
    assert len(layers) == 7 and type(model.network.lm_head) is torch.nn.Linear
    ids = [1, 7, 99, 250, 3]
    torch.testing.assert_close(logits(model, ids), network(torch.tensor([ids])).logits[0], rtol=1e-4, atol=1e-4)
    for precision in ("fp32", "int8"):
        with pytest.raises(TextModelError, match=f"published in 4 bits .*{scheme} reads, not {precision}"):
            load(str(tmp_path / "model"), precision=precision)


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "model"
    publish(folder, "awq")
    return folder


@pytest.fixture
def copied(awq: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder, whose files may be replaced."""
    (tmp_path / "copy").mkdir()
    for path in awq.iterdir():
        (tmp_path / "copy" / path.name).hardlink_to(path)
    return tmp_path / "copy"


def rewritten(path: Path, content: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(content)


@pytest.mark.parametrize(("change", "said"), [
    ({"bits": 3}, "quantization_config.bits: 3 is not supported, only 4"),
    ({"group_size": 32}, "quantization_config.group_size: 32 is not supported, only -1 and multiples of 128"),
    ({"group_size": "128"}, "quantization_config.group_size: '128'"),
    ({"version": "marlin"}, "quantization_config.version: 'marlin' is not supported, only 'gemm'"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "quantization_config.checkpoint_format: 'marlin'"),
    ({"quant_method": "gptq", "dynamic": {"+:x": {"bits": 8}}}, "quantization_config.dynamic: rules"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "quantization_config.format: 'marlin-24'"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "quantization_config.config_groups: one"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized",
      "config_groups": {"g": {"weights": WEIGHTS | {"actorder": "group"}}}}, "g.weights.actorder: 'group' is"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"weights": WEIGHTS}},
      "transform_config": {"config_groups": {"R4": {}}}}, "quantization_config.transform_config: rotations"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quantization_config.quant_algo: 'W4A8_AWQ' is"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "quantization_config.group_size: 32 is"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
      "config_groups": {"g": {"weights": FP4 | {"group_size": 32}}}}, "g.weights.group_size: 32 is"),
    ({"group_size": 256}, "model.layers.0.self_attn.q_proj: 128 inputs are no multiple of its group_size 256"),
])  # fmt: skip
def test_configurations_that_are_not_supported_are_refused_by_field(
    copied: Path, change: dict[str, Any], said: str
) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["quantization_config"] |= change
    rewritten(copied / "config.json", json.dumps(config))
    form = published(str(copied))
    assert form is not None
    with pytest.raises(TextModelError) as raised:
        load(str(copied), precision=form.precision)
    assert said in str(raised.value)


Q = "model.layers.0.self_attn.q_proj"


def _without(key: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(key)


def _with(key: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({key: tensor})


@pytest.mark.parametrize(("change", "said"), [
    (_without(f"{Q}.scales"), f"has no {Q}.scales"),
    (_without(f"{Q}.qweight"), f"{Q}.weight"),
    (_without("model.norm.weight"), "1 missing keys, the first is model.norm.weight"),
    (_with(f"{Q}.qweight", torch.zeros(128, 15).int()), f"{Q}.qweight is I32 [128, 15], not I32 [128, 16]"),
    (_with(f"{Q}.qweight", torch.zeros(128, 16)), f"{Q}.qweight is F32 [128, 16], not I32 [128, 16]"),
    (_with(f"{Q}.scales", torch.zeros(1, 128)), f"{Q}.scales is F32 [1, 128], not F16 or BF16 [1, 128]"),
    (_with(f"{Q}.qzeros", torch.zeros(2, 16).int()), f"{Q}.qzeros is I32 [2, 16], not I32 [1, 16]"),
    (_with(f"{Q}.bias", torch.zeros(64)), f"{Q}.bias is F32 [64], not F16 or BF16 or F32 [128]"),
    (_with(f"{Q}.g_idx", torch.zeros(128).int()), f"1 unexpected keys, the first is {Q}.g_idx"),
])  # fmt: skip
def test_files_that_do_not_fit_are_refused_by_key(
    copied: Path, change: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    path = copied / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)
    with pytest.raises(TextModelError) as raised:
        load(str(copied), precision="w4a16")
    assert said in str(raised.value) and str(copied) in str(raised.value)


@pytest.mark.parametrize(("index", "said"), [
    ({"a": "../model.safetensors"}, "'../model.safetensors' is no .safetensors file of this folder"),
    ({"a": "model.bin"}, "'model.bin' is no .safetensors file"),
    ({"a": 7}, "weight_map: must be an object of file names"),
    ({"a": "x" * 1000 + ".safetensors"}, f"'{'x' * 100}' is no .safetensors file"),
    ({"a": "other.safetensors"}, "other.safetensors: cannot be read"),
    ({"a": "model.safetensors"}, "says that model.safetensors has a, which it has not"),
    ({str(i): f"{i}.safetensors" for i in range(1001)}, "names 1001 files, more than 1000"),
])  # fmt: skip
def test_an_index_names_files_of_its_folder_that_have_its_keys(copied: Path, index: dict[str, Any], said: str) -> None:
    rewritten(copied / "model.safetensors.index.json", json.dumps({"weight_map": index}))
    with pytest.raises(TextModelError) as raised:
        load(str(copied), precision="w4a16")
    assert said in str(raised.value)


@pytest.mark.parametrize(("content", "said"), [
    ("{", "is not JSON"), ("[]", "a JSON object"), ("[" * 200_000, "is not JSON"), (" " * (65 << 20), "64 MiB"),
])  # fmt: skip
def test_a_config_that_is_no_object_of_bounded_size_is_refused(copied: Path, content: str, said: str) -> None:
    rewritten(copied / "config.json", content)
    with pytest.raises(TextModelError, match=said):
        load(str(copied), precision="w4a16")
