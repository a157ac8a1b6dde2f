"""Every way in which a model's folder can be right or wrong, on a small saved model whose files are then damaged."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core import digests
from pipeline.checkpoints import folder as folders
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, ModelError, load
from pipeline.checkpoints.tiny import SDXLShape
from pipeline.families import sdxl
from pipeline.families.sdxl.parts import text_encoders
from tests.pipeline.damage import Damage, edit, rebuilt, remove, replaced, write

UNET = "unet/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
TEXT_2 = "text_encoder_2/model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "whole", SDXLShape())


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def cut(file: str, size: int) -> Damage:
    """Leave off the last `size` bytes."""
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-size])


def alter(file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return damage


def made_of(shape: SDXLShape, part: str) -> Damage:
    return replaced(part, lambda: tiny.make(shape))


def unlike_sdxl(**config: Any) -> Damage:
    return rebuilt("unet", "UNet2DConditionModel", **config)


def pickled(folder: Path) -> None:
    tensors = load_file(folder / UNET)
    (folder / UNET).unlink()
    torch.save(tensors, folder / "unet/diffusion_pytorch_model.bin")


def in_shards(folder: Path, part: str, stem: str) -> None:
    """The part's weights in two files and an index, as large models have them."""
    whole = folder / part / f"{stem}.safetensors"
    tensors = load_file(whole)
    names, where = sorted(tensors), {}
    for number, some in enumerate((names[::2], names[1::2]), 1):
        shard = f"{stem}-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, whole.with_name(shard), metadata={"format": "pt"})
        where |= dict.fromkeys(some, shard)
    whole.unlink()
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    whole.with_name(f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def shard_missing(folder: Path) -> None:
    in_shards(folder, "unet", "diffusion_pytorch_model")
    (folder / "unet/diffusion_pytorch_model-00002-of-00002.safetensors").unlink()


def index_empty(folder: Path) -> None:
    in_shards(folder, "unet", "diffusion_pytorch_model")
    (folder / "unet/diffusion_pytorch_model.safetensors.index.json").write_text("{}")


def fewer_words(folder: Path) -> None:
    edit("text_encoder/config.json", vocab_size=500)(folder)
    name = "embeddings.token_embedding.weight"
    alter(TEXT, lambda t: t.update({key: t[key][:500].clone() for key in t if key.endswith(name)}))(folder)


def only_fp16(folder: Path) -> None:
    (folder / UNET).rename(folder / "unet/diffusion_pytorch_model.fp16.safetensors")


def folder_in_place(folder: Path) -> None:
    (folder / UNET).unlink()
    (folder / UNET).mkdir()


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: value})


def assert_equal_weights(one: ImageModel, other: ImageModel) -> None:
    for name in ("unet", "vae"):
        assert_equal(one.parts[name], other.parts[name])
    for a, b in zip(text_encoders(one), text_encoders(other), strict=True):
        assert_equal(a, b)


def assert_equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


REFINER: dict[str, Any] = {
    "_class_name": "StableDiffusionXLImg2ImgPipeline",
    "text_encoder": [None, None],
    "tokenizer": [None, None],
}
BAD: dict[str, tuple[Damage, str]] = {
    "no index": (remove("model_index.json"), "model_index.json is missing"),
    "index garbage": (write("model_index.json", b"\x80garbage"), "model_index.json: is not JSON"),
    "index a list": (write("model_index.json", b"[]"), "model_index.json: must hold a JSON object"),
    "index nested": (write("model_index.json", b"[" * 100_000), "model_index.json: is not JSON"),
    "another pipeline": (
        edit("model_index.json", _class_name="KandinskyPipeline"),
        "is a KandinskyPipeline; this engine runs StableDiffusionXLPipeline",
    ),
    "another family's pipeline": (
        edit("model_index.json", _class_name="StableDiffusionPipeline"),
        "not a text-to-image Stable Diffusion 1: unet addition_embed_type is text_time",
    ),
    "refiner": (edit("model_index.json", **REFINER), "not an SDXL refiner: unet cross_attention_dim"),
    "part not listed": (edit("model_index.json", text_encoder_2=None), "names no text_encoder_2"),
    "part null": (edit("model_index.json", unet=[None, None]), "names no unet"),
    "part of another class": (
        edit("model_index.json", unet=["diffusers", "FluxTransformer2DModel"]),
        "unet is of class FluxTransformer2DModel; this engine runs UNet2DConditionModel",
    ),
    "part a file": (lambda f: (remove("vae")(f), (f / "vae").touch()), "the part vae is missing"),
    "scheduler config missing": (
        remove("scheduler/scheduler_config.json"),
        "scheduler: scheduler_config.json is missing",
    ),
    "scheduler unknown": (
        edit("scheduler/scheduler_config.json", _class_name="VQDiffusionScheduler"),
        "scheduler: .*VQDiffusionScheduler",
    ),
    "scheduler nonsense": (edit("scheduler/scheduler_config.json", beta_start="x"), "scheduler: "),
    "tokenizer missing": (remove("tokenizer/tokenizer.json"), "tokenizer: vocab.json is missing"),
    "tokenizer config missing": (
        remove("tokenizer_2/tokenizer_config.json"),
        "tokenizer_2: tokenizer_config.json is missing",
    ),
    "tokenizer damaged": (write("tokenizer/tokenizer.json", b"{}"), "tokenizer: does not load"),
    "merges missing": (
        lambda f: (remove("tokenizer/tokenizer.json")(f), write("tokenizer/vocab.json", b"{}")(f)),
        "tokenizer: merges.txt is missing",
    ),
    "prompts too long": (
        edit("tokenizer_2/tokenizer_config.json", model_max_length=99),
        "tokenizer_2 model_max_length is 99, not 77",
    ),
    "words too many": (fewer_words, "tokenizer has 514 words, and text_encoder has room for 500"),
    "unet config missing": (remove("unet/config.json"), "unet: config.json is missing"),
    "unet config empty": (write("unet/config.json", b"{}"), "unet: does not load"),
    "unet of another class": (
        edit("unet/config.json", _class_name="UNet2DModel"),
        "unet/config.json: unet is of class UNet2DModel",
    ),
    "vae of another class": (
        edit("vae/config.json", _class_name="AutoencoderTiny"),
        "vae is of class AutoencoderTiny; this engine runs AutoencoderKL",
    ),
    "weights a folder": (folder_in_place, "unet: diffusion_pytorch_model.safetensors is missing$"),
    "weights of a variant": (only_fp16, r"fp16.safetensors: give its variant\)"),
    "weights pickled": (pickled, r"diffusion_pytorch_model.bin: pickles can run code"),
    "weights cut": (cut(UNET, 100), "unet/diffusion_pytorch_model.safetensors: is damaged"),
    "weights empty": (write(VAE, b""), "vae/diffusion_pytorch_model.safetensors: is damaged"),
    "weights without tensors": (lambda f: save_file({}, f / VAE), "vae/.*: holds no tensors"),
    "weights of integers": (
        alter(UNET, put("conv_in.weight", torch.zeros(16, 4, 3, 3, dtype=torch.int8))),
        "unet/.*: conv_in.weight is I8; weights must be",
    ),
    "weights left out": (alter(UNET, drop("conv_in.weight")), "unet: .* 1 missing keys, the first is conv_in.weight"),
    "weights left out of text": (
        alter(TEXT_2, drop("text_projection.weight")),
        "text_encoder_2: .* the first is text_projection.weight",
    ),
    "weights of other shapes": (alter(UNET, put("conv_in.weight", torch.zeros(3, 3))), "unet: .*conv_in.weight"),
    "weights of other shapes in text": (
        alter(TEXT_2, put("text_projection.weight", torch.zeros(3, 3))),
        "text_encoder_2: .*1 mismatched keys, the first is text_projection.weight",
    ),
    "weights too many": (alter(UNET, put("extra", torch.zeros(1))), "unet: .* 1 unexpected keys, the first is extra"),
    "weights too many in text": (alter(TEXT, put("a.scale_weight", torch.ones(()))), "text_encoder: .* 1 unexpected"),
    "shard missing": (shard_missing, "unet: diffusion_pytorch_model-00002-of-00002.safetensors is missing"),
    "shards not named": (index_empty, "unet/.*index.json: has no weight_map"),
    "by instructions": (unlike_sdxl(in_channels=8), r"unet in_channels \(the VAE's latent_channels\) is 8, not 4"),
    "like SD 1.5": (
        unlike_sdxl(addition_embed_type=None, projection_class_embeddings_input_dim=None),
        "unet addition_embed_type is None, not text_time",
    ),
    "text widths": (
        made_of(SDXLShape(text_width=8), "text_encoder"),
        r"cross_attention_dim \(the text encoders' widths together\) is 32, not 24",
    ),
    "pooled widths": (
        made_of(SDXLShape(pooled_width=40), "text_encoder_2"),
        "projection_class_embeddings_input_dim is 72, not 88",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_folder_is_refused_and_the_part_is_named(what: str, folder: Path) -> None:
    damage, message = BAD[what]
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load(str(folder))
    said = str(caught.value)
    assert str(folder) in said
    assert len(said) < 600 and "\n" not in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "empty"),
        ("/nowhere/at-all", "^/nowhere/at-all: no such folder, and not a hub id"),
        (__file__, "is a file; a model is a folder"),
        ("a--b/c", "not a hub id"),
        ("x/" + "y" * 300, "not a hub id|too long"),
        ("~nobody-of-this-name/x", "home"),
        ("z" * 5000, "…: no such folder"),
    ],
)
def test_a_name_that_is_no_folder_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(name)


def test_a_hub_id_offline_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without looking for the hub, which costs seconds on a machine without a network."""
    looks: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: looks.append(address) or [])
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: looks.append(address))
    with pytest.raises(
        ModelError, match=r"^no-such-owner/no-such-model: no such folder, and the hub cannot be reached"
    ):
        load("no-such-owner/no-such-model")
    assert not looks


def test_a_download_asks_for_one_variant_only(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    import fnmatch

    import huggingface_hub

    asked: list[list[str]] = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, allow_patterns: (asked.append(allow_patterns), saved)[1]
    )
    for variant in (None, "fp16"):
        assert folders.find("owner/name", variant, lambda folder: sdxl.FAMILY.parts) == saved
    shards = "unet/diffusion_pytorch_model-00001-of-00002.safetensors"
    there = [UNET, VAE, TEXT, shards, "vae_decoder/model.onnx", "unet/config.json", "tokenizer/merges.txt", "big.ckpt"]
    there += ["unet/model.onnx", "unet/openvino_model.bin", "text_encoder/pytorch_model.bin"]
    there += [name.replace(".safetensors", ".fp16.safetensors") for name in (UNET, TEXT)]
    index, plain, _, half = ({name for name in there if any(fnmatch.fnmatch(name, p) for p in one)} for one in asked)
    texts = {"unet/config.json", "tokenizer/merges.txt"}
    assert index == set(), "first the index alone, which says what is needed"
    assert plain == {UNET, VAE, TEXT, shards} | texts
    assert half == {name for name in there if ".fp16." in name} | texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int4"}, "precision: must be one of fp32, bf16, fp16, int8, fp8"),
        ({"device": "quantum"}, "cannot be put on 'quantum'"),
        ({"device": "cuda:99"}, "cannot be put on cuda:99"),
        ({"variant": "../fp16"}, "variant: must be a word"),
        ({"variant": "fp16"}, r"diffusion_pytorch_model.fp16.safetensors is missing|model.fp16.safetensors is missing"),
    ],
)
def test_options_that_do_not_fit_are_named(saved: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(str(saved), **options)


def test_a_saved_model_has_the_weights_that_it_was_saved_with(saved: Path) -> None:
    model = load(str(saved))
    assert_equal(model.denoiser, tiny.make(SDXLShape()).unet)
    assert (model.native, model.name) == (32, "whole")
    modules = (model.denoiser, model.vae, *text_encoders(model))
    assert not any(module.training for module in modules)
    assert not any(p.requires_grad for module in modules for p in module.parameters())


def test_shards_give_the_same_model(saved: Path, folder: Path) -> None:
    for name, part in sdxl.FAMILY.parts.items():
        if part.stem:
            in_shards(folder, name, part.stem)
    assert_equal_weights(load(str(folder)), load(str(saved)))


def test_variants_give_the_model_that_they_hold(tmp_path: Path, saved: Path) -> None:
    half = tiny.save(tmp_path / "half", SDXLShape(), variant="fp16", dtype="float16")
    model = load(str(half), variant="fp16")
    assert model.denoiser.dtype is torch.float32
    weight = load(str(saved)).denoiser.conv_in.weight
    assert torch.equal(model.denoiser.conv_in.weight, weight.half().float())


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precisions(saved: Path, precision: str, dtype: torch.dtype) -> None:
    model = load(str(saved), precision=precision)
    parts = (model.denoiser, model.vae, *text_encoders(model))
    assert {p.dtype for part in parts for p in part.parameters()} == {dtype} == {model.dtype}


@pytest.mark.parametrize("upcast", [True, False])
def test_a_vae_that_overflows_in_fp16_stays_in_fp32(folder: Path, saved: Path, upcast: bool) -> None:
    edit("vae/config.json", force_upcast=upcast)(folder)
    model = load(str(folder), precision="fp16")
    assert model.denoiser.dtype is model.parts["text_encoder"].dtype is torch.float16
    assert model.vae.dtype is (torch.float32 if upcast else torch.float16)
    if upcast:  # and was never rounded on its way
        assert_equal(model.vae, load(str(saved)).vae)


def test_a_unet_that_does_not_say_its_size_has_that_of_sdxl(folder: Path) -> None:
    edit("unet/config.json", sample_size=None)(folder)
    assert load(str(folder)).native == 128 * 8


def test_a_text_encoder_may_carry_integers_that_nobody_reads(folder: Path, saved: Path) -> None:
    alter(TEXT, put("text_model.embeddings.position_ids", torch.arange(77)[None]))(folder)
    assert_equal_weights(load(str(folder)), load(str(saved)))


@pytest.mark.parametrize("whole_bytes", [digests._WHOLE_BYTES, 1000])
def test_the_digest_sees_a_change_in_any_tensor(
    saved: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    monkeypatch.setattr(digests, "_WHOLE_BYTES", whole_bytes)  # the small model stands for a large one
    """And not the place."""
    _, files = folders.check(folder, None, sdxl.FAMILY.parts, "SDXL")
    names = list(load_file(folder / UNET))
    seen = {folders.digest(folder, files)}
    assert seen == {folders.digest(saved, folders.check(saved, None, sdxl.FAMILY.parts, "SDXL")[1])}
    for name in names[:: len(names) // 8]:
        alter(UNET, lambda tensors, name=name: tensors[name].add_(1.0))(folder)  # type: ignore[misc]
        seen.add(folders.digest(folder, files))
    assert len(seen) == len(names[:: len(names) // 8]) + 1


@pytest.mark.parametrize("file", ["tokenizer/merges.txt", "scheduler/scheduler_config.json", "vae/config.json"])
def test_the_digest_sees_every_file_that_matters(folder: Path, file: str) -> None:
    _, files = folders.check(folder, None, sdxl.FAMILY.parts, "SDXL")
    before = folders.digest(folder, files)
    with (folder / file).open("a") as stream:
        stream.write("\n")
    assert folders.digest(folder, files) != before


def test_a_model_is_called_by_its_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    assert load(".").name == saved.name


def test_loading_says_nothing(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(str(saved))
    load(tiny.TINY)
    assert capfd.readouterr() == ("", "")
