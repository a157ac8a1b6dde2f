"""The picture's file: what it says of itself, that equal pictures are equal files, and that none is half-written."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from contract.image import ImageParameters
from contract.upscale import LANCZOS, Upscale
from pipeline.pixels.picture import Picture, file_name
from tests.pipeline.pixels.test_png import chunks

PRINT = {"model": "m", "weights": "abc", "bucket": None, "executable": "eager"}


def made(prompt: str = "a fox", seed: int = 7, noise: int = 0, **options: Any) -> Picture:
    pixels = np.random.default_rng(noise).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    return Picture(Image.fromarray(pixels), ImageParameters(prompt, seed, 32, 32, **options), PRINT)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=50))
@example("x" * 10_000)
def test_the_file_says_how_the_picture_was_made(tmp_path_factory: pytest.TempPathFactory, prompt: str) -> None:
    tmp_path = tmp_path_factory.mktemp("made")
    picture = made(prompt, negative_prompt="模糊 😱", guidance_scale=7.5)
    picture.write(tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as image:
        image.load()
        assert isinstance(image.text, dict)  # type: ignore[attr-defined]
        text = dict(image.text)  # type: ignore[attr-defined]
        assert np.array_equal(np.asarray(image), np.asarray(picture.image))
    assert ImageParameters(**json.loads(text["diptych"])) == picture.parameters
    assert json.loads(text["fingerprint"]) == PRINT
    assert set(text) == {"parameters", "diptych", "fingerprint"}  # no id, no time


def test_the_file_holds_no_other_chunks() -> None:
    kinds = Counter(kind for kind, _ in chunks(made().png()) if kind != b"IDAT")
    assert kinds == {b"IHDR": 1, b"tEXt": 1, b"iTXt": 2, b"IEND": 1}  # neither tIME nor eXIf


def test_without_metadata_the_file_holds_pixels_only() -> None:
    bare = made("a secret").png(metadata=False)
    with Image.open(io.BytesIO(bare)) as image:
        assert np.array_equal(np.asarray(image), np.asarray(made("a secret").image))
        assert not image.text  # type: ignore[attr-defined]
    assert b"secret" not in bare and bare == made("another", 8).png(metadata=False)


def test_equal_pictures_are_equal_files_and_others_are_not() -> None:
    assert made().png() == made().png()
    assert len({made().png(), made(seed=8).png(), made("a hen").png(), made(noise=1).png()}) == 4


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 1000 bytes: the kernel's own refusal, as on a full disk or over a quota.

    That holds for pytest's output too, where it goes into a file: nothing but the writing belongs inside.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("old", [[], [b"old"]])
def test_a_file_that_cannot_grow_leaves_what_was_there(tmp_path: Path, old: list[bytes]) -> None:
    for data in old:
        (tmp_path / "p.png").write_bytes(data)
    with pytest.raises(OSError) as caught, small_files():
        made().write(tmp_path / "p.png")
    assert caught.value.errno == errno.EFBIG
    assert [path.read_bytes() for path in tmp_path.iterdir()] == old


def test_folders_that_cannot_be_written_raise_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "taken.png").mkdir()
    for path in (tmp_path / "file/p.png", tmp_path / "missing/p.png", tmp_path / "taken.png", Path("/proc/p.png")):
        with pytest.raises(OSError):
            made().write(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.png"]


def test_ctrl_c_between_writing_and_renaming_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made().write(tmp_path / "p.png")
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_of_the_longest_name_may_be_read_by_whom_the_umask_says(tmp_path: Path) -> None:
    path, before = tmp_path / f"{'x' * 251}.png", os.umask(0o022)
    try:
        made().write(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644 and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("prompt", "name", "expected"),
    [
        ("Café crème", "12", "12-cafe-creme-7.png"),
        ("一只猫", "", "picture-7.png"),
        ("../../etc/passwd", "../../x", "_.._x-etc-passwd-7.png"),
        ("a" * 300, "", f"{'a' * 48}-7.png"),
        ("cat", "猫.1", "猫.1-cat-7.png"),
    ],
)
def test_file_names(prompt: str, name: str, expected: str) -> None:
    assert file_name(ImageParameters(prompt, 7, 32, 32), name) == expected


@given(st.text(max_size=400), st.text(max_size=400), st.integers(0, 2**63 - 1))
def test_file_names_stay_in_their_folder_and_within_limits(prompt: str, name: str, seed: int) -> None:
    found = file_name(ImageParameters(prompt, seed, 32, 32), name)
    assert Path(found).name == found and found.endswith(f"-{seed}.png")
    assert not found.startswith(".") and "\0" not in found
    assert len(found.encode()) < 200


def test_a_picture_cannot_be_altered_and_nan_is_never_written_as_json() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        made().warnings = ("x",)  # type: ignore[misc]
    with pytest.raises(ValueError, match="JSON"):
        made(guidance_scale=float("nan")).png()


@pytest.mark.parametrize(("scale", "size"), [(1.0, (32, 32)), (1.5, (48, 48)), (3.0, (96, 96))])
def test_a_filter_enlarges_a_finished_picture_and_leaves_what_it_says(scale: float, size: tuple[int, int]) -> None:
    picture = dataclasses.replace(made(upscale=Upscale(model=LANCZOS, scale=scale)), warnings=("w",), sampler="euler")
    enlarged = picture.enlarged()
    assert enlarged.image.size == size and picture.image.size == (32, 32)
    assert enlarged.image.tobytes() == picture.image.resize(size, Image.Resampling.LANCZOS).tobytes()
    for name in ("parameters", "fingerprint", "warnings", "sampler", "schedule_type"):
        assert getattr(enlarged, name) == getattr(picture, name)


@pytest.mark.parametrize("upscale", [None, Upscale(model="x4", scale=2.0)], ids=["none", "a network"])
def test_without_a_filter_a_picture_is_as_it_was_drawn(upscale: Upscale | None) -> None:
    """A network's picture came enlarged from the engine."""
    picture = made(upscale=upscale)
    assert picture.enlarged() is picture
