"""Checkpoints in one file: the folder that comes of them is the model's own, and what is none is refused by its key."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
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
from tests.pipeline.worlds import SHAPES, Crank, Watching, apart

Weights = dict[str, torch.Tensor]
NONE: Mapping[str, str] = MappingProxyType({})


Write = Callable[..., Path]


def without(prefix: str) -> Callable[[Weights], Weights]:
    return lambda found: {key: value for key, value in found.items() if not key.startswith(prefix)}


def added(more: Weights) -> Callable[[Weights], Weights]:
    return lambda found: found | more


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the same shape and other weights."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    return tiny.save(tmp_path_factory.mktemp("models") / "base", SHAPES["plain"], seed=5)


@pytest.fixture(scope="module")
def own() -> Any:
    return tiny.make(SHAPES["plain"], seed=1)


@pytest.fixture(scope="module")
def weights(own: Any) -> Weights:
    return checkpoint(own)


@pytest.fixture
def written(tmp_path: Path, weights: Weights) -> Write:
    """The checkpoint in a file, changed, with metadata."""

    def write(change: Callable[[Weights], Weights] = lambda found: found, **metadata: str) -> Path:
        save_file(change({**weights}), tmp_path / "mine.safetensors", metadata)
        return tmp_path / "mine.safetensors"

    return write


@pytest.fixture
def converted(written: Write, base: Path, tmp_path: Path) -> Write:
    """The folder that comes of such a file, with these options."""

    def make(change: Callable[[Weights], Weights], metadata: Mapping[str, str] = NONE, **options: Any) -> Path:
        file = written(change, **metadata)
        return convert(file, tmp_path / "mine", CheckpointOptions(str(base), **options))

    return make


@pytest.mark.parametrize(("shape", "dtype"), [("plain", torch.float32), ("three-levels", torch.float16)])
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


COSXL = {"prediction_type": "v_prediction", "sigma_data": 1.0, "sigma_max": 120.0, "sigma_schedule": "exponential"}
MEAN, STD = [-1.6, 1.1, 2.2, -0.7], [8.4, 5.9, 4.0, 6.6]


@pytest.mark.quick(0, 3)
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
    worlds.MORE[name] = SHAPES["plain"]
    pipeline = worlds.stock(name)
    pipeline.scheduler = EDMEulerScheduler(**config)
    pipeline.vae.register_to_config(**latents)
    said = {key: torch.tensor(value) for key, value in keys.items()}
    save_file(checkpoint(pipeline) | said, tmp_path / "mine.safetensors")
    folder = convert(tmp_path / "mine.safetensors", tmp_path / "mine", CheckpointOptions(str(base), **options))
    assert '"EDMEulerScheduler"' in (folder / "model_index.json").read_text()
    runner = Watching(load(str(folder)))
    assert runner.schedulers == ("edm-euler",) and runner.default_scheduler == "edm-euler"
    side = SHAPES["plain"].native
    plain = ImageParameters("a red cat", 1, side, side, steps=5, scheduler="edm-euler")
    # diffusers' inpainting pipeline leaves out the mean and deviation of latents.
    masks = (False,) if latents else (False, True)
    edits = [test_edit.wanted(name, scheduler="edm-euler", masked=masked, steps=7) for masked in masks]
    pictures = worlds.together(runner, (plain, *edits))
    expected = worlds.stock_picture(name, plain)
    assert expected.std() > 5 and apart(pictures[0], expected) <= 1
    for one, picture in zip(edits, pictures[1:], strict=True):
        test_edit.check_parity(name, one, picture)
    with pytest.raises(Invalid, match="scheduler"):
        Crank(runner).submit("other", replace(plain, scheduler="euler"))
    runner.close()


def test_edms_levels_have_no_zero_snr(converted: Write, base: Path) -> None:
    edm = added({"edm_vpred.sigma_max": torch.tensor([120.0])})
    with pytest.raises(ModelError, match="--zero-snr: is for schedules of betas"):
        converted(edm, zero_snr=True)
    plain = converted(edm, prediction_type="epsilon", zero_snr=False)
    assert load(str(plain)).samplers == load(str(base)).samplers


def test_without_a_vae_the_bases_is_taken(converted: Write, base: Path) -> None:
    folder = converted(without("first_stage"))
    own, theirs = (load(str(each)).vae.state_dict() for each in (folder, base))
    assert all(torch.equal(own[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("keys", "metadata", "options", "prediction", "rescaled"),
    [
        (("v_pred", "ztsnr"), {}, {}, "v_prediction", True),
        (("v_pred",), {}, {}, "v_prediction", False),
        ((), {"modelspec.prediction_type": "v"}, {}, "v_prediction", False),
        *(
            ((), {"modelspec.prediction_type": word}, {}, "v_prediction", False)
            for word in ("v_prediction", "v-prediction", "V", "V Prediction", "v_pred")
        ),
        *(((), {"modelspec.prediction_type": word}, {}, "epsilon", False) for word in ("", "epsilon", "Eps")),
        ((), {"modelspec.prediction_type": "flow"}, {"prediction_type": "v_prediction"}, "v_prediction", False),
        *(
            ((), {"ss_v_parameterization": word, "ss_zero_terminal_snr": word}, {}, "v_prediction", True)
            for word in ("true", "1", " TRUE")
        ),
        ((), {"ss_v_parameterization": "True", "ss_zero_terminal_snr": "True"}, {}, "v_prediction", True),
        ((), {"ss_v_parameterization": "False", "ss_zero_terminal_snr": "None"}, {}, "epsilon", False),
        ((), {}, {"prediction_type": "v_prediction", "zero_snr": True}, "v_prediction", True),
        (("v_pred", "ztsnr"), {}, {"prediction_type": "epsilon", "zero_snr": False}, "epsilon", False),
    ],
)
def test_what_it_predicts_is_read(
    converted: Write, keys: tuple[str, ...], metadata: dict[str, str],
    options: dict[str, Any], prediction: str, rescaled: bool,
) -> None:  # fmt: skip
    folder = converted(added({key: torch.tensor([]) for key in keys}), metadata, **options)
    config = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    assert config["prediction_type"] == prediction and config.get("rescale_betas_zero_snr", False) is rescaled
    assert (config["timestep_spacing"] == "trailing") is rescaled


def test_a_prediction_that_is_not_known_is_refused(converted: Write) -> None:
    with pytest.raises(ModelError, match=r"modelspec\.prediction_type of its metadata is 'flow', which is not known"):
        converted(lambda found: found, {"modelspec.prediction_type": "flow"})


def test_a_projection_may_be_a_linear_layers(converted: Write, own: Any) -> None:
    key = "conditioner.embedders.1.model.text_projection"

    def change(found: Weights) -> Weights:
        return {name: value for name, value in found.items() if name != key} | {
            f"{key}.weight": found[key].T.contiguous()
        }

    model = load(str(converted(change)))
    expected = own.text_encoder_2.state_dict()
    for name, value in model.parts["text_encoder_2"].state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_text_encoder_may_lack_a_level(converted: Write, own: Any) -> None:
    level = "conditioner.embedders.0.transformer.text_model."

    def change(found: Weights) -> Weights:
        return {key.replace(level, level.removesuffix("text_model.")): value for key, value in found.items()}

    model = load(str(converted(change)))
    expected = own.text_encoder.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.parts["text_encoder"].state_dict().items())


DOWN = "first_stage_model.encoder.down.0"
CONV_IN = "model.diffusion_model.input_blocks.0.0.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without(CONV_IN), r"has no weights for unet\.conv_in\.weight"),
        (lambda found: {"lora_unet_down.lora_down.weight": torch.zeros(1)}, "is a LoRA.*lora_unet_down"),
        (added({CONV_IN: torch.zeros(8, 8, 3, 3)}), "edits by instructions.*8 channels"),
        (lambda found: found | {CONV_IN: found[CONV_IN] * float("nan")}, r"conv_in\.weight has .* not finite"),
        (added({CONV_IN: torch.zeros(8, 4, 3, 3)}), r"does not fit .*: unet\.conv_in\.weight is \[8, 4"),
        (added({f"{DOWN}.block.7.norm1.weight": torch.zeros(3)}), "no use for.*resnets.7"),
    ],
)  # fmt: skip
def test_what_is_no_such_checkpoint_is_refused_by_its_key(
    converted: Write, tmp_path: Path, change: Callable[[Weights], Weights], told: str
) -> None:
    with pytest.raises(ModelError, match=told) as caught:
        converted(change)
    assert "mine.safetensors" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]


def fp8(*prefixes: str, names: str = "old", inputs: bool = True) -> Callable[[Weights], Weights]:
    """Return a change that scales these matrices into 8 bits, as ComfyUI does."""

    def change(found: Weights) -> Weights:
        scaled = {}
        for key, weight in found.items():
            if not (key.endswith(".weight") and key.startswith(prefixes) and weight.dim() >= 2):
                scaled[key] = weight
                continue
            layer = key.removesuffix(".weight")
            scale = weight.abs().max().float() / 448
            scaled[key] = (weight / scale).to(torch.float8_e4m3fn)
            old = names == "old"
            scaled[f"{layer}.{'scale_weight' if old else 'weight_scale'}"] = scale
            if inputs:
                scaled[f"{layer}.{'scale_input' if old else 'input_scale'}"] = torch.ones(())
            if not old:
                text = b'{"format": "float8_e4m3fn"}'
                scaled[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if names == "old":
            scaled["model.diffusion_model.scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
        return {key: value.contiguous() for key, value in scaled.items()}

    return change


UNET_PREFIX, TEXTS, VAE_PREFIX = "model.diffusion_model.", "conditioner.embedders.", "first_stage_model."


@pytest.mark.parametrize(
    "change",
    [
        fp8(f"{UNET_PREFIX}time_embed", f"{UNET_PREFIX}label_emb", inputs=False),
        fp8(UNET_PREFIX, TEXTS, VAE_PREFIX),
        fp8(UNET_PREFIX, TEXTS, names="new"),
    ],
)
def test_scaled_weights_of_8_bits_are_the_weights_that_they_stand_for(
    converted: Write, own: Any, change: Callable[[Weights], Weights]
) -> None:
    model = load(str(converted(change)))
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        expected = getattr(own, part).state_dict()
        for key, value in model.parts[part].state_dict().items():
            error = (value - expected[key].float()).abs().max() / expected[key].abs().max().clamp(min=1e-6)
            assert error <= 2**-4, (part, key)  # half a step of three bits of fraction


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("model.diffusion_model.time_embed.7.scale_weight", torch.ones(()), r"time_embed\.7\.weight, which is not"),
        ("model.diffusion_model.label_emb.0.0.comfy_quant", torch.zeros(3, dtype=torch.uint8), "names no format"),
        ("model.diffusion_model.time_embed.0.weight", torch.zeros(32, 8, dtype=torch.int8), "int8 without a scale"),
        ("model.diffusion_model.label_emb.0.0.lora_magnitude", torch.zeros(2), "no use for: .*lora_magnitude"),
        ("conditioner.embedders.1.model.transformer.resblocks.0.gate", torch.zeros(2), "no use for.*gate"),
        ("first_stage_model.decoder.extra.weight", torch.zeros(2), "no use for.*extra"),
        ("conditioner.embedders.2.model.weight", torch.zeros(2), r"no use for: conditioner\.embedders\.2"),
    ],
)  # fmt: skip
def test_no_key_is_dropped_without_a_word(
    converted: Write, tmp_path: Path, key: str, value: torch.Tensor, told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        converted(added({key: value}))
    assert not (tmp_path / "mine").exists()


HARMLESS = (
    "model_ema.diffusion_modelinput_blocks00weight", "model_ema.decay", "model_ema.num_updates", "denoiser.sigmas",
    "alphas_cumprod", "sqrt_one_minus_alphas_cumprod", "posterior_variance", "global_step", "betas",
    "first_stage_model.loss.discriminator.main.0.weight", "optimizer.state.0.exp_avg", "v_pred",
    "conditioner.embedders.0.transformer.text_model.embeddings.position_ids",
    "conditioner.embedders.1.model.attn_mask", "conditioner.embedders.1.model.logit_scale",
    "conditioner.embedders.1.model.visual.proj", "sigmas", "log_sigmas", "embedding_manager.string_to_param.a",
    *(f"conditioner.embedders.0.{key}" for key in ("text_projection", "text_projection.weight", "logit_scale")),
    "conditioner.embedders.0.transformer.text_projection.weight",
)  # fmt: skip


def test_what_no_picture_depends_on_may_be_there(converted: Write, own: Any) -> None:
    model = load(str(converted(added({key: torch.full((2,), 7.0) for key in HARMLESS}))), precision="fp32")
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        actual, expected = model.parts[name].state_dict(), getattr(own, name).state_dict()
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected), name


@pytest.mark.parametrize(
    "key",
    [
        *(f"model.diffusion_model.{name}" for name in ("ema.weight", "step", "input_blocks.0.loss.weight", "a.decay")),
        "conditioner.embedders.1.model.text_projection.weight", "sigmas.0", "a.log_sigmas", "my_embedding_manager.x",
    ],
)  # fmt: skip
def test_words_of_training_excuse_no_weight(key: str, converted: Write) -> None:
    with pytest.raises(ModelError, match=f"has weights that an SDXL has no use for: {key}"):
        converted(added({key: torch.zeros(2)}))


def test_files_and_folders_that_cannot_be_used_are_named(written: Write, base: Path, tmp_path: Path) -> None:
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
