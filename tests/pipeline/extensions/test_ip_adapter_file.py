"""Files of IP-Adapters: which are taken, with which encoder, and what is said of the others."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from core.config import EMBEDDED_MODEL
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import ip_adapter_file
from pipeline.extensions.vision import VisionEncoder
from tests.pipeline.extensions.test_control_file import as_nobody
from tests.pipeline.ip_adapters import EMBEDDING, HIDDEN, encoder, picture, save, state
from tests.pipeline.worlds import model

CPU = torch.device("cpu")


def read(folder: Path, name: str) -> ip_adapter_file.IPAdapterFile:
    return ip_adapter_file.read(name, ip_adapter_file.find(folder, name), model("plain"), CPU)


@pytest.mark.parametrize("depth", [1, 4, 6])
def test_plus_of_any_depth_is_projected_as_diffusers_does(depth: int, tmp_path: Path) -> None:
    """By diffusers' own conversion, which knows depths up to four."""
    own = state(model("plain"), plus=True, depth=depth)
    save(own, tmp_path, "plus")
    adapter = read(tmp_path, "plus").adapter
    assert (adapter.tokens, adapter.channels, adapter.fine) == (6, HIDDEN, True)
    assert len(adapter.projection.layers) == depth  # type: ignore[arg-type]
    seen = torch.randn(2, 17, HIDDEN, generator=torch.Generator().manual_seed(0))
    made = adapter.project(seen)
    assert made.shape == (2, 6, model("plain").denoiser.config.cross_attention_dim)
    if depth == 4:
        given = {key.removeprefix("image_proj."): t for key, t in own.items() if key.startswith("image_proj.")}
        stock = model("plain").denoiser._convert_ip_adapter_image_proj_to_diffusers(given, low_cpu_mem_usage=False)
        assert torch.allclose(made, stock(seen), atol=1e-6)


def test_half_precision_files_are_read_as_they_are(tmp_path: Path) -> None:
    own = {key: tensor.half() for key, tensor in state(model("plain"), plus=False).items()}
    save(own, tmp_path, "half")
    adapter = read(tmp_path, "half").adapter
    assert (
        adapter.layers[0][0].dtype == torch.float16 and adapter.keys(torch.ones(1, 4, 32), 0.5).dtype == torch.float32
    )
    assert adapter.size_bytes < 2 * sum(tensor.nbytes for tensor in own.values())
    assert adapter.width == sum(len(k) + len(v) for k, v in adapter.layers)


def test_a_folder_that_may_not_be_read_is_none_of_them() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "lost+found").mkdir(mode=0)
        file = save(state(model("plain"), plus=False), folder, "base")
        file.chmod(0o644)
        with as_nobody():
            assert ip_adapter_file.offered(folder) == ["base"] and ip_adapter_file.size_bytes(folder) > 0
            with pytest.raises(ModelError, match="there is no encoder"):
                ip_adapter_file.find_encoder(folder, "base", file, read(folder, "base").adapter)


def test_names_are_files_and_folders_with_an_encoder(tmp_path: Path) -> None:
    adapter = state(model("plain"), plus=False)
    save(adapter, tmp_path, "one")
    for name in ("two", "no-encoder", "several"):
        (tmp_path / name).mkdir()
        save(adapter, tmp_path / name, "ip-adapter_sdxl")
    save(adapter, tmp_path / "several", "another")
    encoder(tmp_path / "two")
    (tmp_path / "notes.txt").write_text("none")
    assert ip_adapter_file.offered(tmp_path) == ["one", "two"]
    assert read(tmp_path, "two").adapter.tokens == 4
    with pytest.raises(ModelError, match=r"IP-Adapter several: its folder holds several: another\.safetensors, ip"):
        ip_adapter_file.find(tmp_path, "several")
    assert ip_adapter_file.offered(tmp_path / "nothing") == []


def test_the_encoder_is_the_first_that_fits(tmp_path: Path) -> None:
    """As in the authors' repository: beside the files lies one, beside their folder that of the others."""
    folder = tmp_path / "sdxl_models"
    folder.mkdir()
    for name, plus in (("base", False), ("plus", True)):
        save(state(model("plain"), plus=plus), folder, name)

    def found(name: str) -> Path:
        file = ip_adapter_file.find(folder, name)
        return ip_adapter_file.find_encoder(folder, name, file, read(folder, name).adapter)

    with pytest.raises(ModelError, match="IP-Adapter base: reads embeddings of 24 channels, and there is no encoder"):
        found("base")
    wide = encoder(folder, projection_dim=EMBEDDING, hidden_size=64)
    assert found("base") == wide
    with pytest.raises(ModelError, match="plus: reads hidden states of 32 channels, and image_encoder gives 64"):
        found("plus")
    other = encoder(tmp_path / "models", projection_dim=2 * EMBEDDING)
    assert found("plus") == other and found("base") == wide
    assert ip_adapter_file.size_bytes(folder) >= sum(
        file.stat().st_size for file in tmp_path.rglob("*.safetensors") if file.is_file()
    )


FIRST = "ip_adapter.1.to_k_ip.weight"
FILES: dict[str, tuple[str, dict[str, Tensor | None], str]] = {
    "missing": ("base", {FIRST: None}, f"it has no weights for {FIRST}"),
    "wide": ("base", {FIRST: torch.ones(32, 8)}, rf"{FIRST} is \[32, 8\], not \[32, 32\]"),
    "sd15": (
        "base", {"image_proj.proj.weight": torch.ones(3072, 24)},
        r"image_proj.proj.weight is \[3072, 24\], not \[128, 24\]",
    ),
    "more": ("base", {"ip_adapter.5.x": torch.ones(1)}, "no use for ip_adapter.5.x"),
    "resampler": (
        "plus", {"layers.2.1.3.weight": None}, "it has no weights for image_proj.layers.2.1.3.weight",
    ),
    "gap": ("plus", {".layers.1.": None}, "it has no weights for image_proj.layers.1.0.norm1.weight"),
    "nan": ("base", {FIRST: torch.full((32, 32), torch.nan)}, f"{FIRST} has values that are not finite"),
    "whole-numbers": ("base", {FIRST: torch.ones(32, 32).int()}, f"{FIRST} has values"),
    "tokens": ("plus", {"image_proj.latents": torch.ones(1, 65, 48)}, "latents has 65 tokens; at most 64"),
    "faceid": (
        "", {f"image_proj.{key}.weight": torch.ones(2, 2) for key in ("proj.0", "proj.2", "norm")},
        r"is an IP-Adapter FaceID, which is not supported \(it has image_proj.proj.2.weight",
    ),
    "faceid-plus": (
        "", {"image_proj.perceiver_resampler.proj_in.weight": torch.ones(2, 2)}, "is an IP-Adapter FaceID Plus",
    ),
    "full-face": (
        "", {f"image_proj.proj.{n}.weight": torch.ones(2, 2) for n in (0, 2, 3)}, "is an IP-Adapter Full Face",
    ),
    "lora": ("", {"unet.x.lora_A.weight": torch.ones(2, 2)}, "is a LoRA"),
    "checkpoint": ("", {"model.diffusion_model.x": torch.ones(2)}, "is a checkpoint"),
    "vision": ("", {"vision_model.x": torch.ones(2)}, "is a vision encoder"),
    "other": ("", {"what": torch.ones(2)}, "is no IP-Adapter or IP-Adapter Plus of SDXL: its first key is what"),
}  # fmt: skip
"""The kind of adapter, tensors that its file has in place of its own, or keys that it lacks, and what is said."""


@pytest.mark.parametrize("name", FILES)
def test_other_files_are_refused_by_a_key(name: str, tmp_path: Path) -> None:
    kind, changes, words = FILES[name]
    own = state(model("plain"), plus=kind == "plus") if kind else {}
    left_out = [key for key, tensor in changes.items() if tensor is None]
    kept = {key: tensor for key, tensor in own.items() if not any(part in key for part in left_out)}
    save(kept | {key: tensor for key, tensor in changes.items() if tensor is not None}, tmp_path, name)
    with pytest.raises(ModelError, match=rf"^IP-Adapter {name}: {name}.safetensors: .*{words}") as caught:
        read(tmp_path, name)
    assert str(tmp_path) not in str(caught.value)


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    file = save(state(model("plain"), plus=False), tmp_path, "cut")
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    torch.save({"image_proj": {}}, tmp_path / "pickle.bin")
    torch.save({"image_proj": {}}, tmp_path / "disguised.safetensors")
    for name, words in (
        ("cut", f"is no whole safetensors file: it has {len(whole) - 8} bytes of {len(whole)}"),
        ("pickle", "is a pickle, which could run code"),
        ("disguised", "is a pickle, whatever its name ends in"),
        ("nothing", "there is no nothing.safetensors and no folder nothing"),
    ):
        with pytest.raises(ModelError, match=f"^IP-Adapter {name}: .*{words}"):
            read(tmp_path, name)


def test_pictures_are_fitted_as_transformers_does(tmp_path: Path) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    own = VisionEncoder(encoder(tmp_path), CPU, torch.float32)
    processor = CLIPImageProcessorPil(size=32, crop_size=32)
    for size in ((300, 200), (200, 301), (32, 32), (33, 32), (37, 90), (1, 9), (333, 1001)):
        shown = picture(1, size)
        expected = processor(shown, return_tensors="pt").pixel_values
        assert torch.equal(own.fit(shown.tobytes(), size), expected), size


@pytest.mark.parametrize("turned", [False, True])
def test_of_a_line_only_the_middle_is_enlarged(
    turned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A picture of 1 by 8192 pixels would take gigabytes on its way to an encoder's square."""
    own, made = VisionEncoder(encoder(tmp_path), CPU, torch.float32), list[tuple[int, int]]()
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda image, size, *more: made.append(size) or resize(image, size, *more)
    )
    line, middle = ((8192, 1), (16, 1)) if turned else ((1, 8192), (1, 16))
    shown = picture(1, line)
    box = ((8192 - 16) // 2 * turned, (8192 - 16) // 2 * (not turned))
    cut = shown.crop((*box, box[0] + middle[0], box[1] + middle[1]))
    assert torch.equal(own.fit(shown.tobytes(), line), own.fit(cut.tobytes(), middle))
    assert made and all(width * height <= 16 * 32 * 32 for width, height in made)


def test_files_in_8_bits_and_of_shapes_that_nothing_has(tmp_path: Path) -> None:
    whole = state(model("plain"), plus=False)
    save({key: tensor.to(torch.float8_e4m3fn) for key, tensor in whole.items()}, tmp_path, "eight")
    found = read(tmp_path, "eight").adapter
    assert torch.equal(found.layers[0][0].float(), whole[FIRST].to(torch.float8_e4m3fn).float())
    odd = {**state(model("plain"), plus=True), "image_proj.layers.0.0.to_q.weight": torch.tensor(1.0)}
    save(odd, tmp_path, "odd")
    with pytest.raises(ModelError, match=r"^IP-Adapter odd: is no adapter that is known, or damaged"):
        read(tmp_path, "odd")


def test_folders_that_are_no_encoders_keep_none_from_being_found(tmp_path: Path) -> None:
    save(state(model("plain"), plus=False), tmp_path, "base")
    (tmp_path / "a broken one").mkdir()
    (tmp_path / "a broken one" / "config.json").write_text("{")
    file = ip_adapter_file.find(tmp_path, "base")
    adapter = read(tmp_path, "base").adapter
    with pytest.raises(ModelError, match=r"a broken one/config\.json: is not JSON"):
        ip_adapter_file.find_encoder(tmp_path, "base", file, adapter)
    encoder(tmp_path / "other").rename(tmp_path / "b-encoder")
    assert ip_adapter_file.find_encoder(tmp_path, "base", file, adapter) == tmp_path / "b-encoder"


def test_an_encoders_own_normalization_is_read_and_damage_is_named(tmp_path: Path) -> None:
    where = encoder(tmp_path)
    (where / "preprocessor_config.json").write_text('{"image_mean": [0, 0.5, 1], "image_std": [1, 1, 0.5]}')
    own = VisionEncoder(where, CPU, torch.float32)
    white = own.fit(Image.new("RGB", (40, 32), "white").tobytes(), (40, 32))
    assert white[0, :, 5, 5].tolist() == [1.0, 0.5, 0.0]
    (where / "preprocessor_config.json").write_text('{"image_mean": 0.5}')
    with pytest.raises(ModelError, match="image_mean and image_std must be 3 numbers"):
        VisionEncoder(where, CPU, torch.float32)
    (where / "model.safetensors").write_text("nothing")
    with pytest.raises(ModelError, match=r"image_encoder/model\.safetensors: is damaged"):
        VisionEncoder(where, CPU, torch.float32)


def test_a_right_folder_gives_no_warning_and_a_nested_file_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With encoders beside the adapters, which `find_encoder` takes; of the demonstration's own too."""
    save(state(model("plain"), plus=False), tmp_path, "base")
    encoder(tmp_path)
    encoder(tmp_path / "other").rename(tmp_path / "b-encoder")
    (tmp_path / "other").rmdir()
    assert ip_adapter_file.offered(tmp_path) == ["base"]
    assert ip_adapter_file.offered(EMBEDDED_MODEL.parent / "emoji-xl-ip-adapters")
    assert not caplog.records
    (tmp_path / "nested").mkdir()
    save(state(model("plain"), plus=False), tmp_path / "nested", "inner")
    ip_adapter_file.offered(tmp_path)
    (record,) = caplog.records
    assert record.getMessage() == f"{tmp_path / 'nested'} is not offered: only files right in the folder are"
