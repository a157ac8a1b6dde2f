"""LoRAs and a tiny decoder, from an operator's folders to pictures and previews, through all parts of the service."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from tests.deployment.served import Served, wait_until
from tests.pipeline import loras
from tests.unet_opt.shapes import tiny_vae


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `loras` (one, and a damaged file) and `taesd`."""
    folder = tmp_path_factory.mktemp("operator")
    (folder / "loras").mkdir()
    loras.write(load(tiny.TINY), folder / "loras", "ink")
    (folder / "loras" / "damaged.safetensors").write_bytes(b"none")
    tiny_vae(8).save_pretrained(folder / "taesd")
    return folder


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    variables = {"DIPTYCH_LORA_DIR": str(folder / "loras"), "DIPTYCH_TINY_VAE": str(folder / "taesd")}
    service = Served(tmp_path_factory.mktemp("served"), variables=variables)
    try:
        service.ready()
        yield service
    finally:
        service.close()


@pytest.fixture
def model(service: Served) -> dict[str, Any]:
    """What its image model says of itself."""
    (model,) = [m for m in service.json("/v1/models")["data"] if m["diptych"]["modality"] == "image"]
    return dict(model["diptych"])


def levels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png))).astype(int)


def test_requests_bring_their_own_lora(service: Served, model: dict[str, Any], folder: Path) -> None:
    path = folder / "loras" / "ink.safetensors"
    assert model["loras"] == ["damaged", "ink"]

    fields: dict[str, Any] = {"seed": 7, "prompt": "a fox"}
    png = service.picture(**fields, lora="ink:0.7")
    text = Image.open(io.BytesIO(png)).text  # type: ignore[attr-defined]
    assert json.loads(text["diptych"])["lora"] == "ink:0.7"
    assert json.loads(text["fingerprint"])["lora"] == {"ink": hashlib.sha256(path.read_bytes()).hexdigest()}
    plain = service.picture(**fields)
    assert np.abs(levels(png) - levels(plain)).max() > 3

    job = service.json("/v1/jobs", {"type": "image", **fields, "lora": "damaged"})

    def ended() -> dict[str, Any] | None:
        found = service.json(f"/v1/jobs/{job['id']}")
        return found if found["status"] not in ("queued", "running") else None

    failed = wait_until(ended, "its end")
    assert failed["status"] == "failed" and failed["error"]["message"].startswith("lora: damaged: does not fit")
    status, answer = service.call("/v1/images/generations", {**fields, "lora": "gone"})
    assert status == 400 and json.loads(answer)["error"]["param"] == "lora"
    assert service.picture(**fields) == plain


def test_requests_choose_the_decoder(service: Served, model: dict[str, Any], folder: Path) -> None:
    decoder = load(tiny.TINY, tiny_vae=str(folder / "taesd")).tiny_vae
    assert model["vaes"] == ["full", "tiny"] and model["costs"]["vae_tiny_s"] > 0

    fields = {"seed": 7, "prompt": "a fox"}
    pictures = {name: Image.open(io.BytesIO(service.picture(**fields, vae=name))) for name in ("full", "tiny")}
    told = {name: json.loads(one.text["fingerprint"]).get("vae-tiny") for name, one in pictures.items()}  # type: ignore[attr-defined]
    assert decoder is not None and told == {"full": None, "tiny": decoder.digest}
    assert pictures["full"].tobytes() != pictures["tiny"].tobytes()

    jobs: list[str] = []

    def preview() -> bytes | None:
        """Of a job under way; of another one, if it ended before it was looked at."""
        if not jobs or service.json(f"/v1/jobs/{jobs[-1]}")["status"] not in ("queued", "running"):
            asked = {"type": "image", **fields, "steps": 500, "preview_every": 1}
            jobs.append(service.json("/v1/jobs", asked)["id"])
        status, body = service.call(f"/v1/jobs/{jobs[-1]}/preview")
        return body if status == 200 else None

    seen = Image.open(io.BytesIO(wait_until(preview, "a preview")))
    assert "{}x{}".format(*seen.size) == model["native_size"]
