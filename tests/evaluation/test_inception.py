"""FID's Inception: against a forward written anew over the same weights, and what refuses other weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evaluation.inception import Inception, WeightsError, _prepare
from evaluation.stand_ins import inception_weights

Weights = dict[str, Tensor]


@functools.cache
def weights() -> Weights:
    return inception_weights()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "pt_inception.pth"
    torch.save(weights(), path)
    return path


def other_forward(w: Weights, picture: np.ndarray) -> Tensor:
    """TensorFlow's 2015 graph, as its drawing has it, over the state's names. [H, W, 3] to [2048]."""

    def conv(x: Tensor, name: str, stride: int = 1, pad: tuple[int, int] = (0, 0)) -> Tensor:
        x = F.conv2d(x, w[f"{name}.conv.weight"], None, stride, pad)
        bn = f"{name}.bn."
        return F.batch_norm(
            x, w[bn + "running_mean"], w[bn + "running_var"], w[bn + "weight"], w[bn + "bias"], False, 0.0, 0.001
        ).clamp_min(0)

    def mean3(x: Tensor) -> Tensor:
        ones = F.avg_pool2d(torch.ones_like(x[:, :1]), 3, 1, 1)
        return F.avg_pool2d(x, 3, 1, 1) / ones  # only what lies within counts

    def a(x: Tensor, n: str) -> Tensor:
        five = conv(conv(x, f"{n}.branch5x5_1"), f"{n}.branch5x5_2", pad=(2, 2))
        three = conv(conv(x, f"{n}.branch3x3dbl_1"), f"{n}.branch3x3dbl_2", pad=(1, 1))
        three = conv(three, f"{n}.branch3x3dbl_3", pad=(1, 1))
        return torch.cat([conv(x, f"{n}.branch1x1"), five, three, conv(mean3(x), f"{n}.branch_pool")], 1)

    def c(x: Tensor, n: str) -> Tensor:
        y = conv(x, f"{n}.branch7x7_1")
        y = conv(conv(y, f"{n}.branch7x7_2", pad=(0, 3)), f"{n}.branch7x7_3", pad=(3, 0))
        z = conv(x, f"{n}.branch7x7dbl_1")
        for k, pad in ((2, (3, 0)), (3, (0, 3)), (4, (3, 0)), (5, (0, 3))):
            z = conv(z, f"{n}.branch7x7dbl_{k}", pad=pad)
        return torch.cat([conv(x, f"{n}.branch1x1"), y, z, conv(mean3(x), f"{n}.branch_pool")], 1)

    def e(x: Tensor, n: str, pooled: Tensor) -> Tensor:
        y = conv(x, f"{n}.branch3x3_1")
        z = conv(conv(x, f"{n}.branch3x3dbl_1"), f"{n}.branch3x3dbl_2", pad=(1, 1))
        return torch.cat(
            [
                conv(x, f"{n}.branch1x1"),
                conv(y, f"{n}.branch3x3_2a", pad=(0, 1)), conv(y, f"{n}.branch3x3_2b", pad=(1, 0)),
                conv(z, f"{n}.branch3x3dbl_3a", pad=(0, 1)), conv(z, f"{n}.branch3x3dbl_3b", pad=(1, 0)),
                conv(pooled, f"{n}.branch_pool"),
            ], 1,
        )  # fmt: skip

    x = torch.from_numpy(picture.astype(np.float32) / np.float32(255)).permute(2, 0, 1)[None]
    x = F.interpolate(x, size=(299, 299), mode="bilinear", align_corners=False) * 2 - 1
    x = x.to(w["Conv2d_1a_3x3.conv.weight"].dtype)
    x = conv(conv(conv(x, "Conv2d_1a_3x3", 2), "Conv2d_2a_3x3"), "Conv2d_2b_3x3", pad=(1, 1))
    x = conv(conv(F.max_pool2d(x, 3, 2), "Conv2d_3b_1x1"), "Conv2d_4a_3x3")
    x = F.max_pool2d(x, 3, 2)
    for n in ("Mixed_5b", "Mixed_5c", "Mixed_5d"):
        x = a(x, n)
    y = conv(conv(x, "Mixed_6a.branch3x3dbl_1"), "Mixed_6a.branch3x3dbl_2", pad=(1, 1))
    y = conv(y, "Mixed_6a.branch3x3dbl_3", 2)
    x = torch.cat([conv(x, "Mixed_6a.branch3x3", 2), y, F.max_pool2d(x, 3, 2)], 1)
    for n in ("Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"):
        x = c(x, n)
    y = conv(conv(x, "Mixed_7a.branch3x3_1"), "Mixed_7a.branch3x3_2", 2)
    z = conv(conv(x, "Mixed_7a.branch7x7x3_1"), "Mixed_7a.branch7x7x3_2", pad=(0, 3))
    z = conv(conv(z, "Mixed_7a.branch7x7x3_3", pad=(3, 0)), "Mixed_7a.branch7x7x3_4", 2)
    x = torch.cat([y, z, F.max_pool2d(x, 3, 2)], 1)
    x = e(x, "Mixed_7b", mean3(x))
    x = e(x, "Mixed_7c", F.max_pool2d(x, 3, 1, 1))
    return x.mean((2, 3))[0]


def pictures(count: int, seed: int, side: int) -> list[np.ndarray]:
    """Blobs: noise that is smooth enough for a network to tell apart."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(count, 3, 6, 6, generator=generator)
    large = F.interpolate(small, (side, side + 10), mode="bicubic").clamp(0, 1)
    return [np.asarray((one.permute(1, 2, 0) * 255).round().to(torch.uint8)) for one in large]


@pytest.mark.long
def test_it_sees_what_an_independent_forward_sees(file: Path) -> None:
    """Of a picture that is enlarged, and of one that is reduced."""
    ours = Inception(file)
    double = {name: value.double() for name, value in weights().items()}
    images = [*pictures(1, 1, 128), *pictures(1, 2, 300)]
    seen = [ours.see([image])[0] for image in images]
    ours._network.double()
    for image, found in zip(images, seen, strict=True):
        with torch.inference_mode():
            exact, expected = ours._network(_prepare(torch.tensor(image)).double())[0], other_forward(double, image)
        assert found.shape == (2048,) and found.std() > 1e-3
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(exact, expected, rtol=1e-9, atol=1e-10)


def test_it_is_not_torchvisions_network(file: Path) -> None:
    """The two quirks matter: another pool in the last block changes what is seen."""
    ours = Inception(file)
    picture = pictures(1, 3, 128)
    before = ours.see(picture)
    ours._network.Mixed_7c._pool = ours._network.Mixed_7b._pool
    assert (ours.see(picture) - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"Mixed_7c.branch_pool.bn.bias": None}, "is not FID's Inception"),
        ({"AuxLogits.conv0.conv.weight": torch.zeros(1)}, "is not FID's Inception"),
        ({"Mixed_5b.branch1x1.conv.weight": torch.zeros(1)}, "is not FID's Inception"),
        (b"weights", "is no file of weights"),
        (None, "cannot be read"),
        ([1], "holds no weights by name"),
    ],
)
def test_other_weights_are_refused_by_name(held: Any, said: str, tmp_path: Path) -> None:
    """What refuses is names and shapes: values are one zero each, however many a shape has."""
    path = tmp_path / "w.pth"
    if isinstance(held, bytes):
        path.write_bytes(held)
    elif isinstance(held, dict):
        zeros = {name: torch.zeros((), dtype=value.dtype).expand(value.shape) for name, value in weights().items()}
        torch.save({name: value for name, value in (zeros | held).items() if value is not None}, path)
    elif held:
        torch.save(held, path)
    with pytest.raises(WeightsError, match=said) as refused:
        Inception(path)
    assert str(path) in str(refused.value)
