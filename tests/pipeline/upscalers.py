"""ESRGAN's network restated plainly on a file's tensors, and files of it with random weights in each key layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from pipeline.extensions.esrgan import RRDBNet, Shape

TINY = Shape(filters=8, growth=4, blocks=2)

State = dict[str, Tensor]


def weights(shape: Shape = TINY, seed: int = 0) -> State:
    """Random weights under the newest layout's names, large enough for their picture not to be flat."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = RRDBNet(shape).state_dict()
    return {name: tensor * 2 if name.startswith("conv_") else tensor for name, tensor in state.items()}


def _older(state: State, shape: Shape) -> State:
    def name(key: str) -> str:
        key = re.sub(r"body\.(\d+)\.rdb(\d)\.conv(\d)", r"RRDB_trunk.\1.RDB\2.conv\3", key)
        return key.replace("conv_body", "trunk_conv").replace("conv_up", "upconv").replace("conv_hr", "HRconv")

    return {name(key): tensor for key, tensor in state.items()}


def _oldest(state: State, shape: Shape) -> State:
    ups = shape.doublings

    def name(key: str) -> str:
        key = re.sub(r"body\.(\d+)\.rdb(\d)\.conv(\d)", r"model.1.sub.\1.RDB\2.conv\3.0", key)
        key = key.replace("conv_first", "model.0").replace("conv_body", f"model.1.sub.{shape.blocks}")
        key = re.sub(r"conv_up(\d)", lambda match: f"model.{3 * int(match[1])}", key)
        return key.replace("conv_hr", f"model.{3 * ups + 2}").replace("conv_last", f"model.{3 * ups + 4}")

    return {name(key): tensor for key, tensor in state.items()}


LAYOUTS: dict[str, Callable[[State, Shape], State]] = {
    "newer": lambda state, _: state, "older": _older, "oldest": _oldest,
    "wrapped": lambda state, _: {f"params_ema.{key}": tensor for key, tensor in state.items()},
}  # fmt: skip


def write(folder: Path, name: str, shape: Shape = TINY, layout: str = "newer", seed: int = 0) -> Path:
    """NAME.safetensors in this folder."""
    path = folder / f"{name}.safetensors"
    state = LAYOUTS[layout](weights(shape, seed), shape)
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, path)
    return path


def enlarged(state: State, shape: Shape, x: Tensor) -> Tensor:
    """The network as the papers draw it: [1, 3, h, w] to [1, 3, factor · h, factor · w]."""

    def conv(name: str, h: Tensor) -> Tensor:
        return F.conv2d(h, state[f"{name}.weight"], state[f"{name}.bias"], padding=1)

    def dense(name: str, h: Tensor) -> Tensor:
        x1 = F.leaky_relu(conv(f"{name}.conv1", h), 0.2)
        x2 = F.leaky_relu(conv(f"{name}.conv2", torch.cat((h, x1), 1)), 0.2)
        x3 = F.leaky_relu(conv(f"{name}.conv3", torch.cat((h, x1, x2), 1)), 0.2)
        x4 = F.leaky_relu(conv(f"{name}.conv4", torch.cat((h, x1, x2, x3), 1)), 0.2)
        return h + 0.2 * conv(f"{name}.conv5", torch.cat((h, x1, x2, x3, x4), 1))

    if shape.unshuffle > 1:
        x = F.pixel_unshuffle(x, shape.unshuffle)
    first = h = conv("conv_first", x)
    for block in range(shape.blocks):
        h = h + 0.2 * dense(f"body.{block}.rdb3", dense(f"body.{block}.rdb2", dense(f"body.{block}.rdb1", h)))
    h = first + conv("conv_body", h)
    for number in range(shape.doublings):
        doubled = h.repeat_interleave(2, 2).repeat_interleave(2, 3)
        h = F.leaky_relu(conv(f"conv_up{number + 1}", doubled), 0.2)
    return conv("conv_last", F.leaky_relu(conv("conv_hr", h), 0.2))
