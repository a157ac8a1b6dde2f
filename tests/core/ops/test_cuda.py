"""What the fused lowering does beside computing: weights joined once, slots side by side, and what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.ops.cuda import CudaLowering, CudaOps
from core.quant.fp8 import Fp8Linear
from tests.core.ops.stage import eight, inverse, linear, lowerings, run, through
from tests.core.quant.stage import check_close, normal


def test_layers_side_by_side_are_joined_beforehand_and_hold_no_weight_twice() -> None:
    layers = [linear(seed, 8, 6) for seed in range(3)]
    own, walk = [layer.weight.clone() for layer in layers], through(*layers)
    lowering = CudaLowering(torch.float32, 4)
    lowering.prepare(walk, (1, 8))
    whole = {layer.weight.untyped_storage().data_ptr() for layer in layers}
    assert len(whole) == 1 and all(torch.equal(a, b.weight) for a, b in zip(own, layers, strict=True))
    x = normal(0, 3, 8)
    check_close(lowering.lower(walk, "three")(x)[0], torch.cat([layer(x) for layer in layers], dim=-1))
    assert {layer.weight.untyped_storage().data_ptr() for layer in layers} == whole


def test_two_slots_of_a_joint_are_one_array_without_a_copy() -> None:
    ops = CudaOps(torch.float32, 4)
    like = normal(0, 2, 8, 12, 3)
    left, right = ops.joint(like, (6, 10), 1)
    assert left is not None and right is not None
    left.fill_(1), right.fill_(2)
    both = ops.cat(left, right)
    assert both.shape == (2, 4, 6, 16) and both.data_ptr() == left.data_ptr() and both.is_contiguous()
    assert torch.equal(both, torch.cat([left, right], dim=-1))
    for x, y in ((right, left), (left, right.clone()), (left.clone(), right), (left, left), (left[..., :5], right)):
        found = ops.cat(x, y)
        assert torch.equal(found, torch.cat([x, y], dim=-1)) and found.data_ptr() != x.data_ptr()


def test_joints_are_known_by_their_order_and_shared_by_all_numbers_of_rows() -> None:
    ops = CudaOps(torch.float32, 4)

    def slots(rows: int) -> list[int]:
        ops.begin()
        found = [ops.joint(normal(0, rows, 4, 4, 1), channels, 0)[0] for channels in ((2, 3), (2, 3), (4, 4))]
        return [slot.data_ptr() for slot in found if slot is not None]

    first = slots(3)
    assert len(set(first)) == 3 and slots(1) == slots(4) == first
    with pytest.raises(ValueError, match="5 rows, and there is room for 4"):
        slots(5)


def test_a_head_wider_than_any_kernels_is_attended_to_image_by_image() -> None:
    q, kv = normal(0, 3, 5, 272), normal(1, 3, 7, 544)

    def walk(ops: Any, q: Any, kv: Any) -> Any:
        return ops.attend(q, ops.columns(kv, 0, 272), ops.columns(kv, 272, 272), heads=1)

    check_close(run(lowerings()["cuda"], walk, q, kv)[0], run(lowerings()["torch"], walk, q, kv)[0], relative=1e-5)


def test_fp8_is_what_its_modules_compute_and_stands_beside_no_int8() -> None:
    by = inverse(0, 8)
    layers = [Fp8Linear.of(linear(seed, 8, 6), by / 10) for seed in range(2)]
    walk, x = through(*layers), normal(0, 5, 8)
    check_close(run(lowerings()["cuda"], walk, x)[0], run(lowerings()["torch"], walk, x)[0], relative=1e-5)
    with pytest.raises(ValueError, match="quantized in different ways"):
        CudaLowering(torch.float32, 4).prepare(through(eight(linear(0, 8, 6), by), layers[1]), (1, 8))
