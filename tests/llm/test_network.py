"""The decoder as a walk: operations in the published order; on CPU kernels Qwen3 is what transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.kernels.kv_cache import TokenBatch
from core.ops.ops import bind
from core.ops.trace import trace
from llm import tiny
from llm.execution import KERNELS, TextExecution
from llm.load import TextModel, load
from llm.network import Decoder, hidden_states, logits, trunk
from llm.quantized import quantize
from tests.llm import stage

LAYER = ["rms_norm", "linear", "rotate_paged", "attend_paged", "linear", "rms_norm", "gated", "linear"]


def model_of(name: str) -> TextModel:
    """With weights in all norms: fresh ones are ones."""
    model = load(name)
    generator = torch.Generator().manual_seed(0)
    for key, weight in model.network.named_parameters():
        if "norm" in key:
            weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
    return model


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


def run(execution: TextExecution, texts: list[list[int]], cuts: list[int]) -> list[Tensor]:
    """Logits of every token: the first `cuts` of each text together, then all in steps of one token a text."""
    for s in range(len(texts)):
        execution.cache.place(s, [3 * s, 3 * s + 2, 3 * s + 1])
    found: list[list[Tensor]] = [[] for _ in texts]
    spans = [(0, cut) for cut in cuts]
    while any(start < end for start, end in spans):
        rows = [(s, t) for s, (start, end) in enumerate(spans) for t in range(start, end)]
        made = execution(
            TokenBatch.of(
                [texts[s][t] for s, t in rows], [t for _, t in rows], [s for s, _ in rows], [*range(len(rows))]
            )
        ).clone()
        for (s, _), row in zip(rows, made, strict=True):
            found[s].append(row)
        spans = [(end, min(end + 1, len(text))) for (_, end), text in zip(spans, texts, strict=True)]
    return [torch.stack(each) for each in found]


TEXTS = [[1, *range(40, 75)], [1, 9, 9, 30], [1, *range(100, 119)]]
SIZE: dict[str, Any] = {"pages": 9, "sequences": 3, "context": 48}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_qwen3_is_transformers(precision: str) -> None:
    """Exact in fp32; in INT8 near the same quantized modules."""
    model = model_of(tiny.QWEN3_TINY)
    if precision == "int8":
        drawn = [torch.randint(3, 262, (40,), generator=torch.Generator().manual_seed(i)) for i in range(4)]
        model = quantize(model, [tuple(text.tolist()) for text in drawn])
    theirs = [stage.logits(model, text) for text in TEXTS]
    slack = 1e-5 if precision == "fp32" else 0.02
    execution = TextExecution(model, kernels=stage.kernels(), **SIZE)
    assert execution.kind == KERNELS
    for found, expected in zip(run(execution, TEXTS, [20, 1, 7]), theirs, strict=True):
        assert (found - expected).norm() <= slack * expected.norm()


def test_qwen3s_rows_keep_their_bits_in_any_step() -> None:
    model = model_of(tiny.QWEN3_TINY)
    first = run(TextExecution(model, kernels=stage.kernels(), **SIZE), TEXTS, [20, 1, 7])
    for kv in ("float", "int8"):
        one, other = (
            run(TextExecution(model, kernels=stage.kernels(), kv=kv, **SIZE), TEXTS, cuts)
            for cuts in ([20, 1, 7], [36, 4, 20])
        )
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert kv != "float" or all(torch.equal(a, b) for a, b in zip(one, first, strict=True))
