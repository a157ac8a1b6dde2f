"""LPIPS of two images (Zhang et al., 2018), by torchmetrics: the distance of AlexNet's features, weighted to agree with
people. Where its weights are not to be had: the same distance over a CLIP's layers, without learned weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evaluation.clip import EMBEDDED, Clip
from evaluation.inception import WeightsError, digest_of_file, read_weights
from evaluation.pixels import Pixels

_LEAST_SIDE = 31  # at which the last layer is one pixel wide
_WIDTHS = (64, 192, 384, 256, 256)
_BATCH = 64  # pairs that a network sees at once


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
        features = []
        for layer in self:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                features.append(x)
        return features


@functools.cache
def _library() -> Any:
    from torchmetrics.functional.image import lpips  # which imports slowly

    return lpips


def _measure(network: nn.Module, layers: nn.ModuleList, scaling: nn.Module) -> nn.Module:
    """Return torchmetrics' LPIPS over a given network: its own constructor has torchvision download one."""
    kind = _library()._LPIPS
    measure: nn.Module = kind.__new__(kind)
    nn.Module.__init__(measure)
    for name, value in {
        "L": len(layers), "spatial": False, "resize": None, "scaling_layer": scaling, "net": network, "lins": layers,
    }.items():  # fmt: skip
        setattr(measure, name, value)
    return measure.eval().requires_grad_(False)


def _learned() -> nn.ModuleList:
    """The weights of AlexNet's layers, which torchmetrics brings."""
    library = _library()
    layers = nn.ModuleList(library.NetLinLayer(width, use_dropout=True) for width in _WIDTHS)
    tensors = read_weights(Path(library.__file__).with_name("lpips_models") / "alex.pth")  # of version 0.1
    layers.load_state_dict({name.removeprefix("lin"): value for name, value in tensors.items()})
    return layers


class _Layers(nn.Module):
    """The outputs of a vision transformer's blocks as maps of patches; the class token is left out."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self._tower = tower

    def forward(self, x: Tensor) -> list[Tensor]:
        """[B, 3, H, W] to as many [B, C, 1, patches] as there are blocks."""
        states = self._tower(pixel_values=x, output_hidden_states=True).hidden_states[1:]
        return [state[:, 1:].mT[:, :, None] for state in states]


class ClipLayers(Clip):
    """LPIPS's distance over the blocks of a CLIP's vision tower, unlearned: every channel weighs 1.

    That is the paper's baseline without its linear layers: over blocks the sum of 2 - 2 × cosine of what stands in the
    same patch, averaged over patches. Not LPIPS: another network, not trained on people's judgement, on another scale.
    """

    def __init__(self, source: Path | str = EMBEDDED, *, device: torch.device | str = "cpu") -> None:
        """`source` is a folder, or a hub id. Raises `WeightsError`."""
        super().__init__(source, device=device)
        self.figure = f"{self.name}-layers"
        config = self._model.config.vision_config
        layers = [_library().NetLinLayer(config.hidden_size) for _ in range(config.num_hidden_layers)]
        for layer in layers:
            nn.init.ones_(layer.model[-1].weight)
        network = _Layers(self._model.vision_model)
        self._measure = _measure(network, nn.ModuleList(layers), nn.Identity())

    @torch.inference_mode()
    def between(self, left: Sequence[Pixels], right: Sequence[Pixels]) -> Tensor:
        """The distances [N] of uint8 [H, W, 3] images, pair by pair; 0 for equal ones."""
        distances = [torch.zeros(0)]
        for start in range(0, len(left), _BATCH):
            x, y = (self._prepared(part[start : start + _BATCH]) for part in (left, right))
            distances.append(self._measure(x, y).flatten().cpu())
        return torch.cat(distances)


class Lpips:
    """LPIPS with AlexNet, version 0.1; 0 for equal images."""

    def __init__(self, weights: Path) -> None:
        """`weights` is torchvision's `alexnet-owt-7be5be79.pth`; the layers' weights are torchmetrics' own.

        Raises `WeightsError`.
        """
        tensors = read_weights(weights)
        network = AlexNet()
        try:
            network.load_state_dict({name: tensors.get(f"features.{name}") for name in network.state_dict()})
        except RuntimeError as error:
            raise WeightsError(f"{weights}: is not torchvision's AlexNet ({error})") from None
        self.digest = digest_of_file(weights)
        self._measure = _measure(network, _learned(), _library().ScalingLayer())

    @torch.inference_mode()
    def __call__(self, a: Pixels, b: Pixels) -> float:
        """The distance of uint8 [H, W, 3] images of one size. Raises ValueError for sides below 31 pixels."""
        if min(a.shape[:2]) < _LEAST_SIDE:
            raise ValueError(f"sides must be at least {_LEAST_SIDE} pixels")
        x, y = (torch.tensor(image).permute(2, 0, 1)[None].float() / 127.5 - 1 for image in (a, b))
        return float(self._measure(x, y))
