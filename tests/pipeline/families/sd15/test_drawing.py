"""Stable Diffusion 1.x: pictures equal diffusers' on every backend, in mixed batches, shallow steps too."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.errors import Invalid
from contract.image import ImageParameters
from contract.plan import DeepCache
from core.batching.engine import Engine
from core.batching.request import Request
from pipeline.backends.backend import ImageBackend
from pipeline.backends.graphs import GraphBackend
from pipeline.backends.programs import ProgramBackend
from pipeline.backends.torch_backend import TorchBackend
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from pipeline.families.family import ImageModel
from pipeline.runner import ImageRunner
from pipeline.sampling.samplers import SCHEDULERS
from tests.core.quant.stage import kernels
from tests.pipeline.worlds import solo

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
BACKENDS: dict[str, Callable[[ImageModel], ImageBackend]] = {
    "torch": TorchBackend,
    "programs": lambda model: ProgramBackend(model, kernels()),
    "graphs": GraphBackend,
}
CASES = [("a red cat", 8, 5.0, 1, None), ("two dogs", 3, 1.0, 2, None), ("a boat", 5, 7.5, 3, "blurry")]


def parts(cross_width: int = 32) -> dict[str, Any]:
    """In SD 1.5's layout: attention in the last up block, and convolutions around transformers."""
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    tokenizer = tiny.byte_tokenizer()
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        unet = UNet2DConditionModel(
            sample_size=8, block_out_channels=(32, 64), layers_per_block=1, attention_head_dim=2, norm_num_groups=8,
            cross_attention_dim=cross_width, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip
        vae = AutoencoderKL(
            block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, sample_size=16,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        )  # fmt: skip
        text = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=2, **special,
            )
        )  # fmt: skip
        with torch.no_grad():
            vae.decoder.conv_out.weight.mul_(3.0)
    return {
        "unet": unet.eval(), "vae": vae.eval(), "text_encoder": text.eval(), "tokenizer": tokenizer,
        "scheduler": EulerDiscreteScheduler(
            beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=1
        ),
    }  # fmt: skip


def pipeline(**given: Any) -> Any:
    from diffusers import StableDiffusionPipeline

    made = StableDiffusionPipeline(**given, safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    where = tmp_path_factory.mktemp("sd15") / "tiny-sd15"
    pipeline(**parts()).save_pretrained(where)
    return where


def parameters(case: tuple[str, int, float, int, str | None], model: ImageModel, **options: Any) -> ImageParameters:
    prompt, steps, guidance, seed, negative = case
    return ImageParameters(
        prompt=prompt, seed=seed, width=model.native, height=model.native, steps=steps, guidance_scale=guidance,
        negative_prompt=negative, **options,
    )  # fmt: skip


def drawn(backend: ImageBackend, wanted: list[ImageParameters]) -> list[np.ndarray[Any, Any]]:
    """Together, in batches that others join and leave."""
    runner = ImageRunner(backend)
    with Engine([runner]) as engine:
        made = [engine.submit(Request(str(i), "image", one)) for i, one in enumerate(wanted)]
        pictures = [np.asarray(one.result(timeout=120).image).astype(int) for one in made]
    runner.close()
    return pictures


@pytest.mark.parametrize("name", BACKENDS)
def test_pictures_are_those_of_diffusers(folder: Path, name: str) -> None:
    model = load(str(folder))
    stock = pipeline(**parts())
    found = drawn(BACKENDS[name](model), [parameters(case, model) for case in CASES])
    for picture, (prompt, steps, guidance, seed, negative) in zip(found, CASES, strict=True):
        latents = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(seed))
        (wanted,) = stock(
            prompt, negative_prompt=negative, num_inference_steps=steps, guidance_scale=guidance, latents=latents,
            output_type="np",
        ).images  # fmt: skip
        assert abs(picture - (wanted * 255).round()).max() <= 1
        assert picture.std() > 10, "a flat picture would prove nothing"


SD15 = {  # scheduler/scheduler_config.json as the authors of Stable Diffusion 1.5 publish it
    "_class_name": "PNDMScheduler", "_diffusers_version": "0.6.0", "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "beta_start": 0.00085, "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True,
    "steps_offset": 1, "trained_betas": None, "clip_sample": False,
}  # fmt: skip
DDIM = SD15 | {"_class_name": "DDIMScheduler"}


def with_scheduler(folder: Path, copy: Path, config: dict[str, Any]) -> Path:
    shutil.copytree(folder, copy)
    (copy / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.quick(0, 1, 3)
@pytest.mark.parametrize(
    "config",
    [
        DDIM,
        DDIM | {"steps_offset": 0, "clip_sample": True},  # which diffusers' pipeline replaces
        DDIM | {"prediction_type": "v_prediction", "set_alpha_to_one": True},
        DDIM | {"timestep_spacing": "trailing", "prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
        DDIM | {"beta_schedule": "linear", "_class_name": "DDIMParallelScheduler"},
        DDIM | {"trained_betas": [0.001 + 0.00001 * n for n in range(1000)]},
    ],
)
@pytest.mark.filterwarnings("ignore:The configuration file of this scheduler:FutureWarning")
def test_a_folder_with_ddim_draws_the_pictures_of_diffusers(
    folder: Path, tmp_path: Path, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from diffusers import schedulers

    model = load(str(with_scheduler(folder, tmp_path / "copy", config)))
    how = "the nearest sampler" if config.get("timestep_spacing") == "trailing" else "which takes the same steps"
    assert f"is drawn by euler, {how}" in caplog.text
    stock = pipeline(**parts() | {"scheduler": getattr(schedulers, str(config["_class_name"])).from_config(config)})
    found = drawn(TorchBackend(model), [parameters(case, model) for case in CASES])
    for picture, (prompt, steps, guidance, seed, negative) in zip(found, CASES, strict=True):
        latents = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(seed))
        (expected,) = stock(
            prompt, negative_prompt=negative, num_inference_steps=steps, guidance_scale=guidance, latents=latents,
            output_type="np",
        ).images  # fmt: skip
        assert abs(picture - (expected * 255).round()).max() <= 1 and picture.std() > 10


def test_a_folder_as_its_authors_publish_it_is_drawn_by_the_nearest_sampler(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(str(with_scheduler(folder, tmp_path / "copy", SD15)))
    runner = ImageRunner(TorchBackend(model))
    assert (runner.default_scheduler, runner.schedulers) == ("dpm++2m", SCHEDULERS)
    assert model.scheduler_reason == "PNDMScheduler is drawn by dpm++2m, the nearest sampler"
    assert model.scheduler_reason in caplog.text
    assert np.asarray(solo(runner, parameters(CASES[0], model)).image).std() > 10
    runner.close()
    flow = SD15 | {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    with pytest.raises(ModelError, match="scheduler: _class_name='FlowMatchEulerDiscreteScheduler' is not a supported"):
        load(str(with_scheduler(folder, tmp_path / "flow", flow)))


@pytest.mark.quick("block")
@pytest.mark.parametrize("depth", ["block", "resnet"])
def test_shallow_steps_are_the_same_on_every_backend(folder: Path, depth: str) -> None:
    """Its last up block reads the text, unlike SDXL's."""
    model = load(str(folder))
    wanted = [parameters(CASES[0], model, deepcache=cached) for cached in (DeepCache(depth=depth), None)]
    found = {name: drawn(make(model), wanted) for name, make in BACKENDS.items()}
    for pictures in found.values():
        assert abs(pictures[0] - found["torch"][0]).max() <= 1
        assert abs(pictures[0] - pictures[1]).max() > 1, "features of another step must matter"


def test_a_prompt_beyond_the_encoders_context_is_cut_and_says_so(folder: Path) -> None:
    model = load(str(folder))
    runner = ImageRunner(TorchBackend(model))
    long = parameters(("z" * 75 + " 🦊 left [bold]out", 3, 5.0, 1, "y " * 90), model)
    cut = solo(runner, long)
    assert [warning.split(":")[0] for warning in cut.warnings] == ["negative_prompt", "prompt"]
    assert cut.warnings[1] == "prompt: only the first 77 tokens were read; left out: '🦊 left [bold]out'"
    whole = solo(runner, parameters(("z" * 75, 3, 5.0, 1, "y " * 75), model))
    assert not whole.warnings and cut.image.tobytes() == whole.image.tobytes()
    runner.close()


def test_what_it_does_not_do_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    model = load(str(folder))
    runner = ImageRunner(TorchBackend(model))
    for name, value in {"prompt_weighting": True, "prompt_2": "b", "clip_skip": 1}.items():
        with pytest.raises(Invalid, match=name):
            runner.check(Request("w", "image", parameters(CASES[0], model, **{name: value})))
    runner.close()
    pipeline(**parts(48)).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="not a text-to-image Stable Diffusion 1: unet cross_attention_dim"):
        load(str(tmp_path / "other"))
