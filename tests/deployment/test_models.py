"""A checkpoint of one file from `diptych models add` to pictures, through all parts of the service as it runs."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import cli
from pipeline.checkpoints import tiny
from tests.deployment.served import Served, wait_until
from tests.pipeline.original_layout import checkpoint

TUNED = ("one", "two", "three")
SHAPE = replace(tiny.SHAPES[tiny.TINY], input_channels=9)


def as_url(array: np.ndarray) -> dict[str, str]:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return {"image_url": f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One worker of four models: a painter, added by the command, and fine-tunes of the embedded model's shape, of
    which two find room.
    """
    folder = tmp_path_factory.mktemp("models")
    variables = {"DIPTYCH_MODELS_DIR": str(folder / "store")}
    save_file(checkpoint(tiny.make(SHAPE)), folder / "painter.safetensors")
    base = str(tiny.save(folder / "base", tiny.SHAPES[tiny.TINY]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIPTYCH_MODELS_DIR", variables["DIPTYCH_MODELS_DIR"])
        assert cli.main(["models", "add", str(folder / "painter.safetensors"), "--base", base]) == 0
    for seed, name in enumerate(TUNED):
        tiny.save(folder / "store" / name, tiny.SHAPES[tiny.EMOJI_XL], seed)
    weights_mib = sum(file.stat().st_size for file in (folder / "store" / "one").rglob("*.safetensors")) // 2**20
    service = Served(
        folder / "served", "--models", ",".join(["painter", *TUNED]), "--models-mib",
        f"{2 * weights_mib + weights_mib // 2}", model=None, variables=variables,
    )  # fmt: skip
    try:
        service.ready()
        yield service
    finally:
        service.close()


def cards(service: Served) -> dict[str, dict[str, Any]]:
    found = {model["id"]: model["diptych"] for model in service.json("/v1/models")["data"]}
    return {name: card for name, card in found.items() if card["modality"] == "image"}


def test_an_added_inpainting_model_serves_edits_with_a_mask_alone(service: Served) -> None:
    """It is the first, and so the default."""
    assert cards(service)["painter"]["inpaint_only"] is True

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


def test_four_models_are_served_by_one_worker_which_has_room_for_two(service: Served) -> None:
    """Fine-tunes asked for at once, then one after the other."""
    wait_until(
        lambda: {name for name, card in cards(service).items() if card["live"]} == {"painter", *TUNED}, "all models"
    )
    with ThreadPoolExecutor(6) as pool:
        pictures = list(pool.map(lambda at: drawn(service, model=TUNED[at % 3], seed=at // 3), range(6)))
    assert len({*pictures}) == 6
    for at in (2, 1, 3):
        assert drawn(service, model=TUNED[at % 3], seed=at // 3) == pictures[at]

    def announced() -> bool:
        found = cards(service)
        return bool(found["one"]["loaded"]) and sum(bool(found[name]["loaded"]) for name in TUNED) <= 2

    wait_until(announced, "what was evicted, and what was drawn with last")
    status, body = service.call("/v1/images/generations", {"prompt": "a cat", "model": "five"})
    assert status == 404, body
