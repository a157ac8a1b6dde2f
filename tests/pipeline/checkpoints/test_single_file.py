"""Checkpoints in one file: the folder that comes of them is the model's own, and what is none is refused by its key."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import EDMEulerScheduler
from safetensors.torch import save_file

from contract.errors import Invalid
from contract.image import ImageParameters
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from pipeline.checkpoints.single_file import CheckpointOptions, convert
from tests.pipeline import worlds
from tests.pipeline.original_layout import checkpoint
from tests.pipeline.pixels import test_edit
from tests.pipeline.worlds import SHAPES, Crank, Watching, levels, solo

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the same shape and other weights."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    return tiny.save(tmp_path_factory.mktemp("models") / "base", SHAPES["two-resnets"], seed=5)


@pytest.fixture(scope="module")
def own() -> Any:
    return tiny.make(SHAPES["two-resnets"], seed=1)


@pytest.fixture(scope="module")
def weights(own: Any) -> Weights:
    return checkpoint(own)


@pytest.fixture
def written(tmp_path: Path, weights: Weights) -> Callable[..., Path]:
    """The checkpoint in a file, changed, with metadata."""

    def write(change: Callable[[Weights], Weights] = lambda found: found, **metadata: str) -> Path:
        save_file(change({**weights}), tmp_path / "mine.safetensors", metadata)
        return tmp_path / "mine.safetensors"

    return write


@pytest.mark.parametrize(
    ("shape", "dtype"), [("plain", torch.float32), ("three-levels", torch.float16), ("two-resnets", torch.float32)]
)
def test_every_weight_comes_back(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    own = tiny.make(SHAPES[shape], seed=1).to(dtype)
    save_file(checkpoint(own), tmp_path / "mine.safetensors")
    other = tiny.save(tmp_path / "base", SHAPES[shape], seed=5)
    told: list[str] = []
    folder = convert(tmp_path / "mine.safetensors", tmp_path / "mine", CheckpointOptions(str(other)), say=told.append)
    model = load(str(folder), precision="fp32")
    assert model.name == "mine" and len(told) == 7
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        found = model.parts[name].state_dict()
        expected = getattr(own, name).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key].float()) for key in expected), name
    assert model.scheduler_config == load(str(other)).scheduler_config
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


ZERO_SNR = replace(
    SHAPES["two-resnets"], prediction_type="v_prediction",
    scheduler={"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
def test_zero_snr_and_v_prediction_are_drawn_as_diffusers_does(base: Path, tmp_path: Path) -> None:
    """Of keys in the file, with a base that predicts noise: alone, and among requests that join at other steps."""
    worlds.MORE["zero-snr"] = ZERO_SNR
    said = {key: torch.tensor([]) for key in ("v_pred", "ztsnr")}
    save_file(checkpoint(worlds.stock("zero-snr")) | said, tmp_path / "mine.safetensors")
    folder = convert(tmp_path / "mine.safetensors", tmp_path / "mine", CheckpointOptions(str(base)))
    runner = Watching(load(str(folder)))
    side = ZERO_SNR.native
    wanted = [
        ImageParameters("a red cat", seed, side, side, steps=4 + seed, scheduler=name, guidance_scale=1.0 + seed)
        for seed, name in enumerate(("euler", "euler-ancestral", "dpm++2m", "dpm++2m-sde", "lcm", "tcd"))
    ]
    pictures = worlds.together(runner, wanted, lambda: 2)
    assert any(len(steps) > 1 for steps in runner.shared_steps)
    assert runner.model.sampler_table("euler", 4, (side, side)).timesteps[0] == 999
    for one, picture in zip(wanted, pictures, strict=True):
        expected = worlds.stock_picture("zero-snr", one)
        assert expected.std() > 5
        assert abs(levels(picture) - expected).max() <= 1, one
        assert abs(levels(solo(runner, one)) - expected).max() <= 1, one
    runner.close()


COSXL = {"prediction_type": "v_prediction", "sigma_data": 1.0, "sigma_max": 120.0, "sigma_schedule": "exponential"}
MEAN, STD = [-1.6, 1.1, 2.2, -0.7], [8.4, 5.9, 4.0, 6.6]


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize(
    ("keys", "options", "config", "latents"),
    [
        ({"edm_vpred.sigma_max": [120.0], "edm_vpred.sigma_min": [0.002]}, {}, COSXL, {}),
        ({"edm_vpred.sigma_max": [60.0]}, {}, {**COSXL, "sigma_max": 60.0}, {}),
        ({}, {"prediction_type": "edm_v_prediction"}, COSXL, {}),
        (
            {"edm_mean": [MEAN], "edm_std": [STD]}, {}, {"sigma_data": 0.5, "sigma_max": 80.0},
            {"latents_mean": MEAN, "latents_std": STD, "scaling_factor": 0.5},
        ),
    ],
)  # fmt: skip
def test_edm_models_are_drawn_as_diffusers_does(
    base: Path, tmp_path: Path, keys: dict[str, Any], options: dict[str, Any], config: dict[str, Any],
    latents: dict[str, Any],
) -> None:  # fmt: skip
    """CosXL's keys, Playground v2.5's, and an option: text to image, image to image and inpainting."""
    name = f"edm {sorted(keys)} {config['sigma_max']}"
    worlds.MORE[name] = SHAPES["two-resnets"]
    pipeline = worlds.stock(name)
    pipeline.scheduler = EDMEulerScheduler(**config)
    pipeline.vae.register_to_config(**latents)
    said = {key: torch.tensor(value) for key, value in keys.items()}
    save_file(checkpoint(pipeline) | said, tmp_path / "mine.safetensors")
    folder = convert(tmp_path / "mine.safetensors", tmp_path / "mine", CheckpointOptions(str(base), **options))
    assert '"EDMEulerScheduler"' in (folder / "model_index.json").read_text()
    runner = Watching(load(str(folder)))
    assert runner.schedulers == ("edm-euler",) and runner.default_scheduler == "edm-euler"
    side = SHAPES["two-resnets"].native
    plain = ImageParameters("a red cat", 1, side, side, steps=5, scheduler="edm-euler")
    # diffusers' inpainting pipeline leaves out the mean and deviation of latents.
    masks = (False,) if latents else (False, True)
    edits = [test_edit.wanted(name, scheduler="edm-euler", masked=masked, steps=7) for masked in masks]
    crank = Crank(runner)
    for index, one in enumerate((plain, *edits)):
        crank.submit(str(index), one)
        crank.turn()
    pictures = crank.pictures()
    expected = worlds.stock_picture(name, plain)
    assert expected.std() > 5 and abs(levels(pictures["0"]) - expected).max() <= 1
    for index, one in enumerate(edits, 1):
        test_edit.check_parity(name, one, pictures[str(index)])
    with pytest.raises(Invalid, match="scheduler"):
        crank.submit("other", replace(plain, scheduler="euler"))
    runner.close()


def test_edms_levels_have_no_zero_snr(written: Callable[..., Path], base: Path, tmp_path: Path) -> None:
    file = written(lambda found: found | {"edm_vpred.sigma_max": torch.tensor([120.0])})
    with pytest.raises(ModelError, match="--zero-snr: is for schedules of betas"):
        convert(file, tmp_path / "mine", CheckpointOptions(str(base), zero_snr=True))
    plain = convert(file, tmp_path / "mine", CheckpointOptions(str(base), "epsilon", zero_snr=False))
    assert load(str(plain)).samplers == load(str(base)).samplers


def test_without_a_vae_the_bases_is_taken(written: Callable[..., Path], base: Path, tmp_path: Path) -> None:
    file = written(lambda found: {key: value for key, value in found.items() if not key.startswith("first_stage")})
    folder = convert(file, tmp_path / "mine", CheckpointOptions(str(base)))
    for own, theirs in zip(
        load(str(folder)).vae.state_dict().values(), load(str(base)).vae.state_dict().values(), strict=True
    ):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize(
    ("keys", "metadata", "options", "prediction", "rescaled"),
    [
        ((), {}, {}, "epsilon", False),
        (("v_pred", "ztsnr"), {}, {}, "v_prediction", True),
        (("v_pred",), {}, {}, "v_prediction", False),
        ((), {"modelspec.prediction_type": "v"}, {}, "v_prediction", False),
        ((), {"modelspec.prediction_type": "epsilon"}, {}, "epsilon", False),
        ((), {"modelspec.prediction_type": "something"}, {}, "epsilon", False),
        ((), {"ss_v_parameterization": "True", "ss_zero_terminal_snr": "True"}, {}, "v_prediction", True),
        ((), {"ss_v_parameterization": "False", "ss_zero_terminal_snr": "None"}, {}, "epsilon", False),
        ((), {}, {"prediction_type": "v_prediction", "zero_snr": True}, "v_prediction", True),
        (("v_pred", "ztsnr"), {}, {"prediction_type": "epsilon", "zero_snr": False}, "epsilon", False),
    ],
)
def test_what_it_predicts_is_read(
    written: Callable[..., Path], base: Path, tmp_path: Path, keys: tuple[str, ...], metadata: dict[str, str],
    options: dict[str, Any], prediction: str, rescaled: bool,
) -> None:  # fmt: skip
    file = written(lambda found: found | {key: torch.tensor([]) for key in keys}, **metadata)
    folder = convert(file, tmp_path / "mine", CheckpointOptions(str(base), **options))
    config = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    assert config["prediction_type"] == prediction and config.get("rescale_betas_zero_snr", False) is rescaled
    assert (config["timestep_spacing"] == "trailing") is rescaled
    load(str(folder))


def without(prefix: str) -> Callable[[Weights], Weights]:
    return lambda found: {key: value for key, value in found.items() if not key.startswith(prefix)}


def renamed(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda found: {key.replace(old, new): value for key, value in found.items()}


DOWN = "first_stage_model.encoder.down.0"
CONV_IN = "model.diffusion_model.input_blocks.0.0.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("model.diffusion_model."), "has no UNet .*its first key is conditioner"),
        (without("conditioner.embedders.1"), "has no second text encoder"),
        (without(CONV_IN), r"has no weights for unet\.conv_in\.weight"),
        (renamed("conditioner.embedders.0.transformer", "cond_stage_model"), "Diffusion 1 or 2.*cond_stage_model"),
        (renamed("conditioner.embedders.0.transformer", "conditioner.embedders.0.model"), "is an SDXL refiner"),
        (lambda found: {"lora_unet_down.lora_down.weight": torch.zeros(1)}, "is a LoRA.*lora_unet_down"),
        (lambda found: {"double_blocks.0.x": torch.zeros(1)}, "Flux"),
        (lambda found: found | {CONV_IN: torch.zeros(8, 8, 3, 3)}, "edits by instructions.*8 channels"),
        (lambda found: found | {CONV_IN: found[CONV_IN] * float("nan")}, r"conv_in\.weight has .* not finite"),
        (lambda found: found | {CONV_IN: torch.zeros(8, 4, 3, 3)}, r"does not fit .*: unet\.conv_in\.weight is \[8, 4"),
        (lambda found: found | {f"{DOWN}.block.7.norm1.weight": torch.zeros(3)}, "no use for.*resnets.7"),
    ],
)  # fmt: skip
def test_what_is_no_such_checkpoint_is_refused_by_its_key(
    written: Callable[..., Path], base: Path, tmp_path: Path, change: Callable[[Weights], Weights], told: str
) -> None:
    with pytest.raises(ModelError, match=told) as caught:
        convert(written(change), tmp_path / "mine", CheckpointOptions(str(base)))
    assert "mine.safetensors" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]


def test_files_and_folders_that_cannot_be_used_are_named(
    written: Callable[..., Path], base: Path, tmp_path: Path
) -> None:
    file = written()
    whole = file.read_bytes()
    for data in (b"", whole[:1000], whole[:-100], whole + b"x"):
        file.write_bytes(data)
        with pytest.raises(ModelError, match=r"mine\.safetensors: is no whole safetensors file"):
            convert(file, tmp_path / "mine", CheckpointOptions(str(base)))
    with pytest.raises(ModelError, match="there is no such file"):
        convert(tmp_path / "gone.safetensors", tmp_path / "mine", CheckpointOptions(str(base)))
    file.write_bytes(whole)
    with pytest.raises(ModelError, match=r"model_index\.json"):
        convert(file, tmp_path / "mine", CheckpointOptions(str(tmp_path)))
    (tmp_path / "mine").mkdir()
    with pytest.raises(ModelError, match="mine: is there already"):
        convert(file, tmp_path / "mine", CheckpointOptions(str(base)))
