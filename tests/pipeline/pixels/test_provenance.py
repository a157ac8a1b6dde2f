"""Content credentials: verified by C2PA's own library, of the settings' key or of one made once in the data folder."""

from __future__ import annotations

import importlib.util
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contract.image import ImageParameters
from core.config import Settings
from pipeline.checkpoints.folder import ModelError
from pipeline.pixels import provenance
from pipeline.pixels.picture import Picture
from pipeline.pixels.provenance import GENERATED, Provenance
from tests.children import imports

c2pa = pytest.importorskip("c2pa", exc_type=ImportError)


def made() -> Picture:
    pixels = np.random.default_rng(0).integers(60, 196, (256, 256, 3), dtype=np.uint8)
    return Picture(Image.fromarray(pixels), ImageParameters("a fox", 7, 256, 256), {"model": "m"})


def report(data: bytes, root: str = "") -> dict[str, Any]:
    """What C2PA's library finds; with a certificate in PEM it trusts what that signed."""
    settings = {"trust": {"trust_anchors": root}, "verify": {"verify_trust": True}} if root else {}
    with c2pa.Reader("image/png", io.BytesIO(data), context=c2pa.Context(c2pa.Settings.from_dict(settings))) as reader:
        found: dict[str, Any] = json.loads(reader.json())
    return found


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Provenance:
    loaded = provenance.of(Settings(provenance="c2pa", data_dir=tmp_path_factory.mktemp("data")))
    assert loaded is not None
    return loaded


def test_a_signed_file_holds_the_same_image_and_says_that_it_is_generated(marks: Provenance) -> None:
    picture = made()
    data = replace(picture, provenance=marks).png()
    with Image.open(io.BytesIO(data)) as image, Image.open(io.BytesIO(picture.png())) as plain:
        assert image.tobytes() == plain.tobytes()
        assert GENERATED in image.info["XML:com.adobe.xmp"]
        assert image.info["parameters"] == plain.info["parameters"]
    found = report(data)
    assert found["validation_state"] == "Valid"
    (manifest,) = found["manifests"].values()
    (action,) = manifest["assertions"][0]["data"]["actions"]
    assert (action["action"], action["digitalSourceType"]) == ("c2pa.created", GENERATED)


def test_a_changed_file_is_not_valid(marks: Provenance) -> None:
    data = bytearray(replace(made(), provenance=marks).png())
    at = data.index(b"IDAT") + 100
    data[at] ^= 1
    assert report(bytes(data))["validation_state"] == "Invalid"


def test_processes_that_begin_together_share_one_key(tmp_path: Path) -> None:
    path = tmp_path / "data" / "provenance.pem"
    with ThreadPoolExecutor(4) as threads:
        pairs = {*threads.map(lambda _: provenance._own(path), range(4))}
    assert len(pairs) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*path.parent.iterdir()] == [path]


def test_a_file_system_without_links_holds_a_key_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "provenance.pem"
    assert provenance._own(path) == provenance._own(path)
    assert [*tmp_path.iterdir()] == [path] and path.stat().st_mode & 0o777 == 0o600


def test_without_the_extra_the_start_says_how_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install .*provenance"):
        provenance.of(Settings(provenance="c2pa", data_dir=tmp_path))
    assert not [*tmp_path.iterdir()]


def test_the_settings_key_signs_and_who_trusts_its_root_trusts_the_file(tmp_path: Path) -> None:
    certificates, key = provenance.self_signed()
    (tmp_path / "c.pem").write_text(certificates)
    (tmp_path / "k.pem").write_text(key)
    settings = {"provenance_certificate": tmp_path / "c.pem", "provenance_key": tmp_path / "k.pem"}
    marks = provenance.of(Settings(provenance="c2pa+watermark", data_dir=tmp_path / "data", **settings))
    assert marks is not None
    assert not (tmp_path / "data").exists()
    root = certificates[certificates.rindex("-----BEGIN") :]
    assert report(replace(made(), provenance=marks).png(), root)["validation_state"] == "Trusted"


def test_a_key_that_cannot_sign_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text(provenance.self_signed()[0])
    (tmp_path / "k.pem").write_text(provenance.self_signed()[1])  # another's
    (tmp_path / "x.pem").write_text("nothing")
    for certificate, key in (("c", "k"), ("x", "k"), ("c", "x"), ("none", "k"), ("c", None)):
        given = {"provenance_certificate": tmp_path / f"{certificate}.pem"}
        given |= {"provenance_key": tmp_path / f"{key}.pem"} if key else {}
        with pytest.raises(ModelError, match="provenance_key"):
            provenance.of(Settings(provenance="c2pa", data_dir=tmp_path, **given))


def test_without_the_setting_nothing_is_imported(tmp_path: Path) -> None:
    assert provenance.of(Settings(data_dir=tmp_path)) is None
    assert not imports("workers.images.formats", "c2pa", "cryptography")
