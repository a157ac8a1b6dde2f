"""CLIP vision encoders in transformers' format, and how a picture is fitted for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.digests import digest_of
from pipeline.checkpoints import folder as folders
from pipeline.checkpoints.folder import ModelError, Part
from pipeline.extensions.weight_files import is_file

if TYPE_CHECKING:
    from PIL.Image import Image

_PART = Part("encoder", ("CLIPVisionModelWithProjection",), "transformers.models.clip.modeling_clip")
_MEAN = (0.48145466, 0.4578275, 0.40821073)  # OpenAI's, where a folder does not say
_STD = (0.26862954, 0.26130258, 0.27577711)
_KIND = "clip_vision_model"
_LONGEST = 16  # times its shorter side: so much of a picture's longer side is resized


class EncoderWidths(NamedTuple):
    """Channels of what an encoder gives: of its projected embedding, and of its hidden states."""

    embedding: int
    hidden: int


def widths(folder: Path) -> EncoderWidths | None:
    """Read the widths of a folder's encoder; None without one. Raises `ModelError` for a config that cannot be read."""
    if not is_file(folder / "config.json"):
        return None
    config = folders.read_json(folder / "config.json")
    widths = config.get("projection_dim"), config.get("hidden_size")
    if config.get("model_type") != _KIND or not all(isinstance(width, int) for width in widths):
        return None
    return EncoderWidths(*widths)  # type: ignore[arg-type]


class VisionEncoder:
    """An encoder on one device. Pictures go through it one at a time, so that nothing depends on others."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises `ModelError`, naming the folder."""
        from pipeline.checkpoints.load import load_part

        files = folders.check_part(folder, folder.name, _PART)
        self.digest = digest_of(folder, [folder / "config.json", *files])
        self._network: Any = load_part(folder.parent, folder.name, _PART, dtype, None).eval().to(device)
        self._side = int(self._network.config.image_size)
        self._mean, self._std = normalization(folder)

    @property
    def size_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._network.parameters())

    def fit(self, pixels: bytes, size: tuple[int, int]) -> Tensor:
        """Compute what the encoder reads of a picture [height, width, 3] of this (width, height), as `fit`."""
        from PIL.Image import frombytes

        return fit(frombytes("RGB", size, pixels), self._side, self._mean, self._std)

    @torch.inference_mode()
    def embed(self, fitted: Tensor, *, fine: bool) -> Tensor:
        """The projected embedding [1, C]; `fine`: the hidden states behind the last layer but one, [1, patches, C]."""
        own = self._network.visual_projection.weight
        output = self._network(fitted.to(own.device, own.dtype), output_hidden_states=fine)
        embedding: Tensor = output.hidden_states[-2] if fine else output.image_embeds
        return embedding


def fit(image: Image, side: int, mean: Tensor, std: Tensor) -> Tensor:
    """Compute what a CLIP's encoder of this input `side` reads of a picture in RGB: [1, 3, side, side].

    As transformers' CLIPImageProcessor: the shorter side is fitted by Pillow's bicubic filter, and the middle cut out.
    `mean` and `std` [3, 1, 1] are those of `normalization`.
    """
    from PIL.Image import Resampling

    shorter = min(image.size)
    if max(image.size) > _LONGEST * shorter:  # of the rest nothing is read, and enlarged it might fill the memory
        image = _middle(image, _LONGEST * shorter)
    fitted = int(side * image.width / shorter), int(side * image.height / shorter)
    image = image.resize(fitted, Resampling.BICUBIC)
    left, top = (fitted[0] - side) // 2, (fitted[1] - side) // 2
    cut = np.asarray(image.crop((left, top, left + side, top + side)))
    return ((torch.from_numpy(cut.copy()).permute(2, 0, 1).float() / 255 - mean) / std)[None]


def _middle(image: Image, most: int) -> Image:
    """The middle of a picture, where it is wider or higher than so many pixels."""
    width, height = (min(side, most) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def normalization(folder: Path) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the encoder's pixels [3, 1, 1], as its processor's config has them.

    Raises `ModelError` for a config that has other values.
    """
    paths = (folder / name for name in ("preprocessor_config.json", "processor_config.json"))
    path = next((path for path in paths if path.is_file()), None)
    config = {} if path is None else folders.read_json(path)
    config = config.get("image_processor", config)
    values = config.get("image_mean", [*_MEAN]), config.get("image_std", [*_STD])
    for each in values:
        if not isinstance(each, list) or len(each) != 3 or not all(isinstance(one, int | float) for one in each):
            raise ModelError(f"{path}: image_mean and image_std must be 3 numbers")
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in values)
    return mean, std


def image_processor(folder: Path) -> Any:
    """Load transformers' image processor of this folder, on Pillow. Raises `ModelError`, naming its config."""
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    folders.read_json(folder / "preprocessor_config.json")
    try:
        return AutoImageProcessor.from_pretrained(str(folder), local_files_only=True, backend="pil")
    except Exception as error:  # whatever the library raises: it does not load
        reason = f"{type(error).__name__}: {folders.first_line(error)}"
        raise ModelError(f"{folder}/preprocessor_config.json: does not load ({reason})") from error
