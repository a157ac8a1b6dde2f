"""`diptych generate --image`: what is kept, what is drawn anew, and what cannot be, as at /v1/images/edits."""

from __future__ import annotations

import argparse
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from api.pictures import codec as picture_codec
from cli.arguments import UsageError
from cli.editing import add_edit, read_edit
from contract.picture_input import Edit
from tests.cli.shell import Shell, made_with

SIDE = 32


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def assets(shell: Shell) -> Path:
    """Pictures: a source, its twin in 16 bits, one of another shape, one with a hole, and masks."""
    pixels = noise(SIDE, SIDE, 4)
    pixels[..., 3] = 255
    Image.fromarray(pixels[..., :3]).save("source.png")
    Image.fromarray(pixels[..., 0]).save("grey.png")
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save("grey16.png")
    Image.fromarray(noise(SIDE // 2, SIDE, 3)).save("wide.png")
    pixels[:, SIDE // 2 :, 3] = 0
    Image.fromarray(pixels).save("hole.png")
    pixels[:, SIDE // 2 :, 3] = 100
    Image.fromarray(pixels).save("soft.png")
    (shell.folder / "notes.txt").write_text("no picture")
    small = (shell.folder / "grey.png").read_bytes()
    header = b"IHDR" + struct.pack(">II", 20_000, 15_000) + small[24:29]
    (shell.folder / "huge.png").write_bytes(small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:])
    return shell.folder


def drawn(shell: Shell, *options: str) -> tuple[dict[str, Any], np.ndarray]:
    """A picture's parameters, and its pixels. As many steps are counted as are run."""
    said = shell.generate("a fox", "--seed", "1", "--precision", "fp32", "--steps", "4", *options)
    assert said.code == 0, said
    (count,) = {line.split()[2] for line in said.err.splitlines() if line.startswith("steps ")}
    assert len({*count.split("/")}) == 1
    (path,) = shell.pictures()
    return made_with(path), np.asarray(Image.open(path))


def test_a_source_is_followed_as_far_as_strength_says(shell: Shell, assets: Path) -> None:
    pictures = set()
    for options, strength in ((("--strength", "0.25"), 0.25), ((), 0.8)):
        made, pixels = drawn(shell, "--image", "source.png", *options)
        assert made["edit"]["strength"] == strength and made["edit"]["mask"] is None
        pictures.add(pixels.tobytes())
    made, pixels = drawn(shell)
    assert made.get("edit") is None and len({*pictures, pixels.tobytes()}) == 3


@given(
    st.sampled_from(["source.png", "wide.png", "hole.png", "soft.png", "grey16.png"]),
    st.sampled_from([None, "hole.png", "soft.png"]),
    st.sampled_from([None, (0, 8, 0, 8), (3, 0, 1, 0)]),
    st.sampled_from(["stretch", "crop", "contain"]),
    st.booleans(),
    st.sampled_from([(32, 32), (24, 40)]),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pictures_and_masks_are_the_apis_own(
    assets: Path, image: str, mask: str | None, margins: Any, fit: str, soft: bool, size: tuple[int, int]
) -> None:
    """Of the same files, byte for byte."""
    words = ["--image", image, "--fit", fit, *(["--soft-mask"] if soft else [])]
    words += [] if mask is None else ["--mask", mask]
    words += [] if margins is None else ["--outpaint", ",".join(map(str, margins))]
    parser = argparse.ArgumentParser()
    add_edit(parser)
    try:
        _, source = read_edit(parser.parse_args(words))
    except UsageError:
        assert mask is not None and (image == "wide.png" or (mask == "soft.png" and not soft))
        return
    assert source is not None
    edit = source.fill(Edit(soft_mask=soft), size)
    data = Path(image).read_bytes()
    arguments = {"margins": margins, "size": size, "fit": fit, "soft": soft, "own_size": source.image.size}
    assert edit.image == pixels_of(picture_codec.fit_picture(arguments, [data])[1])
    has_hole = picture_codec.find_hole(arguments, [data])[0]
    hole = Path(mask).read_bytes() if mask is not None else data if has_hole else None
    if hole is None and margins is None:
        assert edit.mask is None and not source.masked
    else:
        assert edit.mask == pixels_of(picture_codec.fit_mask(arguments, [] if hole is None else [hole])[1])


def pixels_of(blobs: list[bytes]) -> bytes:
    return Image.open(io.BytesIO(blobs[0])).tobytes()


@pytest.mark.parametrize(
    "options",
    ["--image source.png --mask hole.png", "--image hole.png --size 32x32"],
    ids=["a mask", "a hole of the source's own"],
)
def test_only_what_is_transparent_is_drawn_anew(shell: Shell, assets: Path, options: str) -> None:
    made, pixels = drawn(shell, *options.split())
    kept = np.asarray(Image.open("source.png"))
    assert made["edit"]["strength"] == 1.0
    assert np.array_equal(pixels[:, : SIDE // 2], kept[:, : SIDE // 2])
    assert not np.array_equal(pixels[:, SIDE // 2 :], kept[:, SIDE // 2 :])


@pytest.mark.parametrize(
    ("image", "options", "kept"),
    [
        # A square source with a quarter more on two sides, in a square of the same pixels.
        ("wide.png", f"--outpaint 0,8,0,8 --size {SIDE}x{SIDE}", np.s_[8:24]),
        # In its own size, as in the API, also where that is in the model's range alone.
        ("source.png", "--outpaint 0,0,8,0", np.s_[:, :SIDE]),
    ],
)
def test_margins_are_drawn_and_the_source_is_kept(
    shell: Shell, assets: Path, image: str, options: str, kept: Any
) -> None:
    made, pixels = drawn(shell, "--image", image, *options.split())
    assert made["edit"]["mask"] is not None and pixels.shape == (made["height"], made["width"], 3)
    assert np.array_equal(pixels[kept], np.asarray(Image.open(image)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--mask hole.png", "--mask: needs an --image"),
        ("--outpaint 1,1,1,1", "--outpaint: needs an --image"),
        ("--image notes.txt", "--image: notes.txt cannot be read as a picture"),
        ("--image source.png --mask gone.png", "--mask: gone.png cannot be read as a picture"),
        ("--image wide.png --mask hole.png", "--mask: must have the width and height of --image"),
        ("--image source.png --mask soft.png", "--mask: soft.png has no transparent pixel"),
        ("--image source.png --strength 1.5", "--strength: must be between 0 and 1, not 1.5"),
        ("--image source.png --strength 0.01", "--strength: 0.01 of 2 steps is less than one step"),
        ("--image wide.png --fit exact", "--image: is 32x16, and the picture 16x16"),
        ("--image source.png --soft-mask", "--soft-mask: needs a mask"),
        ("--image source.png --outpaint 0,0,0,0", "--outpaint: must be pixels of left, top, right, bottom"),
        ("--image source.png --outpaint 0,0,5000,0", "right, bottom, at most 4096 each, such as"),
        ("--image .", "--image: . cannot be read as a picture (Is a directory)"),
        ("--image huge.png", "--image: huge.png cannot be read as a picture (Image size (300000000 pixels)"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(shell: Shell, assets: Path, options: str, message: str) -> None:
    assert message in shell.refused("a fox", "--precision", "fp32", *options.split())
