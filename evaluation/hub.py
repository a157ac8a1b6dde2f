"""Loads feature networks: from folders in transformers' format, plain or as the hub's cache lays them out, and from
files of weights; and scales the pictures that they read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evaluation.inception import WeightsError, read_weights
from evaluation.inception import digest_of_file as digest_of_file
from evaluation.pixels import Pixels


def snapshot(folder: Path) -> Path:
    """The folder that holds `config.json`: this one, or of a hub cache's `models--ORGANISATION--NAME` the snapshot that
    `refs/main` names.
    """
    if (folder / "config.json").is_file():
        return folder
    main = folder / "refs" / "main"
    return folder / "snapshots" / main.read_text("utf-8").strip() if main.is_file() else folder


def name_of(folder: Path) -> str:
    """The name of a folder's model."""
    return folder.resolve().name.rpartition("--")[2]


def load(kind: Any, folder: Path, name: str) -> Any:
    """A network of this class of transformers, in fp32, without gradients. Raises `WeightsError`.

    Weights that are missing in the file would be drawn at random, and are refused.
    """
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # it would overwrite our own
    logging.set_verbosity_error()  # what is missing or superfluous is told below
    try:
        model, loading = kind.from_pretrained(
            snapshot(folder), dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise WeightsError(f"{folder}: is not a {name} ({str(error).splitlines()[0]})") from None
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    if loading["missing_keys"]:
        raise WeightsError(f"{folder}: is not a {name} (no {sorted(loading['missing_keys'])[0]})")
    return model.eval().requires_grad_(False)


def digest_of(model: Any) -> str:
    """A digest of a network's weights."""
    hasher = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        hasher.update(name.encode() + value.contiguous().cpu().numpy().tobytes())
    return hasher.hexdigest()


def file_of(folder: Path, *names: str) -> Path:
    """The first of these files that a folder has. Raises `WeightsError`."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise WeightsError(f"{folder}: has no {' or '.join(names)}")


def read_file(path: Path) -> dict[str, Tensor]:
    """The weights of a file by name: `.safetensors`, or else a pickle of nothing but weights. Raises `WeightsError`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        return read_weights(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: is no file of weights ({error})") from None


def fill(network: nn.Module, weights: Mapping[str, Tensor], path: Path, title: str) -> None:
    """Replace a network's weights by those of a file, in its types. Raises `WeightsError` if they are not the same."""
    expected = network.state_dict()
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected:
            raise WeightsError(f"{path}: is not {title} ({'has' if name in weights else 'no'} {name})")
        if weights[name].shape != expected[name].shape:
            shapes = (list(weights[name].shape), list(expected[name].shape))
            raise WeightsError(f"{path}: is not {title} ({name} is {shapes[0]}, not {shapes[1]})")
    network.load_state_dict(dict(weights), assign=True)


def normalized(pictures: Sequence[Pixels], mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """fp32 [N, 3, H, W] of uint8 [H, W, 3] pictures of one size: less `mean` and over `std`, each of three channels."""
    scaled = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
    return (scaled - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
