"""Depth models of random weights in transformers' format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_NECK = {"neck_hidden_sizes": [8, 12, 16, 24], "fusion_hidden_size": 16}
KINDS = ("dpt", "depth_anything", "metric", "glpn")


def save(folder: Path, kind: str = "depth_anything", seed: int = 0) -> Path:
    """A model of this kind in `folder`, as the published ones lie there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network, processor = _glpn() if kind == "glpn" else _dpt() if kind == "dpt" else _depth_anything(kind)
        most = 0.1 if kind in ("metric", "glpn") else 0.4
        for name, parameter in network.named_parameters():
            if name.startswith(("head", "decoder")):
                torch.nn.init.uniform_(parameter, -most / 4, most)  # positive behind the last activation
            elif parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=2 / parameter[0].numel() ** 0.5)  # a picture changes the map
    network.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _dpt() -> tuple[Any, dict[str, Any]]:
    from transformers.models.dpt import DPTConfig, DPTForDepthEstimation

    config = DPTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8,
        backbone_out_indices=[0, 1, 2, 3], **_NECK,
    )  # fmt: skip
    return DPTForDepthEstimation(config), {"image_processor_type": "DPTImageProcessor", "size": 32}


def _depth_anything(kind: str) -> tuple[Any, dict[str, Any]]:
    from transformers.models.depth_anything import DepthAnythingConfig, DepthAnythingForDepthEstimation

    backbone = {
        "model_type": "dinov2", "image_size": 42, "patch_size": 14, "hidden_size": 32, "num_attention_heads": 2,
        "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False,
    }  # fmt: skip
    config = DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=32, head_hidden_size=8,
        depth_estimation_type="metric" if kind == "metric" else "relative", max_depth=20, **_NECK,
    )  # fmt: skip
    processor = {"image_processor_type": "DPTImageProcessor", "size": {"height": 42, "width": 42}}
    return DepthAnythingForDepthEstimation(config), {**processor, "keep_aspect_ratio": True, "ensure_multiple_of": 14}


def _glpn() -> tuple[Any, dict[str, Any]]:
    from transformers.models.glpn import GLPNConfig, GLPNForDepthEstimation

    config = GLPNConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16
    )
    return GLPNForDepthEstimation(config), {"image_processor_type": "GLPNImageProcessor", "size_divisor": 32}
