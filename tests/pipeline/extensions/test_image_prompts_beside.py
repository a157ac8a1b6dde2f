"""Image prompts beside what else requests have: LoRAs, controls, source images; and in INT8."""

from __future__ import annotations

import copy
import ctypes
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contract.image import Edit, ImageParameters
from contract.plan import AUTO
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.quantization import quantized
from tests.pipeline import loras
from tests.pipeline.controls import control, controlnet
from tests.pipeline.controls import save as save_control
from tests.pipeline.extensions.checks import check_bits
from tests.pipeline.ip_adapters import encoder, prompt, save, state, stock_prompted
from tests.pipeline.pixels.test_edit import photograph
from tests.pipeline.worlds import SHAPES, Watching, apart, options_of, psnr, shared_lane, solo, together

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
SIDE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kernels: ctypes.CDLL) -> Path:
    """A model with an INT8 variant, adapters, a control network, and LoRAs of the denoiser and of all parts."""
    where = tmp_path_factory.mktemp("models")
    SHAPES.setdefault("saved", tiny.SHAPES[tiny.TINY])
    model = load(str(tiny.save(where / "model", SHAPES["saved"])))
    quantized.make(model, ["a red cat", "a slice of pizza", "two boats"], where / "model", kernels=kernels)
    for name in ("adapters", "loras"):
        (where / name).mkdir()
    encoder(where / "adapters")
    for name, plus in (("base", False), ("plus", True)):
        save(state(model, 3, plus=plus, like_text=True), where / "adapters", name)
    loras.write(model, where / "loras", "all", 1)
    keys = tuple(f"{loras.ATTENTION}.attn2.{part}" for part in ("to_q", "to_k", "to_v", "to_out.0"))
    loras.write(model, where / "loras", "keys", 2, layers={"unet": keys}, loud=0.5)
    save_control(controlnet(model), where / "controls", "edges")
    return where


def runner_of(folder: Path, precision: str = "fp32", **options: Any) -> Watching:
    return Watching(
        load(str(folder / "model"), precision=precision), lane=shared_lane(), loras=folder / "loras",
        controls=folder / "controls", image_prompts=folder / "adapters", **options,
    )  # fmt: skip


def wanted(seed: int = 1, **options: Any) -> ImageParameters:
    return ImageParameters("a red cat", seed, SIDE, SIDE, **{"steps": 5, **options})


@functools.cache
def stock_all(folder: Path, one: ImageParameters) -> np.ndarray:
    """What diffusers draws of it with its LoRAs, its control and its image prompts, [H, W, 3] in levels."""
    from diffusers import StableDiffusionXLControlNetPipeline, StableDiffusionXLImg2ImgPipeline

    def more(pipeline: Any) -> tuple[Any, dict[str, Any]]:
        parts, options = dict(pipeline.components), {}
        parts |= {name: copy.deepcopy(parts[name]) for name in ("text_encoder", "text_encoder_2")}
        kind: Any = type(pipeline)
        if one.control:
            kind, parts["controlnet"] = StableDiffusionXLControlNetPipeline, controlnet(load(str(folder / "model")))
            shown = Image.frombytes("RGB", (SIDE, SIDE), one.control[0].image)
            options = {"image": shown, "controlnet_conditioning_scale": one.control[0].strength}
        if one.edit is not None:
            kind = StableDiffusionXLImg2ImgPipeline
            shown = Image.frombytes("RGB", (SIDE, SIDE), one.edit.image)
            options = {"image": shown, "strength": one.edit.strength}
        made = kind(
            **parts, add_watermarker=False,
            force_zeros_for_empty_prompt=pipeline.config.force_zeros_for_empty_prompt,
        )  # fmt: skip
        made.set_progress_bar_config(disable=True)
        named = [part.split(":") for part in one.lora.split(",") if part]
        for name, _ in named:
            made.load_lora_weights(
                str(folder / "loras"), weight_name=f"{name}.safetensors", adapter_name=f"lora_{name}"
            )
        if named:
            made.set_adapters([f"lora_{name}" for name, _ in named], [float(scale) for _, scale in named])
        return made, options

    return stock_prompted("saved", folder / "adapters", one, more)


def together_with_all() -> list[ImageParameters]:
    """LoRA, control and image prompt at once, and each pair of them."""
    pytest.importorskip("peft")
    shown, base, plus = control("edges", SIDE, 1, strength=0.7), prompt("base", 1, strength=0.8), prompt("plus", 2)
    edit = Edit(photograph(SIDE).tobytes(), None, 0.7)
    return [
        wanted(1, lora="all:0.7", control=(shown,), image_prompts=(base,)),
        wanted(2, lora="keys:1.0,all:0.4", control=(shown,), image_prompts=(plus, base), guidance_scale=4.0),
        wanted(3, lora="keys:1.0", image_prompts=(plus,), guidance_scale=1.0),
        wanted(4, control=(shown,), image_prompts=(replace(base, strength=0.4),)),
        wanted(5, image_prompts=(base,), edit=edit, steps=6),
        wanted(6),
    ]


@pytest.mark.quick("kernels")
@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_lora_control_and_image_prompt_in_one_request_equal_diffusers(
    backend: str, folder: Path, kernels: ctypes.CDLL
) -> None:
    runner, asked = runner_of(folder, **options_of(backend, kernels)), together_with_all()
    pictures = (check_bits if backend == "kernels" else together)(runner, asked)
    for one, picture in zip(asked, pictures, strict=True):
        assert not one.image_prompts or apart(picture, stock_all(folder, one)) <= 1, one
    for without in ({"lora": ""}, {"control": ()}, {"image_prompts": ()}):
        other = solo(runner, replace(asked[0], **without))
        assert apart(pictures[0], other) > 3, f"{without} would prove nothing"
    assert set(pictures[0].fingerprint) >= {"lora", "control", "image_prompts"}


def test_in_int8_they_are_as_near_to_fp32_as_pictures_without(folder: Path, kernels: ctypes.CDLL) -> None:
    """Also where they say several times as much as the text, which is all that calibration knows; with a LoRA of the
    layer that reads it. Bits depend on no companion.
    """
    exact, eight = runner_of(folder, kernels=kernels), runner_of(folder, "int8", kernels=kernels)
    asked = [
        wanted(seed, image_prompts=prompts, deepcache=AUTO if seed % 2 else None, lora="keys" if seed > 2 else "")
        for seed in range(1, 5)
        for prompts in ((), (prompt("base", seed),), (prompt("plus", seed), prompt("base", seed)))
    ]
    pictures = check_bits(eight, asked)
    assert {0, 1, 2} in [{int(index) % 3 for index in riders} for riders in eight.companions if riders != {"solo"}]
    found = [psnr(picture, solo(exact, one)) for one, picture in zip(asked, pictures, strict=True)]
    without, one_prompt, two = (float(np.mean(found[count::3])) for count in range(3))
    assert min(one_prompt, two) > without - 2 and min(found) > 22, found
