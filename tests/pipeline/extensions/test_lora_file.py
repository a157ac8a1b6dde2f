"""LoRA files in every layout: what is read is what diffusers and peft make of them; the rest is refused by its kind."""

from __future__ import annotations

import copy
import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel, load
from pipeline.extensions import lora, lora_file
from tests.pipeline import loras

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
PARTS = ("unet", "text_encoder", "text_encoder_2")


@pytest.fixture(scope="module")
def model() -> ImageModel:
    return load(tiny.TINY)


def read(model: ImageModel, path: Path) -> dict[tuple[str, str], lora_file.LoraWeights]:
    return lora_file.read(path.stem, path.read_bytes(), model.parts, model.family.adapters)


def summed(model: ImageModel, factors: lora_file.Factors) -> dict[tuple[str, str], torch.Tensor]:
    """What each layer's weight gets."""
    made = {}
    for (part, name), factor in factors.items():
        weight = model.parts[part].get_submodule(name).weight
        product = factor.up.float().flatten(1) @ factor.down.float().flatten(1)
        made[part, name] = factor.scale * product.view(weight.shape)
    return made


def by_diffusers(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """What diffusers and peft add to each weight of the tiny model."""
    pytest.importorskip("peft")
    stock = tiny.make(tiny.SHAPES[tiny.TINY])
    before = {part: {k: v.clone() for k, v in getattr(stock, part).state_dict().items()} for part in PARTS}
    stock.load_lora_weights(str(path.parent), weight_name=path.name)
    stock.fuse_lora()
    stock.unload_lora_weights()
    after = {part: getattr(stock, part).state_dict() for part in PARTS}
    return {
        (part, key.removesuffix(".weight")): after[part][key] - value
        for part in PARTS
        for key, value in before[part].items()
        if not torch.equal(after[part][key], value)
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "peft": {},
    "diffusers": {"layout": "diffusers"},
    "kohya": {"layout": "kohya"},
    "kohya with alpha": {"layout": "kohya", "alpha": 0.5},
    "sgm": {"layout": "sgm", "alpha": 3.0, "rank": 4},
    "metadata": {"metadata": {f"{part}.{key}": value for part in PARTS for key, value in {
        "r": 2, "lora_alpha": 5, "rank_pattern": {}, "use_rslora": part == "unet",
        # peft wants to know which layers, and takes no more than it was told
        "target_modules": [name.removeprefix("text_model.") for name in loras.LAYERS[part]],
        "alpha_pattern": {f"{loras.ATTENTION}.ff.net.2": 9} if part == "unet" else {},
    }.items()}},
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYOUTS)
def test_it_is_what_diffusers_reads(kind: str, model: ImageModel, tmp_path: Path) -> None:
    path = loras.write(model, tmp_path, "one", **LAYOUTS[kind])
    ours, theirs = summed(model, read(model, path)), by_diffusers(path)
    assert ours.keys() == theirs.keys() and len(ours) == sum(map(len, loras.LAYERS.values()))
    for at, delta in ours.items():
        assert torch.allclose(delta, theirs[at], atol=1e-5), at


@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        (torch.float8_e4m3fn, torch.float16),
        (torch.float8_e5m2, torch.float16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_files_of_less_precision_are_read_as_they_are_or_in_16_bits(
    stored: torch.dtype, kept: torch.dtype, model: ImageModel, tmp_path: Path
) -> None:
    path = loras.write(model, tmp_path, "one")
    whole = read(model, path)
    path.write_bytes(save({key: tensor.to(stored) for key, tensor in load_file(path).items()}))
    found = read(model, path)
    assert {factor.down.dtype for factor in found.values()} == {kept}
    for at, factor in lora_file.converted("one", found, model.device, model.dtype).items():
        assert factor.down.dtype is torch.float32 and torch.equal(factor.down, whole[at].down.to(stored).float())


def test_a_linear_layer_is_a_convolution_of_1_by_1(model: ImageModel, tmp_path: Path) -> None:
    path = loras.write(model, tmp_path, "one", layers={"unet": loras.UNET})
    plain = read(model, path)
    path.write_bytes(save({key: tensor[..., None, None].contiguous() for key, tensor in load_file(path).items()}))
    for at, factor in read(model, path).items():
        assert torch.equal(factor.down, plain[at].down) and torch.equal(factor.up, plain[at].up)


Q = f"unet.{loras.ATTENTION}.attn2.to_q"
CASES: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "a DoRA of another width": ({f"{Q}.lora_magnitude_vector": torch.ones(31)}, "has [31], for a"),
    "a DoRA of NaN": ({f"{Q}.dora_scale": torch.full((32, 1), torch.nan)}, "no finite number"),
    "a DoRA of no layer": ({"lora_unet_x.dora_scale": torch.ones(32)}, "names no layer"),
    "a difference beside a pair": ({f"{Q}.diff": torch.ones(32, 32)}, "beside two matrices"),
    "a norm's weight": ({"unet.conv_norm_out.w_norm": torch.ones(16)}, "changes a norm or a bias, which all rows"),
    "a norm's bias": ({"unet.conv_norm_out.b_norm": torch.ones(16)}, "(DIPTYCH_LORA)"),
    "a bias of its own": ({"unet.conv_in.diff_b": torch.ones(16)}, "changes a norm or a bias"),
    "integers as a difference": ({"unet.conv_out.diff": torch.ones(4, 16, 3, 3, dtype=torch.int32)}, "in floats"),
    "half a pair": ({f"{Q}.lora_B.weight": None}, "one of its two matrices"),
    "another layer": ({f"unet.up.lora_{k}.weight": torch.ones(2, 2) for k in "AB"}, "has no 'up'"),
    "a norm": ({f"unet.conv_norm_out.lora_{k}.weight": torch.ones(2, 2) for k in "AB"}, "GroupNorm"),
    "another width": ({f"{Q}.lora_A.weight": torch.ones(2, 99)}, "this model needs"),
    "two ranks": ({f"{Q}.lora_A.weight": torch.ones(3, 32)}, "this model needs"),
    "rank 0": (
        {f"{Q}.lora_A.weight": torch.ones(0, 32), f"{Q}.lora_B.weight": torch.ones(32, 0)}, "this model needs",
    ),
    "integers": ({f"{Q}.lora_A.weight": torch.ones(2, 32, dtype=torch.int8)}, "not in floats"),
    "an alpha of NaN": (
        {f"lora_unet_conv_in.{name}": tensor for name, tensor in {
            "lora_down.weight": torch.ones(2, 4, 3, 3), "lora_up.weight": torch.ones(16, 2, 1, 1),
            "alpha": torch.tensor(torch.nan),
        }.items()}, "is no finite number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_what_is_not_supported_says_what_it_is(kind: str, model: ImageModel, tmp_path: Path) -> None:
    """Tensors that a file has beside or in place of its own, or that it lacks."""
    changes, words = CASES[kind]
    tensors = load_file(loras.write(model, tmp_path, "bad", layers={"unet": loras.UNET})) | changes
    path = tmp_path / "changed.safetensors"
    path.write_bytes(save({key: tensor for key, tensor in tensors.items() if tensor is not None}))
    with pytest.raises(ModelError, match=rf"^lora changed: does not fit \(.*{re.escape(words)}"):
        read(model, path)


def test_a_file_of_nothing_is_refused(model: ImageModel) -> None:
    with pytest.raises(ModelError, match="nothing in it"):
        lora_file.read("x", save({}), model.parts, model.family.adapters)


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=60)
def test_a_file_with_a_flipped_bit_is_refused_and_nothing_else_happens(
    position: int, bit: int, model: ImageModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = loras.write(model, tmp_path_factory.getbasetemp(), "damaged", layers={"unet": loras.UNET[:1]})
    data = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", data[:8])[0]
    data[position % header] ^= 1 << bit
    try:
        factors = lora_file.read("damaged", bytes(data), model.parts, model.family.adapters)
    except ModelError as error:
        assert str(error).startswith("lora damaged: does not fit (")
    else:  # a letter that says nothing, or one LoRA for another
        assert factors


@pytest.mark.parametrize("config", ['"', "[1]", '{"unet.lora_alpha": []}', '{"unet.alpha_pattern": 3}'])
def test_metadata_that_is_no_config_is_refused(config: str, model: ImageModel, tmp_path: Path) -> None:
    tensors = load_file(loras.write(model, tmp_path, "x", layers={"unet": loras.UNET[:1]}))
    with pytest.raises(ModelError, match=r"^lora x: does not fit \("):
        lora_file.read("x", save(tensors, {"lora_adapter_metadata": config}), model.parts, model.family.adapters)


@pytest.mark.parametrize(
    ("pattern", "alpha"),
    [
        ("to_q", 10), ("attn1.to_q", 8), ("^to_q$", 10), ("to_q.lora_A", 10), (r".*attn1\.to_[qk]", 8), ("^.*to_q$", 8),
        ("o_q", 6), ("ttn1.to_q", 6), ("to_", 6), ("attn1", 6), ("", 6),
    ],
)  # fmt: skip
def test_an_alpha_is_for_whole_words_at_the_end_of_a_layers_name(
    pattern: str, alpha: int, model: ImageModel, tmp_path: Path
) -> None:
    """The first pattern that fits counts; without one it is lora_alpha."""
    patterns = {"elsewhere": 1, pattern: 8} | ({} if alpha == 6 else {"to_q": 10})
    config = {"unet.r": 2, "unet.lora_alpha": 6, "unet.alpha_pattern": patterns}
    path = loras.write(model, tmp_path, "x", layers={"unet": [f"{loras.ATTENTION}.attn1.to_q"]}, metadata=config)
    (factor,) = read(model, path).values()
    assert factor.scale == alpha / 2


def test_many_alphas_cost_no_more_than_they_are(model: ImageModel, tmp_path: Path) -> None:
    """Each is looked at once, not once for each layer; and a config that is too long is refused."""
    config: dict[str, Any] = {"unet.r": 2, "unet.alpha_pattern": {f"n.{n}": n for n in range(20_000)}}
    path = loras.write(model, tmp_path, "x", rank=2, metadata=config)
    assert {factor.scale for factor in read(model, path).values()} == {1.0}
    config["unet.alpha_pattern"] = {f"n.{n}": n for n in range(60_000)}
    path = loras.write(model, tmp_path, "x", rank=2, metadata=config)
    with pytest.raises(ModelError, match="its metadata's lora_adapter_metadata has"):
        read(model, path)


@pytest.mark.quick
@pytest.mark.parametrize("path", [loras.UNET[0], loras.CONVOLUTIONS[1], loras.CONVOLUTIONS[2]])
@pytest.mark.parametrize("kinds", [("dora", "dora"), ("dora", "plain"), ("dora", "diff"), ("dora", "dora", "plain")])
def test_dora_merged_at_start_is_that_of_requests_in_any_order(
    path: str, kinds: tuple[str, ...], model: ImageModel, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    weight = loras.layer(model, "unet", path).weight.detach()
    files = []
    for number, kind in enumerate(kinds):
        ((down, up),) = loras.matrices(model, number, loud=1.0, layers={"unet": [path]}).values()
        state = {"lora_down.weight": down, "lora_up.weight": up}
        if kind == "dora":
            magnitude = weight.flatten(1).norm(dim=1) * (1 + 0.3 * torch.rand(weight.shape[0]))
            state["dora_scale"] = magnitude.view(-1, *[1] * (weight.dim() - 1))
        elif kind == "diff":
            state = {"diff": 0.1 * torch.randn(weight.shape)}
        files.append(lora.Lora(str(number), tmp_path / f"{number}.safetensors", 0.8))
        files[-1].path.write_bytes(save({f"unet.{path}.{end}": tensor for end, tensor in state.items()}))
    expected = weight + sum(0.8 * summed(model, read(model, one.path))["unet", path] for one in files)
    for order in (files, files[::-1]):
        parts = {part: copy.deepcopy(model.parts[part]) for part in PARTS}
        lora.fuse_(parts, model.family.adapters, order)
        torch.testing.assert_close(parts["unet"].get_submodule(path).weight, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
@pytest.mark.parametrize("ends", [("lora_A.weight", "lora_B.weight"), ("diff",), ("diff_b",)])
def test_a_layer_in_two_spellings_is_refused(part: str, ends: tuple[str, ...], model: ImageModel) -> None:
    """Text encoders have one level less in some versions of transformers."""
    layer = loras.layer(model, part, loras.TEXT[0])
    shapes = {
        "lora_A.weight": (2, layer.in_features), "lora_B.weight": (layer.out_features, 2),
        "diff": layer.weight.shape, "diff_b": layer.bias.shape,
    }  # fmt: skip
    spellings = (loras.TEXT[0], loras.TEXT[0].removeprefix("text_model."))
    data = save({f"{part}.{name}.{end}": torch.ones(shapes[end]) for name in spellings for end in ends})
    parts = {one: copy.deepcopy(model.parts[one]) for one in PARTS}
    reason = rf"it has the (weight|bias) of .*q_proj in the {part} twice"
    with pytest.raises(ModelError, match=reason):
        lora_file.fuse_("x", data, parts, model.family.adapters, 1.0)
    if ends != ("diff_b",):  # which is refused as a bias
        with pytest.raises(ModelError, match=reason):
            lora_file.read("x", data, parts, model.family.adapters)


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("kind", ["token", "position"])
def test_whole_embeddings_are_for_the_start(part: int, kind: str, model: ImageModel) -> None:
    name = f"text_model.embeddings.{kind}_embedding"
    weight = loras.layer(model, "text_encoder" + ("_2" if part == 2 else ""), name).weight
    data = save({f"lora_te{part}_{name.replace('.', '_')}.diff": torch.zeros(weight.shape)})
    with pytest.raises(ModelError, match=r"changes embeddings, which all .*DIPTYCH_LORA"):
        lora_file.read("x", data, model.parts, model.family.adapters)


@pytest.mark.parametrize("kind", ["kohya with alpha", "sgm", "metadata"])
def test_pairs_are_merged_at_start_with_their_alphas(kind: str, model: ImageModel, tmp_path: Path) -> None:
    """Weight + scale · alpha / rank · up · down, as requests have it."""
    path = loras.write(model, tmp_path, "one", **LAYOUTS[kind])
    factors = read(model, path)
    assert any(factor.scale != 1 for factor in factors.values() if isinstance(factor, lora_file.LowRank))
    changed = replace(model, parts={name: copy.deepcopy(part) for name, part in model.parts.items()})
    lora_file.fuse_("one", path.read_bytes(), changed.parts, model.family.adapters, 0.75)
    for (part, name), delta in summed(model, factors).items():
        before, after = (one.parts[part].get_submodule(name).weight for one in (model, changed))
        torch.testing.assert_close(after, before + 0.75 * delta, rtol=0, atol=1e-5)


def test_norms_biases_and_whole_weights_are_merged_at_start(model: ImageModel) -> None:
    """As LyCORIS adds them: parameter + scale · difference."""
    changes = {
        "lora_unet_conv_norm_out.w_norm": ("unet", "conv_norm_out", "weight"),
        "lora_unet_conv_norm_out.b_norm": ("unet", "conv_norm_out", "bias"),
        "lora_unet_conv_in.diff": ("unet", "conv_in", "weight"),
        "lora_unet_conv_in.diff_b": ("unet", "conv_in", "bias"),
        "lora_te1_text_model_final_layer_norm.w_norm": ("text_encoder", "text_model.final_layer_norm", "weight"),
    }
    changed = replace(model, parts={name: copy.deepcopy(part) for name, part in model.parts.items()})
    before, after = (
        {key: getattr(loras.layer(one, part, layer), name) for key, (part, layer, name) in changes.items()}
        for one in (model, changed)
    )
    generator = torch.Generator().manual_seed(3)
    tensors = {key: torch.randn(parameter.shape, generator=generator) for key, parameter in before.items()}
    lora_file.fuse_("x", save(tensors), changed.parts, model.family.adapters, -0.5)
    for key, tensor in tensors.items():
        torch.testing.assert_close(after[key], before[key] - 0.5 * tensor, rtol=0, atol=1e-6)


def test_a_whole_weight_without_room_is_refused(model: ImageModel) -> None:
    data = save({"unet.conv_in.diff": torch.ones(16, 4, 3, 3)})
    assert lora_file.read("x", data, model.parts, model.family.adapters, 16 * (16 + 36))
    with pytest.raises(
        ModelError, match=r"'unet.conv_in.diff' changes a whole weight, and LoRAs have no room .*DIPTYCH_LORA"
    ):
        lora_file.read("x", data, model.parts, model.family.adapters, 16 * (16 + 36) - 1)


def test_dora_merges_as_peft_merges_it(model: ImageModel) -> None:
    peft = pytest.importorskip("peft")
    layers = {"linear": loras.UNET[0], "conv": loras.CONVOLUTIONS[1]}
    own = {name: copy.deepcopy(loras.layer(model, "unet", path)) for name, path in layers.items()}
    torch.manual_seed(5)
    net = peft.get_peft_model(
        torch.nn.ModuleDict(own), peft.LoraConfig(r=2, lora_alpha=3, target_modules=[*own], use_dora=True)
    )
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
            elif "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
    state = {}
    for key, tensor in peft.get_peft_model_state_dict(net).items():
        name, _, rest = key.removeprefix("base_model.model.").partition(".")
        state[f"unet.{layers[name]}.{rest}"] = tensor.detach().clone().contiguous()
    assert sum("lora_magnitude_vector" in key for key in state) == 2
    config = {"unet.r": 2, "unet.lora_alpha": 3, "unet.use_dora": True}
    parts = {part: copy.deepcopy(model.parts[part]) for part in PARTS}
    data = save(state, {"lora_adapter_metadata": json.dumps(config)})
    lora_file.fuse_("x", data, parts, model.family.adapters, 1.0)
    merged = net.merge_and_unload()
    for name, path in layers.items():
        weight = parts["unet"].get_submodule(path).weight
        torch.testing.assert_close(weight, merged[name].weight, rtol=1e-4, atol=1e-5)
        assert (weight - loras.layer(model, "unet", path).weight).abs().max() > 0.01
    plain = {key: tensor for key, tensor in state.items() if "magnitude" not in key}
    with pytest.raises(ModelError, match="is DoRA without a lora_magnitude_vector"):
        lora_file.read("x", save(plain, {"lora_adapter_metadata": json.dumps(config)}), parts, model.family.adapters)
