"""FID-Inception: the Inception v3 whose third pooling layer gives the features of FID's published figures.

Loads pt_inception-2015-12-05-6726825d.pth (github.com/mseitzer/pytorch-fid), a port of TensorFlow's 2015 graph. It is
not torchvision's Inception: average pools leave their padding out of the count, and the last block pools by maximum
(Szegedy et al., 2016, as in that graph).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

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


def _halve(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2)


class _A(nn.Module):
    def __init__(self, inside: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = _Conv(inside, 64, 1)
        self.branch5x5_1 = _Conv(inside, 48, 1)
        self.branch5x5_2 = _Conv(48, 64, 5)
        self.branch3x3dbl_1 = _Conv(inside, 64, 1)
        self.branch3x3dbl_2 = _Conv(64, 96, 3)
        self.branch3x3dbl_3 = _Conv(96, 96, 3)
        self.branch_pool = _Conv(inside, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat(
            [self.branch1x1(x), self.branch5x5_2(self.branch5x5_1(x)), double, self.branch_pool(_mean_pool(x))], 1
        )


class _B(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.branch3x3 = _Conv(inside, 384, 3, 2, padded=False)
        self.branch3x3dbl_1 = _Conv(inside, 64, 1)
        self.branch3x3dbl_2 = _Conv(64, 96, 3)
        self.branch3x3dbl_3 = _Conv(96, 96, 3, 2, padded=False)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, _halve(x)], 1)


class _C(nn.Module):
    def __init__(self, inside: int, middle: int) -> None:
        super().__init__()
        self.branch1x1 = _Conv(inside, 192, 1)
        self.branch7x7_1 = _Conv(inside, middle, 1)
        self.branch7x7_2 = _Conv(middle, middle, (1, 7))
        self.branch7x7_3 = _Conv(middle, 192, (7, 1))
        self.branch7x7dbl_1 = _Conv(inside, middle, 1)
        self.branch7x7dbl_2 = _Conv(middle, middle, (7, 1))
        self.branch7x7dbl_3 = _Conv(middle, middle, (1, 7))
        self.branch7x7dbl_4 = _Conv(middle, middle, (7, 1))
        self.branch7x7dbl_5 = _Conv(middle, 192, (1, 7))
        self.branch_pool = _Conv(inside, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), single, double, self.branch_pool(_mean_pool(x))], 1)


class _D(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.branch3x3_1 = _Conv(inside, 192, 1)
        self.branch3x3_2 = _Conv(192, 320, 3, 2, padded=False)
        self.branch7x7x3_1 = _Conv(inside, 192, 1)
        self.branch7x7x3_2 = _Conv(192, 192, (1, 7))
        self.branch7x7x3_3 = _Conv(192, 192, (7, 1))
        self.branch7x7x3_4 = _Conv(192, 192, 3, 2, padded=False)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([self.branch3x3_2(self.branch3x3_1(x)), seven, _halve(x)], 1)


class _E(nn.Module):
    def __init__(self, inside: int, *, by_maximum: bool) -> None:
        super().__init__()
        self._by_maximum = by_maximum
        self.branch1x1 = _Conv(inside, 320, 1)
        self.branch3x3_1 = _Conv(inside, 384, 1)
        self.branch3x3_2a = _Conv(384, 384, (1, 3))
        self.branch3x3_2b = _Conv(384, 384, (3, 1))
        self.branch3x3dbl_1 = _Conv(inside, 448, 1)
        self.branch3x3dbl_2 = _Conv(448, 384, 3)
        self.branch3x3dbl_3a = _Conv(384, 384, (1, 3))
        self.branch3x3dbl_3b = _Conv(384, 384, (3, 1))
        self.branch_pool = _Conv(inside, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, 1, 1) if self._by_maximum else _mean_pool(x)
        return torch.cat(
            [
                self.branch1x1(x),
                self.branch3x3_2a(single), self.branch3x3_2b(single),
                self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double),
                self.branch_pool(pooled),
            ], 1,
        )  # fmt: skip


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
            Mixed_5b=_A(192, 32), Mixed_5c=_A(256, 64), Mixed_5d=_A(288, 64),
            Mixed_6a=_B(288),
            Mixed_6b=_C(768, 128), Mixed_6c=_C(768, 160), Mixed_6d=_C(768, 160), Mixed_6e=_C(768, 192),
            Mixed_7a=_D(768),
            Mixed_7b=_E(1280, by_maximum=False), Mixed_7c=_E(2048, by_maximum=True),
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
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
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
