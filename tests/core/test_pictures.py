"""The reader of pictures: every mode and format that Pillow writes, by numpy or Pillow's own conversion in memory."""

from __future__ import annotations

import ast
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops

from core import pictures
from core.pictures import UnreadablePicture, alpha, decode, fitted, on_white, opened, orientation, read
from tests.core.present import present
from tests.faults.payloads import chunk

ROOT = Path(__file__).resolve().parents[2]
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16",
         "I;16B", "F")  # fmt: skip
LOSSLESS = ("PNG", "TIFF", "WEBP", "GIF", "BMP", "TGA", "PPM", "PCX", "SGI", "DDS")
SIZE = (16, 16)
DEEP = ("I", "I;16", "I;16B")


def picture(mode: str, seed: int) -> Image.Image:
    """A smooth picture of this mode whose samples, and alpha where it has one, differ."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[: SIZE[1], : SIZE[0]] / 15
    layers = [random.uniform(0, 1) * x + random.uniform(0, 1) * y for _ in range(4)]
    layers = [layer / max(layer.max(), 1e-6) for layer in layers]
    if mode == "F":
        return Image.fromarray(layers[0].astype(np.float32))
    if mode in DEEP:
        deep = Image.fromarray((layers[0] * 65535).astype(np.uint16))
        if mode == "I;16B":
            return Image.frombytes("I;16B", SIZE, np.asarray(deep).astype(">u2").tobytes())
        return deep.convert(mode)
    colours = Image.fromarray(np.dstack([(layer * 255).astype(np.uint8) for layer in layers]))
    if mode in ("La", "LA"):
        return colours.convert("LA").convert(mode)
    if mode in ("RGBa", "RGBA"):
        return colours.convert(mode)
    if mode == "LAB":
        from PIL import ImageCms

        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        lab = present(ImageCms.profileToProfile(colours.convert("RGB"), *profiles, outputMode="LAB"))
        return lab
    if mode == "PA":
        return colours.convert("RGB").convert("P").convert("PA")
    return colours.convert("RGB").convert(mode)


def expected(image: Image.Image) -> np.ndarray:
    """What a picture in memory looks like, in RGB on white."""
    if image.mode in DEEP:
        raw = image if image.mode != "I;16B" else image.convert("I")
        return np.repeat((np.asarray(raw).astype(np.int64) >> 8)[..., None], 3, 2)
    if image.mode == "F":
        return np.repeat(np.rint(np.asarray(image).astype(np.float64) * 255)[..., None], 3, 2)
    straight = image.convert("LA") if image.mode == "La" else image
    values = np.asarray(straight.convert("RGBA")).astype(np.float64)
    opacity = values[..., 3:] / 255
    return values[..., :3] * opacity + 255 * (1 - opacity)


def difference(image: Image.Image, wanted: Any) -> np.ndarray:
    return np.abs(np.asarray(image) - wanted)


def written(image: Image.Image, form: str, **options: Any) -> bytes | None:
    stream = io.BytesIO()
    try:
        image.save(stream, form, **options)
    except (OSError, KeyError, ValueError, AttributeError):  # as writers say that they do not take a mode
        return None
    return stream.getvalue()


def pairs() -> list[tuple[str, str]]:
    """Formats, and the modes that they keep: some writers convert deep samples themselves, or reduce colours."""
    Image.init()
    kept = []
    for form in LOSSLESS:
        for mode in MODES:
            data = written(picture(mode, 0), form) if form in Image.SAVE else None
            deep = mode in (*DEEP, "F")
            if data is None or (form == "GIF" and mode not in ("1", "L", "P")):
                continue
            lost = picture(mode, 0).has_transparency_data and not opened(data).has_transparency_data
            if not lost and (not deep or opened(data).mode.startswith(("I", "F"))):
                kept.append((form, mode))
    return kept


PAIRS = pairs()


def test_every_mode_that_a_file_can_have_is_among_them() -> None:
    assert {mode for _, mode in PAIRS} == {*MODES} - {"La"}
    assert len({form for form, _ in PAIRS}) == len(LOSSLESS)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PAIRS), st.integers(0, 2**16))
def test_a_file_looks_as_it_did_in_memory(pair: tuple[str, str], seed: int) -> None:
    form, mode = pair
    image = picture(mode, seed)
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    result = read(present(written(image, form, **options)))
    assert result.mode == "RGB"
    assert difference(result, expected(image)).max() <= (4 if mode in ("YCbCr", "LAB") else 1.5)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODES), st.integers(0, 99), st.integers(1, 40))
def test_a_picture_in_memory_is_composited_in_bands_of_any_height(mode: str, seed: int, rows: int) -> None:
    image = pictures._reduced(picture(mode, seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "_BAND", SIZE[0] * rows)
        assert difference(on_white(image), expected(picture(mode, seed))).max() <= 1.5
        straight = image.convert("LA") if mode == "La" else image
        assert np.array_equal(alpha(image), straight.convert("RGBA").getchannel("A"))


# -- deep samples ------------------------------------------------------------------------------------------------------


def png(depth: int, colour_type: int, rows: np.ndarray, extra: bytes = b"") -> bytes:
    """A PNG of these samples, [H, W] or [H, W, C], as 16-bit numbers or packed from their lowest bits."""
    import zlib

    height, width = rows.shape[:2]
    if depth == 16:
        lines = [row.astype(">u2").tobytes() for row in rows]
    else:
        bits = [[[int(v) >> shift & 1 for shift in range(depth - 1, -1, -1)] for v in row.ravel()] for row in rows]
        lines = [np.packbits(np.array(line, np.uint8)).tobytes() for line in bits]
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + line for line in lines))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", body) + chunk(b"IEND")


@pytest.mark.parametrize(("colour_type", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bits_are_read_as_their_8_bit_twin(colour_type: int, channels: int) -> None:
    samples = np.random.default_rng(1).integers(0, 2**16, (9, 7, channels))
    deep, twin = png(16, colour_type, samples), png(8, colour_type, samples >> 8)
    assert np.array_equal(read(deep), read(twin)) and np.array_equal(alpha(decode(deep)), alpha(decode(twin)))


@pytest.mark.parametrize(("depth", "most"), [(1, 1), (2, 3), (4, 15), (8, 255), (16, 65535)])
def test_a_transparent_grey_is_found_at_every_depth(depth: int, most: int) -> None:
    samples = np.array([[0, 1, most, most - 1]])
    for colour in (0, most):
        data = png(depth, 0, samples, chunk(b"tRNS", struct.pack(">H", colour)))
        assert np.array_equal(np.asarray(alpha(decode(data))) == 0, samples == colour)
        assert np.asarray(read(data))[0][samples[0] == colour].min() == 255, "white, whatever is under it"


def test_a_transparent_colour_of_16_bits_is_found() -> None:
    samples = np.array([[[65535, 256, 7], [65535, 65535, 65535]]])
    data = png(16, 2, samples, chunk(b"tRNS", struct.pack(">HHH", 65535, 256, 7)))
    assert np.asarray(alpha(decode(data))).tolist() == [[0, 255]]


@pytest.mark.parametrize(
    ("values", "greys"),
    [([0.0, 0.5, 1.0], [0, 128, 255]), ([0.0, 127.5, 255.0], [0, 128, 255]), ([-1.0, 0.25, 1.0], [0, 64, 255]),
     ([-5.0, 2.0, 999.0], [0, 2, 255])],
)  # fmt: skip
def test_floats_end_at_1_or_else_at_255(values: list[float], greys: list[int]) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.array([values], np.float32)).save(stream, "TIFF")
    assert np.asarray(read(stream.getvalue()))[0, :, 0].tolist() == greys


# -- CMYK, orientation, frames -----------------------------------------------------------------------------------------


def test_cmyk_is_inverted_where_adobe_says_so() -> None:
    image = picture("CMYK", 3)
    data = present(written(image, "JPEG", quality=100))
    at = data.index(b"\xff\xee")  # Adobe's marker
    plain = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
    assert difference(read(data), expected(image)).mean() < 3
    assert difference(read(plain), expected(ImageChops.invert(image))).mean() < 3


TURNS = {
    1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud, 5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, 3), 7: lambda a: np.rot90(a, 2).swapaxes(0, 1), 8: np.rot90,
}  # fmt: skip


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("form", ["PNG", "PNG behind its pixels", "XMP", "JPEG", "WEBP", "TIFF", "TIFF deep", "AVIF"])
def test_a_turned_picture_is_turned_back(form: str, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    array = np.random.default_rng(5).integers(0, 256, (2, 3, 3), dtype=np.uint8).repeat(16, 0).repeat(16, 1)
    image, kind = Image.fromarray(array), "WEBP" if form == "XMP" else form.split()[0]
    if form == "TIFF deep":
        image = image.convert("L").convert("I;16")
    plain = present(written(image, kind))
    if form == "XMP":
        xmp = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="{turn}"/></x:xmpmeta>'.encode()
        data = present(written(image, kind, xmp=xmp))
    elif form == "PNG behind its pixels":
        data = plain[:-12] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[-12:]
    else:
        data = present(written(image, kind, exif=exif))
    assert np.array_equal(read(data), TURNS[turn](np.asarray(read(plain))))


def test_damaged_exif_is_no_reason_to_refuse_a_picture() -> None:
    image = Image.new("RGB", (4, 2), "red")
    data = present(written(image, "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"))
    assert read(data).size == (4, 2) and orientation(opened(data)) == 1


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_the_first_frame_counts(form: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    data = present(written(frames[0], form, save_all=True, append_images=frames[1:]))
    assert difference(read(data), (255.0, 0, 0)).max() < 12


# -- sizes -------------------------------------------------------------------------------------------------------------

SIDES = st.integers(1, 60)


@settings(max_examples=100, deadline=None)
@given(SIDES, SIDES, SIDES, SIDES)
def test_a_picture_of_one_colour_fits_every_way(width: int, height: int, w: int, h: int) -> None:
    image = Image.new("RGB", (width, height), (10, 200, 30))
    for fit in ("crop", "contain", "stretch"):
        result = fitted(image, (w, h), fit)  # type: ignore[arg-type]
        assert result.size == (w, h) and len(result.getcolors() or ()) == 1


@pytest.mark.parametrize("fit", ["crop", "contain", "stretch", "exact"])
def test_an_equal_shape_is_resized_alike_by_all(fit: Any) -> None:
    image = picture("RGB", 1)
    plain = image.resize((8, 8), Image.Resampling.LANCZOS)
    assert np.array_equal(fitted(image, (8, 8), fit), plain)


def test_crop_keeps_the_middle_and_contain_all_of_it() -> None:
    array = np.zeros((4, 12, 3), np.uint8)
    array[:, :4], array[:, 4:8], array[:, 8:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    image = Image.fromarray(array)
    assert np.array_equal(fitted(image, (4, 4), "crop"), array[:, 4:8])
    whole = np.asarray(fitted(image, (12, 12), "contain"))
    assert np.array_equal(whole, np.pad(array, ((4, 4), (0, 0), (0, 0)), mode="edge"))
    mask = Image.new("L", (12, 4), 255)
    assert np.asarray(fitted(mask, (12, 12), "contain", surround=0)).sum() == 255 * 12 * 4


# -- errors, and the only place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"hello", (written(picture("RGB", 0), "PNG") or b"")[:-40]])
def test_what_is_no_picture_says_why(data: bytes) -> None:
    with pytest.raises(UnreadablePicture) as caught:
        read(data)
    assert str(caught.value)


def test_nothing_else_opens_or_converts_pictures() -> None:
    """A conversion that does not look at the mode is how 16 bits turned white."""
    elsewhere = []
    for folder in ("api", "cli", "contract", "core", "evaluation", "lab", "llm", "pipeline", "workers"):
        for path in (ROOT / folder).rglob("*.py"):
            if path == ROOT / "core" / "pictures.py":
                continue
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                call, first = ast.unparse(node.func), node.args[0] if node.args else None
                mode = first.value if isinstance(first, ast.Constant) else ""
                if (
                    call.endswith("Image.open")
                    or "exif_transpose" in call
                    or (node.func.attr == "convert" and mode in (*MODES, "RGB", "L"))
                ):
                    elsewhere.append(f"{path.relative_to(ROOT)}:{node.lineno}: {call}")
    assert not elsewhere
