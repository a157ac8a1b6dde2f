"""A LoRA from a request to its picture, through all parts of the service as it runs."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pipeline import tiny
from pipeline.load import load
from tests.deployment.served import Served, wait_until
from tests.pipeline import loras


def levels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png))).astype(int)


def test_requests_bring_their_own(serve: Callable[..., Served], tmp_path: Path) -> None:
    folder = tmp_path / "loras"
    folder.mkdir()
    path = loras.write(load(tiny.TINY), folder, "ink")
    (folder / "damaged.safetensors").write_bytes(b"none")
    service = serve(variables={"DIPTYCH_LORA_DIR": str(folder)})
    service.ready()
    (model,) = [m for m in service.json("/v1/models")["data"] if m["diptych"]["modality"] == "image"]
    assert model["diptych"]["loras"] == ["damaged", "ink"]

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
