"""A checkpoint of one file from `diptych models add` to pictures, through all parts of the service as it runs."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import cli
from pipeline.checkpoints import tiny
from tests.deployment.served import Served
from tests.pipeline.original_layout import checkpoint

SHAPE = replace(tiny.SHAPES[tiny.TINY], input_channels=9)


def as_url(array: np.ndarray) -> dict[str, str]:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return {"image_url": f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"}


def test_an_added_inpainting_model_serves_edits_with_a_mask_alone(
    serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_MODELS_DIR", str(tmp_path / "store"))
    save_file(checkpoint(tiny.make(SHAPE)), tmp_path / "painter.safetensors")
    base = str(tiny.save(tmp_path / "base", tiny.SHAPES[tiny.TINY]))
    assert cli.main(["models", "add", str(tmp_path / "painter.safetensors"), "--base", base]) == 0
    service = serve(model="painter", variables={"DIPTYCH_MODELS_DIR": str(tmp_path / "store")})
    service.ready()
    (model,) = [m for m in service.json("/v1/models")["data"] if m["diptych"]["modality"] == "image"]
    assert model["id"] == "painter" and model["diptych"]["inpaint_only"] is True

    side = SHAPE.native
    image = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    mask = np.full((side, side, 4), 255, dtype=np.uint8)
    mask[: side // 2, :, 3] = 0
    fields = {"prompt": "a fox", "seed": 7, "response_format": "b64_json"}
    for path, more, wrong in (
        ("/v1/images/generations", {}, "model"),
        ("/v1/images/edits", {"images": [as_url(image)]}, "mask"),
    ):
        status, body = service.call(path, {**fields, **more})
        assert status == 400 and json.loads(body)["error"]["param"] == wrong, body
    Image.fromarray(image).save(service.folder / "cat.png")
    Image.fromarray(mask).save(service.folder / "mask.png")
    (command,) = re.findall(r"curl .*", service.out)
    subprocess.run(command, shell=True, cwd=service.folder, check=True, timeout=60)
    with Image.open(service.folder / "hat.png") as hat:
        assert hat.size == (side, side)
    status, body = service.call("/v1/images/edits", {**fields, "images": [as_url(image)], "mask": as_url(mask)})
    assert status == 200, body
    drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(json.loads(body)["data"][0]["b64_json"]))))
    assert (drawn[side // 2 :] == image[side // 2 :]).all() and (drawn[: side // 2] != image[: side // 2]).mean() > 0.5
