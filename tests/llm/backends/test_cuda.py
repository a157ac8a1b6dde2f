"""The fused decoder against transformers, whole and kernel by kernel: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.kernels.cuda.device import CUDA, DEVICE, DTYPE, EIGHT, draw, normal

# isort: split
from core.kernels.cuda.chunk_kernel import chunks, tiles
from core.kernels.cuda.decode_kernel import decode, decode_reference, part_count
from core.kernels.cuda.fused_kernels import (
    SplitSums,
    add_norm,
    add_norm_reference,
    gate,
    gate_reference,
    rotate,
    rotate_reference,
)
from core.kernels.cuda.quantize import to_levels
from core.kernels.cuda.stream_kernel import choose, gated, gated_reference, stream, stream_reference
from core.kernels.kv_cache import Kind, KVCache, TokenBatch
from core.ops.branches import LowRank
from llm.backends.cuda import CudaDecoder
from llm.backends.fused import FusedBackend
from llm.backends.step_graphs import mixed_buckets
from llm.checkpoints.load import TextModel, load
from llm.checkpoints.quantized import quantize
from llm.families import tiny
from llm.families.recipe import llama
from tests.llm import stage
from tests.llm.checkpoints.test_load import FAMILY, saved

SLACK = 2e-2 if CUDA else 2e-5


def operand(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return to_levels(40 * normal(generator, *shape), dtype) if dtype in EIGHT else normal(generator, *shape).to(dtype)


def ints(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def close(found: Tensor, wanted: Tensor) -> None:
    """Equal up to one level of 8 bits, else to the type's last digits."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    a, b = found.float(), wanted.float()
    if found.dtype == torch.int8:
        assert (a - b).abs().max() <= 1 and ((a != b).float().mean() <= 0.02)
    else:
        slack = 0.13 if found.dtype == torch.float8_e4m3fn else SLACK
        torch.testing.assert_close(a, b, rtol=slack, atol=slack * float(b.abs().amax()))


@pytest.mark.parametrize("dtype", [*EIGHT, DTYPE])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 128, 512), (3, 200, 96), (17, 64, 1024), (70, 130, 80)])
def test_stream(dtype: torch.dtype, rows: int, columns: int, depth: int) -> None:
    generator = draw(0)
    x, weight = operand(generator, dtype, rows, depth), operand(generator, dtype, columns, depth)
    found, wanted = stream(x, weight).sum(0, keepdim=True).to(torch.float32), stream_reference(x, weight).float()
    assert dtype != torch.int8 or torch.equal(found, wanted)
    close(found, wanted)


@pytest.mark.parametrize("dtype", [*EIGHT, DTYPE])
def test_a_row_does_not_depend_on_its_companions(dtype: torch.dtype) -> None:
    generator = draw(1)
    x, weight = operand(generator, dtype, 40, 1024), operand(generator, dtype, 96, 1024)
    whole = stream(x, weight).sum(0)
    for first, count in ((0, 1), (5, 2), (20, 17)):
        assert torch.equal(stream(x[first : first + count].contiguous(), weight).sum(0), whole[first : first + count])


@pytest.mark.parametrize("dtype", [*EIGHT, DTYPE])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 64, 256), (5, 100, 96), (80, 64, 64)])
def test_gated(dtype: torch.dtype, rows: int, columns: int, depth: int) -> None:
    generator = draw(2)
    x, weight = operand(generator, dtype, rows, depth), operand(generator, dtype, 2 * columns, depth)
    scale = torch.rand(2 * columns, generator=generator, device=DEVICE) * (1e-5 if dtype == torch.int8 else 1e-4)
    bias, inverse = normal(generator, 2 * columns), 20 + normal(generator, columns)
    arguments = (x, weight, scale, bias, inverse, dtype) if dtype in EIGHT else (x, weight, None, bias, None, dtype)
    options = {} if dtype in EIGHT else {"gelu": rows == 5}
    close(gated(*arguments, **options), gated_reference(*arguments, **options))


def test_splits_fit_the_shapes_of_8b() -> None:
    """Enough programs to keep every multiprocessor's loads in flight, and no part without work."""
    for columns, depth in ((6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096)):
        for rows in (1, 64, 256):
            for size in (1, 2):
                tile = choose(rows, columns, depth, size)
                steps = depth // tile.depth
                assert depth % tile.depth == 0 and steps % tile.splits == 0 and steps // tile.splits >= 4
                assert -(-columns // tile.columns) * -(-rows // tile.rows) * tile.splits >= (96 if rows > 64 else 192)
                assert tile.splits == choose(1, columns, depth, size).splits or rows > 64


@pytest.mark.parametrize("to", [*EIGHT, DTYPE])
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_add_norm(to: torch.dtype, splits: int) -> None:
    generator, rows, channels = draw(3), 5, 96
    x, weight = normal(generator, rows, channels).to(DTYPE), 1 + 0.1 * normal(generator, channels).to(DTYPE)
    parts = operand(generator, torch.int8, max(1, splits), rows, channels).int()
    scale, bias = normal(generator, channels) / 40, normal(generator, channels)
    sums = SplitSums(parts, scale, bias) if splits else None
    inverse = 30 + normal(generator, channels) if to in EIGHT else None
    kept = torch.empty_like(x)
    found = add_norm(x, weight, 1e-5, inverse, to, sums=sums, sum_out=kept)
    wanted_kept, wanted = add_norm_reference(x, weight, 1e-5, inverse, to, sums)
    close(kept, wanted_kept)
    close(found, wanted)
    index = ints([4, 0, 4])
    if sums is None:
        assert torch.equal(add_norm(x, weight, 1e-5, inverse, to, index=index).float(), found.float()[index.long()])


def cache_of(kind: Kind, heads: int, d: int, *, sequences: int = 6, context: int = 256) -> KVCache:
    """Empty, its pages in no order, a few of them nobody's."""
    each = context // 16
    cache = KVCache(layers=1, kv_heads=heads, head_dim=d, pages=each * sequences + 3, sequences=sequences,
                    context=context, dtype=DTYPE, device=DEVICE, kind=kind, turned=True)  # fmt: skip
    order = torch.randperm(each * sequences + 3, generator=torch.Generator().manual_seed(0)).tolist()
    for s in range(sequences):
        cache.place(s, order[s * each : (s + 1) * each])
    cache.settle()
    return cache


KINDS: list[Kind] = ["float", "int8", "fp8"] if len(EIGHT) > 1 else ["float", "int8"]


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 16), (3, 1, 32), (4, 4, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotate(kind: Kind, heads: int, kv_heads: int, d: int, normed: bool) -> None:
    generator, rows = draw(4), 7
    positions = ints([0, 15, 16, 17, 255, -1, 100])
    sequences = ints([0, 1, 2, 3, 4, 0, 5])
    parts = normal(generator, 2, rows, (heads + 2 * kv_heads) * d)
    angle = normal(generator, 256, d // 2)
    angles = torch.cat([angle.cos(), angle.sin()], dim=1)
    found, wanted = cache_of(kind, kv_heads, d), cache_of(kind, kv_heads, d)
    norms: dict[str, Any] = {}
    if normed:  # Qwen3's
        norms = {name: (1 + 0.3 * normal(generator, d)).to(DTYPE) for name in ("q_norm", "k_norm")} | {"eps": 1e-6}
    q = rotate(SplitSums(parts), angles, positions, sequences, found, 0, heads, DTYPE, **norms)
    real = positions >= 0
    wanted_q, k, v = rotate_reference(parts.sum(0), angles, positions.clamp_min(0), heads, kv_heads, **norms)
    close(q, wanted_q.to(DTYPE))
    step = TokenBatch(positions[real], positions[real], sequences[real], positions[:0])
    wanted.write(0, k[real], v[real], step)
    for ours, theirs in zip(found.layer(0), wanted.layer(0), strict=True):
        if ours is not None and theirs is not None:
            close(ours, theirs)
    assert torch.equal(found.keys.float() == 0, wanted.keys.float() == 0)  # nobody wrote where nobody should


@pytest.mark.parametrize("to", [*EIGHT, DTYPE])
def test_gate(to: torch.dtype) -> None:
    generator = draw(5)
    x = normal(generator, 4, 2 * 96).to(DTYPE)
    inverse = 20 + normal(generator, 96) if to in EIGHT else None
    for gelu in (False, True):
        close(gate(x, inverse, to, gelu=gelu), gate_reference(x, inverse, to, gelu=gelu))


@pytest.mark.quick("4-2-16-float", "16-4-32-int8", "3-1-32-int8")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 16), (16, 4, 32), (3, 1, 32)])
def test_chunks(kind: Kind, heads: int, kv_heads: int, d: int) -> None:
    """Chunks at the beginning and in the middle, beside rows that decode, each into its own rows."""
    generator = draw(6)
    cache = cache_of(kind, kv_heads, d)
    for s in range(6):
        every = ints(range(256))
        step = TokenBatch(every, every, torch.full_like(every, s), every[:0])
        keys, values = (normal(generator, 256, kv_heads, d).to(DTYPE) for _ in range(2))
        cache.write(0, keys, values, step)
    spans = [(0, 0, 40), (1, 90, 1), (2, 17, 70), (3, 0, 1), (4, 200, 2)]  # sequence, first position, rows
    positions = ints([p for _, a, n in spans for p in range(a, a + n)])
    sequences = ints([s for s, _, n in spans for _ in range(n)])
    firsts = [0, 40, 41, 111, 112]
    runs = [(first, n, s) for first, (s, _, n) in zip(firsts, spans, strict=True) if n > 1]
    cut = ints(tiles(runs, heads // kv_heads))
    singles = ints([40, 111])
    q = normal(generator, len(positions), heads, d).to(DTYPE)
    layer = (*cache.layer(0), cache.table)
    for inverse, to, limits in (
        (None, DTYPE, {}),
        (30 + normal(generator, heads * d), torch.int8, {}),
        *([(None, DTYPE, {"window": 65, "cap": 2.0})] if kind == "float" else []),
    ):
        out = torch.full(q.shape, 77, dtype=to, device=DEVICE)
        chunks(q, *layer, positions, cut, d**-0.5, out, inverse=inverse, **limits)
        decode(q, *layer, positions, sequences, d**-0.5, index=singles, inverse=inverse, out=out, **limits)
        expected = decode_reference(q, *layer, positions, sequences, d**-0.5, inverse=inverse, dtype=to, **limits)
        if kind == "fp8":  # queries and weights in E4M3 too, of 3 bits
            assert cosine(out.float(), expected.float()) > 0.998
        else:
            close(out, expected)


@pytest.mark.quick("16-int8", "32-float")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [16, 32])
def test_what_others_left_in_pages_reaches_nobody(kind: Kind, d: int) -> None:
    """Keys and values that are not finite, behind the end of the sequence that has their page next."""
    generator, heads = draw(9), 2
    angles = torch.ones(256, d, device=DEVICE)
    finite = normal(generator, 1, 16, 3 * heads * d)
    left = finite.clone()
    left[:, ::3], left[:, 1::3], left[:, 2::3] = torch.inf, torch.nan, 3e38
    positions = ints(range(16))
    own, cut = positions[:5], ints([[0, 5, 0]])
    results = []
    for before in (None, left, 1e6 * finite):
        cache = cache_of(kind, heads, d)
        if before is not None:
            rotate(SplitSums(before), angles, positions, positions * 0, cache, 0, heads, DTYPE)
        q = rotate(SplitSums(finite[:, :5]), angles, own, own * 0, cache, 0, heads, DTYPE)
        layer = (*cache.layer(0), cache.table)
        chunk = chunks(q, *layer, own, cut, d**-0.5, torch.empty_like(q))
        results.append((chunk, decode(q[4:], *layer, own[4:], own[4:] * 0, d**-0.5)))
    for one, other in zip(results[0] * 2, results[1] + results[2], strict=True):
        assert bool(one.isfinite().all()) and torch.equal(one, other)


def test_reach_grows_with_the_sequence_alone() -> None:
    assert [part_count(n) for n in (1, 256, 257, 1024, 1025, 4096, 4097, 131_072)] == [1, 1, 2, 4, 5, 16, 11, 16]


EIGHT_NAMES = ("int8", "fp8")[: len(EIGHT)]


def model_of(kind: Any, name: str = tiny.TINY) -> TextModel:
    """A small model on the device, plain or quantized."""
    model = load(name, device=DEVICE, precision="bf16" if CUDA else "fp32")
    if kind == "plain":
        return model
    texts = [tuple(torch.randint(3, 262, (40,), generator=torch.Generator().manual_seed(i)).tolist()) for i in range(4)]
    return quantize(model, texts, scheme=kind, recipe=llama())


def fused(model: TextModel, kv: Kind = "float", **options: Any) -> FusedBackend:
    cache = KVCache(
        layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim, pages=40, sequences=4, context=160,
        dtype=DTYPE, device=DEVICE, kind=kv, turned=True,
    )  # fmt: skip
    for s in range(4):
        cache.place(s, list(range(s * 10, s * 10 + 10)))
    cache.settle()
    decoder = CudaDecoder(model.network, cache, **options)
    return FusedBackend(model, cache, decoder, sequences=4, context=160, rows=64)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


def alike(found: Tensor, expected: Tensor, slack: float) -> None:
    """Equal up to 16 bits on a GPU, else up to this share of the largest."""
    if CUDA:
        assert cosine(found, expected) > 0.999
    else:
        torch.testing.assert_close(found, expected, rtol=slack, atol=slack * float(expected.abs().max()))


TEXTS = [[1, *range(40, 58)], [1, 9, 9], [1, *range(100, 106)]]  # across a page's border, some of one page
FOUR_BITS = ("w4a16", "w4a8", "nvfp4")
# In the interpreter, where each launch is dear, weights and cache are quantized one at a time.
PAIRS = [(kind, kv) for kind in ("plain", "int8", "fp8", *FOUR_BITS) for kv in KINDS] if CUDA else [
    ("plain", "float"), ("plain", "int8"), ("int8", "float"), ("w4a16", "float"),
]  # fmt: skip


@pytest.mark.quick("plain-float", "int8-float")
@pytest.mark.parametrize(("kind", "kv"), [(kind, kv) for kind, kv in PAIRS if kind != "fp8" or len(EIGHT) > 1])
def test_it_is_transformers_model(kind: str, kv: Kind) -> None:
    """Against transformers' own forward of the same layers, quantized or not."""
    model = model_of(kind)
    short = kind in FOUR_BITS and not CUDA
    texts, cuts = ([text[:5] for text in TEXTS[:2]], [4, 2]) if short else (TEXTS, [18, 2, 6])
    theirs = [stage.logits(model, text) for text in texts]
    run = fused(model, kv)
    for found, expected in zip(stage.read(run, texts, cuts), theirs, strict=True):
        if kind == "plain" and kv == "float" and not CUDA:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        # E4M3 keeps three bits of a key or value: 2.6% of each at the mean, where int8 of a row's largest keeps 0.5%.
        least = 0.99 if kind != "plain" else 0.998 if kv == "fp8" else 0.999
        assert cosine(found, expected) > least, cosine(found, expected)


@pytest.mark.quick("qwen3", "gemma3")
@pytest.mark.parametrize("name", ["llama-with-biases", "qwen3", "gemma2", "gemma3"])
def test_models_of_the_family_are_transformers(name: str, tmp_path: Path) -> None:
    """With biases, with norms of heads, and Gemma's embeddings, norms, caps and windows."""
    model = load(str(saved(tmp_path / name, FAMILY[name][0])), device=DEVICE, precision="bf16" if CUDA else "fp32")
    # Of Gemma a text that is longer than its windows, at once and then one token more.
    texts, cuts = ([TEXTS[0][:14]], [13]) if "gemma" in name else ([text[:6] for text in TEXTS], [5, 2, 5])
    theirs = [stage.logits(model, text) for text in texts]
    for found, expected in zip(stage.read(fused(model), texts, cuts), theirs, strict=True):
        alike(found, expected, 1e-5)


@pytest.mark.parametrize("kind", ["plain", *EIGHT_NAMES] if CUDA else ["int8"])
def test_mixtures(kind: str) -> None:
    """Against torch's products of the same experts; a row has the same bits alone and among others."""
    model = model_of(kind, tiny.QWEN3_MOE_TINY)
    # Probabilities of experts that these tokens take and leave differ by an eighth at least: E4M3 swaps near ties.
    texts = [[1, 60, 61, 62], *(text[:4] for text in TEXTS[1:])]
    run = fused(model)
    for found, text in zip(stage.read(run, texts, [*map(len, texts)]), texts, strict=True):
        expected = stage.logits(model, text)
        assert cosine(found, expected) > (0.99 if CUDA else 0.9999), cosine(found, expected)
    if kind != "plain":
        alone = run.forward(TokenBatch.of([9], [3], [1], [0])).logits[0].clone()
        together = run.forward(TokenBatch.of([8, 9, 7], [4, 3, 3], [0, 1, 2], [0, 1, 2])).logits
        assert torch.equal(together[1], alone)


def test_hidden_states_beside_logits() -> None:
    """Of some rows, among others whose logits are wanted: in every kind of step."""
    model = model_of("plain")
    network, texts = model.network.model, TEXTS[1:]
    with stage.by_transformers(model):
        output = network(torch.tensor([texts[1]], device=DEVICE), use_cache=False, output_hidden_states=True)
        theirs, layers = output.last_hidden_state[0].float(), [x[0].float() for x in output.hidden_states]
    run = fused(model, features=(1, 0))
    rows = [(s, p) for s, text in enumerate(texts) for p in range(len(text))]
    tokens, positions, sequences = [texts[s][p] for s, p in rows], [p for _, p in rows], [s for s, _ in rows]
    forward = run.forward(TokenBatch.of(tokens, positions, sequences, [2], [*range(3, len(rows))]))
    assert forward.states is not None and forward.features is not None
    for found, expected in (
        (forward.states.float(), theirs),
        (forward.features[3:].float(), torch.cat([layers[1], layers[0]], -1)),
        (forward.logits, stage.logits(model, texts[0])[2:]),
    ):
        alike(found, expected, 1e-4)


def test_weights_are_held_once() -> None:
    model = model_of("int8")
    before = stage.logits(model, TEXTS[0])
    run = fused(model)
    attention = model.network.model.layers[0].self_attn
    assert attention.k_proj.weight.untyped_storage().data_ptr() == attention.q_proj.weight.untyped_storage().data_ptr()
    # transformers' own forward still runs, on the same weights
    assert torch.equal(stage.logits(model, TEXTS[0]), before)
    held = run.decoder.ops.weight_bytes
    config: Any = model.config
    width, inner, kv = config.hidden_size, config.intermediate_size, 2 * model.kv_heads * model.head_dim
    assert held == model.layers * (2 * width * 64 + width * kv + 3 * width * inner) + config.vocab_size * width


@pytest.mark.quick("int8")
@pytest.mark.parametrize("kind", ["plain", *EIGHT_NAMES])
def test_equal_bits_alone_and_in_a_crowd(kind: str) -> None:
    """Decoding rows, whatever fills the batch up beside them."""
    model = model_of(kind)
    texts = [text[: 6 if CUDA else 2] for text in TEXTS]
    crowd = stage.read(fused(model, "int8"), texts, [1, 1, 1])
    for text, together in list(zip(texts, crowd, strict=True))[::2]:  # the first and the last
        (alone,) = stage.read(fused(model, "int8"), [text], [1])
        assert torch.equal(alone, together)


def test_rows_that_fill_up_write_nowhere() -> None:
    run = fused(model_of("plain"))
    cache = run.cache
    for held in (cache.keys, cache.values):
        held.fill_(1)  # what no row would write
    before = cache.keys.clone(), cache.values.clone()
    step = TokenBatch.of([7, 8, 9], [60, 61, 62], [0, 1, 2], [0, 1, 2])  # in a bucket of four
    run.forward(step)
    for old, new in zip(before, (cache.keys, cache.values), strict=True):
        changed = (old != new).flatten(2).any(-1).any(0).nonzero()[:, 0].tolist()
        assert changed == [3, 13, 23]  # the pages of these positions, and no others


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", *EIGHT_NAMES] if CUDA else ["plain"])
def test_graphs_of_any_step_bring_equal_bits(kind: str) -> None:
    """Prompts in chunks beside rows that decode, padded to a graph's shape, against the same steps as they are."""
    model = model_of(kind)
    run, plain = (fused(model, "int8", features=(0, 1)) for _ in range(2))
    run.prepare(4) if CUDA else None
    steps = [
        TokenBatch.of([1, 40, 41, 1, 9, 9, 1], [0, 1, 2, 0, 1, 2, 0], [0, 0, 0, 1, 1, 1, 2], [2, 5, 6]),
        TokenBatch.of([-1, 7, 7, -1], [3, 3, 4, 1], [0, 1, 1, 2], [0, 3]),
        TokenBatch.of([-1, 8, -1], [4, 5, 2], [0, 1, 2], [0, 1, 2]),
    ]
    for step in steps:
        without = plain.graphs.run(*plain._on_device(plain._step(step)))
        expected, alike, forward = without.logits.clone(), without.features, run.forward(step)
        assert torch.equal(forward.logits, expected)
        captured = forward.features
        assert captured is not None and alike is not None and torch.equal(captured[: len(alike)], alike)
        assert forward.best is not None and torch.equal(forward.best, expected.argmax(-1))
        assert torch.equal(run.graphs.latest[:4], plain.graphs.latest[:4])
        assert int(run.graphs.latest[step.sequences[step.output_rows[-1]]]) == int(forward.best[-1])
    for ours, theirs in zip(run.cache.layer(0), plain.cache.layer(0), strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["plain", *EIGHT_NAMES] if CUDA else ["plain"])
def test_rows_with_adapters_are_those_of_merged_weights(kind: str) -> None:
    """With two adapters and without, in one step: rows without any have the bits of a batch without."""
    model, (one, two) = model_of(kind), (factors(model_of("plain"), seed) for seed in range(2))
    run, plain = fused(model), fused(model_of(kind))
    adapters = [None, run.pack(one), run.pack(two), None]
    chunk = TokenBatch.of([1, 40, 41] * 4, [0, 1, 2] * 4, [s for s in range(4) for _ in range(3)], [2, 5, 8, 11])
    steps = [chunk] if CUDA else []  # which the interpreter takes long for
    steps += [
        TokenBatch.of([t] * 4, [len(steps) * 3 + k] * 4, [0, 1, 2, 3], [0, 1, 2, 3]) for k, t in enumerate([7, 8])
    ]
    tokens = [1, 40, 41, 7, 8] if CUDA else [7, 8]
    expected = [merged_logits(model_of("plain"), own, tokens) for own in (one, two)]
    for step in steps:
        mixed = replace(step, adapters=[adapters[s] for s in step.sequences.tolist()])
        found, without = run.forward(mixed).logits.clone(), plain.forward(step).logits.clone()
        assert torch.equal(found[[0, 3]], without[[0, 3]])
        for row in (1, 2):
            own = expected[row - 1][int(step.positions[-1])]
            assert cosine(found[row], own) > (0.999 if kind == "plain" else 0.95) > cosine(without[row], own)


def factors(model: TextModel, seed: int) -> dict[str, LowRank]:
    """A branch of each of a model's linear layers, of rank 9 in some and 4 in others."""
    draw = torch.Generator().manual_seed(seed)
    names = [n for n, m in model.network.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    made = {}
    for k, name in enumerate(names):
        width, rank = model.network.get_submodule(name).weight.shape, 9 if k % 2 else 4
        pair = (torch.randn(s, generator=draw) * 0.15 for s in ((rank, width[1]), (width[0], rank)))
        made[name] = LowRank(*pair, 1.5)
    return made


def merged_logits(model: TextModel, own: dict[str, LowRank], tokens: list[int]) -> Tensor:
    network = copy.deepcopy(model.network)
    with torch.no_grad():
        for name, pair in own.items():
            weight = network.get_submodule(name).weight
            weight += ((pair.up @ pair.down) * pair.scale).to(weight)
    return stage.logits(replace(model, network=network), tokens)


@pytest.mark.long
def test_guesses_have_the_bits_of_single_steps() -> None:
    """Of a sequence whose next tokens are known, in one step beside another that decodes."""
    model = model_of("int8")
    tokens = [1, 40, 41]
    run, single = fused(model, features=(0, 1)), fused(model)
    step = TokenBatch.of([9, *tokens], [0, 0, 1, 2], [1, 0, 0, 0], [0, 1, 2, 3])
    assert run._step(step).decodes
    together = run.forward(step).logits[1:].clone()
    steps = [TokenBatch.of([token], [place], [0], [0]) for place, token in enumerate(tokens)]
    alone = [single.forward(each).logits.clone() for each in steps]
    assert torch.equal(together, torch.cat(alone))


def test_steps_that_no_graph_fits_run_without() -> None:
    run = fused(model_of("plain"))
    step = TokenBatch.of([1, *range(40, 109)], list(range(70)), [0] * 70, list(range(70)))
    assert run.graphs(run._step(step)) is None  # more rows than the largest has
    assert run.forward(step).logits.shape == (70, 262)


def test_mixed_buckets_waste_little() -> None:
    for rows in (1, 64, 65, 192, 500, 2048, 3000):
        sizes = mixed_buckets(rows)
        assert rows <= sizes[-1] < rows + 128 and len(sizes) <= 8 + rows // 128
        assert all(b - a <= 128 for a, b in pairwise(sizes))
