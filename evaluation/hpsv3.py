"""Scores an image with its caption by HPSv3 (Ma et al., 2025): Qwen2-VL, asked to rate, and an MLP on one token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from evaluation.features import Unscorable
from evaluation.hub import digest_of_file, file_of, fill, read_file, snapshot
from evaluation.inception import WeightsError
from evaluation.pixels import Pixels

# As in hpsv3 1.0.0 of github.com/MizzenAI/HPSv3, which asks for transformers 4.45.2. The prompt is in Qwen2-VL's chat
# template, and ends where the reward is read: attention is causal.
_PROMPT = Path(__file__).with_name("hpsv3_prompt.txt")
_REWARD, _IMAGE, _VIDEO = "<|Reward|>", "<|image_pad|>", "<|video_pad|>"
_AREA = 256 * 28 * 28  # of a picture, about
_PREFIXES = {"visual.": "qwen.visual.", "model.": "qwen.language_model."}


class HpsV3:
    """Ratings of images: the first of HPSv3's two outputs, the mean of what people would say."""

    name = "hpsv3"

    def __init__(
        self, source: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """`source` holds `HPSv3.safetensors`, and Qwen2-VL-7B-Instruct's `config.json` and tokenizer.

        Qwen2-VL computes in `dtype`, the head in fp32. Raises `WeightsError`.
        """
        from transformers import AutoConfig, AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        folder = snapshot(source)
        path, config = file_of(folder, "HPSv3.safetensors"), file_of(folder, "config.json")
        try:
            sizes: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers documents no exception class
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise WeightsError(f"{folder}: has no config and tokenizer of Qwen2-VL ({reason})") from None
        image = self._tokenizer.convert_tokens_to_ids(_IMAGE)
        if sizes.model_type != "qwen2_vl" or sizes.image_token_id != image:
            raise WeightsError(f"{config}: is not Qwen2-VL's, or the tokenizer beside it is not ({_IMAGE} is {image})")
        self._tokenizer.add_tokens([_REWARD], special_tokens=True)
        sizes.text_config.vocab_size = len(self._tokenizer)
        self._network = _network(sizes, read_file(path), path, dtype).eval().requires_grad_(False)
        self._longest = int(sizes.text_config.max_position_embeddings)
        self._processor: Any = Qwen2VLImageProcessorPil(size={"shortest_edge": _AREA, "longest_edge": _AREA})
        self._prompt = _PROMPT.read_text("utf-8").rstrip("\n")
        self._device = torch.device(device)
        self.digest = digest_of_file(path)

    @torch.inference_mode()
    def score(self, picture: Pixels, caption: str) -> float:
        """The rating of a uint8 [H, W, 3] picture, resized by bicubic to about 448×448, its sides multiples of 28."""
        for token in (_REWARD, _IMAGE, _VIDEO):
            if token in caption:
                raise Unscorable(f"its caption has {token}")
        try:
            seen = self._processor(Image.fromarray(np.asarray(picture)), return_tensors="pt")
        except ValueError as error:
            raise Unscorable(str(error)) from None
        places = int(seen["image_grid_thw"].prod()) // 4  # 2×2 patches each
        prompt = self._prompt.format(image=_IMAGE * places, caption=caption)
        ids = self._tokenizer(prompt, return_tensors="pt").input_ids
        if ids.shape[1] > self._longest:
            raise Unscorable(f"its caption makes {ids.shape[1]} tokens, {self._longest} are the most")
        network: Any = self._network.to(self._device)  # only now: what draws the pictures may need the memory before
        states = network["qwen"](
            input_ids=ids.to(self._device),
            pixel_values=seen["pixel_values"].to(self._device),
            image_grid_thw=seen["image_grid_thw"].to(self._device),
            # Not rows and columns: 4.45.2's decoder counts tokens where it is given no positions, as here.
            position_ids=torch.arange(ids.shape[1], device=self._device).expand(3, 1, -1),
            use_cache=False,
        ).last_hidden_state
        return float(network["rm_head"](states[0, -1].float())[0])


class _VisionRotary(nn.Module):
    """The angles of a vision tower, computed in the type of its weights, as 4.45.2 does; later ones do so in fp32."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[2, N] rows and columns to cosines and sines [N, D]."""
        frequencies = self._inner.inv_freq
        angles = position_ids[..., None].to(frequencies.dtype) * frequencies
        return self._inner.recomposition_frequencies(angles.cos()), self._inner.recomposition_frequencies(angles.sin())


def _network(sizes: Any, tensors: Mapping[str, Tensor], path: Path, dtype: torch.dtype) -> nn.ModuleDict:
    """Qwen2-VL without its language head, and the reward's; frequencies are rounded to `dtype`, as published."""
    from transformers.models.qwen2_vl import modeling_qwen2_vl as library

    width = int(sizes.text_config.hidden_size)
    layers = (nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2))
    with torch.device("meta"):
        network = nn.ModuleDict({"qwen": library.Qwen2VLModel(sizes), "rm_head": nn.Sequential(*layers)})
    renamed = {}
    for name, value in tensors.items():
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        if not name.startswith("lm_head."):
            renamed[_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = value
    fill(network, renamed, path, "HPSv3")
    qwen: Any = network["qwen"]
    qwen.language_model.rotary_emb = library.Qwen2VLRotaryEmbedding(sizes.text_config)
    qwen.visual.rotary_pos_emb = _VisionRotary(library.Qwen2VLVisionRotaryEmbedding(sizes.vision_config))
    qwen.to(dtype)
    network["rm_head"].float()
    return network
