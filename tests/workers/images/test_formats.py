"""Pictures as files of each form, with what they were made of inside; and the shelf that they are put on."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contract.errors import Invalid
from contract.image import MEDIA_TYPES, ImageJob, ImageParameters
from contract.picture_input import Edit
from core.artifacts import Artifacts, key_of
from core.config import Settings
from pipeline.pixels import provenance
from pipeline.pixels.picture import Picture
from tests.workers.desk import JOB
from workers.artifact_writer import ArtifactWriter
from workers.images.formats import ImageFormat, encode, preview

PIXELS = np.random.default_rng(7).integers(0, 256, (48, 64, 3), dtype=np.uint8)
SMOOTH = np.tile(np.linspace(0, 255, 64, dtype=np.uint8)[None, :, None], (48, 1, 3))


def picture(pixels: np.ndarray[Any, Any] = PIXELS, **more: Any) -> Picture:
    parameters = ImageParameters('ein Fuchs 🦊\n"', 2**63 - 1, 64, 48, **more)
    return Picture(Image.fromarray(pixels), parameters, {"model": "m", "bucket": None}, sampler="euler-ancestral")


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def told(image: Image.Image) -> dict[str, Any]:
    """What EXIF's MakerNote holds; its UserComment is the same in another grammar."""
    held = image.getexif().get_ifd(0x8769)
    assert held[0x9286][:8] == b"UNICODE\0"
    comment = held[0x9286][8:].decode("utf-16-be")
    assert comment.startswith('ein Fuchs 🦊\n"\nSteps: 20, Sampler: Euler a, Schedule type: Automatic, CFG scale')
    return dict(json.loads(held[0x927C]))


def test_what_is_shown_on_the_way_changes_no_bit() -> None:
    for name in MEDIA_TYPES:
        assert encode(picture(preview_every=3), ImageFormat(name)) == encode(picture(), ImageFormat(name))
    assert encode(picture(preview_every=3), ImageFormat()) == picture().png()


def test_webp_loses_nothing_at_its_best() -> None:
    data = encode(picture(), ImageFormat("webp"))
    image = opened(data)
    assert image.format == "WEBP" and np.array_equal(np.asarray(image), PIXELS)
    assert told(image)["parameters"] == json.loads(json.dumps(picture().parameters.to_dict()))
    assert told(image)["fingerprint"] == {"model": "m", "bucket": None}
    assert len(encode(picture(), ImageFormat("webp", 50))) < len(data) / 2


def test_jpeg_is_near_and_smaller_as_asked() -> None:
    sizes = [len(encode(picture(), ImageFormat("jpeg", quality))) for quality in (0, 50, 100)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[2] / 4
    image = opened(encode(picture(SMOOTH), ImageFormat("jpeg")))
    assert image.format == "JPEG" and told(image)["parameters"]["seed"] == 2**63 - 1
    assert np.abs(np.asarray(image).astype(int) - SMOOTH.astype(int)).max() <= 2


@pytest.mark.parametrize("form", MEDIA_TYPES)
def test_without_metadata_files_hold_pixels_only(form: str) -> None:
    bare = encode(picture(), ImageFormat(form), metadata=False)
    image = opened(bare)
    assert not image.getexif() and not {"parameters", "diptych", "fingerprint", "exif"} & image.info.keys()
    assert np.array_equal(np.asarray(image), np.asarray(opened(encode(picture(), ImageFormat(form)))))
    for sign in ("utf-8", "utf-16-be"):
        assert "Fuchs".encode(sign) not in bare


@pytest.mark.parametrize(("signs", "fields"), [(3_000, 2), (8_000, 1)])
def test_a_jpeg_holds_as_much_as_fits_into_its_64_kib(signs: int, fields: int) -> None:
    """Of the longest prompts the fields of other tools before our own; of still longer ones none."""
    long = replace(picture().parameters, prompt="火" * signs, negative_prompt="水" * signs)
    one = replace(picture(), parameters=long)
    held = opened(encode(one, ImageFormat("jpeg"))).getexif().get_ifd(0x8769)
    assert len(held) == fields and "火" * signs in held[0x9286][8:].decode("utf-16-be")
    whole = opened(encode(one, ImageFormat("webp"))).getexif().get_ifd(0x8769)
    assert json.loads(whole[0x927C])["parameters"]["negative_prompt"] == "水" * signs
    longest = replace(picture(), parameters=replace(long, prompt="🦊" * 10_000, negative_prompt="🐺" * 10_000))
    assert not opened(encode(longest, ImageFormat("jpeg"))).getexif()


@pytest.mark.parametrize(
    ("field", "value"),
    [("output_format", "gif"), ("output_format", 3), ("output_compression", 101), ("output_compression", -1),
     ("output_compression", True), ("output_compression", 5.0)],
)  # fmt: skip
def test_what_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(Invalid, match=f"^{field}: "):
        ImageJob.read({**JOB, field: value}).pictures()


def test_a_preview_is_a_small_png() -> None:
    image = opened(base64.b64decode(preview(PIXELS)))
    assert image.format == "PNG" and np.array_equal(np.asarray(image), PIXELS)


def test_the_shelf_waits_until_a_deletion_is_over() -> None:
    artifacts, asked = Artifacts("memory://"), []

    def keep(key: str) -> bool:
        asked.append(key)
        return len(asked) > 2

    artifact_writer = ArtifactWriter(artifacts, keep)
    key = artifact_writer.put(b"data", "image/webp")
    assert asked == [key] * 3 and artifact_writer.keys == [key] == [key_of(b"data", "image/webp")]
    assert artifacts.get(key) == b"data" and key.endswith(".webp")


@pytest.mark.parametrize("name", MEDIA_TYPES)
@pytest.mark.parametrize("edit", [None, Edit(PIXELS.tobytes())], ids=["generated", "edited"])
def test_every_format_is_marked_whether_or_not_it_tells_how_it_was_made(
    name: str, edit: Edit | None, tmp_path: Path
) -> None:
    c2pa = pytest.importorskip("c2pa", exc_type=ImportError)
    marks = provenance.of(Settings(provenance="c2pa", data_dir=tmp_path))
    made = picture(edit=edit)
    data = encode(replace(made, provenance=marks), ImageFormat(name), metadata=False)
    with c2pa.Reader(MEDIA_TYPES[name], io.BytesIO(data)) as reader:
        report = json.loads(reader.json())
    assert report["validation_state"] == "Valid"
    assert made.source_type in json.dumps(report)
    xmp = opened(data).info["XML:com.adobe.xmp" if name == "png" else "xmp"]
    assert made.source_type in (xmp if isinstance(xmp, str) else xmp.decode())
    plain = encode(made, ImageFormat(name), metadata=False)
    assert opened(data).tobytes() == opened(plain).tobytes()
