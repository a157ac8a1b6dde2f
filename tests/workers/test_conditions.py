"""Control networks and image prompts in a worker: what its card offers, what jobs get, and how mistakes are named."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contract.card import ImageCard, read_card, to_data
from contract.errors import Invalid
from contract.image import ImageJob
from core.artifacts import NoArtifact
from core.batching.request import Request
from core.config import Settings
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from pipeline.checkpoints.tiny import TINY
from pipeline.extensions import canny
from pipeline.extensions.depth import DepthEstimator
from tests.core.quant.stage import CACHE
from tests.pipeline import controls, depths, ip_adapters
from tests.pipeline.pixels.test_edit import photograph
from tests.workers.stage import handler_of
from workers import sources
from workers.build import Runtime, build
from workers.handlers import ImageJobHandler, pictures

SIDE = 32
JOB: dict[str, Any] = {
    "prompt": "a pizza", "n": 2, "seed": 5, "steps": 3, "guidance_scale": 5.0, "width": SIDE, "height": SIDE,
}  # fmt: skip
MODELS = {"control": "edges", "image_prompts": "base"}


@pytest.fixture(params=MODELS)
def field(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conditions")
    for name in MODELS:
        (folder / name).mkdir()
        (folder / name / "damaged.safetensors").write_bytes(b"none")
    controls.save(controls.controlnet(load(TINY)), folder / "control", "edges")
    (folder / "control" / "notes").mkdir()
    ip_adapters.encoder(folder / "image_prompts")
    for name, plus in (("base", False), ("plus", True)):
        ip_adapters.save(ip_adapters.state(load(TINY), plus=plus), folder / "image_prompts", name)
    return folder


@pytest.fixture(scope="module")
def works(folder: Path) -> Iterator[Runtime]:
    with build(settings(folder)) as works:
        yield works


def settings(folder: Path, **more: Any) -> Settings:
    return Settings(
        model=TINY, control_dir=str(folder / "control"), ip_adapter_dir=str(folder / "image_prompts"), device="cpu",
        compile=False, threads=1, precision="fp32", cache_dir=CACHE.parent, **more,
    )  # fmt: skip


def fetch(key: str) -> bytes:
    """A store of two pictures, of a text and of nothing else."""
    if key == "text":
        return b"text"
    if key not in ("photograph", "other"):
        raise NoArtifact(key)
    stream = io.BytesIO()
    (photograph(SIDE) if key == "photograph" else ip_adapters.picture(2)).save(stream, "PNG")
    return stream.getvalue()


def asked(field: str = "control", **condition: Any) -> ImageJob:
    return ImageJob.read({**JOB, field: [{"model": MODELS[field], "image": "photograph", **condition}]})


def drawn(works: Runtime, job: ImageJob) -> list[Any]:
    futures = [works.engine.submit(Request(f"{k}", "image", one)) for k, one in enumerate(pictures(job, None, fetch))]
    return [future.result(60) for future in futures]


def test_a_job_of_several_pictures_draws_each_by_its_picture(works: Runtime, field: str) -> None:
    plain, conditioned = drawn(works, ImageJob.read(JOB)), drawn(works, asked(field))
    for one, other in zip(plain, conditioned, strict=True):
        assert one.image.tobytes() != other.image.tobytes()
        assert set(other.fingerprint[field]) == {MODELS[field]} and field not in one.fingerprint
        (told,) = other.parameters.to_dict()[field]
        assert {"model", "image"} <= set(told) and len(told["image"]) == 64
    again = drawn(works, ImageJob.read(JOB))
    assert [one.image.tobytes() for one in again] == [one.image.tobytes() for one in plain]
    if field == "image_prompts":
        others = drawn(works, asked(field, image="other"))
        assert [one.image.tobytes() for one in others] != [one.image.tobytes() for one in conditioned]
        (told,) = others[0].parameters.to_dict()[field]
        assert (told["width"], told["height"]) == ip_adapters.picture(2).size


def test_the_card_offers_what_lies_in_the_folders_and_its_cost(works: Runtime) -> None:
    drawn(works, asked())
    card = ImageJobHandler(works.images).card()
    assert card.controls == ("damaged", "edges") == tuple(card.offer.controls or ())
    assert card.image_prompts == ("base", "damaged", "plus") == tuple(card.offer.image_prompts or ())
    assert card.costs.control_row_step_s[f"{SIDE}x{SIDE}"] > 0


def test_without_a_folder_none_is_offered() -> None:
    with build(Settings(model=TINY, device="cpu", compile=False, precision="fp32", cache_dir=CACHE.parent)) as works:
        card = ImageJobHandler(works.images).card()
        assert card.controls == card.image_prompts == () and card.costs.control_row_step_s == {}
        for field, setting in (("control", "DIPTYCH_CONTROL_DIR"), ("image_prompts", "DIPTYCH_IP_ADAPTER_DIR")):
            with pytest.raises(Invalid, match=setting):
                works.images.check(Request("x", "image", pictures(asked(field), None, fetch)[0]))


def test_canny_is_taken_of_what_was_stored() -> None:
    (one, _) = pictures(asked(preprocessor="canny"), None, fetch)
    expected = canny.edges(np.asarray(photograph(SIDE)))
    assert one.control[0].image == expected.tobytes() and expected.any()
    (plain, _) = pictures(asked(), None, fetch)
    assert plain.control[0].image == photograph(SIDE).tobytes()


def test_depth_is_taken_by_the_settings_model(tmp_path: Path, folder: Path) -> None:
    estimate = DepthEstimator(depths.save(tmp_path / "depth"))
    (one, _) = pictures(asked(preprocessor="depth"), None, fetch, estimate)
    assert one.control[0].image == estimate(np.asarray(photograph(SIDE))).tobytes()
    with build(settings(folder, depth_model=str(tmp_path / "depth"))) as works:
        card = handler_of(works).card()
        assert isinstance(card, ImageCard) and card.offer.preprocessors == ("canny", "depth")
        assert read_card(to_data(card)) == card
    with pytest.raises(ModelError, match=r"depth model: .*gone: no such folder"):
        build(settings(folder, depth_model=str(tmp_path / "gone")))


def test_without_a_depth_model_it_is_refused_by_the_setting(works: Runtime) -> None:
    assert ImageJobHandler(works.images).card().preprocessors == ("canny",)
    with pytest.raises(Invalid, match=r"depth is not offered by this model .*DIPTYCH_DEPTH_MODEL") as caught:
        pictures(asked(preprocessor="depth"), None, fetch)
    assert caught.value.field == "control.preprocessor"


@pytest.mark.parametrize(
    ("key", "words"), [(None, "is missing"), ("gone", "is no longer there"), ("text", "cannot be decoded")]
)
def test_pictures_that_cannot_be_read_are_named(field: str, key: str | None, words: str) -> None:
    job = ImageJob.read({**JOB, field: [{"model": MODELS[field]} | ({} if key is None else {"image": key})]})
    with pytest.raises(Invalid, match=words) as caught:
        pictures(job, None, fetch)
    assert caught.value.field == f"{field}.image"


def test_a_control_image_of_another_size_is_refused() -> None:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    with pytest.raises(Invalid, match="must have the image's size"):
        sources.read(asked().picture, lambda _: stream.getvalue())


def test_a_damaged_network_fails_its_job_alone(works: Runtime, field: str) -> None:
    with pytest.raises(Invalid, match=r"damaged\.safetensors: is no whole safetensors file") as caught:
        works.images.check(Request("x", "image", pictures(asked(field, model="damaged"), None, fetch)[0]))
    assert caught.value.field == f"{field}.model"
    assert len(drawn(works, asked(field))) == 2
