"""POST /v1/images/edits: OpenAI's client as it is, what comes of what is handed in, and what is refused by name."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from openai import OpenAI
from PIL import Image

from api import edits
from api.uploads import MAX_BYTES
from contract.image import ImageJob
from core.jobs.record import Claim
from core.pictures import fitted
from tests.api.easel import Easel
from tests.api.world import PATIENCE_S, Api, Worker, check_error, eventually
from tests.faults.payloads import form_body

EDITS = "/v1/images/edits"


@pytest.fixture
def client(shared: Api) -> Iterator[OpenAI]:
    with OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def pixels(width: int = 128, height: int = 128, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def as_file(array: np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, form, **options)
    return stream.getvalue()


def hole(width: int = 128, height: int = 128) -> np.ndarray:
    """A mask in RGBA whose left upper quarter is transparent."""
    array = pixels(width, height, 4)
    array[..., 3] = 255
    array[: height // 2, : width // 2, 3] = 0
    return array


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


def test_the_openai_client_paints_into_what_its_mask_leaves_open(client: OpenAI, easel: Easel, worker: Worker) -> None:
    answer = client.images.edit(
        image=io.BytesIO(as_file(pixels())), mask=io.BytesIO(as_file(hole())), prompt="a hat", response_format="url"
    )
    assert answer.data is not None and str(answer.data[0].url).startswith("http")
    claim = easel.seen[-1]
    assert claim.parameters["edit"]["strength"] == 1.0
    _, mask = handed_on(worker, claim)
    assert mask is not None and set(np.unique(mask)) == {0, 255}
    assert (mask[:60, :60] == 255).all() and (mask[68:] == 0).all() and (mask[:, 68:] == 0).all()


def test_a_soft_masks_transparency_reaches_the_worker(shared: Api, easel: Easel, worker: Worker) -> None:
    array = pixels(channels=4)
    array[..., 3] = np.arange(128, dtype=np.uint8)[:, None] + 64  # nothing is quite transparent
    files = {"image": as_file(pixels()), "mask": as_file(array)}
    check_error(shared.client.post(EDITS, data={"prompt": "a hat"}, files=files), 400, "mask", "invalid_value")
    answer = shared.client.post(EDITS, data={"prompt": "a hat", "soft_mask": "true"}, files=files)
    assert answer.status_code == 200, answer.text
    claim = easel.seen[-1]
    assert claim.parameters["edit"]["soft_mask"] is True and ImageJob.read(claim.parameters).picture.edit is not None
    _, mask = handed_on(worker, claim)
    assert mask is not None and np.array_equal(mask, 255 - array[..., 3])


def test_it_streams_as_openai_does(client: OpenAI, easel: Easel) -> None:
    easel.step_s = 0.05
    events = list(
        client.images.edit(
            image=[as_file(pixels())], prompt="a hat", stream=True, partial_images=2, extra_body={"steps": 10}
        )
    )
    assert {event.type for event in events[:-1]} == {"image_edit.partial_image"}
    assert events[-1].type == "image_edit.completed" and base64.b64decode(events[-1].b64_json)


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
    shared: Api, easel: Easel, worker: Worker, size: tuple[int, int], asked: str | None, expected: tuple[int, int]
) -> None:
    array = pixels(*size)
    data = {"prompt": "a hat", **({} if asked is None else {"size": asked})}
    answer = shared.client.post(EDITS, data=data, files={"image": as_file(array)})
    assert answer.status_code == 200 and answer.json()["size"] == "{}x{}".format(*expected)
    image, _ = handed_on(worker, easel.seen[-1])
    resized = Image.fromarray(array).resize(expected, Image.Resampling.LANCZOS)
    assert np.array_equal(image, np.asarray(resized))


MARGINS = {"left": 24, "top": 0, "right": 16, "bottom": 32}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({}, (168, 96)), ({"size": "64x64"}, (64, 64)), ({"outpaint": {**MARGINS, "top": 8}}, (168, 96))],
)
@pytest.mark.parametrize("form", [True, False])
def test_what_lies_beyond_the_picture_is_drawn_too(
    shared: Api, easel: Easel, worker: Worker, form: bool, asked: dict[str, Any], expected: tuple[int, int]
) -> None:
    """The larger size as it is, where the model has it; else the nearest."""
    fields, array = {"prompt": "a hat", "outpaint": MARGINS, **asked}, pixels(128, 64)
    if form:
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
        answer = shared.client.post(EDITS, data=texts, files={"image": as_file(array)})
    else:
        url = f"data:image/png;base64,{base64.b64encode(as_file(array)).decode()}"
        answer = shared.client.post(EDITS, json={**fields, "images": [{"image_url": url}]})
    assert answer.status_code == 200 and answer.json()["size"] == "{}x{}".format(*expected)
    claim = easel.seen[-1]
    assert claim.parameters["edit"]["strength"] == 1
    image, mask = handed_on(worker, claim)
    assert mask is not None and image.shape[:2] == mask.shape == expected[::-1]
    if not asked:
        assert np.array_equal(image[:64, 24:152], array) and (mask == 0).sum() == array[..., 0].size


@pytest.mark.parametrize(
    ("margins", "said"),
    [({}, "outpaint: must have a side of more than 0"), ({"left": -1}, "outpaint.left: "), ({"up": 8}, "outpaint.up"),
     ({"left": 4097}, "outpaint.left: "), ({"left": 4096, "right": 4096}, "outpaint: makes more than 8192 pixels"),
     ("8", "outpaint: ")],
)  # fmt: skip
def test_margins_are_refused_by_name(shared: Api, margins: Any, said: str) -> None:
    texts = {"prompt": "a hat", "outpaint": margins if isinstance(margins, str) else json.dumps(margins)}
    answer = shared.client.post(EDITS, data=texts, files={"image": as_file(pixels())})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize("text", ["[0.25, 1]", "[0.25,1.0]", "0.25, 1"])
def test_a_form_tells_an_interval_as_text(shared: Api, easel: Easel, text: str) -> None:
    data = {"prompt": "a hat", "steps": "10", "guidance_interval": text}
    assert shared.client.post(EDITS, data=data, files={"image": PNG}).status_code == 200
    assert easel.seen[-1].parameters["guidance_interval"] == [0.25, 1]


def test_a_form_tells_lists_of_steps_as_text(shared: Api, easel: Easel) -> None:
    data = {"prompt": "a hat", "steps": "5", "guided_steps": "0,2"}
    assert shared.client.post(EDITS, data=data, files={"image": PNG}).status_code == 200
    assert easel.seen[-1].parameters["guided_steps"] == [0, 2]
    for name, text, expected in (
        ("timesteps", "[999, 500]", [999, 500]), ("timesteps", "999.0,5e2", [999, 500]),
        ("sigmas", "9.5,0.25", [9.5, 0.25]),
    ):  # fmt: skip
        data = {"prompt": "a hat", name: text}
        assert shared.client.post(EDITS, data=data, files={"image": PNG}).status_code == 200
        assert easel.seen[-1].parameters[name] == expected and easel.seen[-1].parameters["steps"] == 2


def test_what_is_handed_in_never_enters_the_record_and_goes_with_it(shared: Api, worker: Worker) -> None:
    with ThreadPoolExecutor(1) as pool:
        known = worker.ids()
        files = {"image": as_file(pixels(seed=99)), "mask": as_file(hole())}
        answer = pool.submit(shared.client.post, EDITS, data={"prompt": "a hat"}, files=files)
        (id,) = eventually(lambda: worker.ids() - known)
        keys = worker.job(id).inputs
        record = worker.redis.hgetall(f"diptych:job:{id}")
        assert len(keys) == 2 and len(str(record)) < 3000
        assert all(worker.redis.hget("diptych:needed", key) == "1" for key in keys)
        worker.work(id)
        assert answer.result(PATIENCE_S).status_code == 200
    assert not any(worker.redis.hexists("diptych:needed", key) for key in keys)
    assert all(worker.artifacts.get(key) for key in keys), "as long as its record is there"
    assert shared.client.delete(f"/v1/jobs/{id}").status_code == 200
    for key in keys:  # let ten minutes pass
        worker.redis.zadd("diptych:kept", {key: 1})
    eventually(lambda: not any(worker.redis.zscore("diptych:going", key) for key in keys) and gone(worker, keys))


def gone(worker: Worker, keys: tuple[str, ...]) -> bool:
    folder = worker.artifacts
    try:
        for key in keys:
            folder.get(key)
    except Exception as error:
        return "does not exist" in str(error)
    return False


def test_a_job_that_is_asked_for_again_begins_with_the_same(shared: Api, worker: Worker) -> None:
    with ThreadPoolExecutor(1) as pool:
        known = worker.ids()
        answer = pool.submit(shared.client.post, EDITS, data={"prompt": "x"}, files={"image": as_file(pixels())})
        (id,) = eventually(lambda: worker.ids() - known)
        claim = worker.take(id)
        assert worker.store.leases.fail(id, claim.attempt, "engine_error", "no")
        check_error(answer.result(PATIENCE_S), 500, code="engine_error")
    again = shared.client.post(f"/v1/jobs/{id}/requeue")
    assert again.status_code == 202, again.text
    job = worker.job(again.json()["id"])
    assert job.inputs == worker.job(id).inputs and job.parameters["edit"] == claim.parameters["edit"]
    assert all(worker.redis.hget("diptych:needed", key) for key in job.inputs)
    worker.work(job.id)


def test_an_idempotency_key_stands_for_one_picture(shared: Api, easel: Easel) -> None:
    def ask(data: bytes) -> httpx2.Response:
        headers = {"Idempotency-Key": "edit-1"}
        return shared.client.post(EDITS, data={"prompt": "x", "steps": "4"}, files={"image": data}, headers=headers)

    first, same = ask(as_file(pixels())), ask(as_file(pixels()))
    assert first.status_code == 200 and first.json()["job_id"] == same.json()["job_id"]
    check_error(ask(as_file(pixels(seed=1))), 422, code="idempotency_conflict")


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises far more than is in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def webp_bomb() -> bytes:
    head = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + (16382).to_bytes(3, "little") * 2
    return b"RIFF" + struct.pack("<I", 4 + len(head)) + b"WEBP" + head


PNG = as_file(pixels())
OPAQUE = as_file(np.dstack([pixels(), np.full((128, 128), 255, np.uint8)]))


@pytest.mark.parametrize(
    ("files", "status", "param", "code"),
    [
        ({}, 400, "image", "missing_required_parameter"),
        ({"image": b""}, 400, "image", "invalid_value"),
        ({"image": b"hello"}, 400, "image", "invalid_value"),
        ({"image": PNG[:200]}, 400, "image", "invalid_value"),
        ({"image": PNG[:-500]}, 400, "image", "invalid_value"),
        ({"image": as_file(pixels(), "GIF")}, 400, "image", "invalid_value"),
        ({"image": as_file(pixels(), "BMP")}, 400, "image", "invalid_value"),
        ({"image": bomb(20_000, 20_000)}, 400, "image", "invalid_value"),
        ({"image": bomb(4097, 4096)}, 400, "image", "invalid_value"),
        ({"image": bomb(128, 128)}, 400, "image", "invalid_value"),
        ({"image": webp_bomb()}, 400, "image", "invalid_value"),
        ({"image": PNG + bytes(MAX_BYTES)}, 413, "image", "body_too_large"),
        ({"image": PNG, "mask": b"hello"}, 400, "mask", "invalid_value"),
        ({"image": PNG, "mask": as_file(hole(64, 64))}, 400, "mask", "invalid_value"),
        ({"image": PNG, "mask": PNG}, 400, "mask", "invalid_value"),
        ({"image": PNG, "mask": OPAQUE}, 400, "mask", "invalid_value"),
        ({"image": PNG, "prompt": b"a cat"}, 400, "prompt", "invalid_type"),
    ],
)
def test_files_are_refused_by_name(
    shared: Api, worker: Worker, files: dict[str, bytes], status: int, param: str, code: str
) -> None:
    known = worker.ids()
    data = {} if "prompt" in files else {"prompt": "a hat"}
    answer = shared.client.post(EDITS, data={**data, "n": "1"}, files=files or {"other": b""})
    if not files:
        check_error(answer, 400, "other", "invalid_type")
        answer = shared.client.post(EDITS, data=data, files={"mask": as_file(hole())})
    check_error(answer, status, param, code)
    assert worker.ids() == known


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": " "}, "prompt", "invalid_value"),
        ({"n": "two"}, "n", "invalid_type"),
        ({"n": "2.5"}, "n", "invalid_type"),
        ({"n": "11"}, "n", "invalid_value"),
        ({"strength": "1.01"}, "strength", "invalid_value"),
        ({"strength": "-0.1"}, "strength", "invalid_value"),
        ({"strength": "nan"}, "strength", "invalid_type"),
        ({"strength": "0.04"}, "strength", "invalid_value"),
        ({"strength": "0.5", "steps": "1"}, "strength", "invalid_value"),
        ({"size": "1x1"}, "size", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"deepcache": "{"}, None, "invalid_body"),
        ({"guidance_interval": "["}, "guidance_interval", None),
        ({"timesteps": "999.5, 3"}, "timesteps", None),
        ({"sigmas": "9, 9"}, "sigmas.1", "invalid_value"),
        ({"guidance_interval": "0:1"}, "guidance_interval", None),
        ({"guidance_interval": "[0, 0.2]", "steps": "10", "strength": "0.3"}, "guidance_interval", "invalid_value"),
        ({"guided_steps": "0, 3", "steps": "10", "strength": "0.3"}, "guided_steps", "invalid_value"),
        ({"deepcache": '{"deep_steps": [0, 17]}'}, "deepcache.deep_steps", "invalid_value"),
        ({"soft_mask": "true"}, "soft_mask", "invalid_value"),
        ({"soft_mask": "half"}, "soft_mask", "invalid_type"),
        ({"image": "text"}, "image", None),
        ({"nonsense": "1"}, "nonsense", "unknown_parameter"),
        ({"non sense": "1"}, None, "unknown_parameter"),
        ({"response_format": "tiff"}, "response_format", "invalid_value"),
    ],
)
def test_fields_are_refused_by_name(
    shared: Api, worker: Worker, fields: dict[str, str | None], param: str | None, code: str | None
) -> None:
    known = worker.ids()
    data = {name: value for name, value in {"prompt": "a hat", **fields}.items() if value is not None}
    check_error(shared.client.post(EDITS, data=data, files={"image": PNG}), 400, param, code)
    assert worker.ids() == known


def test_without_an_adapter_two_pictures_are_one_too_many(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="image_prompts") as caught:
        client.images.edit(image=[PNG, PNG], prompt="a hat")
    assert (caught.value.param, caught.value.code) == ("image", "too_many_images")


# -- pictures as people have them ------------------------------------------------------------------------------------


@pytest.mark.parametrize("soft", [False, True])
def test_a_transparent_hole_is_the_mask_where_there_is_none(
    shared: Api, easel: Easel, worker: Worker, soft: bool
) -> None:
    array = hole()
    if soft:
        array[..., 3] = np.arange(128, dtype=np.uint8)[:, None] + 64
    data = {"prompt": "a hat", **({"soft_mask": "true"} if soft else {})}
    answer = shared.client.post(EDITS, data=data, files={"image": as_file(array)})
    assert answer.status_code == 200, answer.text
    claim = easel.seen[-1]
    assert claim.parameters["edit"]["strength"] == 1
    _, mask = handed_on(worker, claim)
    expected = 255 - array[..., 3] if soft else np.where(array[..., 3] == 0, 255, 0)
    assert mask is not None and np.array_equal(mask, expected)


@pytest.mark.parametrize("opaque", [255, 254, 1])
def test_a_picture_without_a_hole_has_no_mask(shared: Api, easel: Easel, worker: Worker, opaque: int) -> None:
    """What is half transparent is composited on white, as before."""
    array = np.dstack([pixels(), np.full((128, 128), opaque, np.uint8)])
    answer = shared.client.post(EDITS, data={"prompt": "a hat"}, files={"image": as_file(array)})
    assert answer.status_code == 200, answer.text
    assert easel.seen[-1].parameters["edit"]["strength"] == 0.8 and handed_on(worker, easel.seen[-1])[1] is None
    refused = shared.client.post(
        EDITS, data={"prompt": "a hat", "soft_mask": "true"}, files={"image": as_file(array[..., :3].copy())}
    )
    check_error(refused, 400, "soft_mask", "invalid_value")


def test_a_mask_of_its_own_comes_before_a_hole(shared: Api, easel: Easel, worker: Worker) -> None:
    files = {"image": as_file(hole()), "mask": as_file(hole()[::-1].copy())}
    assert shared.client.post(EDITS, data={"prompt": "a hat"}, files=files).status_code == 200
    _, mask = handed_on(worker, easel.seen[-1])
    assert mask is not None and (mask[70:, :60] == 255).all() and (mask[:60] == 0).all()


def test_an_edit_of_16_bits_is_that_of_8(shared: Api, easel: Easel, worker: Worker) -> None:
    """Source, mask, and all else go through the same reader."""
    ramp = np.tile(np.linspace(0, 65535, 128).astype(np.uint16), (128, 1))
    for array in (ramp, (ramp >> 8).astype(np.uint8)):
        data = {"prompt": "a hat", "size": "128x128"}
        assert shared.client.post(EDITS, data=data, files={"image": as_file(array)}).status_code == 200
    deep, twin = (handed_on(worker, claim)[0] for claim in easel.seen[-2:])
    assert np.array_equal(deep, twin) and 126 < twin.mean() < 129


@pytest.mark.parametrize("fit", ["crop", "contain", "stretch"])
def test_source_and_mask_are_fitted_alike(shared: Api, easel: Easel, worker: Worker, fit: Any) -> None:
    array = hole(160, 80)
    data = {"prompt": "a hat", "size": "128x128", "fit": fit}
    files = {"image": as_file(array[..., :3].copy()), "mask": as_file(array)}
    assert shared.client.post(EDITS, data=data, files=files).status_code == 200
    image, mask = handed_on(worker, easel.seen[-1])
    drawn = Image.fromarray(np.where(array[..., 3] == 0, 255, 0).astype(np.uint8))
    assert np.array_equal(image, fitted(Image.fromarray(array[..., :3]), (128, 128), fit))
    assert np.array_equal(mask, np.where(np.asarray(fitted(drawn, (128, 128), fit, surround=0)) < 128, 0, 255))


def test_an_exact_source_must_have_the_size(shared: Api, easel: Easel) -> None:
    for size, status in (("128x128", 200), ("64x64", 400)):
        data = {"prompt": "a hat", "size": size, "fit": "exact"}
        answer = shared.client.post(EDITS, data=data, files={"image": PNG})
        assert answer.status_code == status, answer.text
    check_error(answer, 400, "image", "mismatched_size")


def test_a_form_whose_length_is_not_declared(shared: Api, easel: Easel, worker: Worker) -> None:
    """As openai-node sends a file that it streams."""
    array = pixels()
    parts = form_body({"prompt": b"a hat"}, {"image": as_file(array)})
    headers = {"content-type": "multipart/form-data; boundary=edge"}
    answer = shared.client.post(EDITS, content=iter([parts[:5000], parts[5000:]]), headers=headers)
    assert answer.status_code == 200, answer.text
    assert np.array_equal(handed_on(worker, easel.seen[-1])[0], array)


def test_what_is_no_form_is_refused(shared: Api) -> None:
    check_error(shared.client.post(EDITS, content=b"a hat"), 415, "content-type")
    headers = {"content-type": "multipart/form-data; boundary=x"}
    check_error(shared.client.post(EDITS, content=b"nothing of the kind", headers=headers), 400, code=None)
    check_error(shared.client.post(EDITS, content=iter([b"a"]), headers=headers), 400, code="invalid_body")


def test_a_form_of_unknown_length_is_read_and_bounded(
    shared: Api, easel: Easel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clients send one that they make on the way: chunked, without Content-Length."""
    form = httpx2.Request("POST", shared.url, data={"prompt": "a hat", "steps": "2"}, files={"image": PNG})
    data, headers = form.read(), {"content-type": form.headers["content-type"]}

    def post(data: bytes) -> httpx2.Response:
        pieces = (data[at : at + 65_536] for at in range(0, len(data), 65_536))
        return shared.client.post(EDITS, content=pieces, headers=headers)

    assert post(data).status_code == 200
    assert easel.seen[-1].parameters["steps"] == 2
    monkeypatch.setattr(edits, "_ENVELOPE", len(data) - 1 - edits._MOST * MAX_BYTES)
    check_error(post(data), 413, code="body_too_large")


def test_what_a_checker_refused_is_a_400(shared: Api, worker: Worker) -> None:
    with ThreadPoolExecutor(1) as pool:
        known = worker.ids()
        answer = pool.submit(shared.client.post, EDITS, data={"prompt": "x"}, files={"image": PNG})
        (id,) = eventually(lambda: worker.ids() - known)
        claim = worker.take(id)
        assert worker.store.leases.fail(id, claim.attempt, "content_policy_violation", "a picture was refused")
        check_error(answer.result(PATIENCE_S), 400, code="content_policy_violation")
    assert shared.job(id)["error"]["code"] == "content_policy_violation"
