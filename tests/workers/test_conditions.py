"""Control networks and image prompts in a worker: what its card offers, what jobs get, and how mistakes are named."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from tests.workers.desk import JOB, drawn, torch_settings
from tests.workers.stage import handler_of
from workers import sources
from workers.build import Runtime, build
from workers.handlers import ImageJobHandler, pictures

SIDE = 32
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
    return torch_settings(
        control_dir=str(folder / "control"), ip_adapter_dir=str(folder / "image_prompts"), kernels=True,
        precision="fp32", cache_dir=CACHE.parent, **more,
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


def draw(works: Runtime, job: ImageJob) -> list[bytes]:
    return [one.image.tobytes() for one in drawn(works, pictures(job, None, fetch))]


def test_a_job_of_several_pictures_draws_each_by_its_picture(works: Runtime, field: str) -> None:
    plain, conditioned = (drawn(works, pictures(job, None, fetch)) for job in (ImageJob.read(JOB), asked(field)))
    for one, other in zip(plain, conditioned, strict=True):
        assert one.image.tobytes() != other.image.tobytes()
        assert set(other.fingerprint[field]) == {MODELS[field]} and field not in one.fingerprint
        (told,) = other.parameters.to_dict()[field]
        assert {"model", "image"} <= set(told) and len(told["image"]) == 64
    assert draw(works, ImageJob.read(JOB)) == [one.image.tobytes() for one in plain]
    if field == "image_prompts":
        assert draw(works, asked(field, image="other")) != [one.image.tobytes() for one in conditioned]


def test_the_card_offers_what_lies_in_the_folders_and_its_cost(works: Runtime) -> None:
    draw(works, asked())
    card = ImageJobHandler(works.images).card()
    assert card.controls == ("damaged", "edges") == tuple(card.offer.controls or ())
    assert card.image_prompts == ("base", "damaged", "plus") == tuple(card.offer.image_prompts or ())
    assert card.costs.control_row_step_s[f"{SIDE}x{SIDE}"] > 0


def test_without_a_folder_none_is_offered() -> None:
    with build(torch_settings(cache_dir=CACHE.parent)) as works:
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


def test_a_damaged_network_fails_its_job_alone(works: Runtime, field: str) -> None:
    with pytest.raises(Invalid, match=r"damaged\.safetensors: is no whole safetensors file") as caught:
        works.images.check(Request("x", "image", pictures(asked(field, model="damaged"), None, fetch)[0]))
    assert caught.value.field == f"{field}.model"
    assert len(draw(works, asked(field))) == 2


def test_a_control_image_of_another_size_is_refused() -> None:
    with pytest.raises(Invalid, match="must have the image's size"):
        sources.read(asked(image="other").picture, fetch)
