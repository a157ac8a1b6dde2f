"""ESRGAN's network, and its weights from safetensors files in the three key layouts that are in use.

RRDBNet of Wang et al. (2018), with the pixel unshuffle of Real-ESRGAN (Wang et al., 2021) where the file has it.
Written here because spandrel, which reads these files too, needs torchvision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract.upscale import MAX_SCALE
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions.weight_files import tensors

_COLOURS = 3
_MOST_CHANNELS = 256  # of a network's filters and growth; published ones have 64 and 32
_MOST_BLOCKS = 64  # published ones have up to 40
_SLOPE = 0.2  # of the leaky ReLU; also what a residual is multiplied by
_CONVS, _BLOCKS = 5, 3  # convolutions of a dense block, dense blocks of an RRDB
_WRAPPERS = ("params_ema.", "params.", "module.")  # before every key, as training frameworks save them
_ENDS = {"trunk_conv": "conv_body", "HRconv": "conv_hr"}
_BODY = (
    re.compile(r"body\.(\d+)\.rdb(\d)\.conv(\d)\.(weight|bias)"),  # BasicSR, Real-ESRGAN
    re.compile(r"RRDB_trunk\.(\d+)\.RDB(\d)\.conv(\d)\.(weight|bias)"),  # ESRGAN, BSRGAN
    re.compile(r"model\.1\.sub\.(\d+)\.RDB(\d)\.conv(\d)\.0\.(weight|bias)"),  # ESRGAN's first layout
)
_CONV = re.compile(r"(conv_first|conv_body|trunk_conv|conv_hr|HRconv|conv_last|conv_up\d|upconv\d)\.(weight|bias)")
_TRUNK = re.compile(r"model\.1\.sub\.(\d+)\.(weight|bias)")
_NUMBERED = re.compile(r"model\.(\d+)\.(weight|bias)")


class _DenseBlock(nn.Module):
    """Five convolutions, each of which reads all before it."""

    def __init__(self, filters: int, growth: int) -> None:
        super().__init__()
        for number in range(_CONVS):
            out = growth if number < _CONVS - 1 else filters
            self.add_module(f"conv{number + 1}", nn.Conv2d(filters + number * growth, out, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        *convs, last = self.children()
        seen = [x]
        for conv in convs:
            seen.append(F.leaky_relu(conv(torch.cat(seen, dim=1)), _SLOPE))
        residual: Tensor = last(torch.cat(seen, dim=1))
        return residual * _SLOPE + x


class _ResidualBlock(nn.Module):
    """RRDB: residual in residual, of dense blocks."""

    def __init__(self, filters: int, growth: int) -> None:
        super().__init__()
        for number in range(_BLOCKS):
            self.add_module(f"rdb{number + 1}", _DenseBlock(filters, growth))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.children():
            h = block(h)
        return h * _SLOPE + x


class Shape(NamedTuple):
    """The dimensions of a network. `doublings` are its upsamplings, `unshuffle` the side of the squares of pixels that
    it reads as channels.
    """

    filters: int = 64
    growth: int = 32
    blocks: int = 23
    doublings: int = 2
    unshuffle: int = 1

    @property
    def factor(self) -> int:
        """The number of times that its result is wider and higher."""
        return int(2**self.doublings // self.unshuffle)

    def forward_bytes(self, side: int, item_bytes: int) -> int:
        """The most that a forward holds at once of a square of this side, in items of so many bytes.

        That is a dense block, which keeps the outputs of its convolutions beside their concatenation, or the last
        convolutions: their input, its output, and its activation.
        """
        inner = -(-side // self.unshuffle)
        dense = 2 * (self.filters + (_CONVS - 1) * self.growth) + 4 * self.filters
        last = 3 * self.filters * int(4**self.doublings)
        return item_bytes * inner**2 * (2 * _COLOURS * self.unshuffle**2 + max(dense, last))


class RRDBNet(nn.Module):
    """Enlarges pictures [B, 3, h, w] in [0, 1] to [B, 3, factor · h, factor · w]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        filters = shape.filters
        self.conv_first = nn.Conv2d(_COLOURS * shape.unshuffle**2, filters, 3, padding=1)
        self.body = nn.Sequential(*(_ResidualBlock(filters, shape.growth) for _ in range(shape.blocks)))
        self.conv_body = nn.Conv2d(filters, filters, 3, padding=1)
        self.ups = [f"conv_up{number + 1}" for number in range(shape.doublings)]
        for name in self.ups:
            self.add_module(name, nn.Conv2d(filters, filters, 3, padding=1))
        self.conv_hr = nn.Conv2d(filters, filters, 3, padding=1)
        self.conv_last = nn.Conv2d(filters, _COLOURS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        height, width = (side * self.shape.factor for side in x.shape[-2:])
        side = self.shape.unshuffle
        if side > 1:
            x = F.pad(x, (0, -x.shape[-1] % side, 0, -x.shape[-2] % side), "replicate")
            x = F.pixel_unshuffle(x, side)
        h = self.conv_first(x)
        h = h + self.conv_body(self.body(h))
        for name in self.ups:
            h = F.leaky_relu(self.get_submodule(name)(F.interpolate(h, scale_factor=2, mode="nearest")), _SLOPE)
        output: Tensor = self.conv_last(F.leaky_relu(self.conv_hr(h), _SLOPE))
        return output[..., :height, :width]


def read(name: str, data: bytes) -> RRDBNet:
    """The network of a safetensors file, in fp32 and evaluation mode.

    Raises `ModelError`, naming the upscaler and the key, for a file that is a pickle, damaged, or of another network.
    """
    try:
        return _network(_renamed(tensors(data)))
    except ValueError as error:
        raise ModelError(f"{name}: {error}", kind="upscaler") from error


def _renamed(state: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """The tensors by the names of `RRDBNet`, each with its key in the file. Raises ValueError for an unknown key."""
    wrapper = next((each for each in _WRAPPERS if any(key.startswith(each) for key in state)), "")
    own = {key.removeprefix(wrapper): (key, tensor) for key, tensor in state.items() if key.startswith(wrapper)}
    numbers = sorted({int(match[1]) for key in own if (match := _NUMBERED.fullmatch(key))})
    layers: dict[str, tuple[str, Tensor]] = {}
    for key, (given, tensor) in own.items():
        target = _name(key, numbers)
        if target is None:
            raise ValueError(f"{given[:200]} is no part of an ESRGAN network (RRDBNet); it is of another architecture")
        if target in layers:
            raise ValueError(f"{given[:200]} and {layers[target][0][:200]} are the same layer")
        layers[target] = given, tensor
    return layers


def _name(key: str, numbers: list[int]) -> str | None:
    """A key's name in `RRDBNet`; None: it has none. `numbers` are those of the outer layers of the first layout.

    There an upsampling, its convolution and its activation count three, and the last two convolutions have an
    activation between them: 0, 3 and 6 of two upsamplings, 8 and 10.
    """
    for body in _BODY:
        if match := body.fullmatch(key):
            block, dense, conv, kind = match.groups()
            return f"body.{block}.rdb{dense}.conv{conv}.{kind}"
    if match := _CONV.fullmatch(key):
        return f"{_ENDS.get(match[1], match[1].replace('upconv', 'conv_up'))}.{match[2]}"
    if match := _TRUNK.fullmatch(key):
        return f"conv_body.{match[2]}"
    if match := _NUMBERED.fullmatch(key):
        number, ups = int(match[1]), (len(numbers) - 3)
        names = {0: "conv_first", 3 * ups + 2: "conv_hr", 3 * ups + 4: "conv_last"}
        names |= {3 * up: f"conv_up{up}" for up in range(1, ups + 1)}
        return f"{names[number]}.{match[2]}" if number in names else None
    return None


def _network(layers: Mapping[str, tuple[str, Tensor]]) -> RRDBNet:
    """The network of these weights. Raises ValueError, naming a key, for ones that do not fit together."""
    with torch.device("meta"):
        network = RRDBNet(_shape(layers))
    expected = network.state_dict()
    for name, tensor in expected.items():
        if name not in layers:
            raise ValueError(f"{name} is missing")
        key, given = layers[name]
        if given.shape != tensor.shape or not given.is_floating_point():
            raise ValueError(f"{key} is {given.dtype} {[*given.shape]}, and must be {[*tensor.shape]} in floats")
        if not bool(torch.isfinite(given).all()):
            raise ValueError(f"{key} holds what is no finite number")
    for name, (key, _) in layers.items():
        if name not in expected:
            raise ValueError(f"{key[:200]} is more than the network has")
    network.load_state_dict({name: given.float() for name, (_, given) in layers.items()}, assign=True)
    return network.eval().requires_grad_(False)


def _shape(layers: Mapping[str, tuple[str, Tensor]]) -> Shape:
    """The dimensions by the weights' own. Raises ValueError, naming a key."""
    first, growing = (_weight(layers, name) for name in ("conv_first", "body.0.rdb1.conv1"))
    filters, channels = first.shape[:2]
    unshuffle = {_COLOURS * side**2: side for side in (1, 2, 4)}.get(channels)
    if unshuffle is None:
        raise ValueError(f"{layers['conv_first.weight'][0]} reads {channels} channels, and not RGB")
    blocks = {int(name.split(".")[1]) for name in layers if name.startswith("body.")}
    doublings = sum(re.fullmatch(r"conv_up\d\.weight", name) is not None for name in layers)
    shape = Shape(filters, growing.shape[0], len(blocks), doublings, unshuffle)
    if max(filters, shape.growth) > _MOST_CHANNELS or shape.blocks > _MOST_BLOCKS:
        given = f"{filters} filters, {shape.growth} more in each layer and {shape.blocks} blocks"
        raise ValueError(f"it has {given}; at most {_MOST_CHANNELS}, {_MOST_CHANNELS} and {_MOST_BLOCKS} are supported")
    if not 1 <= 2**doublings / unshuffle <= MAX_SCALE:
        raise ValueError(f"{layers['conv_first.weight'][0]}: it enlarges {2**doublings / unshuffle:g} times")
    return shape


def _weight(layers: Mapping[str, tuple[str, Tensor]], name: str) -> Tensor:
    """The weight of this convolution, of four dimensions."""
    if f"{name}.weight" not in layers:
        raise ValueError(f"{name}.weight is missing: it is no ESRGAN network (RRDBNet)")
    key, weight = layers[f"{name}.weight"]
    if weight.dim() != 4:
        raise ValueError(f"{key} is {[*weight.shape]}, and no convolution")
    return weight
