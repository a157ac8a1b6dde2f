"""2:4 sparse weights: compressed and expanded, pruned by what inputs are, and stored smaller."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from core.kernels.cuda import sparse_gemm
from core.ops.cuda_tokens import TokenExperts
from core.ops.fused import Linear
from core.ops.mixture import Mixture
from core.quant import sparse
from core.quant.convert import Recipe, RecipeError, Rule, quantize_
from core.quant.grouped import StackedLinear, grouped
from core.quant.sparse import SparseInt8Linear
from core.quant.statistics import Statistics
from tests.core.quant.blocks import TWO, observed_two, squared_error
from tests.core.quant.stage import Many, Seed, Several, TwoLayers, normal

few = settings(max_examples=30, deadline=None)


def inputs(seed: int = 0) -> Tensor:
    alike = normal(seed, 1000, 24) @ normal(99, 24, 300) / 5
    return (alike + normal(seed + 50, 1000, 300)) * (2 * normal(1, 300)).exp()


@few
@given(...)
def test_compressed_levels_come_back(n: Several, groups: Many, seed: Seed) -> None:
    g = torch.Generator().manual_seed(seed)
    levels = torch.randint(-127, 128, (n, 4 * groups), generator=g, dtype=torch.int8)
    levels *= sparse.mask(torch.rand(levels.shape, generator=g)) & (torch.rand(levels.shape, generator=g) < 0.8)
    values, metadata = sparse.compress(levels)
    assert values.shape == (n, 2 * groups) and metadata.shape == (n, (groups + 1) // 2)
    assert torch.equal(sparse.expand(values, metadata), levels)
    first = int(metadata[0, 0]) & 15
    assert (first & 3) < (first >> 2), "places are in order, as sparse tensor cores want them"


def test_of_four_neighbours_the_two_largest_stay() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 0.0, 5.0, 5.0, 5.0, 1.0]])
    assert sparse.mask(scores).tolist() == [[False, True, True, False, True, True, False, False]]
    with pytest.raises(ValueError, match="6 inputs are no whole groups of 4"):
        sparse.mask(torch.ones(1, 6))
    with pytest.raises(ValueError, match="more than two of four weights are not zero"):
        sparse.compress(torch.tensor([[1, 2, 3, 0]], dtype=torch.int8))


def test_inputs_choose_what_is_pruned_and_other_weights_make_up_for_it() -> None:
    model = TwoLayers()
    errors = {}
    for name, sampled, gptq in (("magnitude", False, False), ("wanda", True, False), ("sparsegpt", True, True)):
        quantized = copy.deepcopy(model)
        report = quantize_(
            quantized, TWO, observed_two(model, inputs(), sampled=sampled), scheme="int8-sparse", gptq=gptq
        )
        assert bool(report.compensated) == gptq
        for layer in (quantized.first, quantized.second):
            assert isinstance(layer, SparseInt8Linear)
            assert ((layer.levels.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all()
            assert layer.weight.nbytes + layer.metadata.nbytes <= 0.63 * layer.levels.nbytes
        errors[name] = squared_error(quantized, model, inputs(7))
    assert errors["sparsegpt"] < 0.9 * errors["wanda"] and errors["wanda"] < 0.9 * errors["magnitude"], errors


def test_a_sparse_model_is_a_dense_one_with_zeros() -> None:
    """Bit for bit, by every lowering: the same weights, pruned before they are quantized in INT8."""
    model = TwoLayers()
    for layer in (model.first, model.second):
        layer.weight.mul_(sparse.mask(layer.weight.abs()))
    dense, pruned = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(dense, TWO, observed_two(model, inputs()))
    quantize_(pruned, TWO, observed_two(model, inputs()), scheme="int8-sparse")
    assert torch.equal(pruned(inputs(3)), dense(inputs(3)))
    layers = [Linear([each.first], torch.float32) for each in (pruned, dense)]
    levels = layers[0].modules[0].read(inputs(4))
    assert layers[0].channels == 300 and torch.equal(*(layer(levels) for layer in layers))


def test_experts_in_a_stack_are_expanded_for_the_kernels_of_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grouped products read dense weights, also where the sparse kernel would run."""
    experts, counts, x = 3, (4, 0, 5), normal(2, 9, 128)
    gate_up, down = (
        SparseInt8Linear.of(StackedLinear(normal(i, experts, *shape)), torch.full((shape[1],), 20.0))
        for i, shape in enumerate(((256, 128), (128, 128)))
    )
    assert torch.equal(grouped(gate_up, x, counts), grouped(sparse.expanded(gate_up), x, counts))
    monkeypatch.setattr(sparse_gemm, "unsupported_reason", lambda *_: None)
    assert Linear([down], torch.bfloat16).metadata is not None
    router = nn.Linear(128, experts, bias=False)
    layers = TokenExperts(Mixture(router, gate_up, down, experts, 1, normalized=True), torch.bfloat16)
    for layer, stack in ((layers._gate_up, gate_up), (layers._down, down)):
        assert layer.metadata is None and torch.equal(layer.weight, stack.levels)


def test_what_is_no_sparse_layer_is_rejected() -> None:
    layer = nn.Linear(16, 4)
    tensors = SparseInt8Linear.of(layer, torch.ones(16)).state_dict()
    with pytest.raises(ValueError, match="is stored with its weights"):
        SparseInt8Linear.restored(layer, {"inverse": tensors["inverse"]})
    with pytest.raises(ValueError, match="does not name two places of each group"):
        SparseInt8Linear.restored(layer, tensors | {"metadata": torch.zeros_like(tensors["metadata"])})
    odd, statistics = nn.ModuleDict({"first": nn.Linear(30, 4)}), Statistics("odd")
    with statistics.observe(odd, ["first"], 0):
        odd["first"](torch.randn(9, 30))
    with pytest.raises(RecipeError, match=r"^first: 30 inputs are no whole groups of 4"):
        quantize_(odd, Recipe("odd", (Rule("first"),)), statistics, scheme="int8-sparse")
