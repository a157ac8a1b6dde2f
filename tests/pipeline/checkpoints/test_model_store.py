"""Models are added from files, addresses and folders, and whatever fails leaves nothing of them."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from pipeline.checkpoints import release_assets, tiny
from pipeline.checkpoints.folder import ModelError, local
from pipeline.checkpoints.load import load
from pipeline.checkpoints.model_store import AddOptions, add, names
from pipeline.checkpoints.single_file import CheckpointOptions
from tests.http_server import Handler, LocalServer
from tests.pipeline.original_layout import checkpoint
from tests.pipeline.worlds import SHAPES

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    return tiny.save(tmp_path_factory.mktemp("models") / "base", SHAPES["plain"], seed=5)


@pytest.fixture(scope="module")
def own() -> Any:
    return tiny.make(SHAPES["plain"], seed=1)


@pytest.fixture
def file(own: Any, tmp_path: Path) -> Path:
    save_file(checkpoint(own), tmp_path / "My Model v1.safetensors")
    return tmp_path / "My Model v1.safetensors"


@pytest.fixture
def address(file: Path) -> Iterator[str]:
    """Of a server that has this file, and one that is no checkpoint."""

    class Page(Handler):
        def respond(self) -> None:
            lora = save({"lora_unet_x.lora_down.weight": torch.zeros(2**18)})
            data = lora if "lora" in self.path else file.read_bytes()
            self.answer(200, data, {"ETag": '"one"'})

    with LocalServer(Page) as server:
        yield f"{server.url}/mine.safetensors?token=secret"


def options(base: Path, **changed: Any) -> AddOptions:
    return replace(AddOptions(CheckpointOptions(str(base)), 2**30), **changed)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def check_is_the_models(folder: Path, own: Any) -> None:
    model = load(str(folder), precision="fp32")
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        expected = getattr(own, part).state_dict()
        found = model.parts[part].state_dict()
        assert all(torch.equal(found[key], expected[key]) for key in expected), part


def test_a_file_is_added_under_its_own_name(file: Path, base: Path, own: Any, tmp_path: Path) -> None:
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    found = add(str(file), tmp_path / "store", options(base, sha256=sha256.upper()))
    assert found == (tmp_path / "store/My-Model-v1", sha256)
    check_is_the_models(found.folder, own)
    assert names(tmp_path / "store") == ["My-Model-v1"] and file.is_file()
    assert names(tmp_path / "nowhere") == []


def test_an_address_is_downloaded_converted_and_not_kept_twice(
    address: str, base: Path, own: Any, tmp_path: Path
) -> None:
    counted: list[tuple[str, int, int]] = []
    found = add(address, tmp_path / "store", options(base, count=lambda *told: counted.append(told)))
    assert found.folder.name == "mine" and counted[-1][1] == counted[-1][2]
    check_is_the_models(found.folder, own)
    assert files_in(tmp_path / "store") == files_in(found.folder)


def test_a_wrong_hash_leaves_nothing(address: str, file: Path, base: Path, tmp_path: Path) -> None:
    actual = hashlib.sha256(file.read_bytes()).hexdigest()
    for source in (address, str(file)):
        with pytest.raises(ModelError, match=f"its SHA-256 is {actual}, not {'0' * 64}") as caught:
            add(source, tmp_path / "store", options(base, sha256="0" * 64))
        assert "secret" not in str(caught.value)
    assert file.is_file() and not files_in(tmp_path / "store")


def test_what_is_no_checkpoint_is_refused_while_it_is_downloaded(address: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"/lora\.safetensors: is a LoRA"):
        add(address.replace("mine", "lora"), tmp_path / "store", options(base))
    assert not files_in(tmp_path / "store")


def test_a_folder_is_copied_without_its_pickles(base: Path, tmp_path: Path) -> None:
    mine = tiny.save(tmp_path / "mine", SHAPES["plain"])
    (mine / "unet/diffusion_pytorch_model.bin").write_bytes(b"x")
    (mine / ".git").mkdir()
    found = add(str(mine), tmp_path / "store", options(base, name="other"))
    assert found == (tmp_path / "store/other", "")
    assert load(str(found.folder)).digest == load(str(mine)).digest
    assert not list(found.folder.rglob("*.bin")) and not (found.folder / ".git").exists()
    assert not (found.folder / WEIGHTS).samefile(mine / WEIGHTS)


def test_a_repository_of_the_hub_is_linked_from_its_cache(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As huggingface_hub lays its cache out: a snapshot of links to files named by their content."""
    import huggingface_hub.constants

    cache = tmp_path / "hub/models--somebody--thing"
    blobs, snapshot = cache / "blobs", cache / "snapshots" / ("a" * 40)
    blobs.mkdir(parents=True)
    for number, path in enumerate(path for path in base.rglob("*") if path.is_file()):
        (blobs / str(number)).write_bytes(path.read_bytes())
        target = snapshot / path.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(blobs / str(number))
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    found = add("somebody/thing", tmp_path / "store", options(base))
    assert found.folder.name == "thing" and load(str(found.folder)).digest == load(str(base)).digest
    weights = found.folder / WEIGHTS
    assert not weights.is_symlink() and weights.stat().st_nlink == 2


@pytest.mark.parametrize(
    ("source", "changed", "told"),
    [
        ("{file}", {"name": "../up"}, "--name: must be letters"),
        ("{file}", {"name": "taken"}, "--name: there is a model taken already"),
        ("{file}", {"sha256": "abc"}, "--sha256: must be 64 hexadecimal digits"),
        ("{base}", {"sha256": "0" * 64}, "--sha256: is of a file"),
        ("{folder}", {}, r"model_index\.json is missing"),
        ("nowhere", {}, "no such folder"),
        ("", {}, "the name is empty"),
        ("ftp://127.0.0.1/x", {}, "must begin with https"),
    ],
)
def test_what_cannot_be_added_is_named(
    source: str, changed: dict[str, Any], told: str, file: Path, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    given = options(base, is_taken=lambda name: name == "taken", **changed)
    with pytest.raises(ModelError, match=told):
        add(source.format(file=file, base=base, folder=tmp_path / "folder"), tmp_path / "store", given)
    assert not files_in(tmp_path / "store")


def test_a_model_is_not_replaced(file: Path, base: Path, tmp_path: Path) -> None:
    add(str(file), tmp_path / "store", options(base, name="it"))
    before = (tmp_path / "store/it/model_index.json").stat()
    for source in (file, base):
        with pytest.raises(ModelError, match="--name: there is a model it already; give another"):
            add(str(source), tmp_path / "store", options(base, name="it"))
    assert (tmp_path / "store/it/model_index.json").stat() == before


def vae_file(folder: Path, layout: str) -> tuple[Path, Any]:
    """A VAE alone, in a file of this layout, or a folder."""
    other = tiny.make(SHAPES["plain"], seed=9)
    prefix = "first_stage_model."
    original = {key: value for key, value in checkpoint(other).items() if key.startswith(prefix)}
    if layout == "folder":
        other.vae.register_to_config(force_upcast=False)
        other.vae.save_pretrained(folder / "vae")
        return folder / "vae", other.vae
    if layout == "model":
        other.save_pretrained(folder / "model")
        return folder / "model", other.vae
    states = {
        "original": original, "bare": {key.removeprefix(prefix): value for key, value in original.items()},
        "diffusers": dict(other.vae.state_dict()),
    }  # fmt: skip
    save_file(states[layout], folder / "vae.safetensors")
    return folder / "vae.safetensors", other.vae


Publish = Callable[..., str]


ARCHIVE = io.BytesIO()
with zipfile.ZipFile(ARCHIVE, "w") as _written:
    _written.writestr("small/model_index.json", "{}")


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], str]]:
    """Publishes a release whose index pins `ARCHIVE` as `small`, and whose server sends these bytes; its address."""
    sent: list[bytes] = []

    class Page(Handler):
        def respond(self) -> None:
            self.answer(200 if self.path == "/v1/small.zip" else 404, sent[-1])

    with LocalServer(Page) as server:

        def publish(data: bytes, address: str = f"{server.url}/v1") -> str:
            sent.append(data)
            entry = {"bytes": len(ARCHIVE.getvalue()), "sha256": hashlib.sha256(ARCHIVE.getvalue()).hexdigest()}
            index = {"address": address, "models": {"small": entry}}
            (tmp_path / "assets.json").write_text(json.dumps(index))
            monkeypatch.setattr(release_assets, "INDEX", tmp_path / "assets.json")
            return f"{server.url}/v1/small.zip"

        yield publish


@pytest.mark.parametrize("source", ["name", "address", "file"])
def test_a_model_of_the_release_is_added(source: str, release: Publish, base: Path, tmp_path: Path) -> None:
    mirror = release(ARCHIVE.getvalue(), **({} if source == "name" else {"address": ""}))
    (tmp_path / "small.zip").write_bytes(ARCHIVE.getvalue())
    given = {"name": "small", "address": mirror, "file": str(tmp_path / "small.zip")}[source]
    added = add(given, tmp_path / "store", options(base))
    assert added.folder == tmp_path / "store/small"
    assert files_in(tmp_path / "store") == ["model_index.json"]
    with pytest.raises(ModelError, match="there is a model small already"):
        add(given, tmp_path / "store", options(base))


def test_an_archive_of_other_bytes_leaves_nothing(release: Publish, base: Path, tmp_path: Path) -> None:
    other = bytearray(ARCHIVE.getvalue())
    other[-30] ^= 1
    for data, reason in ((bytes(other), "its SHA-256 is"), (bytes(other) + b"x", "more than the")):
        release(data)
        with pytest.raises(ModelError, match=reason):
            add("small", tmp_path / "store", options(base))
        assert not files_in(tmp_path / "store")


@pytest.mark.parametrize("at", ["name", "address", "file"])
def test_an_archive_has_the_digest_of_the_release(at: str, release: Publish, base: Path, tmp_path: Path) -> None:
    """Whatever `--sha256` says: nothing else bounds what an archive holds."""
    with zipfile.ZipFile(tmp_path / "small.zip", "w") as other:
        other.writestr("small/other", "")
    data = (tmp_path / "small.zip").read_bytes()
    source = {"name": "small", "address": release(data), "file": str(tmp_path / "small.zip")}[at]
    with pytest.raises(ModelError, match=r"--sha256: small\.zip of this release has [0-9a-f]{64}"):
        add(source, tmp_path / "store", options(base, sha256=hashlib.sha256(data).hexdigest()))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("source", ["~nobody-of-this-name/small.zip", f"{'x' * 300}/small.zip"])
def test_a_file_that_is_not_there_is_not_downloaded(source: str, release: Publish, base: Path, tmp_path: Path) -> None:
    release(ARCHIVE.getvalue())
    with pytest.raises(ModelError, match=r"small\.zip: no such file; `diptych models add small` downloads it"):
        add(source, tmp_path / "store", options(base))
    with pytest.raises(ModelError, match="no such file"):
        add(f"{source}.safetensors", tmp_path / "store", options(base))


@pytest.mark.parametrize("address", [None, ""])
def test_a_remedy_is_one_that_works(
    address: str | None, release: Publish, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build without its release's address cannot download; what it names instead is done here."""
    release(ARCHIVE.getvalue(), **({} if address is None else {"address": address}))
    (tmp_path / "small.zip").write_bytes(ARCHIVE.getvalue())
    monkeypatch.chdir(tmp_path)
    remedy = release_assets.listed()["small"].remedy
    source = re.match(r"`diptych models add (\S+)` (downloads|unpacks) it", remedy)
    assert source is not None and source[1] == ("small" if address is None else "small.zip")
    with pytest.raises(ModelError, match=f"small: is not installed; {re.escape(remedy)}$"):
        local("small")
    assert add(source[1], tmp_path / "store", options(base)).folder.is_dir()


def test_without_the_release_another_place_can_be_named(release: Publish, base: Path, tmp_path: Path) -> None:
    for address, told in (
        (release(b"").replace("/v1/small.zip", "/v2"), "answers 404 .*; the file or another address of small.zip can"),
        ("", "small: this build has no address .* file or address of small.zip"),
    ):
        release(b"", address=address)
        with pytest.raises(ModelError, match=told):
            add("small", tmp_path / "store", options(base))


@pytest.mark.parametrize("layout", ["original", "bare", "diffusers", "folder", "model"])
def test_a_vae_of_its_own_takes_the_place_of_the_baked_one(layout: str, file: Path, base: Path, tmp_path: Path) -> None:
    vae, expected = vae_file(tmp_path, layout)
    given = options(base, checkpoint=CheckpointOptions(str(base), vae=str(vae)))
    folder = add(str(file), tmp_path / "store", given).folder
    found = load_file(folder / "vae/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(found[key], value) for key, value in expected.state_dict().items())
    load(str(folder))


@pytest.mark.parametrize(
    ("layout", "dtype"), [("baked", torch.float32), ("bare", torch.float32), ("folder", torch.float16)]
)
def test_a_vae_is_run_in_fp16_only_if_its_folder_says_that_it_may_be(
    layout: str, dtype: torch.dtype, file: Path, base: Path, tmp_path: Path
) -> None:
    """Whatever the base's config says, which is about another VAE."""
    config = base / "vae/config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "force_upcast": False}))
    try:
        vae = "" if layout == "baked" else str(vae_file(tmp_path, layout)[0])
        given = options(base, checkpoint=CheckpointOptions(str(base), vae=vae))
        model = load(str(add(str(file), tmp_path / "store", given).folder), precision="fp16")
    finally:
        config.write_text(before)
    assert model.vae.dtype == dtype and model.denoiser.dtype == torch.float16


def test_a_file_without_a_vae_is_refused_as_one(file: Path, base: Path, tmp_path: Path) -> None:
    save_file({"lora_unet_x.alpha": torch.zeros(1)}, tmp_path / "lora.safetensors")
    for name, told in (
        ("lora.safetensors", r"lora\.safetensors: has no VAE; its first key is lora_unet_x"),
        ("gone", "gone: there is no such file"),
    ):
        given = options(base, checkpoint=CheckpointOptions(str(base), vae=str(tmp_path / name)))
        with pytest.raises(ModelError, match=told):
            add(str(file), tmp_path / "store", given)
