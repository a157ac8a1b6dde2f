"""LoRAs, upscalers, refiners, controls and image prompts of requests, at every door: what reaches the worker, what a
model's card offers, and what is refused by name with no job made.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from api.jobs import admission
from api.jobs.presentation import size
from contract.errors import Invalid
from contract.estimates import work_s
from contract.image import ImageJob
from contract.image_prompt import ImagePrompt
from contract.image_request import EditRequest, ImageRequest
from contract.refining import Refining
from contract.upscale import Upscale
from core.config import Settings
from core.jobs.record import Claim, Job, JobState
from core.pictures import fitted
from tests.api.easel import Easel
from tests.api.pictures.test_edits import as_file, pixels
from tests.api.pictures.test_references import uploaded
from tests.api.world import CARD, Api, Worker, check_error, client_of, eventually, ok, opened

DRAW, EDIT = "/v1/images/generations", "/v1/images/edits"
KINDS = {"control": ("control_image", "edges", "pose"), "image_prompts": ("image_prompt", "base", "plus")}
"""By the field of pictures: the form's name of its files, and two models."""
OFFERED = replace(
    CARD, loras=("emoji-v1.2", "ink", "Detail Tweaker XL (v2)"), upscalers=("x4",),
    refiners=("xl-refiner",), controls=KINDS["control"][1:], image_prompts=KINDS["image_prompts"][1:],
    costs=replace(CARD.costs, upscale_megapixel_s=100.0),
)  # fmt: skip
RECORD = {"prompt": "x", "n": 1, "seed": 1, "steps": 4, "guidance_scale": 5.0, "width": 128, "height": 128}


def inline(array: np.ndarray) -> dict[str, str]:
    return {"image_url": "data:image/png;base64," + base64.b64encode(as_file(array)).decode()}


def body(**options: Any) -> dict[str, Any]:
    return {"prompt": "a hat", "size": "128x128", "steps": 2, **options}


def handed_on(worker: Worker, claim: Claim, field: str) -> list[np.ndarray]:
    """The pictures of a field that the worker finds in the store, [H, W, 3] each."""
    found = [Image.open(io.BytesIO(worker.artifacts.get(one["image"]))) for one in claim.parameters[field]]
    assert all((image.format, image.mode) == ("PNG", "RGB") for image in found)
    return [np.asarray(image) for image in found]


def without_pictures(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in entry.items() if name != "image"} for entry in entries]


def test_models_say_which_there_are(shared: Api) -> None:
    (model,) = shared.get("/v1/models").json()["data"]
    for name in ("loras", "upscalers", "refiners", "controls", "image_prompts"):
        assert model["diptych"][name] == list(getattr(OFFERED, name))


# -- pictures that come with a request ---------------------------------------------------------------------------------


def test_a_body_hands_on_its_pictures(shared: Api, easel: Easel, worker: Worker) -> None:
    """Those that are followed at the image's size, the others at a size of their own."""
    first, tall, second = pixels(seed=1), pixels(40, 200, seed=1), pixels(900, 900, seed=2)
    stored = uploaded(shared, as_file(second))
    told = {
        "control": [
            {"model": "edges", "strength": 0.5, "start": 0.25, "end": 0.75}, {"model": "pose", "preprocessor": "canny"}
        ],
        "image_prompts": [{"model": "base", "strength": 0.5, "start": 0.25, "end": 0.75}, {"model": "plus"}],
    }  # fmt: skip
    pictures = {"control": [inline(first), stored], "image_prompts": [inline(tall), stored]}
    asked = {
        field: [{**one, "image": image} for one, image in zip(told[field], pictures[field], strict=True)]
        for field in KINDS
    }
    answer = ok(shared.post(DRAW, **body(**asked)))
    for field, own, side in (("control", first, 128), ("image_prompts", tall, 768)):
        assert without_pictures(easel.last[field]) == told[field]
        got = handed_on(worker, easel.seen[-1], field)
        resized = Image.fromarray(second).resize((side, side), Image.Resampling.LANCZOS)
        assert np.array_equal(got[0], own) and np.array_equal(got[1], np.asarray(resized))
    job = shared.job(answer.json()["job_id"])
    assert job["status"] == "succeeded" and "request" not in job  # its pictures are not part of a request


@pytest.mark.parametrize(("field", "follows"), [("control", "168x96"), ("image_prompts", "128x128")])
def test_the_size_follows_controls_alone_unless_it_is_given(
    shared: Api, easel: Easel, field: str, follows: str
) -> None:
    entry = {"model": KINDS[field][1], "image": inline(pixels(168, 96))}
    assert shared.draw(**{field: [entry]}).json()["size"] == follows


@pytest.mark.parametrize("path", [DRAW, EDIT])
@pytest.mark.parametrize("field", KINDS)
def test_a_form_hands_on_its_files(shared: Api, easel: Easel, worker: Worker, field: str, path: str) -> None:
    name, first, second = KINDS[field]
    array = pixels(seed=3)
    own = [("image", as_file(pixels()))] if path == EDIT else []
    files = [(f"{name}[]", as_file(array)), (f"{name}[]", as_file(pixels())), *own]
    entries = json.dumps([{"model": first, "strength": 0.5}, {"model": second}])
    data = {"prompt": "a hat", "size": "128x128", field: entries}
    ok(shared.client.post(path, data=data, files=files))
    assert [one["model"] for one in easel.last[field]] == [first, second]
    assert np.array_equal(handed_on(worker, easel.seen[-1], field)[0], array)
    for wrong, refused in (
        ({"files": files[:1] + own}, f"{field}.image"),
        ({"files": [*files, files[1]]}, name),
        ({"data": {**data, field: first}}, field),
        ({"data": {**data, name: "none"}, "files": [*own, ("other", b"x")]}, name),
        ({"files": [*files, ("mask", as_file(pixels())), ("photo", b"x")]}, "photo" if own else "mask"),
    ):
        check_error(shared.client.post(path, **{"data": data, "files": files, **wrong}), 400, refused)


@pytest.mark.parametrize("field", KINDS)
def test_pictures_that_are_refused_name_the_field(shared: Api, field: str) -> None:
    model = KINDS[field][1]
    good = {"model": model, "image": inline(pixels())}
    for wrong, part in (
        ({"model": "depth"}, "model"),
        ({"end": 0.0}, "end"),
        ({"strength": "much"}, "strength"),
        ({"image": None}, "image"),
        ({"image": {}}, "image"),
        ({"image": {"image_url": "http://example.com/a.png"}}, "image.image_url"),
        ({"image": {"image_url": "https://127.0.0.1/a.png"}}, "image.image_url"),
        ({"image": {"image_url": "data:image/png;base64,AAAA"}}, "image"),
        ({"fit": "zoom"}, "fit"),
        ({"preprocessor": "depth"}, "preprocessor"),
        ({"mode": -1}, "mode"),
    ):
        check_error(shared.draw(**{field: [{**good, **wrong}]}), 400, f"{field}.{part}")
    if field == "control":
        wide = {**good, "image": inline(pixels(128, 64)), "fit": "exact"}
        check_error(shared.draw(control=[wide], size="128x128"), 400, "control.image", "mismatched_size")
    for value in ([good] * 5, model):
        check_error(shared.draw(**{field: value}), 400, field)


@pytest.mark.parametrize(
    ("fit", "edit_fit", "expected"),
    [({}, {}, "crop"), ({"fit": "contain"}, {}, "contain"), ({}, {"fit": "contain"}, "contain"),
     ({"fit": "crop"}, {"fit": "stretch"}, "crop")],
)  # fmt: skip
def test_a_photo_of_another_shape_is_fitted(
    shared: Api, easel: Easel, worker: Worker, fit: dict[str, str], edit_fit: dict[str, str], expected: Any
) -> None:
    """A control as it says, or else as an edit's source."""
    photo = pixels(256, 192, seed=2)
    asked = body(control=[{"model": "edges", "image": inline(photo), **fit}])
    path = EDIT if edit_fit else DRAW
    ok(shared.post(path, **asked, **({"images": [inline(photo)], **edit_fit} if edit_fit else {})))
    (control,) = handed_on(worker, easel.seen[-1], "control")
    assert np.array_equal(control, fitted(Image.fromarray(photo), (128, 128), expected))


def test_an_edits_further_images_are_image_prompts(shared: Api, easel: Easel, worker: Worker) -> None:
    arrays = [pixels(seed=n) for n in range(4)]
    named = [{"model": "plus", "strength": 0.5, "image": inline(arrays[3])}]
    entries = [{"model": "plus", "strength": 0.5}, {"model": "base"}, {"model": "base"}]
    with client_of(shared.url) as client:
        client.images.edit(image=[as_file(array) for array in arrays[:3]], prompt="a hat", size="128x128")  # type: ignore[call-overload]
    claims = [easel.seen[-1]]
    for asked in (
        {"json": body(images=[inline(array) for array in arrays[:3]], image_prompts=named)},
        {
            "data": {"prompt": "a hat", "size": "128x128", "image_prompts": json.dumps([entries[0]])},
            "files": [*(("image", as_file(array)) for array in arrays[:3]), ("image_prompt", as_file(arrays[3]))],
        },
    ):
        ok(shared.client.post(EDIT, **asked))
        claims.append(easel.seen[-1])
        assert without_pictures(easel.last["image_prompts"]) == entries
    for claim, first in zip(claims, ([], arrays[3:], arrays[3:]), strict=True):
        prompts = handed_on(worker, claim, "image_prompts")
        assert np.array_equal(prompts, [*first, *arrays[1:3]])
        key = claim.parameters["edit"]["image"]
        assert np.array_equal(Image.open(io.BytesIO(worker.artifacts.get(key))), arrays[0])


@pytest.mark.parametrize(("count", "own"), [(6, 0), (5, 1)])
def test_more_further_images_than_there_is_room_for_are_refused(
    shared: Api, easel: Easel, count: int, own: int
) -> None:
    """One fewer is drawn."""
    image = inline(pixels(8, 8))
    prompts = [{"model": "plus", "image": image}] * own
    files = [("image[]", as_file(pixels(8, 8)))] * count
    data = {"prompt": "a hat", **({"image_prompts": json.dumps(prompts)} if own else {})}
    answer = shared.client.post(EDIT, data=data, files=files)
    check_error(answer, 400, "image", "too_many_images")
    fields = body(image_prompts=prompts)
    check_error(shared.post(EDIT, **fields, images=[image] * count), 400, "images")
    ok(shared.post(EDIT, **fields, images=[image] * (count - 1)))


@pytest.mark.parametrize("field", KINDS)
def test_a_repeated_request_is_one_job_and_another_picture_is_another_request(
    shared: Api, easel: Easel, field: str
) -> None:
    key = {"Idempotency-Key": f"once-{field}"}
    asked = [body(**{field: [{"model": KINDS[field][1], "image": inline(pixels(seed=n))}]}) for n in (1, 1, 2)]
    first, again, other = (shared.client.post(DRAW, json=one, headers=key) for one in asked)
    assert first.json()["job_id"] == again.json()["job_id"]
    check_error(other, 422)


def test_the_work_of_a_job_counts_its_pictures() -> None:
    costs = replace(CARD.costs, row_step_s={"128x128": 1.0}, control_row_step_s={"128x128": 0.25})
    card = replace(CARD, costs=costs, deepcache="off")
    plain = ImageJob.read(RECORD)
    controlled = ImageJob.read({**RECORD, "control": [{"model": "edges"}, {"model": "edges", "end": 0.5}]})
    prompted = ImageJob.read({**RECORD, "image_prompts": [{"model": "base"}, {"model": "base", "end": 0.5}]})
    assert work_s(card, controlled) - work_s(card, plain) == pytest.approx(2 * (4 + 2) * 0.25)
    assert work_s(card, prompted) - work_s(card, plain) == pytest.approx(2 * 4 * ImagePrompt.SHARE)
    halved = replace(controlled, deepcache={"interval": 2})
    base = replace(plain, deepcache=halved.deepcache)
    assert work_s(card, halved) - work_s(card, base) == pytest.approx(2 * (2 + 1) * 0.25)


# -- LoRAs, upscalers, refiners ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"upscale": {"model": "x8"}}, "upscale.model", "is not offered by this model: there is no x8; it has x4"),
        *(({"upscale": {"model": "x4", "scale": scale}}, "upscale.scale", "") for scale in (9, 0.5)),
        ({"upscale": {"scale": 2}}, "upscale.model", ""),
        ({"upscale": "x4"}, "upscale", ""),
        ({"refiner": {"model": "other"}}, "refiner.model", "is not offered by this model: there is no other; it has"),
        ({"refiner": {"model": "../xl"}}, "refiner.model", "must be a name"),
        *(({"refiner": {"model": "xl-refiner", "from": share}}, "refiner.from", "") for share in (0, 1)),
        *(
            ({"lora": lora}, "lora", "")
            for lora in (
                "ink,gone:0.5", "ink:loud", "ink,ink", "../ink", " ", ",".join(["ink"] * 4000), {"name": "ink"},
            )
        ),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(
    shared: Api, worker: Worker, fields: dict[str, Any], param: str, said: str
) -> None:
    known = worker.ids()
    (value,) = fields.values()
    code = "invalid_type" if "lora" in fields and not isinstance(value, str) else None
    assert said in check_error(shared.draw(**fields), 400, param, code)["message"]
    if "lora" in fields and isinstance(value, str):
        form = {"prompt": "x", "lora": value}
        answer = shared.client.post(EDIT, data=form, files={"image": as_file(pixels())})
        check_error(answer, 400, "lora", "invalid_value")
    assert worker.ids() == known


def test_who_asks_for_a_lora_gets_it_at_every_door(shared: Api, easel: Easel) -> None:
    text = "ink:0.8, emoji-v1.2, Detail Tweaker XL (v2):-1.5"
    asked = {"prompt": "a fox", "lora": text}
    assert shared.post(DRAW, **asked).status_code == 200
    assert shared.client.post(EDIT, data=asked, files={"image": as_file(pixels())}).status_code == 200
    job = shared.order(**asked)
    eventually(lambda: shared.job(job)["status"] == "succeeded")
    assert [claim.parameters["lora"] for claim in easel.seen] == [text] * 3
    assert shared.post(DRAW, prompt="a fox", lora="").status_code == 200
    assert "lora" not in easel.last


def test_upscaling_counts_as_the_work_that_was_measured() -> None:
    def draft(**fields: Any) -> Any:
        return admission.image_draft(ImageRequest(prompt="a fox", steps=10, seed=1, **fields), OFFERED)

    plain, enlarged = draft(), draft(upscale=Upscale(model="x4", scale=2))
    assert enlarged.work_ms - plain.work_ms == round(100_000 * 128 * 128 / 1e6)
    assert ImageJob.read(enlarged.parameters).picture.upscale == Upscale(model="x4", scale=2)


def test_the_size_of_an_answer_is_the_pictures_own() -> None:
    request = admission.image_draft(ImageRequest(prompt="a fox"), CARD).request
    ended = (None, None, None, 1, 0, "", None, None, None, False, 0)
    job = Job("1", "image", "m", JobState.SUCCEEDED, request.to_dict(), 5, 0.0, *ended)
    assert size(job, request) == "128x128"
    assert size(replace(job, result={"images": [{"width": 512, "height": 384}]}), request) == "512x384"


def test_an_edit_is_refined_but_for_a_soft_mask() -> None:
    def complete(masked: bool, **fields: Any) -> ImageJob:
        request = EditRequest.model_validate({"prompt": "a fox", "refiner": {"model": "xl-refiner"}, **fields})
        return request.complete(OFFERED.offer, (64, 64), masked=masked)

    for job in (complete(False, strength=0.5), complete(True)):
        assert job.picture.refiner == Refining(model="xl-refiner") and job.picture.edit is not None
    with pytest.raises(Invalid, match="refiner: is not supported together with soft_mask"):
        complete(True, soft_mask=True)


def test_the_record_carries_a_refiner_under_the_requests_names() -> None:
    fields = ImageRequest.model_validate({"prompt": "a fox", "refiner": {"model": "xl-refiner", "from": 0.7}})
    parameters = admission.image_draft(fields, OFFERED).parameters
    assert parameters["refiner"] == {"model": "xl-refiner", "from": 0.7}
    assert ImageJob.read(parameters).picture.refiner == Refining(model="xl-refiner", **{"from": 0.7})


# -- at the end: another API on the same Redis, which begins anew ------------------------------------------------------


def test_a_model_without_any_says_so(settings: Settings) -> None:
    card = replace(CARD, precision="int8", refusals={"loras": "no LoRA folder is configured"})
    with opened(settings, card) as (api, worker):
        for field, value, param, said in (
            ("lora", "ink", "lora", "lora: no LoRA folder is configured"),
            ("upscale", {"model": "x4"}, "upscale.model", "there is no x4; its worker's folder of them is empty"),
            ("refiner", {"model": "xl-refiner"}, "refiner.model", "it has none"),
        ):
            form = {"prompt": "a hat", field: value if isinstance(value, str) else json.dumps(value)}
            for answer in (
                api.post(DRAW, prompt="a fox", **{field: value}),
                api.client.post(EDIT, data=form, files={"image": as_file(pixels())}),  # as JSON in a form
            ):
                check_error(answer, 400, param, "invalid_value")
                assert answer.json()["error"]["message"].endswith(said)
        assert not worker.ids()
