"""Image prompts in a worker: what its card offers, what jobs get, and what their mistakes are told as."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from contract.errors import Invalid
from contract.image import ImageJob
from core.artifacts import NoArtifact
from core.batching.request import Request
from core.config import Settings
from pipeline.checkpoints.load import load
from pipeline.checkpoints.tiny import TINY
from tests.core.quant.stage import CACHE
from tests.pipeline.ip_adapters import encoder, picture, save, state
from workers.build import Runtime, build
from workers.handlers import ImageJobHandler, pictures

JOB: dict[str, Any] = {
    "prompt": "a pizza", "n": 2, "seed": 5, "steps": 3, "guidance_scale": 5.0, "width": 32, "height": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = tmp_path_factory.mktemp("adapters")
    encoder(folder)
    for name, plus in (("base", False), ("plus", True)):
        save(state(load(TINY), plus=plus), folder, name)
    (folder / "damaged.safetensors").write_bytes(b"none")
    settings = Settings(
        model=TINY, ip_adapter_dir=str(folder), device="cpu", compile=False, threads=1, precision="fp32",
        cache_dir=CACHE.parent,
    )  # fmt: skip
    with build(settings) as works:
        yield works


def fetch(key: str) -> bytes:
    """A store of two pictures, of a text and of nothing else."""
    if key == "text":
        return b"text"
    if key not in ("1", "2"):
        raise NoArtifact(key)
    stream = io.BytesIO()
    picture(int(key)).save(stream, "PNG")
    return stream.getvalue()


def asked(**prompt: Any) -> ImageJob:
    return ImageJob.read({**JOB, "image_prompts": [{"model": "base", "image": "1", **prompt}]})


def drawn(works: Runtime, job: ImageJob) -> list[Any]:
    futures = [works.engine.submit(Request(f"{k}", "image", one)) for k, one in enumerate(pictures(job, None, fetch))]
    return [future.result(60) for future in futures]


def test_a_job_of_several_pictures_draws_each_like_its_prompt(works: Runtime) -> None:
    plain, prompted, other = drawn(works, ImageJob.read(JOB)), drawn(works, asked()), drawn(works, asked(image="2"))
    for one, two, three in zip(plain, prompted, other, strict=True):
        assert len({each.image.tobytes() for each in (one, two, three)}) == 3
        assert set(two.fingerprint["image_prompts"]) == {"base"} and "image_prompts" not in one.fingerprint
        (told,) = two.parameters.to_dict()["image_prompts"]
        assert (told["width"], told["height"], len(told["image"])) == (50, 41, 64)
    again = drawn(works, ImageJob.read(JOB))
    assert [one.image.tobytes() for one in again] == [one.image.tobytes() for one in plain]


def test_the_card_offers_what_lies_in_the_folder(works: Runtime) -> None:
    card = ImageJobHandler(works.images).card()
    assert card.image_prompts == ("base", "damaged", "plus") == tuple(card.offer.image_prompts or ())


def test_without_a_folder_none_is_offered() -> None:
    with build(Settings(model=TINY, device="cpu", compile=False, precision="fp32", cache_dir=CACHE.parent)) as works:
        assert ImageJobHandler(works.images).card().image_prompts == ()
        with pytest.raises(Invalid, match="DIPTYCH_IP_ADAPTER_DIR"):
            works.images.check(Request("x", "image", pictures(asked(), None, fetch)[0]))


@pytest.mark.parametrize(
    ("key", "words"), [(None, "is missing"), ("gone", "is no longer there"), ("text", "cannot be decoded")]
)
def test_pictures_that_cannot_be_read_are_named(key: str | None, words: str) -> None:
    job = ImageJob.read({**JOB, "image_prompts": [{"model": "base"} | ({} if key is None else {"image": key})]})
    with pytest.raises(Invalid, match=words) as caught:
        pictures(job, None, fetch)
    assert caught.value.field == "image_prompts.image"


def test_a_damaged_adapter_fails_its_job_alone(works: Runtime) -> None:
    with pytest.raises(Invalid, match=r"damaged\.safetensors: is no whole safetensors file") as caught:
        works.images.check(Request("x", "image", pictures(asked(model="damaged"), None, fetch)[0]))
    assert caught.value.field == "image_prompts.model"
    assert len(drawn(works, asked())) == 2
