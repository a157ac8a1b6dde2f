"""Z-Images from folders: as diffusers saved them, with either class of text encoder, and every way not to fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoints import tiny_zimage
from pipeline.checkpoints.load import ModelError, load, weights_digest
from pipeline.checkpoints.tiny_zimage import TINY_Z, ZImageShape
from pipeline.families.zimage import FAMILY
from pipeline.sizes import sizes
from tests.pipeline.damage import Damage, edit, rebuilt, replaced
from tests.pipeline.families.zimage.models import SHAPES, model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "z"
    tiny_zimage.make(SHAPES["tiny"]).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def narrow() -> Any:
    return tiny_zimage.make(ZImageShape(text_width=32, text_heads=1))


def another_transformer(**config: Any) -> Damage:
    return rebuilt("transformer", "ZImageTransformer2DModel", **config)


def without_template(folder: Path) -> None:
    (folder / "tokenizer/chat_template.jinja").unlink(missing_ok=True)
    edit("tokenizer/tokenizer_config.json", chat_template=None)(folder)


def test_a_saved_model_is_the_one_that_was_saved(saved: Path) -> None:
    one, seeded = load(str(saved)), load(TINY_Z)
    assert one.family is seeded.family is FAMILY and one.name == "z"
    assert (one.native, one.size_range.multiple, one.latent_channels) == (32, 16, 16)
    for part in ("transformer", "text_encoder", "vae"):
        weights = seeded.parts[part].state_dict()
        assert one.parts[part].state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in one.parts[part].state_dict().items())
        assert not one.parts[part].training


@pytest.mark.quick
@pytest.mark.parametrize("ending", ["scale_weight", "weight_scale", "weight_scale_inv", "scale_input"])
@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_scaled_weights_of_8_bits_are_refused_by_key(folder: Path, part: str, ending: str) -> None:
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    key = next(key for key, value in tensors.items() if (key.endswith(".weight") and value.dim() == 2) or part == "vae")
    layer = key.removesuffix(".weight").removesuffix(".bias")
    save_file(tensors | {f"{layer}.{ending}": torch.ones(())}, file, {"format": "pt"})
    with pytest.raises(
        ModelError, match=rf"{part}: does not fit .*1 unexpected keys, the first is .*{layer}\.{ending}"
    ):
        load(str(folder))


def test_the_text_encoder_may_have_a_language_models_head(saved: Path, folder: Path) -> None:
    from transformers import Qwen3ForCausalLM

    plain = load(str(saved)).parts["text_encoder"]
    whole = Qwen3ForCausalLM(plain.config)
    whole.model.load_state_dict(plain.state_dict())
    shutil.rmtree(folder / "text_encoder")
    whole.save_pretrained(folder / "text_encoder")
    edit("model_index.json", text_encoder=["transformers", "Qwen3ForCausalLM"])(folder)
    found = load(str(folder)).parts["text_encoder"]
    assert type(found) is type(plain)
    for name, value in plain.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit("model_index.json", transformer=None), "names no transformer; Z-Image has tokenizer, text_enc"),
        (edit("model_index.json", text_encoder=["transformers", "Qwen2Model"]), "text_encoder is of class Qwen2Model"),
        (lambda folder: shutil.rmtree(folder / "transformer"), "the part transformer is missing"),
        (replaced("text_encoder", narrow), r"cap_feat_dim .* is 64, not 32"),
        (another_transformer(in_channels=4), r"transformer in_channels .* is 4, not 16"),
        (another_transformer(all_patch_size=(4,)), r"all_patch_size is \[4\], not \[2\]"),
        (another_transformer(siglip_feat_dim=8), "siglip_feat_dim is 8, not None"),
        (another_transformer(axes_lens=(512, 64, 64)), "axes_lens has room for 512 text tokens, of 514"),
        (another_transformer(axes_lens=(1024, 3, 64)), "axes_lens has room for 3 rows, of 4"),
        (edit("vae/config.json", sample_size=40), "vae sample_size is 40, no multiple of a token's 16"),
        (without_template, "tokenizer has no chat template"),
        (edit("scheduler/scheduler_config.json", _class_name="EulerDiscreteScheduler"), "_class_name='Euler"),
        (edit("scheduler/scheduler_config.json", invert_sigmas=True), "scheduler: invert_sigmas=True is not supported"),
        (edit("transformer/config.json", n_layers=1), "does not fit its config.json: .* unexpected keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_named(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load(str(folder))


def test_the_digest_sees_the_chat_template(saved: Path, folder: Path) -> None:
    assert weights_digest(str(saved)) == weights_digest(str(folder)) == load(str(folder)).digest
    with (folder / "tokenizer/chat_template.jinja").open("a") as stream:
        stream.write(" ")
    assert weights_digest(str(saved)) != weights_digest(str(folder))


def test_sizes_are_whole_numbers_of_tokens() -> None:
    one = model("deep")
    for width, height in one.sizes:
        assert width % 16 == height % 16 == 0 and (width, height) in one.size_range
        assert FAMILY.image_tokens(one, (width, height)) == width * height // 256
    assert (1024, 1024) in sizes(1024, 16) and (1280, 832) in sizes(1024, 16)


def test_the_recipe_decides_about_every_layer() -> None:
    parts = model("deep").parts
    recipes = FAMILY.recipes(parts, 0.8)
    assert tuple(recipes) == FAMILY.quantized
    layers = recipes["transformer"].targets(parts["transformer"])
    assert len(layers) == 7 * (3 + 2) and not any("context" in name for name in layers)
    shares = {recipes["transformer"].shares(name) for name in layers}
    assert len(shares) == 4 * (3 + 2), "q, k and v read one input, and so do w1 and w3"
    assert recipes["vae"].targets(parts["vae"])
