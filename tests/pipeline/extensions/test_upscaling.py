"""Pictures enlarged by an ESRGAN network: tile by tile, between others' iterations, and as the whole would be."""

from __future__ import annotations

import ctypes
import io
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from contract.errors import Invalid
from contract.image import Edit, ImageParameters
from contract.upscale import MAX_SIDE, Upscale
from pipeline.backends.phases import UPSCALE
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import upscaling
from pipeline.extensions.esrgan import Shape
from pipeline.extensions.upscaling import TiledUpscale, UpscalerFolder
from tests.pipeline import upscalers, worlds
from tests.pipeline.extensions.checks import refusal
from tests.pipeline.pixels.test_edit import hole, photograph
from tests.pipeline.worlds import Crank, Watching, apart, levels, model, options_of, solo, together

SHAPE = "upscaled"


@pytest.fixture(scope="module", autouse=True)
def shapes() -> None:
    worlds.MORE[SHAPE] = tiny.SDXLShape(heads=(1, 2))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upscaling, "_TILES", {"cpu": 16})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> UpscalerFolder:
    """Networks whose results depend on fewer pixels around than a tile's margin."""
    where = tmp_path_factory.mktemp("upscalers")
    upscalers.write(where, "four", Shape(8, 4, 1))
    upscalers.write(where, "two", Shape(8, 4, 1, 1), layout="oldest", seed=1)
    return UpscalerFolder(where)


def wanted(name: str | None = "four", scale: float | None = None, **options: Any) -> ImageParameters:
    enlarged = None if name is None else Upscale(model=name, scale=scale)
    return ImageParameters(**{"prompt": "a red hat", "seed": 3, "width": 40, "height": 24, "steps": 3, **options},
                           upscale=enlarged)  # fmt: skip


def whole(folder: UpscalerFolder, name: str, pixels: np.ndarray) -> np.ndarray:
    """The picture [H, W, 3] through the network at once."""
    x = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None] / 255
    with torch.inference_mode():
        made = folder.get(name).network(x)[0]
    return made.clamp(0, 1).mul(255).round().permute(1, 2, 0).numpy().astype(int)


@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_finished_pictures_are_enlarged_alone_and_among_others(
    folder: UpscalerFolder, backend: str, kernels: ctypes.CDLL
) -> None:
    runner = Watching(model(SHAPE), upscalers=folder, **options_of(backend, kernels))
    edit = Edit(photograph(32).tobytes(), hole(32).tobytes(), 1.0)
    parameters = [
        wanted(), wanted("two", seed=4), wanted(None, seed=5), wanted(seed=6, deterministic=True), wanted("four", 2.5),
        wanted("two", width=32, height=32, edit=edit),
    ]  # fmt: skip
    pictures = together(runner, parameters)
    for one, picture in zip(parameters, pictures, strict=True):
        plain = levels(solo(runner, replace(one, upscale=None)))
        assert apart(solo(runner, one), picture) <= 1
        if one.upscale is None:
            assert apart(picture, plain) <= 1 and "upscaler" not in picture.fingerprint
            continue
        assert list(picture.fingerprint["upscaler"]) == [one.upscale.model]
        expected = whole(folder, one.upscale.model, plain.astype(np.uint8))
        assert expected.std() > 5, "a flat picture would prove nothing"
        if one.upscale.scale is not None:
            assert picture.image.size == (100, 60)
            reduced = Image.fromarray(expected.astype(np.uint8)).resize((100, 60), Image.Resampling.LANCZOS)
            expected = np.asarray(reduced).astype(int)
        if backend == "kernels":  # where a picture's bits do not depend on the others
            assert apart(picture, expected) <= 1, one
    assert solo(runner, parameters[3]).png() == pictures[3].png()
    runner.close()


def test_others_are_served_between_two_tiles(folder: UpscalerFolder) -> None:
    runner = Watching(model(SHAPE), upscalers=folder)
    crank = Crank(runner)
    crank.submit("large", wanted(steps=2), priority=5)
    while not any(phase == UPSCALE for phase, _ in runner.rides):
        crank.turn()
    crank.submit("urgent", wanted(None, steps=2), priority=0)
    pictures = crank.pictures()
    assert {name: picture.image.size for name, picture in pictures.items()} == {"large": (160, 96), "urgent": (40, 24)}
    phases = [phase for phase, _ in runner.rides]
    tiles = [number for number, phase in enumerate(phases) if phase == UPSCALE]
    assert len(tiles) == 6, "of 40×24 pixels in tiles of 16"
    assert {"encode", "deep", "vae"} <= {*phases[tiles[0] : tiles[-1]]}
    assert all(len(riders) == 1 for phase, riders in runner.rides if phase == UPSCALE)


@pytest.mark.parametrize("size", [(16, 16), (17, 40), (33, 15), (5, 3)])
def test_tiles_make_the_whole(folder: UpscalerFolder, size: tuple[int, int]) -> None:
    """A network that sees no further than the margin."""
    pixels = np.asarray(photograph(64).resize(size))
    canvas, tiles = enlarged(folder, pixels)
    assert len(tiles) == -(-size[0] // 16) * -(-size[1] // 16)
    assert apart(canvas, whole(folder, "two", pixels)) <= 1


def enlarged(folder: UpscalerFolder, pixels: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """A picture tile by tile, and each tile's longest side with its margin."""
    upscaler, sides = folder.get("two"), list[int]()
    work = TiledUpscale(upscaler, torch.from_numpy(pixels.copy()), torch.device("cpu"), torch.float32)
    hook = upscaler.network.register_forward_pre_hook(lambda _, given: sides.append(max(given[0].shape[2:])))
    left = work.left
    while work.left:
        work.compute()
        work.done += 1
        assert work.left == left - len(sides)
    hook.remove()
    return work.canvas.numpy().astype(int), sides


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_large_networks_are_smaller(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of published ones are as they were; none takes more than its budget, however many filters it has."""
    monkeypatch.setattr(upscaling, "_TILES", {"cpu": 128})
    usual, budget = (128, 2**29) if device == "cpu" else (512, 2**32)
    for shape in (Shape(), Shape(doublings=1), Shape(blocks=6), Shape(doublings=2, unshuffle=2)):
        assert upscaling.tile_side(shape, torch.device(device), dtype) == usual
    for filters, growth, doublings, unshuffle in itertools.product((64, 256), (32, 256), range(6), (1, 2, 4)):
        shape = Shape(filters, growth, 23, doublings, unshuffle)
        if 1 <= 2**doublings / unshuffle <= 8:
            side = upscaling.tile_side(shape, torch.device(device), dtype)
            assert side >= 16 and shape.forward_bytes(side + 32, dtype.itemsize) <= budget


def test_a_network_that_needs_more_is_computed_in_smaller_tiles(
    folder: UpscalerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, pixels = folder.get("two").network.shape, np.asarray(photograph(64))
    budget = shape.forward_bytes(32 + 32, 4)
    monkeypatch.setattr(upscaling, "_TILES", {"cpu": 64})
    monkeypatch.setattr(upscaling, "_FORWARD_BYTES", {"cpu": budget})
    canvas, tiles = enlarged(folder, pixels)
    assert len(tiles) == 4 and all(shape.forward_bytes(side, 4) <= budget for side in tiles)
    assert apart(canvas, whole(folder, "two", pixels)) <= 1


def test_what_is_enlarged_counts_as_memory(folder: UpscalerFolder) -> None:
    runner = Watching(model(SHAPE), upscalers=folder)
    crank, taken = Crank(runner), []
    for name in (None, "four"):
        crank.submit(str(name), wanted(name))
        crank.turn()
        taken.append(runner.holdings.memory.taken)
    assert taken[1] - 2 * taken[0] == 3 * 40 * 24 * 16


def test_admission_reads_no_file(tmp_path: Path) -> None:
    """Requests wait while the networks of others take their places in memory, and files go."""
    for number in range(6):
        upscalers.write(tmp_path, f"net{number}", Shape(8, 4, 1, 1), seed=number)
    files = UpscalerFolder(tmp_path)
    runner = Watching(model(SHAPE), upscalers=files, max_requests=1)
    crank = Crank(runner)
    for number in range(6):
        crank.submit(str(number), wanted(f"net{number}", steps=2))
    for path in tmp_path.iterdir():
        path.unlink()
    pictures = crank.pictures()
    assert {picture.image.size for picture in pictures.values()} == {(80, 48)}
    assert len({repr(picture.fingerprint["upscaler"]) for picture in pictures.values()}) == 6


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (wanted("old"), "upscale: upscaler old: old.pth is a pickle"),
        (wanted("dir"), "upscale: upscaler dir: dir.safetensors is no file"),
        (wanted("net", 4.5), "upscale.scale: must be at most 4, the factor of net"),
        (wanted("../net"), "upscale.model: must be a name"),
    ],
)
def test_what_cannot_enlarge_is_refused_and_nobody_else(tmp_path: Path, one: ImageParameters, said: str) -> None:
    upscalers.write(tmp_path, "net")
    (tmp_path / "old.pth").write_bytes(b"")
    (tmp_path / "dir.safetensors").mkdir()
    runner = Watching(model(SHAPE), upscalers=UpscalerFolder(tmp_path))
    assert str(refusal(runner, one)).startswith(said)
    assert solo(runner, wanted("net")).image.size == (160, 96)


def test_without_a_folder_and_beyond_all_bounds_it_is_refused(folder: UpscalerFolder) -> None:
    error = refusal(Watching(model(SHAPE)), wanted())
    assert error.field == "upscale" and error.message.startswith("no folder of upscalers")
    large = replace(model(SHAPE), max_pixels=4096 * 4096)
    error = refusal(Watching(large, upscalers=folder), wanted(width=2048, height=2048))
    assert error.field == "upscale" and "4 times 2048x2048 is more than 33554432 pixels" in error.message


def test_sides_that_a_file_cannot_have_are_refused_before_anything_is_drawn() -> None:
    """WebP's are the shortest; its encoder refuses one more."""
    for size in ((2048, 256), (256, 2048)):
        with pytest.raises(Invalid, match=r"^upscale: it makes a side of more than 16383 pixels"):
            Upscale(model="x8").check_factor(*size, 8)
        Upscale(model="x8", scale=7.9).check_factor(*size, 8)
    Image.new("RGB", (MAX_SIDE, 1)).save(io.BytesIO(), "WEBP")
    with pytest.raises(ValueError, match="16383"):
        Image.new("RGB", (MAX_SIDE + 1, 1)).save(io.BytesIO(), "WEBP")


def test_a_changed_file_is_read_anew_and_a_running_request_keeps_its_own(tmp_path: Path) -> None:
    upscalers.write(tmp_path, "net", Shape(8, 4, 1), seed=0)
    files = UpscalerFolder(tmp_path)
    crank = Crank(Watching(model(SHAPE), upscalers=files))
    crank.submit("old", wanted("net"))
    crank.turn()
    path = upscalers.write(tmp_path, "net", Shape(8, 4, 1, 1), seed=5)
    crank.submit("new", wanted("net", 1.5))
    old, new = (crank.pictures()[name] for name in ("old", "new"))
    assert old.image.size == (160, 96) and new.image.size == (60, 36)
    assert old.fingerprint["upscaler"] != new.fingerprint["upscaler"]
    assert new.parameters.to_dict()["upscale"] == {"model": "net", "scale": 1.5}
    assert "Postprocess upscale by: 1.5, Postprocess upscaler: net" in new.infotext
    path.unlink()
    with pytest.raises(ModelError, match="there is no net"):
        files.get("net")
    assert files.asset_names() == [] and UpscalerFolder(tmp_path / "gone").asset_names() == []
