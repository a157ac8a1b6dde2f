"""FID-Inception: the Inception v3 whose third pooling layer gives the features of FID's published figures.

Loads pt_inception-2015-12-05-6726825d.pth (github.com/mseitzer/pytorch-fid), a port of TensorFlow's 2015 graph. It is
not torchvision's Inception: average pools leave their padding out of the count, and the last block pools by maximum
(Szegedy et al., 2016, as in that graph).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evaluation.pixels import Pixels

WEIGHTS = "pt_inception-2015-12-05-6726825d.pth"
URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{WEIGHTS}"
SIDE = 299


class WeightsError(ValueError):
    """Weights that are missing, or not of this network. The message names the file."""


class _Conv(nn.Module):
    """Convolution, batch norm, ReLU: one letter of the blocks below."""

    def __init__(
        self, inside: int, out: int, kernel: int | tuple[int, int], stride: int = 1, padded: bool = True
    ) -> None:
        super().__init__()
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (sides[0] // 2, sides[1] // 2) if padded else (0, 0)
        self.conv = nn.Conv2d(inside, out, sides, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


def _mean_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def _max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 1, 1)


def _halve(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2)


class _Block(nn.ModuleDict):
    """Chains of convolutions side by side, whose outputs are concatenated; the last chain reads what `pool` gives.

    A chain has (channels, kernel, stride) by the published file's names. Names that end in "a" or "b" read the same.
    """

    def __init__(self, inside: int, pool: Callable[[Tensor], Tensor], *chains: dict[str, tuple[Any, ...]]) -> None:
        super().__init__()
        self._pool, self._chains = pool, [list(chain) for chain in chains]
        for chain in chains:
            width = inside
            for name, (out, kernel, *stride) in chain.items():
                self[name] = _Conv(width, out, kernel, next(iter(stride), 1), padded=not stride)
                width = out

    def forward(self, x: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for chain in self._chains:
            y = self._pool(x) if chain is self._chains[-1] else x
            for name in chain:
                y = y if name.endswith(("a", "b")) else self[name](y)
            parts += [self[name](y) for name in chain if name.endswith(("a", "b"))] or [y]
        return torch.cat(parts, 1)


def _a(inside: int, pooled: int) -> _Block:
    return _Block(
        inside, _mean_pool, {"branch1x1": (64, 1)}, {"branch5x5_1": (48, 1), "branch5x5_2": (64, 5)},
        {"branch3x3dbl_1": (64, 1), "branch3x3dbl_2": (96, 3), "branch3x3dbl_3": (96, 3)}, {"branch_pool": (pooled, 1)},
    )  # fmt: skip


def _b(inside: int) -> _Block:
    double = {"branch3x3dbl_1": (64, 1), "branch3x3dbl_2": (96, 3), "branch3x3dbl_3": (96, 3, 2)}
    return _Block(inside, _halve, {"branch3x3": (384, 3, 2)}, double, {})


def _c(inside: int, middle: int) -> _Block:
    sides, names = ((7, 1), (1, 7), (7, 1)), ("branch7x7dbl_2", "branch7x7dbl_3", "branch7x7dbl_4")
    double = {"branch7x7dbl_1": (middle, 1), **{name: (middle, side) for name, side in zip(names, sides, strict=True)}}
    return _Block(
        inside, _mean_pool, {"branch1x1": (192, 1)},
        {"branch7x7_1": (middle, 1), "branch7x7_2": (middle, (1, 7)), "branch7x7_3": (192, (7, 1))},
        {**double, "branch7x7dbl_5": (192, (1, 7))}, {"branch_pool": (192, 1)},
    )  # fmt: skip


def _d(inside: int) -> _Block:
    seven = {"branch7x7x3_1": (192, 1), "branch7x7x3_2": (192, (1, 7)), "branch7x7x3_3": (192, (7, 1))}
    return _Block(
        inside, _halve, {"branch3x3_1": (192, 1), "branch3x3_2": (320, 3, 2)},
        {**seven, "branch7x7x3_4": (192, 3, 2)}, {},
    )  # fmt: skip


def _e(inside: int, pool: Callable[[Tensor], Tensor]) -> _Block:
    single = {"branch3x3_1": (384, 1), "branch3x3_2a": (384, (1, 3)), "branch3x3_2b": (384, (3, 1))}
    double = {"branch3x3dbl_1": (448, 1), "branch3x3dbl_2": (384, 3)}
    fan = {"branch3x3dbl_3a": (384, (1, 3)), "branch3x3dbl_3b": (384, (3, 1))}
    return _Block(inside, pool, {"branch1x1": (320, 1)}, single, {**double, **fan}, {"branch_pool": (192, 1)})


class InceptionNetwork(nn.Sequential):
    """[B, 3, 299, 299] in -1..1 to [B, 2048]. Parameters are called as in the published file."""

    def __init__(self) -> None:
        super().__init__(OrderedDict[str, nn.Module](
            Conv2d_1a_3x3=_Conv(3, 32, 3, 2, padded=False),
            Conv2d_2a_3x3=_Conv(32, 32, 3, padded=False),
            Conv2d_2b_3x3=_Conv(32, 64, 3),
            halve_1=nn.MaxPool2d(3, 2),
            Conv2d_3b_1x1=_Conv(64, 80, 1),
            Conv2d_4a_3x3=_Conv(80, 192, 3, padded=False),
            halve_2=nn.MaxPool2d(3, 2),
            Mixed_5b=_a(192, 32), Mixed_5c=_a(256, 64), Mixed_5d=_a(288, 64),
            Mixed_6a=_b(288),
            Mixed_6b=_c(768, 128), Mixed_6c=_c(768, 160), Mixed_6d=_c(768, 160), Mixed_6e=_c(768, 192),
            Mixed_7a=_d(768),
            Mixed_7b=_e(1280, _mean_pool), Mixed_7c=_e(2048, _max_pool),
            pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(),
        ))  # fmt: skip


class Inception:
    """Features [N, 2048] of pictures, prepared as MLPerf's text-to-image test does it."""

    name = "inception"
    width = 2048

    def __init__(self, weights: Path | None = None, *, device: torch.device | str = "cpu") -> None:
        """`weights` is the published file; None downloads it (95 MB) into torch's cache. Raises `WeightsError`."""
        path = weights or _fetch()
        tensors = read_weights(path)
        self.digest = digest_of_file(path)
        network = InceptionNetwork()
        try:
            wrong = network.load_state_dict(
                {name: value for name, value in tensors.items() if not name.startswith("fc.")}, strict=False
            )
        except RuntimeError as error:
            raise WeightsError(f"{path}: is not FID's Inception ({error})") from None
        missing = [name for name in wrong.missing_keys if not name.endswith("num_batches_tracked")]
        if missing or wrong.unexpected_keys:
            name = (missing or wrong.unexpected_keys)[0]
            raise WeightsError(f"{path}: is not FID's Inception ({'no' if missing else 'has'} {name})")
        self._device = torch.device(device)
        self._network = network.eval().requires_grad_(False).to(self._device)

    @torch.inference_mode()
    def see(self, pictures: Sequence[Pixels]) -> Tensor:
        """Features of uint8 [H, W, 3] pictures of any sizes, fp32 on the CPU."""
        prepared = torch.cat([_prepare(torch.tensor(picture)) for picture in pictures])
        features: Tensor = self._network(prepared.to(self._device))
        return features.cpu()


def digest_of_file(path: Path) -> str:
    """A file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a file by name. Raises `WeightsError`."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # torch.load documents no exception class
        raise WeightsError(f"{path}: is no file of weights ({error})") from None
    if not isinstance(tensors, dict):
        raise WeightsError(f"{path}: holds no weights by name")
    return tensors


def _prepare(picture: Tensor) -> Tensor:
    """uint8 [H, W, 3] to [1, 3, 299, 299] in -1..1."""
    scaled = picture.permute(2, 0, 1)[None].float() / 255
    return 2 * F.interpolate(scaled, (SIDE, SIDE), mode="bilinear", align_corners=False) - 1


def _fetch() -> Path:
    path = Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(URL, str(path), hash_prefix="6726825d")
        except (OSError, RuntimeError) as error:
            raise WeightsError(
                f"{WEIGHTS} could not be fetched ({error}); put it somewhere and name it with --inception"
            ) from None
    return path
