"""A checkpoint of one file from `diptych models add` to pictures, through all parts of the service as it runs."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import cli
from pipeline.checkpoints import tiny
from tests.deployment.served import Served, wait_until
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


def drawn(service: Served, seed: int = 1, **fields: object) -> bytes:
    given = {"prompt": "a cat", "seed": seed, "steps": 2, "deterministic": True, "response_format": "b64_json"}
    status, body = service.call("/v1/images/generations", given | fields)
    assert status == 200, body
    return base64.b64decode(json.loads(body)["data"][0]["b64_json"])


def test_four_models_are_served_by_one_worker_which_has_room_for_two(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    """Fine-tunes of the embedded model's shape, asked for at once, then one after the other."""
    names = ["one", "two", "three", "four"]
    for seed, name in enumerate(names):
        tiny.save(tmp_path / "store" / name, tiny.SHAPES[tiny.EMOJI_XL], seed)
    weights_mib = sum(file.stat().st_size for file in (tmp_path / "store" / "one").rglob("*.safetensors")) // 2**20
    service = serve(
        "--models", ",".join(names), "--models-mib", f"{2 * weights_mib + weights_mib // 2}", model=None,
        variables={"DIPTYCH_MODELS_DIR": str(tmp_path / "store")},
    )  # fmt: skip
    service.ready()

    def cards() -> dict[str, dict[str, object]]:
        return {m["id"]: m["diptych"] for m in service.json("/v1/models")["data"] if m["id"] in names}

    wait_until(lambda: {name for name, card in cards().items() if card["live"]} == {*names}, "all models")
    with ThreadPoolExecutor(8) as pool:
        pictures = list(pool.map(lambda at: drawn(service, model=names[at % 4], seed=at // 4), range(8)))
    assert len({*pictures}) == 8
    for at in (2, 1, 7, 4):
        assert drawn(service, model=names[at % 4], seed=at // 4) == pictures[at]
    assert drawn(service, seed=0) == pictures[0], "the first is the default"
    wait_until(lambda: sum(bool(card["loaded"]) for card in cards().values()) <= 2, "what was evicted is announced")
    assert cards()["one"]["loaded"] is True
    status, body = service.call("/v1/images/generations", {"prompt": "a cat", "model": "five"})
    assert status == 404, body
