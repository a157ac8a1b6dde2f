"""Generates requests with known results, so that the bytes of another request are recognized.

Images of a stand-in are computed here, a different one per prompt; a real model generates a few before the history.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
import time
from pathlib import Path
from typing import Any

import httpx2
from PIL import Image

from tests.faults.histories.worker import LORAS, edited
from tests.workers.stage import picture

_SIDE = 32
_FEW = 16  # orders of a real model
_PATIENCE_S = 120.0


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def wanted(prompt: str, seed: int, n: int = 1) -> tuple[str, ...]:
    """Digests of the pictures that the stand-in makes of this."""
    return tuple(digest(picture(prompt, seed + k, _SIDE, _SIDE)) for k in range(n))


Asked = tuple[dict[str, Any], tuple[str, ...]]
"""The fields of a job, and digests of its images."""


class Gallery:
    """Of the stand-in."""

    def order(self, random_: random.Random, name: str, line: bool = False) -> Asked:
        """`name` is unique; a batch's `line` is short."""
        # Some ask for the same as others do, and share its artifact.
        prompt = f"common {random_.randrange(4)}" if random_.random() < 0.2 else name
        prompt += f" STEP={0.005 if line else random_.choice((0.005, 0.01, 0.02, 0.05, 0.1))}"
        seed, n = random_.randrange(3), 1 if line else random_.choice((1, 1, 1, 2))
        fields: dict[str, Any] = {
            "prompt": prompt, "seed": seed, "n": n, "steps": 3 if line else random_.randrange(2, 25),
            "size": f"{_SIDE}x{_SIDE}",
        }  # fmt: skip
        if not line and random_.random() < 0.2:
            fields["lora"] = f"{random_.choice(LORAS)}:0.5"
        if line or random_.random() > 0.15:
            return fields, wanted(prompt, seed, n)
        source = _source(random_)
        return {**fields, **_editing(source)}, wanted(edited(prompt, _pixels(source)), seed, n)

    def source(self, random_: random.Random) -> bytes | None:
        """A picture to edit; None: there are no edits."""
        return _source(random_)

    def edit(self, random_: random.Random, name: str, source: bytes, file: str = "") -> Asked:
        """An edit of this picture. `file`: the id of its upload; empty: inline."""
        fields = {"prompt": name, "seed": 0, "n": 1, "steps": 2, "size": f"{_SIDE}x{_SIDE}", **_editing(source, file)}
        return fields, wanted(edited(name, _pixels(source)), 0)


def _source(random_: random.Random) -> bytes:
    return picture(f"source {random_.randrange(3)}", 0, _SIDE, _SIDE)


def _editing(source: bytes, file: str = "") -> dict[str, Any]:
    inline = "data:image/png;base64," + base64.b64encode(source).decode()
    return {"type": "edit", "images": [{"file_id": file} if file else {"image_url": inline}]}


def loras(folder: Path) -> None:
    """Write the LoRAs that a tiny model of noise may be asked for."""
    from pipeline.checkpoints.load import load
    from tests.pipeline.loras import write

    folder.mkdir(parents=True, exist_ok=True)
    model = load("random:tiny", device="cpu")
    for seed, name in enumerate(LORAS):
        write(model, folder, name, seed)


class Drawn(Gallery):
    """Of a real model: deterministic orders, drawn once by the service while nothing disturbs it.

    Without edits: what these bring is not known.
    """

    def __init__(self, url: str, token: str) -> None:
        self._orders: list[Asked] = []
        key = {"Authorization": f"Bearer {token}"}
        with httpx2.Client(base_url=url, headers=key, timeout=_PATIENCE_S, trust_env=False) as http:
            for k in range(_FEW):
                fields = {
                    "prompt": f"a house {k}", "seed": k, "steps": 2 + k % 5, "deterministic": True,
                    "n": 1 + (k % 4 == 0), **({"lora": LORAS[k % len(LORAS)]} if k % 3 == 0 else {}),
                }  # fmt: skip
                id = http.post("/v1/jobs", json={"type": "image", **fields}).json()["id"]
                until = time.monotonic() + _PATIENCE_S
                while (job := http.get(f"/v1/jobs/{id}?wait_s=10").json())["status"] != "succeeded":
                    assert time.monotonic() < until, job
                found = [http.get(f"/v1/jobs/{id}/images/{n}").content for n in range(len(job["images"]))]
                self._orders.append((fields, tuple(map(digest, found))))

    def source(self, random_: random.Random) -> None:
        return None

    def order(self, random_: random.Random, name: str, line: bool = False) -> Asked:
        fields, wants = random_.choice([one for one in self._orders if not line or len(one[1]) == 1])
        return dict(fields), wants


def _pixels(png: bytes) -> bytes:
    with Image.open(io.BytesIO(png)) as image:
        return image.convert("RGB").tobytes()
