"""FID's Inception: against a forward written anew over the same weights, and what refuses other weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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

    def conv(x: Tensor, *names: str, stride: int = 1, padded: bool = True) -> Tensor:
        """One behind the other, padded to keep the size; the last one in strides, and then without."""
        for name in names:
            kernel, step = w[f"{name}.conv.weight"], stride if name == names[-1] else 1
            pad = [side // 2 for side in kernel.shape[2:]] if padded and step == 1 else 0
            mean, var, scale, shift = (
                w[f"{name}.bn.{key}"] for key in ("running_mean", "running_var", "weight", "bias")
            )
            x = F.conv2d(x, kernel, None, step, pad)
            x = F.batch_norm(x, mean, var, scale, shift, False, 0.0, 0.001).clamp_min(0)
        return x

    def branch(x: Tensor, n: str, *ends: str, **options: Any) -> Tensor:
        return conv(x, *(f"{n}.branch{end}" for end in ends), **options)

    def mean3(x: Tensor) -> Tensor:
        ones = F.avg_pool2d(torch.ones_like(x[:, :1]), 3, 1, 1)
        return F.avg_pool2d(x, 3, 1, 1) / ones  # only what lies within counts

    def block(x: Tensor, n: str, *branches: Sequence[str]) -> Tensor:
        ways = [branch(x, n, "1x1"), *(branch(x, n, *ends) for ends in branches), branch(mean3(x), n, "_pool")]
        return torch.cat(ways, 1)

    def reduced(x: Tensor, n: str, *branches: Sequence[str]) -> Tensor:
        return torch.cat([*(branch(x, n, *ends, stride=2) for ends in branches), F.max_pool2d(x, 3, 2)], 1)

    def last(x: Tensor, n: str, pooled: Tensor) -> Tensor:
        ways = [branch(x, n, "1x1")]
        for start in (["3x3_1"], ["3x3dbl_1", "3x3dbl_2"]):
            number, name = len(start) + 1, start[0].removesuffix("_1")
            ways += [branch(branch(x, n, *start), n, f"{name}_{number}{side}") for side in "ab"]
        return torch.cat([*ways, branch(pooled, n, "_pool")], 1)

    x = torch.from_numpy(picture.astype(np.float32) / np.float32(255)).permute(2, 0, 1)[None]
    x = F.interpolate(x, size=(299, 299), mode="bilinear", align_corners=False) * 2 - 1
    x = conv(x.to(w["Conv2d_1a_3x3.conv.weight"].dtype), "Conv2d_1a_3x3", stride=2)
    x = conv(conv(x, "Conv2d_2a_3x3", padded=False), "Conv2d_2b_3x3")
    x = conv(F.max_pool2d(x, 3, 2), "Conv2d_3b_1x1")
    x = F.max_pool2d(conv(x, "Conv2d_4a_3x3", padded=False), 3, 2)
    for letter in "bcd":
        x = block(x, f"Mixed_5{letter}", ("5x5_1", "5x5_2"), ("3x3dbl_1", "3x3dbl_2", "3x3dbl_3"))
    x = reduced(x, "Mixed_6a", ("3x3",), ("3x3dbl_1", "3x3dbl_2", "3x3dbl_3"))
    for letter in "bcde":
        x = block(x, f"Mixed_6{letter}", ("7x7_1", "7x7_2", "7x7_3"), [f"7x7dbl_{k}" for k in range(1, 6)])
    x = reduced(x, "Mixed_7a", ("3x3_1", "3x3_2"), [f"7x7x3_{k}" for k in range(1, 5)])
    x = last(x, "Mixed_7b", mean3(x))
    x = last(x, "Mixed_7c", F.max_pool2d(x, 3, 1, 1))
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
