"""Depth maps of pictures by a model in transformers' format, as ControlNets of depth were trained on: near is white."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from core.failures import NotFinite
from core.threads import lower_priority
from pipeline.checkpoints import folder as folders
from pipeline.checkpoints.folder import ModelError, Part
from pipeline.extensions.vision import image_processor

_PART = Part(
    "encoder",
    ("AutoModelForDepthEstimation",),
    "transformers.models.auto.modeling_auto",
    unread=("neck.fusion_stage.layers.0.residual_layer1.",),  # the published DPT models have none
)
_PREDICTS_DISTANCE: Mapping[str, bool] = {"dpt": False, "depth_anything": False, "glpn": True, "zoedepth": True}
_NEAREST = 1e-3  # of a distance: its reciprocal is finite


class DepthEstimator:
    """A depth model on the CPU, in fp32. Thread-safe; one picture is read at a time, at a low priority."""

    def __init__(self, folder: Path) -> None:
        """Load the model of a folder. Raises `ModelError`, naming it."""
        from pipeline.checkpoints.load import load_part

        try:
            where = folder.expanduser().absolute()
            if not where.is_dir():
                raise ModelError(f"{folder}: no such folder")
            config = folders.read_json(where / "config.json")
            self._name = where.name
            self._distances = _of_distances(where, config)
            folders.check_part(where, where.name, _PART)
            self._network: Any = load_part(where.parent, where.name, _PART, torch.float32, None).eval()
            self._processor = image_processor(where)
        except ModelError as error:
            raise ModelError(f"depth model: {error}") from error
        self._lock = threading.Lock()

    def __call__(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The depth map of a picture [H, W, 3], RGB: [H, W, 3], three equal channels from 0, the farthest, to 255.
        Raises `NotFinite`.

        As transformers' depth-estimation pipeline and diffusers' examples of depth ControlNets make it: the model's
        inverse depth (MiDaS; Ranftl et al., 2020), resized by the bicubic filter and stretched. Of models that predict
        distances it is their reciprocal.
        """
        # In a thread that ends: OpenMP keeps a team of threads for every thread that ever computed.
        with self._lock, ThreadPoolExecutor(1, "depth", lower_priority, ("estimating depth",)) as thread:
            return thread.submit(self._map, pixels).result()

    @torch.inference_mode()
    def _map(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        from PIL.Image import fromarray

        given, size = self._processor(images=fromarray(pixels), return_tensors="pt"), pixels.shape[:2]
        (output,) = self._processor.post_process_depth_estimation(self._network(**given), [size])
        depth: NDArray[np.float32] = output["predicted_depth"].float().numpy()
        if not np.isfinite(depth).all():
            raise NotFinite(f"the fp32 depth model {self._name}")
        if self._distances:
            depth = np.reciprocal(np.maximum(depth, np.float32(_NEAREST)))
        depth = depth - depth.min()
        levels = (depth / (depth.max() or 1.0) * 255).astype(np.uint8)
        return np.repeat(levels[..., None], 3, axis=2)


def _of_distances(where: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the model predicts distances, not inverse ones. Raises `ModelError` for one that is not known."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _PREDICTS_DISTANCE:
        known = ", ".join(_PREDICTS_DISTANCE)
        raise ModelError(f"{where}/config.json: model_type is {kind!r}, and must be one of {known}")
    backbone = config.get("backbone_config")
    if kind == "dpt" and isinstance(backbone, dict) and backbone.get("model_type") == "dinov2":
        return True  # DINOv2's, trained on NYU and KITTI
    return _PREDICTS_DISTANCE[kind] or config.get("depth_estimation_type") == "metric"
