"""png-info and extra-single-image."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
from collections import Counter
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from PIL import Image

from api.dialects.sdapi.infotext import parse
from api.pictures import body as picture_body
from contract.image import ImageParameters
from pipeline.pixels.picture import Picture
from tests.api.dialects.sdapi.studio import Studio
from tests.api.dialects.sdapi.test_generation import draw, info, opened, picture, sdapi_error
from tests.api.world import PATIENCE_S, Api, eventually, ok
from workers.images.formats import ImageFormat, encode


def test_a_drawn_picture_says_how(shared: Api, studio: Studio) -> None:
    answer = draw(shared, prompt="a <lora:sepia:0.5> cat, in snow", seed=3)
    (image,), (text,) = answer.json()["images"], info(answer)["infotexts"]
    for form in (image, "data:image/png;base64," + image):
        said = shared.post("/sdapi/v1/png-info", image=form).json()
        assert said == {"info": text, "items": {"parameters": text}, "parameters": parse(text)}
    assert said["parameters"]["Seed"] == "3"


@pytest.mark.parametrize("form", ["JPEG", "WEBP"])
@pytest.mark.parametrize("prompt", ["a cat, in snow", "une forêt, 雪の猫 🦊"])
def test_a_jpeg_and_a_webp_say_how_too(shared: Api, form: str, prompt: str) -> None:
    """As a worker writes them; of other programs in the other order, and in UTF-8."""
    drawn = Picture(Image.new("RGB", (64, 64)), ImageParameters(prompt, 3, 64, 64), {"model": "emoji-xl"}, (), "euler")
    own = encode(drawn, ImageFormat(form.lower(), 90))
    assert png_info(shared, own) == {
        "info": drawn.infotext, "items": {"exif comment": drawn.infotext}, "parameters": parse(drawn.infotext),
    }  # fmt: skip
    for comment in (b"UNICODE\0" + drawn.infotext.encode("utf-16-le"), b"ASCII\0\0\0" + drawn.infotext.encode(),
                    drawn.infotext.encode()):  # fmt: skip
        stream, exif = io.BytesIO(), Image.Exif()
        exif.get_ifd(0x8769)[0x9286] = comment
        drawn.image.save(stream, form, exif=exif)
        assert png_info(shared, stream.getvalue())["info"] == drawn.infotext
    for damaged in (own[:40], own[:200], own.replace(b"Exif", b"Ex\xff\xff"), own.replace(b"UNICODE", b"\xff" * 7)):
        assert set(png_info(shared, damaged)) == {"info", "items", "parameters"}


def png_info(api: Api, data: bytes) -> Any:
    return ok(api.post("/sdapi/v1/png-info", image=base64.b64encode(data).decode())).json()


def test_a_picture_without_words(shared: Api) -> None:
    empty = {"info": "", "items": {}, "parameters": {}}
    assert shared.post("/sdapi/v1/png-info", image=picture()).json() == empty
    assert shared.post("/sdapi/v1/png-info", image=base64.b64encode(b"hello").decode()).json() == empty
    sdapi_error(shared.post("/sdapi/v1/png-info", image=""), 422, "image")
    sdapi_error(shared.post("/sdapi/v1/png-info"), 422, "image")


def test_texts_are_read_in_a_child(shared: Api, calls: Counter[str]) -> None:
    assert shared.post("/sdapi/v1/png-info", image=picture()).status_code == 200
    assert calls == {"png_info": 1}


def test_what_a_client_has_not_read_is_counted(shared: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client's picture has no room until it is gone."""
    held = shared.server._service.inline_bytes
    body = json.dumps({"image": picture(512, 512), "upscaling_resize": 4}).encode()
    head = b"POST /sdapi/v1/extra-single-image HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", shared.port))
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert b"200 OK" in client.recv(100)
        shared.get("/healthz")
        assert held.count > 3 * 2**20, "of a PNG of 2048 pixels a side"
        monkeypatch.setattr(held, "limit", held.count)
        refused = shared.post("/sdapi/v1/extra-single-image", image=picture(40, 30))
        assert refused.headers["retry-after"] == "2" and sdapi_error(refused, 503, "memory_full")
    eventually(lambda: held.count == 0)
    assert shared.post("/sdapi/v1/extra-single-image", image=picture(40, 30)).status_code == 200


def test_a_picture_in_another_size(shared: Api) -> None:
    source = picture(40, 30)
    for fields, size in (({}, (80, 60)), ({"upscaling_resize": 1.5}, (60, 45)),
                         ({"resize_mode": 1, "upscaling_resize_w": 120, "upscaling_resize_h": 90}, (120, 90)),
                         ({"resize_mode": 1, "upscaling_resize_w": 20, "upscaling_resize_h": 90,
                           "upscaling_crop": False}, (120, 90))):  # fmt: skip
        answer = shared.post("/sdapi/v1/extra-single-image", image=source, upscaler_1="None", **fields)
        image = opened(answer.json()["image"])
        assert np.array_equal(image, opened(source).resize(size, Image.Resampling.LANCZOS))
    held = shared.server._service.inline_bytes
    eventually(lambda: held.count == 0, "what is sent is counted, and given back")


def test_what_is_not_enlarged(shared: Api) -> None:
    def refused(where: str, **fields: object) -> str:
        answer = shared.post("/sdapi/v1/extra-single-image", image=picture(40, 30), **fields)
        return sdapi_error(answer, 422, where)

    assert "enable_hr" in refused("upscaler_1", upscaler_1="R-ESRGAN 4x+")
    refused("upscaler_2", upscaler_2="nearest4")
    refused("upscaling_resize_w", resize_mode=1)
    refused("upscaling_resize", upscaling_resize=17)
    large = shared.post("/sdapi/v1/extra-single-image", image=picture(1024, 1024), upscaling_resize=8)
    sdapi_error(large, 422, "upscaling_resize")
    sdapi_error(shared.post("/sdapi/v1/extra-single-image", image="aGVsbG8="), 422, "image")


def test_the_largest_body_is_bounded(shared: Api) -> None:
    """By what it declares, before any of it is read."""
    with closing(http.client.HTTPConnection("127.0.0.1", shared.port, timeout=PATIENCE_S)) as connection:
        connection.putrequest("POST", "/sdapi/v1/img2img")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(picture_body.MAX_BODY_BYTES + 1))
        connection.endheaders()
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]) == (413, "body_too_large")
