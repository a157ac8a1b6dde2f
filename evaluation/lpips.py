"""LPIPS of two images (Zhang et al., 2018): the distance of AlexNet's features, weighted to agree with people."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from core.extras import pip_install
from evaluation.inception import WeightsError, read_weights
from evaluation.pixels import Pixels

_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # ImageNet's mean and deviation, for pixels in -1..1
_EPSILON = 1e-8
_LEAST_SIDE = 31  # at which the last layer is one pixel wide


def alexnet() -> nn.Sequential:
    """AlexNet's convolutions (Krizhevsky, 2014), numbered as in torchvision's file."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(),
    )  # fmt: skip


class Lpips:
    """LPIPS with AlexNet, version 0.1, as torchmetrics computes it; 0 for equal images."""

    def __init__(self, weights: Path) -> None:
        """`weights` is torchvision's `alexnet-owt-7be5be79.pth`; the layers' weights are torchmetrics' own.

        Raises `WeightsError`.
        """
        found = read_weights(weights)
        network = alexnet()
        wanted = network.state_dict()
        named = {name: found[f"features.{name}"] for name in wanted if f"features.{name}" in found}
        try:
            network.load_state_dict(named)
        except RuntimeError as error:
            raise WeightsError(f"{weights}: is not torchvision's AlexNet ({error})") from None
        self.digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        self._network = network.eval().requires_grad_(False)
        self._layers = _layer_weights()
        self._shift, self._scale = (torch.tensor(values).view(1, 3, 1, 1) for values in (_SHIFT, _SCALE))

    @torch.inference_mode()
    def __call__(self, a: Pixels, b: Pixels) -> float:
        """The distance of uint8 [H, W, 3] images of one size. Raises ValueError for sides below 31 pixels."""
        if min(a.shape[:2]) < _LEAST_SIDE:
            raise ValueError(f"sides must be at least {_LEAST_SIDE} pixels")
        pixels = torch.stack([torch.tensor(one) for one in (a, b)]).permute(0, 3, 1, 2).float()  # [2, 3, H, W]
        x = (pixels / 127.5 - 1 - self._shift) / self._scale
        total, layers = 0.0, iter(self._layers)
        for layer in self._network:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                unit = x / (x.square().sum(1, keepdim=True) + _EPSILON).sqrt()
                total += float(((unit[0] - unit[1]).square() * next(layers)).sum(0).mean())
        return total


def _layer_weights() -> list[Tensor]:
    """The weight of each channel [C, 1, 1] of each layer, from the file that torchmetrics brings."""
    spec = find_spec("torchmetrics")
    if spec is None or spec.origin is None:
        raise WeightsError(f"LPIPS needs torchmetrics: {pip_install('eval')}")
    found = read_weights(Path(spec.origin).parent / "functional" / "image" / "lpips_models" / "alex.pth")
    return [found[f"lin{number}.model.1.weight"][0] for number in range(5)]
