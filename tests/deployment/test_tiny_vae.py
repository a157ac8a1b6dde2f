"""A tiny decoder from its folder to pictures and previews, through all parts of the service as it runs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from pipeline import tiny
from pipeline.load import load
from tests.deployment.served import Served, wait_until
from tests.unet_opt.shapes import tiny_vae


def test_requests_choose_the_decoder(serve: Callable[..., Served], tmp_path: Path) -> None:
    tiny_vae(8).save_pretrained(tmp_path / "taesd")
    decoder = load(tiny.TINY, tiny_vae=str(tmp_path / "taesd")).tiny_vae
    service = serve(variables={"DIPTYCH_TINY_VAE": str(tmp_path / "taesd")})
    service.ready()
    (model,) = [m for m in service.json("/v1/models")["data"] if m["diptych"]["modality"] == "image"]
    assert model["diptych"]["vaes"] == ["full", "tiny"] and model["diptych"]["costs"]["vae_tiny_s"] > 0

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
    assert "{}x{}".format(*seen.size) == model["diptych"]["native_size"]
