"""Pipelines by diffusers' own loop beside a native family in one engine, and over HTTP by folders and hub ids."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from contract.card import read_card, to_data
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.image_request import ImageRequest
from core.batching.request import Request
from core.config import Settings
from pipeline.checkpoints.folder import ModelError
from tests.core.quant.stage import warm
from tests.deployment.served import Served, wait_until
from tests.pipeline.families.diffusers.conftest import Folders
from tests.pipeline.families.diffusers.pipelines import cached
from tests.pipeline.families.diffusers.test_runner import called, picture
from workers.build import build
from workers.images.cards import image_card


def test_a_pipeline_and_a_native_family_share_an_engine(folders: Folders, tmp_path: Path) -> None:
    flux = str(folders("flux"))
    settings = Settings(
        models=f"{flux},random:tiny",
        device="cpu",
        compile=False,
        kernels=False,
        text_model="off",
        cache_dir=tmp_path,
        threads=torch.get_num_threads(),
    )
    with build(settings) as runtime:
        assert runtime.pool is not None
        native, _ = runtime.pool.load("random:tiny")
        card = read_card(to_data(image_card(runtime.image_runner)))
        assert (card.loop, card.sources, native.model.name) == ("diffusers", ("text", "image", "mask"), "random:tiny")
        with pytest.raises(ModelError, match="native family"):
            _ = runtime.images
        offers = {"flux": card.offer, "random:tiny": image_card(native).offer}
        futures = [
            runtime.engine.submit(
                Request(f"{name} {k}", "image", job.picture, model=name, tenant=name, priority=5)
            )
            for k in range(2)
            for name, offer in offers.items()
            for job in [ImageRequest(prompt="a cat", steps=3, size="32x32", seed=k).complete(offer)]
        ]  # fmt: skip
        pictures = [future.result(60) for future in futures]
        assert [picture.fingerprint.get("loop") for picture in pictures] == ["diffusers", None] * 2
        for fields in ({"lora": "a"}, {"deepcache": "auto"}, {"plan": "auto"}, {"pipeline_options": {"cfg": 1}}):
            with pytest.raises(Invalid):
                ImageRequest(prompt="a", **fields).complete(card.offer)
        with pytest.raises(Invalid, match="it has none"):
            ImageRequest(prompt="a", pipeline_options={"cfg": 1}).complete(offers["random:tiny"])


@pytest.mark.long
def test_settings_of_native_families_are_refused(folders: Folders, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    base = {"device": "cpu", "text_model": "off", "cache_dir": warm(tmp_path / "cache"), "threads": threads}
    for model, fields in (
        (str(folders("flux")), {"lora": "a"}),
        (str(folders("flux")), {"backend": "programs"}),
        ("random:tiny", {"precision": "nf4"}),
        ("random:tiny", {"offload": "model"}),
    ):
        with pytest.raises(ModelError, match=r"diffusers' own loop"):
            build(Settings(model=model, **base, **fields)).close()


HUB_ID = "tests/flux-of-the-hub"
STEPS = 3


@pytest.fixture(scope="module")
def service(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two pipelines in one service without a network: one by an id of the hub, from its cache."""
    root = tmp_path_factory.mktemp("served")
    cached(folders("flux"), HUB_ID, root / "hub")
    service = Served(
        root, "--models", f"{HUB_ID},{folders('flux2_klein')}", "--precision", "fp32", model=None,
        variables={"HF_HUB_CACHE": str(root / "hub"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    try:
        service.ready()
        live = lambda: [model["diptych"]["live"] for model in service.json("/v1/models")["data"]]  # noqa: E731
        wait_until(lambda: live() == [True, True], f"both models of {service!r}")
        yield service
    finally:
        service.close()


def drawn(answer: dict[str, Any]) -> bytes:
    """The pixels of an answer, which says by which loop they were drawn."""
    with Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))) as image:
        assert '"loop": "diffusers"' in image.text["fingerprint"]  # type: ignore[attr-defined]
        return image.tobytes()


def data_url(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "builder", "kind", "strength"),
    [
        (HUB_ID.rpartition("/")[2], "flux", diffusers.FluxImg2ImgPipeline, {"strength": 0.7}),
        ("flux2_klein", "flux2_klein", diffusers.Flux2KleinPipeline, {}),
    ],
)
def test_pipelines_are_served_over_http(
    name: str, builder: str, kind: type, strength: dict[str, float], service: Served, folders: Folders
) -> None:
    """Pictures and edits are diffusers' own, byte for byte, and a call is cancelled in its middle."""
    card = {entry["id"]: entry["diptych"] for entry in service.json("/v1/models")["data"]}[name]
    assert card["loop"] == "diffusers"
    guidance, folder = card["defaults"]["guidance_scale"], folders(builder)
    parameters = ImageParameters("a red fox", 7, 64, 64, steps=STEPS, guidance_scale=guidance)
    source = picture(parameters.size, 1)
    body = {"model": name, "prompt": "a red fox", "size": "64x64", "steps": STEPS, "seed": 7}
    as_png = {"response_format": "b64_json", "output_format": "png"}
    assert drawn(service.json("/v1/images/generations", body | as_png)) == called(folder, parameters).tobytes()
    body |= {"images": [{"image_url": data_url(source)}], **strength}
    expected = called(folder, parameters, kind, image=source, guidance_scale=guidance, **strength)
    assert drawn(service.json("/v1/images/edits", body | as_png)) == expected.tobytes()
    job = service.json("/v1/jobs", {**body, "type": "edit", "steps": 1000})
    state = lambda: service.json(f"/v1/jobs/{job['id']}")  # noqa: E731
    wait_until(lambda: (state().get("progress") or {}).get("steps_done", 0) >= 1, "a step")
    assert service.json(f"/v1/jobs/{job['id']}/cancel", {})["status"] == "cancelled"
    ended = state()
    assert ended["status"] == "cancelled" and ended["progress"]["steps_done"] < ended["progress"]["steps"]
