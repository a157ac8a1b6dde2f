"""LPIPS of two images (Zhang et al., 2018), by torchmetrics: the distance of AlexNet's features, weighted to agree with
people.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torchmetrics.functional.image import lpips as library

from evaluation.inception import WeightsError, read_weights
from evaluation.pixels import Pixels

_LEAST_SIDE = 31  # at which the last layer is one pixel wide
_WIDTHS = (64, 192, 384, 256, 256)


class AlexNet(nn.Sequential):
    """AlexNet's convolutions (Krizhevsky, 2014), numbered as in torchvision's file. Gives all five activations."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> list[Tensor]:
        """[B, 3, H, W] to five [B, C, H', W']."""
        found = []
        for layer in self:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                found.append(x)
        return found


class _Measure(library._LPIPS):
    """torchmetrics' LPIPS over a given network: its own constructor has torchvision download one."""

    def __init__(self, network: AlexNet) -> None:
        nn.Module.__init__(self)
        self.L, self.spatial, self.resize = len(_WIDTHS), False, None
        self.scaling_layer = library.ScalingLayer()
        self.net = network  # type: ignore[assignment] # one of three networks there
        layers = nn.ModuleList(library.NetLinLayer(width, use_dropout=True) for width in _WIDTHS)
        found = read_weights(Path(library.__file__).with_name("lpips_models") / "alex.pth")  # of version 0.1
        layers.load_state_dict({name.removeprefix("lin"): value for name, value in found.items()})
        self.lins = layers  # type: ignore[assignment] # there too, in truth


class Lpips:
    """LPIPS with AlexNet, version 0.1; 0 for equal images."""

    def __init__(self, weights: Path) -> None:
        """`weights` is torchvision's `alexnet-owt-7be5be79.pth`; the layers' weights are torchmetrics' own.

        Raises `WeightsError`.
        """
        found = read_weights(weights)
        network = AlexNet()
        try:
            network.load_state_dict({name: found.get(f"features.{name}") for name in network.state_dict()})
        except RuntimeError as error:
            raise WeightsError(f"{weights}: is not torchvision's AlexNet ({error})") from None
        self.digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        self._measure = _Measure(network).eval().requires_grad_(False)

    @torch.inference_mode()
    def __call__(self, a: Pixels, b: Pixels) -> float:
        """The distance of uint8 [H, W, 3] images of one size. Raises ValueError for sides below 31 pixels."""
        if min(a.shape[:2]) < _LEAST_SIDE:
            raise ValueError(f"sides must be at least {_LEAST_SIDE} pixels")
        x, y = (torch.tensor(one).permute(2, 0, 1)[None].float() / 127.5 - 1 for one in (a, b))
        return float(self._measure(x, y))
