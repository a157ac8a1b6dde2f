"""The decoder as a walk: operations in the published order; rows on CPU kernels have the same bits in any step."""

from __future__ import annotations

import pytest
import torch

from core.kernels.kv_cache import Kind
from core.ops.ops import bind
from core.ops.trace import trace
from llm import tiny
from llm.execution import TextExecution
from llm.load import load
from llm.network import Decoder, hidden_states, logits, trunk
from tests.llm import stage

LAYER = ["rms_norm", "linear", "rotate_paged", "attend_paged", "linear", "rms_norm", "gated", "linear"]


@pytest.mark.parametrize("name", [tiny.TINY, tiny.QWEN3_TINY])
def test_operations_in_the_published_order(name: str) -> None:
    network = load(name).network
    decoder = Decoder.of(network)
    made = trace(bind(trunk, decoder), (5,), ())
    assert [call.operation for call in made.calls] == ["embed", *LAYER, *LAYER]
    width = network.config.hidden_size
    assert made.outputs == ((5, width),)
    attn, mlp = network.model.layers[0].self_attn, network.model.layers[0].mlp
    layers = [call.layers for call in made.calls[1:9]]
    assert layers[1] == (attn.q_proj, attn.k_proj, attn.v_proj) and layers[6] == (mlp.up_proj, mlp.gate_proj)
    assert layers[2] == ((attn.q_norm, attn.k_norm) if name == tiny.QWEN3_TINY else ())
    head = trace(bind(logits, decoder), made.outputs[0])
    assert [call.operation for call in head.calls] == ["rms_norm", "head"] and head.outputs == ((5, 262),)


def test_encoding_asks_for_the_same_layers_without_a_cache() -> None:
    network = load(tiny.QWEN3_TINY).network
    layers = Decoder.of(network).layers
    made = trace(bind(hidden_states, layers), (2, 7, network.config.hidden_size), (2, 7, 16), (2,))
    unpaged = [operation.removesuffix("_paged") for operation in LAYER]
    assert [call.operation for call in made.calls] == [*unpaged, *unpaged]


TEXTS = [[1, *range(40, 75)], [1, 9, 9, 30], [1, *range(100, 119)]]


@pytest.mark.parametrize("kv", ["float", "int8"])
def test_qwen3s_rows_keep_their_bits_in_any_step(kv: Kind) -> None:
    model, logits = load(tiny.QWEN3_TINY), []
    for cuts in ([20, 1, 7], [36, 4, 20]):
        execution = TextExecution(model, kernels=stage.kernels(), kv=kv, pages=9, sequences=3, context=48)
        for s in range(3):
            execution.cache.place(s, [3 * s, 3 * s + 2, 3 * s + 1])
        logits.append(stage.read(execution, TEXTS, cuts))
    assert all(map(torch.equal, *logits))
