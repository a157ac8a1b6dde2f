"""POST /v1/images/edits: OpenAI's client as it is, what comes of what is handed in, and what is refused by name."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from openai import OpenAI
from PIL import Image

from api.pictures import forms as picture_forms
from api.pictures.uploads import MAX_BYTES
from contract.image import ImageJob
from core.jobs.record import Claim
from core.pictures import fitted
from tests.api.easel import Easel, asked
from tests.api.world import PATIENCE_S, Api, Worker, check_error, eventually, ok
from tests.faults.payloads import chunk, form_body

EDITS = "/v1/images/edits"


def pixels(width: int = 128, height: int = 128, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def as_file(array: np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, form, **options)
    return stream.getvalue()


def with_alpha(alpha: Any) -> np.ndarray:
    array = pixels(channels=4)
    array[..., 3] = alpha
    return array


def hole(width: int = 128, height: int = 128) -> np.ndarray:
    """A mask in RGBA whose left upper quarter is transparent."""
    array = pixels(width, height, 4)
    array[..., 3] = 255
    array[: height // 2, : width // 2, 3] = 0
    return array


def drawn_anew(mask: np.ndarray) -> np.ndarray:
    """White where the mask is transparent."""
    return np.where(mask[..., 3] == 0, 255, 0).astype(np.uint8)


PNG = as_file(pixels())
SOFT = with_alpha(np.arange(128, dtype=np.uint8)[:, None] + 64)  # nothing is quite transparent


def handed_on(worker: Worker, claim: Claim) -> tuple[np.ndarray, np.ndarray | None]:
    """What the worker finds in the store: [H, W, 3], and the mask, [H, W]."""
    found = []
    for name, mode in (("image", "RGB"), ("mask", "L")):
        key = claim.parameters["edit"].get(name)
        image = None if key is None else Image.open(io.BytesIO(worker.artifacts.get(key)))
        assert image is None or (image.format, image.mode) == ("PNG", mode)
        found.append(None if image is None else np.asarray(image))
    assert found[0] is not None
    return found[0], found[1]


def edit(api: Api, image: bytes = PNG, mask: bytes | None = None, **fields: str) -> httpx2.Response:
    """The answer to a form."""
    files = {"image": image} if mask is None else {"image": image, "mask": mask}
    return api.client.post(EDITS, data={"prompt": "a hat", **fields}, files=files)


def edited(
    api: Api, easel: Easel, image: np.ndarray, mask: np.ndarray | None = None, /, **fields: str
) -> tuple[dict[str, Any], np.ndarray, np.ndarray | None]:
    """The parameters, the image and the mask that the worker gets of a form."""
    answer = ok(edit(api, as_file(image), None if mask is None else as_file(mask), **fields))
    claim = easel.seen[-1]
    assert answer.json()["size"] == "{width}x{height}".format(**claim.parameters)
    return claim.parameters, *handed_on(easel.worker, claim)


def test_the_openai_client_edits_a_picture(client: OpenAI, easel: Easel, worker: Worker) -> None:
    array = pixels()
    answer = client.images.edit(
        image=("cat.png", as_file(array)), prompt="a cat in a hat", n=2, size="128x128", response_format="b64_json",
        extra_body={"steps": 10, "seed": 7, "guidance_scale": 3.5, "negative_prompt": "fog", "strength": 0.45},
    )  # fmt: skip
    assert answer.data is not None and len(answer.data) == 2
    assert Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or ""))).size == (128, 128)
    claim = easel.seen[-1]
    given_parameters = {"prompt": "a cat in a hat", "n": 2, "steps": 10, "seed": 7, "guidance_scale": 3.5}
    assert claim.parameters.items() >= {**given_parameters, "negative_prompt": "fog", "width": 128}.items()
    assert claim.parameters["edit"]["strength"] == 0.45
    image, mask = handed_on(worker, claim)
    assert np.array_equal(image, array) and mask is None
    linked = client.images.edit(
        image=io.BytesIO(PNG), mask=io.BytesIO(as_file(hole())), prompt="a hat", response_format="url"
    )
    assert linked.data is not None and str(linked.data[0].url).startswith("http")
    assert handed_on(worker, easel.seen[-1])[1] is not None


def test_it_streams_as_openai_does(client: OpenAI, easel: Easel) -> None:
    easel.looked.clear()
    options: dict[str, Any] = {"stream": True, "partial_images": 2, "extra_body": {"steps": 10}}
    events = easel.previewed(client.images.edit(image=[PNG], prompt="a hat", **options))
    assert {event.type for event in events[:-1]} == {"image_edit.partial_image"}
    assert events[-1].type == "image_edit.completed" and base64.b64decode(events[-1].b64_json)


@pytest.mark.parametrize(
    ("image", "mask", "fields", "expected"),
    [
        (pixels(), SOFT, {"soft_mask": "true"}, 255 - SOFT[..., 3]),
        (SOFT, None, {"soft_mask": "true"}, 255 - SOFT[..., 3]),
        (hole(), None, {}, drawn_anew(hole())),
        (hole(), hole()[::-1].copy(), {}, drawn_anew(hole())[::-1]),
        *((with_alpha(opaque), None, {}, None) for opaque in (255, 254, 1)),
    ],
    ids=["soft mask", "soft picture", "hole", "hole and mask", "opaque", "nearly opaque", "nearly transparent"],
)
def test_what_is_transparent_is_drawn_anew(
    shared: Api, easel: Easel, image: np.ndarray, mask: np.ndarray | None, fields: dict[str, str], expected: Any
) -> None:
    """In the mask, or else in the picture; what is half transparent is no hole unless that is said."""
    parameters, _, found = edited(shared, easel, image, mask, **fields)
    assert parameters["edit"]["strength"] == (0.8 if expected is None else 1)
    assert parameters["edit"].get("soft_mask", False) is bool(fields) and ImageJob.read(parameters).picture.edit
    assert (found is None) if expected is None else np.array_equal(found, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "asked", "expected"),
    [
        ((128, 128), None, (128, 128)),
        ((64, 64), "auto", (64, 64)),
        ((500, 500), None, (128, 128)),
        ((70, 66), None, (64, 64)),
        ((960, 1680), None, (96, 168)),
        ((300, 150), None, (168, 96)),
        ((500, 300), "64x64", (64, 64)),
    ],
)
def test_the_size_follows_the_picture_unless_it_is_given(
    shared: Api, easel: Easel, size: tuple[int, int], asked: str | None, expected: tuple[int, int]
) -> None:
    array = pixels(*size)
    _, image, _ = edited(shared, easel, array, **({} if asked is None else {"size": asked}))
    assert np.array_equal(image, np.asarray(Image.fromarray(array).resize(expected, Image.Resampling.LANCZOS)))


MARGINS = {"left": 24, "top": 0, "right": 16, "bottom": 32}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, (168, 96)), ({"size": "64x64"}, (64, 64)), ({"outpaint": json.dumps({**MARGINS, "top": 8})}, (168, 96))],
)
def test_what_lies_beyond_the_picture_is_drawn_too(
    shared: Api, easel: Easel, fields: dict[str, str], expected: tuple[int, int]
) -> None:
    """The larger size as it is, where the model has it; else the nearest."""
    array = pixels(128, 64)
    parameters, image, mask = edited(shared, easel, array, **{"outpaint": json.dumps(MARGINS), **fields})
    assert parameters["edit"]["strength"] == 1
    assert mask is not None and image.shape[:2] == mask.shape == expected[::-1]
    if not fields:
        assert np.array_equal(image[:64, 24:152], array) and (mask == 0).sum() == array[..., 0].size


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        *(("guidance_interval", text, [0.25, 1]) for text in ("[0.25, 1]", "[0.25,1.0]", "0.25, 1")),
        ("guided_steps", "0,2", [0, 2]),
        ("timesteps", "[999, 500]", [999, 500]),
        ("timesteps", "999.0,5e2", [999, 500]),
        ("sigmas", "9.5,0.25", [9.5, 0.25]),
    ],
)
def test_a_form_tells_lists_as_text(shared: Api, easel: Easel, name: str, text: str, expected: list[float]) -> None:
    schedule = name in ("timesteps", "sigmas")
    parameters, _, _ = edited(shared, easel, pixels(), **{name: text} | ({} if schedule else {"steps": "10"}))
    assert parameters[name] == expected and parameters["steps"] == (2 if schedule else 10)


def test_what_is_handed_in_never_enters_the_record_and_goes_with_it(shared: Api, worker: Worker) -> None:
    id, answer = asked(worker, edit, shared, as_file(pixels(seed=99)), as_file(hole()))
    keys = worker.job(id).inputs
    assert len(keys) == 2 and len(str(worker.redis.hgetall(f"diptych:job:{id}"))) < 3000
    assert all(worker.redis.hget("diptych:needed", key) == "1" for key in keys)
    worker.work(id)
    assert answer.result(PATIENCE_S).status_code == 200
    assert not any(worker.redis.hexists("diptych:needed", key) for key in keys)
    assert all(worker.artifacts.get(key) for key in keys), "as long as its record is there"
    assert shared.delete(f"/v1/jobs/{id}").status_code == 200
    for key in keys:  # let ten minutes pass
        worker.redis.zadd("diptych:kept", {key: 1})
    eventually(lambda: not any(worker.redis.zscore("diptych:going", key) for key in keys) and gone(worker, keys))


def gone(worker: Worker, keys: tuple[str, ...]) -> bool:
    try:
        for key in keys:
            worker.artifacts.get(key)
    except Exception as error:
        return "does not exist" in str(error)
    return False


@pytest.mark.parametrize(("code", "status"), [("engine_error", 500), ("content_policy_violation", 400)])
def test_a_job_that_is_asked_for_again_begins_with_the_same(
    shared: Api, worker: Worker, code: str, status: int
) -> None:
    """Whether it failed, or a checker refused its picture."""
    id, answer = asked(worker, edit, shared)
    claim = worker.take(id)
    assert worker.store.leases.fail(id, claim.attempt, code, "no")
    check_error(answer.result(PATIENCE_S), status, code=code)
    assert shared.job(id)["error"]["code"] == code
    again = ok(shared.client.post(f"/v1/jobs/{id}/requeue"), 202)
    job = worker.job(again.json()["id"])
    assert job.inputs == worker.job(id).inputs and job.parameters["edit"] == claim.parameters["edit"]
    assert all(worker.redis.hget("diptych:needed", key) for key in job.inputs)
    worker.work(job.id)


def test_an_idempotency_key_stands_for_one_picture(shared: Api, easel: Easel) -> None:
    def ask(data: bytes) -> httpx2.Response:
        headers = {"Idempotency-Key": "edit-1"}
        return shared.client.post(EDITS, data={"prompt": "x", "steps": "4"}, files={"image": data}, headers=headers)

    first, same = ask(PNG), ask(PNG)
    assert first.status_code == 200 and first.json()["job_id"] == same.json()["job_id"]
    check_error(ask(as_file(pixels(seed=1))), 422, code="idempotency_conflict")


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises far more than is in it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND")


def webp_bomb() -> bytes:
    head = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + (16382).to_bytes(3, "little") * 2
    return b"RIFF" + struct.pack("<I", 4 + len(head)) + b"WEBP" + head


@pytest.mark.parametrize(
    ("image", "mask", "param"),
    [
        *((data, None, "image") for data in (b"", b"hello", bomb(128, 128), as_file(pixels(), "BMP"))),
        *((PNG, as_file(mask), "mask") for mask in (hole(64, 64), with_alpha(255), SOFT)),
        (PNG, b"hello", "mask"),
    ],
    ids=range(8),
)
def test_pictures_are_refused_by_name(
    shared: Api, worker: Worker, image: bytes, mask: bytes | None, param: str
) -> None:
    known = worker.ids()
    check_error(edit(shared, image, mask), 400, param, "invalid_value")
    assert worker.ids() == known


@pytest.mark.parametrize(
    ("files", "status", "param", "code"),
    [
        ({"mask": as_file(hole())}, 400, "image", "missing_required_parameter"),
        ({"image": PNG + bytes(MAX_BYTES)}, 413, "image", "body_too_large"),
        ({"image": PNG, "steps": b"4"}, 400, "steps", "invalid_type"),
        ({"other": b""}, 400, "other", "invalid_type"),
        ({"image": PNG, "outpaint[up]": PNG}, 400, "outpaint[up]", "invalid_type"),
        ({"image": PNG, "mask[]": b""}, 400, "mask", "invalid_value"),
    ],
)
def test_files_are_refused_by_name(shared: Api, files: dict[str, bytes], status: int, param: str, code: str) -> None:
    check_error(shared.client.post(EDITS, data={"prompt": "a hat"}, files=files), status, param, code)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        *(({"n": text}, "n", "invalid_type") for text in ("two", "2.5")),
        ({"strength": "nan"}, "strength", "invalid_type"),
        ({"strength": "0.04"}, "strength", "invalid_value"),
        ({"strength": "0.5", "steps": "1"}, "strength", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"deepcache": "{"}, "deepcache", "invalid_value"),
        ({"outpaint": '{"a b": 1}'}, "outpaint", "unknown_parameter"),
        ({"outpaint": '{"a b": NaN}'}, "outpaint", "invalid_value"),
        ({"outpaint[up]": "8"}, "outpaint[up]", "unknown_parameter"),
        ({"control": '{"model": 1}'}, "control.model", "invalid_type"),
        ({"control": '{"model": "a", "image": "data:"}'}, "control.image", "invalid_type"),
        ({"deepcache": '{"deep_steps": [0, 17]}'}, "deepcache.deep_steps", "invalid_value"),
        *(({"guidance_interval": text}, "guidance_interval", None) for text in ("[", "0:1")),
        ({"timesteps": "999.5, 3"}, "timesteps", None),
        ({"guidance_interval": "[0, 0.2]", "steps": "10", "strength": "0.3"}, "guidance_interval", "invalid_value"),
        ({"guided_steps": "0, 3", "steps": "10", "strength": "0.3"}, "guided_steps", "invalid_value"),
        ({"soft_mask": "true"}, "soft_mask", "invalid_value"),
        ({"soft_mask": "half"}, "soft_mask", "invalid_type"),
        *(({"outpaint": text}, "outpaint", None) for text in ("{}", '{"left": 4096, "right": 4096}', "8")),
        *(({"outpaint": json.dumps({"left": side})}, "outpaint.left", None) for side in (-1, 4097)),
        ({"outpaint": '{"up": 8}'}, "outpaint.up", None),
        ({"image": "text"}, "image", None),
        ({"nonsense": "1"}, "nonsense", "unknown_parameter"),
        ({"non sense": "1"}, None, "unknown_parameter"),
    ],
)
def test_fields_are_refused_by_name(
    shared: Api, worker: Worker, fields: dict[str, str], param: str | None, code: str | None
) -> None:
    known = worker.ids()
    answer = shared.client.post(EDITS, data={"prompt": "a hat", **fields}, files={"image": PNG})
    check_error(answer, 400, param, code)
    assert worker.ids() == known


@pytest.mark.parametrize(
    "names", [("image[]", "mask[]"), ("image[0]", "mask[0]"), ("image", "mask[]"), ("image[]", "mask")], ids=str
)
def test_the_names_of_lists_are_those_of_their_fields(shared: Api, easel: Easel, names: tuple[str, str]) -> None:
    array, mask = pixels(seed=3), hole()
    files = list(zip(names, (as_file(array), as_file(mask)), strict=True))
    fields = {"prompt[]": "a hat", "steps": "10", "guided_steps[1]": "2", "guided_steps[0]": "0"}
    ok(shared.client.post(EDITS, data=fields, files=files))
    claim = easel.seen[-1]
    assert (claim.parameters["prompt"], claim.parameters["guided_steps"]) == ("a hat", [0, 2])
    image, drawn = handed_on(easel.worker, claim)
    assert np.array_equal(image, array) and drawn is not None and np.array_equal(drawn, drawn_anew(mask))


def test_a_file_that_nobody_chose_in_a_browser_is_not_given(shared: Api, easel: Easel) -> None:
    head = b'Content-Disposition: form-data; name="%b"; filename=""\r\nContent-Type: application/octet-stream'
    empty = b"\r\n" + head + b"\r\n\r\n\r\n--edge"
    form = form_body({"prompt": b"a hat"}, {"image": PNG}).removesuffix(b"--\r\n")
    form += empty % b"mask" + empty % b"control_image[]"
    headers = {"content-type": "multipart/form-data; boundary=edge"}
    ok(shared.client.post(EDITS, content=form + b"--\r\n", headers=headers))
    assert handed_on(easel.worker, easel.seen[-1])[1] is None
    bare = form_body({"prompt": b"a hat"}, {}).removesuffix(b"--\r\n") + empty % b"image" + b"--\r\n"
    check_error(shared.client.post(EDITS, content=bare, headers=headers), 400, "image", "missing_required_parameter")


def test_without_an_adapter_two_pictures_are_one_too_many(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="image_prompts") as caught:
        client.images.edit(image=[PNG, PNG], prompt="a hat")
    assert (caught.value.param, caught.value.code) == ("image", "too_many_images")


def test_an_edit_of_16_bits_is_that_of_8(shared: Api, easel: Easel) -> None:
    """Source, mask, and all else go through the same reader."""
    ramp = np.tile(np.linspace(0, 65535, 128).astype(np.uint16), (128, 1))
    deep, twin = (edited(shared, easel, array)[1] for array in (ramp, (ramp >> 8).astype(np.uint8)))
    assert np.array_equal(deep, twin) and 126 < twin.mean() < 129


@pytest.mark.parametrize("fit", ["crop", "contain", "stretch"])
def test_source_and_mask_are_fitted_alike(shared: Api, easel: Easel, fit: Any) -> None:
    array = hole(160, 80)
    _, image, mask = edited(shared, easel, array[..., :3].copy(), array, size="128x128", fit=fit)
    assert np.array_equal(image, np.asarray(fitted(Image.fromarray(array[..., :3]), (128, 128), fit)))
    drawn = Image.fromarray(drawn_anew(array))
    assert np.array_equal(mask, np.where(np.asarray(fitted(drawn, (128, 128), fit, surround=0)) < 128, 0, 255))  # type: ignore[arg-type]


def test_an_exact_source_must_have_the_size(shared: Api, easel: Easel) -> None:
    edited(shared, easel, pixels(), size="128x128", fit="exact")
    check_error(edit(shared, size="64x64", fit="exact"), 400, "image", "mismatched_size")


def test_what_is_no_form_is_refused(shared: Api) -> None:
    check_error(shared.client.post(EDITS, content=b"a hat"), 415, "content-type")
    headers = {"content-type": "multipart/form-data; boundary=x"}
    check_error(shared.client.post(EDITS, content=b"nothing of the kind", headers=headers), 400, code=None)
    check_error(shared.client.post(EDITS, content=iter([b"a"]), headers=headers), 400, code="invalid_body")


def test_a_form_of_unknown_length_is_read_and_bounded(
    shared: Api, easel: Easel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clients send one that they make on the way, such as openai-node: chunked, without Content-Length."""
    form = httpx2.Request("POST", shared.url, data={"prompt": "a hat", "steps": "2"}, files={"image": PNG})
    data, headers = form.read(), {"content-type": form.headers["content-type"]}

    def post(data: bytes) -> httpx2.Response:
        pieces = (data[at : at + 5000] for at in range(0, len(data), 5000))
        return shared.client.post(EDITS, content=pieces, headers=headers)

    assert post(data).status_code == 200
    assert easel.last["steps"] == 2
    assert np.array_equal(handed_on(easel.worker, easel.seen[-1])[0], pixels())
    monkeypatch.setattr(picture_forms, "_ENVELOPE", len(data) - 1 - picture_forms._MOST * MAX_BYTES)
    check_error(post(data), 413, code="body_too_large")
