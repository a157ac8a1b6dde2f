"""What requests name from folders, in a worker: what its card offers, what jobs get, and how mistakes are named."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from contract.card import ImageCard, read_card, to_data
from contract.errors import Invalid
from contract.image import ImageJob, ImageParameters
from contract.image_request import ImageRequest
from contract.upscale import Upscale
from core.artifacts import NoArtifact
from core.batching.request import Request
from core.config import Settings
from pipeline import plans
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from pipeline.extensions import canny
from pipeline.extensions.adapters import LoraFolder
from pipeline.extensions.depth import DepthEstimator
from pipeline.quantization import quantized
from tests.core.quant.stage import CACHE, kernels
from tests.pipeline import depths, ip_adapters
from tests.pipeline.pixels.test_edit import photograph
from tests.workers import assets
from tests.workers.desk import JOB, drawn, result_of, torch_settings
from tests.workers.stage import handler_of
from workers.build import Runtime, build
from workers.images import sources
from workers.images.cards import image_card
from workers.images.handler import pictures

SIDE = 32
FOLDERS = {
    "lora_dir": "loras", "control_dir": "controls", "ip_adapter_dir": "adapters", "upscalers_dir": "upscalers",
    "refiner": "refiner",
}  # fmt: skip
ASKED: dict[str, Any] = {
    "lora": "ink:0.5", "control": [{"model": "edges", "image": "photograph"}],
    "image_prompts": [{"model": "base", "image": "photograph"}], "upscale": {"model": "x4"},
    "refiner": {"model": "refiner"},
}  # fmt: skip
PICTURED = ("control", "image_prompts")
SENT = {field: value for field, value in ASKED.items() if field not in (*PICTURED, "refiner")} | {
    field: [{"model": ASKED[field][0]["model"]}] for field in PICTURED
}
"""The same in a body, whose pictures are elsewhere."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = assets.write(tmp_path_factory.mktemp("assets"))
    torch.save({"x": torch.ones(2)}, place / "loras" / "pickle.safetensors")
    other = {"transformer.single_transformer_blocks.0.attn.to_k.lora_A.weight": torch.ones(2, 2)}
    save_file(other, place / "loras" / "flux.safetensors")
    for folder in FOLDERS.values():
        (place / folder / "notes.txt").write_text("none")
    return place


def settings(place: Path, *names: str, **more: Any) -> Settings:
    """With these folders, and on the CPU kernels where there are any."""
    folders = {name: str(place / FOLDERS[name]) for name in names}
    return torch_settings(**{"kernels": True, "precision": "fp32", "cache_dir": CACHE.parent, **folders, **more})


@pytest.fixture(scope="module")
def works(place: Path) -> Iterator[Runtime]:
    with build(settings(place, *FOLDERS)) as works:
        yield works


def fetch(key: str) -> bytes:
    """A store of two pictures, of a text and of nothing else."""
    if key == "text":
        return b"text"
    if key not in ("photograph", "other"):
        raise NoArtifact(key)
    stream = io.BytesIO()
    (photograph(SIDE) if key == "photograph" else ip_adapters.picture(2)).save(stream, "PNG")
    return stream.getvalue()


def requests(estimate: DepthEstimator | None = None, **fields: Any) -> list[ImageParameters]:
    return pictures(ImageJob.read({**JOB, **fields}), None, fetch, estimate)


def naming(field: str, **changes: Any) -> dict[str, Any]:
    """The fields of a job that names a network by its picture."""
    return {field: [{**ASKED[field][0], **changes}]}


@pytest.mark.parametrize("field", ASKED)
def test_all_pictures_of_a_job_get_what_it_names_and_others_are_drawn_as_without(works: Runtime, field: str) -> None:
    plain, asked, again = (drawn(works, requests(**fields)) for fields in ({}, {field: ASKED[field]}, {}))
    for one, other in zip(plain, asked, strict=True):
        assert one.image.tobytes() != other.image.tobytes() and np.asarray(other.image).std() > 5
        printed = "upscaler" if field == "upscale" else field
        assert printed in other.fingerprint and printed not in one.fingerprint
        if field in PICTURED:
            (told,) = other.parameters.to_dict()[field]
            assert {"model", "image"} <= set(told) and len(told["image"]) == 64
    for one, other in zip(plain, again, strict=True):
        assert np.abs(np.asarray(one.image).astype(int) - np.asarray(other.image)).max() <= 1
        assert not works.images.backend.batch_invariant or one.png() == other.png(), "kernels promise bits"
    if field == "image_prompts":
        others = drawn(works, requests(**naming(field, image="other")))
        assert [one.png() for one in others] != [one.png() for one in asked]


def test_the_card_offers_what_lies_in_the_folders_now_and_its_cost(works: Runtime, place: Path) -> None:
    drawn(works, requests(**naming("control")))
    for _ in range(3):
        assert drawn(works, requests(upscale=ASKED["upscale"]))[0].image.size == (4 * SIDE, 4 * SIDE)
    card = image_card(works.images)
    assert card.loras == ("damaged", "flux", "ink", "pickle")
    assert card.controls == ("damaged", "edges", "pose") == tuple(card.offer.controls or ())
    assert card.image_prompts == ("base", "damaged", "plus") == tuple(card.offer.image_prompts or ())
    assert (card.upscalers, card.refiners, card.preprocessors) == (("x4",), ("refiner",), ("canny",))
    assert card.costs.control_row_step_s[f"{SIDE}x{SIDE}"] > 0 and card.costs.upscale_megapixel_s > 0
    assert read_card(to_data(card)) == card
    late = place / "loras" / "late.safetensors"
    late.write_bytes((place / "loras" / "ink.safetensors").read_bytes())
    assert image_card(works.images).loras == ("damaged", "flux", "ink", "late", "pickle")
    late.unlink()


def test_loras_have_the_names_that_they_were_trained_as(tmp_path: Path) -> None:
    def save(name: str, **metadata: str) -> None:
        save_file({"x": torch.ones(2)}, tmp_path / f"{name}.safetensors", metadata)

    folder = LoraFolder(tmp_path, torch.nn.Module(), 2**20)  # type: ignore[arg-type]  # which is not read
    for name, title in (("v1-000010", "MyStyle"), ("v2", "Twin"), ("v3", "Twin"), ("v4", "v2"), ("v5", "a/b")):
        save(name, ss_output_name=title)
    save("plain")
    (tmp_path / "damaged.safetensors").write_bytes(b"no header")
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "gone.safetensors")
    assert folder.aliases() == {"MyStyle": "v1-000010"}
    save("v3", ss_output_name="Other", ss_comment="so that its size differs")
    assert folder.aliases() == {"MyStyle": "v1-000010", "Twin": "v2", "Other": "v3"}


def test_a_filter_enlarges_without_a_network(place: Path) -> None:
    """Once the engine is done with a picture, whose own pixels are those without it."""
    with build(settings(place)) as works:
        card, handler = image_card(works.images), handler_of(works)
        request = ImageRequest(
            prompt="a", steps=1, size=f"{SIDE}x{SIDE}", seed=1, upscale={"model": "lanczos", "scale": 3}
        )
        job = request.complete(card.offer)
        outputs = drawn(works, handler.requests(job))
        stored: list[bytes] = []

        class Writer:
            def put(self, data: bytes, media_type: str) -> str:
                stored.append(data)
                return "key"

        (image,) = result_of(works, job, outputs, Writer())["images"]  # type: ignore[arg-type]
        (plain,) = drawn(works, handler.requests(replace(job, picture=replace(job.picture, upscale=None))))
        enlarged = plain.image.resize((3 * SIDE, 3 * SIDE), Image.Resampling.LANCZOS)
        assert (image["width"], image["height"]) == enlarged.size and "upscaler" not in image["fingerprint"]
        assert Image.open(io.BytesIO(stored[0])).tobytes() == enlarged.tobytes()
        for scale, size in ((8, (4096, 4096)), (8, (2048, 64))):
            with pytest.raises(Invalid, match="upscale: it makes"):
                Upscale(model="lanczos", scale=scale).check_filtered(*size)
        with pytest.raises(Invalid, match="no folder of upscalers"):
            Upscale(model="lanczos").check((), "no folder of upscalers", ())


def test_without_folders_none_is_offered(place: Path) -> None:
    with build(settings(place)) as works:
        card = image_card(works.images)
        assert card.loras == card.controls == card.image_prompts == card.upscalers == card.refiners == ()
        assert card.costs.control_row_step_s == {} and card.costs.upscale_megapixel_s == 0
        for field, said in (
            ("control", "DIPTYCH_CONTROL_DIR"), ("image_prompts", "DIPTYCH_IP_ADAPTER_DIR"), ("lora", "no LoRA folder"),
        ):  # fmt: skip
            with pytest.raises(Invalid, match=said):
                works.images.check(Request("x", "image", requests(**{field: ASKED[field]})[0]))
            with pytest.raises(Invalid, match=said):
                ImageRequest(prompt="a", **{field: SENT[field]}).complete(card.offer)


def test_an_empty_folder_is_another_reason_than_none(place: Path, tmp_path: Path) -> None:
    folders = {name: str(tmp_path) for name in FOLDERS if name != "refiner"}
    with build(settings(place, **folders)) as works:
        card = read_card(to_data(image_card(works.images)))
        assert card.refusals == {} and card.loras == card.upscalers == ()
        for field, value in SENT.items():
            with pytest.raises(Invalid, match="its worker's folder of them is empty"):
                ImageRequest(prompt="a", **{field: value}).complete(card.offer)


@pytest.mark.parametrize(
    ("field", "name", "said"),
    [
        ("lora", "damaged", "it is damaged or cut short"),
        ("lora", "pickle", "it is a pickle, which could run code; convert it to safetensors"),
        ("lora", "flux", "'transformer.single_transformer_blocks.0.attn.to_k.lora_A.weight' is for no part of an SDXL"),
        ("lora", "gone", "there is no gone.safetensors in the LoRA folder"),
        ("control", "damaged", "damaged.safetensors: is no whole safetensors file"),
        ("image_prompts", "damaged", "damaged.safetensors: is no whole safetensors file"),
    ],
)
def test_a_job_that_names_a_bad_one_is_refused_and_others_are_drawn(
    works: Runtime, field: str, name: str, said: str
) -> None:
    (one, *_) = requests(**{field: ASKED[field]}, steps=20)
    under_way = works.engine.submit(Request("other", "image", one))
    with pytest.raises(Invalid) as caught:
        drawn(works, requests(**({"lora": f"ink,{name}"} if field == "lora" else naming(field, model=name))))
    assert caught.value.field == ("lora" if field == "lora" else f"{field}.model") and said in str(caught.value)
    assert under_way.result(60).png()


def test_the_models_own_weights_are_kept_only_where_torch_draws_with_loras(place: Path) -> None:
    kernels()  # skips where there are none
    for on_kernels in (True, False):
        with build(settings(place, "lora_dir", kernels=on_kernels)) as works:
            for layer in (works.images.model.denoiser.conv_in, works.images.model.vae.decoder.conv_in):
                assert bool(layer.weight.numel()) != on_kernels, "the kernels add LoRAs to what they have packed"
            assert len(drawn(works, requests(lora="ink"))) == 2


def test_canny_and_depth_are_taken_of_what_was_stored(tmp_path: Path, place: Path) -> None:
    model = depths.save(tmp_path / "depth")
    source, estimate = np.asarray(photograph(SIDE)), DepthEstimator(model)
    for preprocessor, expected in (
        (None, source), ("canny", canny.edges(source)), ("depth", np.asarray(estimate(source))),
    ):  # fmt: skip
        (one, _) = requests(estimate, **naming("control", preprocessor=preprocessor))
        assert one.control[0].image == expected.tobytes() and expected.any()
    with build(settings(place, "control_dir", depth_model=str(model))) as works:
        card = handler_of(works).card()
        assert isinstance(card, ImageCard) and card.offer.preprocessors == ("canny", "depth")
        assert read_card(to_data(card)) == card
    with pytest.raises(ModelError, match=r"depth model: .*gone: no such folder"):
        build(settings(place, depth_model=str(tmp_path / "gone")))
    with pytest.raises(Invalid, match=r"depth is not offered by this model .*DIPTYCH_DEPTH_MODEL") as caught:
        requests(**naming("control", preprocessor="depth"))
    assert caught.value.field == "control.preprocessor"


@pytest.mark.parametrize("field", PICTURED)
@pytest.mark.parametrize(
    ("key", "words"), [(None, "is missing"), ("gone", "is no longer there"), ("text", "cannot be decoded")]
)
def test_pictures_that_cannot_be_read_are_named(field: str, key: str | None, words: str) -> None:
    condition = {"model": "edges"} | ({} if key is None else {"image": key})
    with pytest.raises(Invalid, match=words) as caught:
        requests(**{field: [condition]})
    assert caught.value.field == f"{field}.image"


def test_a_control_image_of_another_size_is_refused() -> None:
    with pytest.raises(Invalid, match="must have the image's size"):
        sources.read(ImageJob.read({**JOB, **naming("control", image="other")}).picture, fetch)


def test_beside_a_model_in_int8_a_refiner_is_whole_unless_it_has_such_a_variant(place: Path, tmp_path: Path) -> None:
    kernels()  # skips where there are none
    base = tiny.save(tmp_path / "base", tiny.SHAPES[tiny.TINY])
    quantized.make(load(str(base)), ["a hat"], base)
    with build(settings(place, "refiner", model=str(base), precision="int8")) as works:
        printed = drawn(works, requests(refiner=ASKED["refiner"]))[0].fingerprint
        assert (printed["precision"], printed["refiner"]["precision"]) == ("int8", "fp32")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"refiner": "random:emoji-xl"}, "emoji-xl: is no SDXL refiner, and cannot take the last steps"),
        ({"refiner": "gone"}, "gone: no such folder"),
        ({"model": "random:emoji-z"}, "refiner: refines SDXL's pictures, and .* is no SDXL that draws any"),
        ({"model": "refiner", "refiner": ""}, "refiner: is a refiner, which draws nothing alone"),
    ],
)
def test_what_is_no_refiner_of_this_model_is_refused(
    place: Path, more: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(ModelError, match=said):
        build(settings(place, "refiner", kernels=False, **more))


def test_the_models_plans_are_no_refiners(place: Path, tmp_path: Path) -> None:
    plans.write(tmp_path / "plans.json", "fp32", {"plans": {"quick": {"steps": 4}}})
    with build(settings(place, "refiner", plans=str(tmp_path / "plans.json"), plan="quick", kernels=False)) as works:
        assert image_card(works.images, plan="quick").plans == {"quick": {"steps": 4}}
        assert "refiner" in drawn(works, requests(refiner=ASKED["refiner"]))[0].fingerprint
