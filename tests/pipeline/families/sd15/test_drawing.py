"""Stable Diffusion 1.x: pictures equal diffusers' on every backend, in mixed batches, shallow steps too."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.errors import Invalid
from contract.image import ImageParameters
from contract.plan import DeepCache
from core.batching.request import Request
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from pipeline.sampling.samplers import SCHEDULERS
from tests.core.quant.stage import kernels
from tests.pipeline.worlds import Watching, apart, levels, options_of, solo, stock_options, together

BACKENDS = ("torch", "kernels", "layers")
CASES: list[dict[str, Any]] = [
    {"prompt": "a red cat", "steps": 8, "guidance_scale": 5.0, "seed": 1},
    {"prompt": "two dogs", "steps": 3, "guidance_scale": 1.0, "seed": 2},
    {"prompt": "a boat", "steps": 5, "guidance_scale": 7.5, "seed": 3, "negative_prompt": "blurry"},
]


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


def wanted(case: dict[str, Any], **options: Any) -> ImageParameters:
    return ImageParameters(**{"width": 16, "height": 16, **case, **options})


def runner_of(folder: Path, backend: str = "torch") -> Watching:
    return Watching(load(str(folder)), **options_of(backend, kernels()))


def check_parity(folder: Path, backend: str = "torch", **changed: Any) -> None:
    """Pictures of a mixed batch are those of diffusers' pipeline, whose parts `changed` replaces."""
    stock, asked = pipeline(**parts() | changed), [wanted(case) for case in CASES]
    for one, picture in zip(asked, together(runner_of(folder, backend), asked), strict=True):
        expected = np.asarray(stock(**stock_options(one)).images[0]).astype(int)
        assert apart(picture, expected) <= 1
        assert expected.std() > 10, "a flat picture would prove nothing"


@pytest.mark.parametrize("backend", BACKENDS)
def test_pictures_are_those_of_diffusers(folder: Path, backend: str) -> None:
    check_parity(folder, backend)


SD15: dict[str, Any] = {  # scheduler/scheduler_config.json as the authors of Stable Diffusion 1.5 publish it
    "_class_name": "PNDMScheduler", "_diffusers_version": "0.6.0", "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "beta_start": 0.00085, "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True,
    "steps_offset": 1, "trained_betas": None, "clip_sample": False,
}  # fmt: skip


def with_scheduler(folder: Path, copy: Path, config: dict[str, Any]) -> Path:
    shutil.copytree(folder, copy)
    (copy / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.quick(0, 1, 3)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps_offset": 0, "clip_sample": True},  # which diffusers' pipeline replaces
        {"prediction_type": "v_prediction", "set_alpha_to_one": True},
        {"timestep_spacing": "trailing", "prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
        {"beta_schedule": "linear", "_class_name": "DDIMParallelScheduler"},
        {"trained_betas": [0.001 + 0.00001 * n for n in range(1000)]},
    ],
)
@pytest.mark.filterwarnings("ignore:The configuration file of this scheduler:FutureWarning")
def test_a_folder_with_ddim_draws_the_pictures_of_diffusers(
    folder: Path, tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from diffusers import schedulers

    config = SD15 | {"_class_name": "DDIMScheduler"} | changes
    scheduler = getattr(schedulers, config["_class_name"]).from_config(config)
    check_parity(with_scheduler(folder, tmp_path / "copy", config), scheduler=scheduler)
    how = "the nearest sampler" if config.get("timestep_spacing") == "trailing" else "which takes the same steps"
    assert f"is drawn by euler, {how}" in caplog.text


def test_a_folder_as_its_authors_publish_it_is_drawn_by_the_nearest_sampler(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = runner_of(with_scheduler(folder, tmp_path / "copy", SD15))
    assert (runner.default_scheduler, runner.schedulers) == ("dpm++2m", SCHEDULERS)
    reason = runner.model.scheduler_reason
    assert reason == "PNDMScheduler is drawn by dpm++2m, the nearest sampler" and reason in caplog.text
    assert levels(solo(runner, wanted(CASES[0]))).std() > 10
    flow = SD15 | {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    with pytest.raises(ModelError, match="scheduler: _class_name='FlowMatchEulerDiscreteScheduler' is not a supported"):
        load(str(with_scheduler(folder, tmp_path / "flow", flow)))


@pytest.mark.quick("block")
@pytest.mark.parametrize("depth", ["block", "resnet"])
def test_shallow_steps_are_the_same_on_every_backend(folder: Path, depth: str) -> None:
    """Its last up block reads the text, unlike SDXL's."""
    asked = [wanted(CASES[0], deepcache=cached) for cached in (DeepCache(depth=depth), None)]
    (cached, whole), *others = (together(runner_of(folder, backend), asked) for backend in BACKENDS)
    assert apart(cached, whole) > 1, "features of another step must matter"
    assert all(apart(other, cached) <= 1 for other, _ in others)


def test_a_prompt_beyond_the_encoders_context_is_cut_and_says_so(folder: Path) -> None:
    runner, fits = runner_of(folder), CASES[2] | {"prompt": "z" * 75, "negative_prompt": "y " * 75}
    cut = solo(runner, wanted(fits, prompt="z" * 75 + " 🦊 left [bold]out", negative_prompt="y " * 90))
    assert [warning.split(":")[0] for warning in cut.warnings] == ["negative_prompt", "prompt"]
    assert cut.warnings[1] == "prompt: only the first 77 tokens were read; left out: '🦊 left [bold]out'"
    whole = solo(runner, wanted(fits))
    assert not whole.warnings and apart(cut, whole) == 0


def test_what_it_does_not_do_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    runner = runner_of(folder)
    for name, value in {"prompt_weighting": True, "prompt_2": "b", "clip_skip": 1}.items():
        with pytest.raises(Invalid, match=name):
            runner.check(Request("w", "image", wanted(CASES[0], **{name: value})))
    pipeline(**parts(48)).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="not a text-to-image Stable Diffusion 1: unet cross_attention_dim"):
        load(str(tmp_path / "other"))
