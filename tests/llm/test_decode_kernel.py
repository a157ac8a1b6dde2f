"""The GPU's kernel of attention over pages against its plain twin: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
pytest.importorskip("triton")

from llm.decode_kernel import decode, decode_reference, lacks  # noqa: E402
from llm.kv_cache import KVCache, Step  # noqa: E402
from tests.core.quant.stage import ROOT  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"


def filled(lengths: list[int], kv_heads: int, d: int, dtype: torch.dtype, kind: Any, context: int) -> KVCache:
    """A cache with sequences of these lengths, in pages that lie in no order; behind them lies what must not matter."""
    each = -(-context // 16)
    cache = KVCache(layers=1, kv_heads=kv_heads, head_dim=d, pages=each * len(lengths), sequences=len(lengths),
                    context=context, dtype=dtype, device=DEVICE, kind=kind)  # fmt: skip
    draw = torch.Generator(DEVICE).manual_seed(0)
    order = torch.randperm(each * len(lengths), generator=draw, device=DEVICE).tolist()
    for s, length in enumerate(lengths):
        cache.place(s, order[s * each : (s + 1) * each])
        positions = torch.arange(length, dtype=torch.int32, device=DEVICE)
        step = Step(positions, positions, torch.full_like(positions, s), positions[:0])
        keys, values = (torch.randn(length, kv_heads, d, generator=draw, device=DEVICE).to(dtype) for _ in range(2))
        cache.write(0, keys, values, step)
    return cache


@pytest.mark.parametrize("kind", ["float", "int8"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "splits"), [(4, 2, 16, 1), (8, 1, 64, 3), (3, 3, 32, 8), (16, 4, 128, 2)]
)
def test_decode(heads: int, kv_heads: int, d: int, kind: str, splits: int) -> None:
    lengths = [1, 16, 17, 100, 255, 64]
    dtype = torch.bfloat16 if CUDA else torch.float32
    cache = filled(lengths, kv_heads, d, dtype, kind, 256)
    draw = torch.Generator(DEVICE).manual_seed(1)
    q = torch.randn(len(lengths), heads, d, generator=draw, device=DEVICE).to(dtype)
    scales = [None if s is None else s[0] for s in (cache.key_scales, cache.value_scales)]
    places = (torch.tensor([n - 1 for n in lengths], dtype=torch.int32, device=DEVICE),
              torch.arange(len(lengths), dtype=torch.int32, device=DEVICE))  # fmt: skip
    given = (q, cache.keys[0], cache.values[0], *scales, cache.table, *places, d**-0.5)
    found, wanted = decode(*given, splits=splits), decode_reference(*given)
    slack = 2e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found, wanted, rtol=slack, atol=slack)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from llm import decode_kernel

def made(kernel, types, constants):
    names = list(types) + list(constants)
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
    assert ".local" not in code["ptx"], "registers were spilled"

for kind, scales in (("bf16", "bf16"), ("i8", "fp32")):
    types = {"q": "*bf16", "keys": f"*{kind}", "values": f"*{kind}", "key_scales": f"*{scales}",
             "value_scales": f"*{scales}", "table": "*i32", "positions": "*i32", "sequences": "*i32",
             "out": "*fp32", "largest": "*fp32", "sums": "*fp32", "scale": "fp32", "table_stride": "i32",
             "heads": "i32", "part": "i32"}
    shape = {"KV": 8, "G": 4, "M": 16, "D": 128, "SPLITS": 8, "BLOCK": 64, "SIZE": 16, "INT8": kind == "i8"}
    made(decode_kernel._parts, types, shape)
types = {"parts": "*fp32", "largest": "*fp32", "sums": "*fp32", "out": "*bf16"}
made(decode_kernel._together, types, {"D": 128, "SPLITS": 8, "ALL": 8})
print("compiled")
"""


def test_it_compiles_for_hopper_without_one() -> None:
    """The interpreter runs what the compiler refuses."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "compiled", done.stderr


def test_what_it_is_not_for() -> None:
    assert lacks(torch.zeros(1, 1, 48, 16)) == "heads of width 48 are no power of two"
    assert lacks(torch.zeros(1, 1, 64, 16)) is None


@pytest.mark.skipif(not CUDA, reason="the whole engine on a GPU needs one")
def test_greedy_answers_on_a_gpu() -> None:
    """fp32 on the GPU against transformers' generate there."""
    from dataclasses import replace

    from tests.llm import stage

    model = stage.emoji()
    moved = replace(model, network=model.network.to("cuda"), device=torch.device("cuda"))
    given = stage.prompts(model, 30)
    with stage.serving(moved) as (engine, _):
        made = [text.tokens for text in stage.answers(engine, [stage.greedy(p, 24) for p in given])]
    model.network.to("cpu")
    wanted = stage.generated(model, given, 24)
    assert sum(a == b for a, b in zip(made, wanted, strict=True)) >= 29
