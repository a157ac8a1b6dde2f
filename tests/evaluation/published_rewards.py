"""Scores stand-ins of reward models by their published implementations, and keeps the figures for the tests.

Runs in an environment of its own, which has the packages that a function below names, without all that they ask for:
`python -m tests.evaluation.published_rewards imagereward`, then `hpsv3`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image
from safetensors.torch import load_file

from tests.evaluation import reward_stand_ins

KEPT = Path(__file__).with_name("published_rewards.json")
TRAINING = (  # what hpsv3 imports to train
    "datasets", "deepspeed", "fire", "matplotlib", "matplotlib.patches", "matplotlib.pyplot", "pandas", "peft", "trl",
    "torch.utils.tensorboard",
)  # fmt: skip
Figures = dict[str, list[float]]


def imagereward(folder: Path) -> Figures:
    """By image-reward 1.5, timm 0.6.13, fairscale 0.4.13, transformers 4.45.2 and torchvision."""
    for name in ("ImageReward", "ImageReward.models"):  # they import training, and other figures
        _bare(name)
    reward: Any = importlib.import_module("ImageReward.ImageReward")
    blip: Any = importlib.import_module("ImageReward.models.BLIP.blip")
    reward_stand_ins.image_reward(folder)
    vit = blip.VisionTransformer(img_size=224, patch_size=16, embed_dim=128, depth=2, num_heads=2, mlp_ratio=0.75)
    tokenizer = blip.BertTokenizer.from_pretrained(str(folder))
    with (
        mock.patch("ImageReward.models.BLIP.blip_pretrain.create_vit", return_value=(vit, 128)),
        mock.patch.object(blip.BertTokenizer, "from_pretrained", return_value=tokenizer),
    ):
        model = reward.ImageReward(med_config=str(folder / "med_config.json")).eval()
    told = model.load_state_dict(torch.load(folder / "ImageReward.pt"), strict=False)
    assert not told.missing_keys and not told.unexpected_keys, told
    return {"imagereward": [model.score(caption, picture) for picture, caption in _pairs()]}


def hpsv3(folder: Path) -> Figures:
    """By hpsv3 1.0.0, transformers 4.45.2, torchvision and omegaconf."""
    for name in TRAINING:
        parts = {"RewardTrainer": object, "get_quantization_config": lambda _: None}
        sys.modules[name] = mock.MagicMock(__spec__=ModuleSpec(name, None), **parts)
    _bare("hpsv3")
    inference: Any = importlib.import_module("hpsv3.inference")
    library: Any = importlib.import_module("transformers")
    reward_stand_ins.hpsv3(folder)
    library.Qwen2VLForConditionalGeneration(library.Qwen2VLConfig.from_pretrained(folder)).save_pretrained(folder)
    library.Qwen2VLImageProcessor().save_pretrained(folder)
    said = (Path(inference._MODEL_CONFIG_PATH) / "HPSv3_7B.yaml").read_text("utf-8")
    for published, here in (
        ("Qwen/Qwen2-VL-7B-Instruct", str(folder)),
        ("bf16: True", "bf16: False\nuse_cpu: True"),  # set below
        ('torch_dtype: "bfloat16"', 'torch_dtype: "float32"'),
        ("report_to: tensorboard", "report_to: none"),
    ):
        assert published in said
        said = said.replace(published, here)
    (folder / "config.yaml").write_text(said, "utf-8")
    whole = inference.HPSv3RewardInferencer(str(folder / "config.yaml"), str(folder / "HPSv3.safetensors"), "cpu")
    found = {"hpsv3": _rewards(whole)}
    rotary = (whole.model.visual.rotary_pos_emb, whole.model.model.rotary_emb)
    for module in rotary:
        module.to(torch.bfloat16)
    found["hpsv3, frequencies in bf16"] = _rewards(whole)
    head = whole.model.rm_head
    whole.model.to(torch.bfloat16)  # as the configuration asks for
    head.float()
    whole.model.load_state_dict(load_file(folder / "HPSv3.safetensors"))
    head.register_forward_pre_hook(lambda _, given: (given[0].float(),))  # as autocast does on a GPU
    return found | {"hpsv3, bf16": _rewards(whole)}


def _rewards(inferencer: Any) -> list[float]:
    with torch.inference_mode():
        return [float(inferencer.reward([picture], [caption])[0, 0]) for picture, caption in _pairs()]


def _pairs() -> list[tuple[Image.Image, str]]:
    pictures = [Image.fromarray(picture) for picture in reward_stand_ins.pictures()]
    return list(zip(pictures, reward_stand_ins.CAPTIONS, strict=True))


def _bare(name: str) -> None:
    """Makes a package importable without what its `__init__` imports."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.submodule_search_locations is not None
    sys.modules[name] = importlib.util.module_from_spec(found)


def main() -> None:
    by_name: dict[str, Callable[[Path], Figures]] = {"imagereward": imagereward, "hpsv3": hpsv3}
    kept = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        kept |= by_name[sys.argv[1]](Path(folder))
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
