"""txt2img and img2img over a real service: pictures, `info`, what the worker gets, and errors in their form."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from functools import partial
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from contract import image_request
from core.jobs.record import JobState
from tests.api.dialects.sdapi.studio import Studio
from tests.api.world import Api, Worker, check_error, eventually, ok


def picture(width: int = 128, height: int = 128, mode: str = "RGB", seed: int = 0, **options: Any) -> str:
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return encoded(Image.fromarray(pixels, mode), **options)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return base64.b64encode(stream.getvalue()).decode()


def opened(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)))


def info(answer: httpx2.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return dict(json.loads(answer.json()["info"]))


def draw(api: Api, **fields: Any) -> httpx2.Response:
    return api.post("/sdapi/v1/txt2img", **{"prompt": "a cat", "steps": 2, **fields})


def sdapi_error(answer: httpx2.Response, status: int, where: str) -> str:
    """The answer is an error in FastAPI's form about this field, or of this code; returns its message."""
    assert answer.status_code == status, answer.text
    content = answer.json()
    if status == 422:
        (error,) = content["detail"]
        assert error["loc"] == ["body", *where.split(".")] and error["type"], error
        return str(error["msg"])
    assert content["error"] == where and set(content) == {"error", "detail", "body", "errors"}
    return str(content["detail"])


def test_pictures_seeds_and_texts(shared: Api, studio: Studio) -> None:
    answer = draw(shared, seed=41, batch_size=2, n_iter=2, negative_prompt="blur", sampler_name="Euler a", cfg_scale=6)
    said = info(answer)
    assert said["all_seeds"] == [41, 42, 43, 44] and said["seed"] == 41 and said["batch_size"] == 2
    pictures = [opened(text) for text in answer.json()["images"]]
    assert [image.size for image in pictures] == [(128, 128)] * 4
    assert said["infotexts"] == [image.text["parameters"] for image in pictures]  # type: ignore[attr-defined]
    assert "Seed: 44" in said["infotexts"][3] and "Negative prompt: blur" in said["infotexts"][0]
    assert (said["sampler_name"], said["cfg_scale"], said["steps"]) == ("Euler a", 6.0, 2)
    assert (said["width"], said["height"], said["sd_model_name"]) == (128, 128, "emoji-xl")
    assert said["warnings"] == []
    assert studio.last["n"] == 4 and studio.worker.is_(said["job_id"], JobState.SUCCEEDED)
    echoed = answer.json()["parameters"]
    assert (echoed["seed"], echoed["sampler_name"]) == (41, "Euler a")


def test_the_web_uis_name_of_a_sampler_is_taken_at_our_endpoint_too(shared: Api, studio: Studio) -> None:
    for name in ("sampler_name", "scheduler"):
        assert shared.post("/v1/images/generations", prompt="a", steps=2, **{name: "Euler a"}).status_code == 200
        assert studio.last["scheduler"] == "euler-ancestral"


def test_no_pictures_and_other_formats(shared: Api, studio: Studio) -> None:
    answer = draw(shared, send_images=False, seed=5)
    assert answer.json()["images"] == [] and info(answer)["all_seeds"] == [5]
    draw(shared, override_settings={"samples_format": "webp"})
    assert studio.last["output_format"] == "webp"


@pytest.mark.parametrize("name", ["dall-e-3", "gpt-image-1", "models/tgi.safetensors", "dummy"])
def test_a_name_that_no_model_has_is_refused(shared: Api, studio: Studio, name: str) -> None:
    """OpenAI's names and placeholders too, which other endpoints take for any model."""
    answer = draw(shared, override_settings={"sd_model_checkpoint": name})
    sdapi_error(answer, 422, "override_settings.sd_model_checkpoint")


def test_options_that_were_set_and_hold_no_more_are_told(shared: Api, studio: Studio) -> None:
    store = shared.server._service.sdapi
    try:
        store.set_options("", {"sd_model_checkpoint": "gone", "CLIP_stop_at_last_layers": 99})
        said = info(draw(shared))
        assert said["sd_model_name"] == "emoji-xl"
        told = sorted(warning.partition(":")[0] for warning in said["warnings"])
        assert told == ["CLIP_stop_at_last_layers", "sd_model_checkpoint"]
    finally:
        store.set_options("", {"sd_model_checkpoint": "", "CLIP_stop_at_last_layers": 1})
    assert info(draw(shared))["warnings"] == []


def test_what_is_told_of_a_request_is_told_here_too(
    shared: Api, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in every other answer about the job."""
    monkeypatch.setattr(image_request, "_warnings", lambda given: ["steps: has no effect"])
    said = info(draw(shared, batch_size=2))
    assert said["warnings"] == ["steps: has no effect"]
    job = shared.get(f"/v1/jobs/{said['job_id']}").json()
    assert job["images"][0]["warnings"] == said["warnings"]


def test_secrets_of_a_client_are_not_echoed(shared: Api, studio: Studio) -> None:
    """SillyTavern sends its whole body on, with the password."""
    answer = draw(shared, url="http://127.0.0.1:7860", auth="user:dpt_secret")
    assert "dpt_secret" not in answer.text and info(answer)["warnings"] == []


def handed_on(worker: Worker, parameters: dict[str, Any], *path: Any) -> np.ndarray:
    key: Any = parameters
    for name in path:
        key = key[name]
    return np.asarray(Image.open(io.BytesIO(worker.artifacts.get(key))))


def redraw(api: Api, **fields: Any) -> httpx2.Response:
    return api.post("/sdapi/v1/img2img", **{"prompt": "a cat", "steps": 4, "init_images": [picture()], **fields})


def inpaint(api: Api, mask: str, **fields: Any) -> httpx2.Response:
    return redraw(api, **{"mask": mask, "denoising_strength": 1, **fields})


def half(mode: str = "L", size: tuple[int, int] = (128, 128), white: Any = 255, black: Any = 0) -> Image.Image:
    """White on its left half."""
    image = Image.new(mode, size, black)
    image.paste(white, (0, 0, size[0] // 2, size[1]))
    return image


@pytest.mark.quick(0, 3, 4)
@pytest.mark.parametrize(
    "mask",
    [
        half(), half("RGB", white="white", black="black"),
        half("RGBA", white=(255, 255, 255, 255), black=(0, 0, 0, 255)),
        half("RGBA", white=(0, 0, 0, 255), black=(255, 255, 255, 0)), half(size=(64, 64)), half("1", white=1),
        half().convert("P"),
    ],
)  # fmt: skip
def test_what_is_white_in_a_mask_is_drawn_anew(shared: Api, studio: Studio, mask: Image.Image) -> None:
    """Or what is opaque in one with transparent parts, whatever its size."""
    for invert in (0, 1):
        answer = inpaint(shared, encoded(mask), inpainting_mask_invert=invert, mask_blur=0)
        assert info(answer)["denoising_strength"] == 1
        drawn = handed_on(studio.worker, studio.last, "edit", "mask")
        expected = np.zeros((128, 128), np.uint8)
        expected[:, 64:] = 255
        assert np.array_equal(drawn, expected if invert else 255 - expected)


def test_an_edge_of_a_mask_is_blurred(shared: Api, studio: Studio) -> None:
    """By four pixels where the request says nothing."""
    assert info(inpaint(shared, encoded(half())))["warnings"] == []
    drawn = handed_on(studio.worker, studio.last, "edit", "mask")
    between = (drawn > 0) & (drawn < 255)
    assert between.any() and not between[:, :50].any() and not between[:, 78:].any()


def test_a_refused_request_decodes_nothing(shared: Api, calls: Counter[str]) -> None:
    """Neither its source nor its mask, whatever these are."""
    for fields in ({"steps": 100_000}, {"sampler_name": "Eulerest"}, {"batch_size": 20}):
        assert inpaint(shared, "aGVsbG8=", **fields).status_code == 422
    assert not calls


@pytest.mark.parametrize(("sides", "mask_sides"), [((32, 24), (1, 1)), ((600, 400), (8, 8)), ((8, 8), (600, 400))])
def test_a_turn_takes_what_the_larger_of_its_sizes_does(
    shared: Api, studio: Studio, monkeypatch: pytest.MonkeyPatch, sides: tuple[int, int], mask_sides: tuple[int, int]
) -> None:
    """The picture's as it comes, and as it is drawn from; of a mask likewise."""
    pictures = shared.server._service.pictures
    turn, costs = pictures._turns.turn, list[int]()

    def counted(tenant: str, cost: int) -> Any:
        costs.append(cost)
        return turn(tenant, cost)

    monkeypatch.setattr(pictures._turns, "turn", counted)
    mask = encoded(Image.new("L", mask_sides, 255))
    assert redraw(shared, width=256, height=256, init_images=[picture(*sides)], mask=mask).status_code == 200
    source_cost, mask_cost = sorted(costs)[-2:]
    areas = sorted(max(256 * 256, width * height) for width, height in (sides, mask_sides))
    assert [source_cost // (12 * 2**10), mask_cost // (12 * 2**10)] >= [area // 2**10 for area in areas]
    costs.clear()
    extra = shared.post("/sdapi/v1/extra-single-image", image=picture(*sides), upscaling_resize=0.25)
    assert extra.status_code == 200 and max(costs) >= 12 * sides[0] * sides[1]


def test_a_transparent_source_is_on_white(shared: Api, studio: Studio) -> None:
    """And no mask of its own."""
    source = half("RGBA", white=(10, 20, 30, 255), black=(0, 0, 0, 0))
    assert info(redraw(shared, init_images=[encoded(source)]))["warnings"] == []
    edit = studio.last["edit"]
    drawn = handed_on(studio.worker, studio.last, "edit", "image")
    assert "mask" not in edit and drawn[0, 0].tolist() == [10, 20, 30] and drawn[0, 127].tolist() == [255] * 3


def test_an_empty_mask_is_refused(shared: Api, studio: Studio) -> None:
    message = sdapi_error(inpaint(shared, encoded(Image.new("L", (128, 128)))), 422, "mask")
    assert "nothing to draw" in message
    sdapi_error(inpaint(shared, base64.b64encode(b"GIF89a" * 9).decode()), 422, "mask")


def test_large_pictures_go_through(shared: Api, studio: Studio) -> None:
    """Of several MiB, in data URLs and without; each with its own content."""
    source, portrait = picture(1400, 1400), picture(1024, 1024, seed=1)
    assert len(source) > 5 * 2**20
    unit = {"model": "face", "image": "data:image/png;base64," + portrait, "weight": 0.6}
    scripts = {"ControlNet": {"args": [unit]}}
    answer = redraw(shared, init_images=["data:image/png;base64," + source], alwayson_scripts=scripts)
    assert info(answer)["denoising_strength"] == 0.75 and len(answer.content) < 2**20
    parameters = studio.last
    resized = opened(source).resize((128, 128), Image.Resampling.LANCZOS)
    assert np.array_equal(handed_on(studio.worker, parameters, "edit", "image"), np.asarray(resized))
    (entry,) = parameters["image_prompts"]
    assert (entry["model"], entry["strength"]) == ("face", 0.6)
    assert handed_on(studio.worker, entry, "image").shape == (768, 768, 3)


def test_errors_name_the_fields_of_this_api(shared: Api) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"steps": 100_000}, "steps"), ({"cfg_scale": 1e6}, "cfg_scale"), ({"batch_size": 20}, "batch_size"),
        ({"seed": -7}, "seed"), ({"prompt": "a <lora:nothing:1>"}, "prompt"),
        ({"prompt": "a [cat:dog:0.5]"}, "prompt"), ({"sampler_name": "Eulerest"}, "sampler_name"),
        ({"sampler_index": "Eulerest"}, "sampler_index"), ({"scheduler": "fast"}, "scheduler"),
        ({"scheduler": 5}, "scheduler"), ({"sampler_name": 5, "scheduler": "Karras"}, "sampler_name"),
        ({"override_settings": {"sd_model_checkpoint": "sdxl"}}, "override_settings.sd_model_checkpoint"),
        ({"refiner_checkpoint": "none-such"}, "refiner_checkpoint"), ({"prompt": "a" * 16_384}, "prompt"),
        ({"alwayson_scripts": {"controlnet": {"args": [{"model": "depths", "image": picture()}]}}},
         "alwayson_scripts.controlnet.model"),
        ({"alwayson_scripts": {"controlnet": {"args": [{"model": "edges", "image": "!"}]}}},
         "alwayson_scripts.controlnet.image"),
    ]  # fmt: skip
    for fields, where in cases:
        sdapi_error(draw(shared, **fields), 422, where)
    broken = partial(shared.client.post, "/sdapi/v1/txt2img", content=b"{")
    sdapi_error(broken(), 415, "unsupported_media_type")
    sdapi_error(broken(headers={"Content-Type": "application/json"}), 400, "invalid_body")
    sdapi_error(redraw(shared, init_images=None), 422, "init_images")
    wrong = redraw(shared, init_images=["https://example.com/a.png"])
    assert "not fetched" in sdapi_error(wrong, 422, "init_images")
    sdapi_error(shared.post("/sdapi/v1/options", sd_model_checkpoint="none"), 422, "sd_model_checkpoint")


@pytest.mark.parametrize("prompt", ["", None, "<lora:sepia:1>", "# a cat"])
def test_an_empty_prompt_draws(shared: Api, studio: Studio, prompt: str | None) -> None:
    assert len(ok(draw(shared, prompt=prompt)).json()["images"]) == 1
    assert studio.last["prompt"] == "" and bool(studio.last.get("lora")) == ("lora" in (prompt or ""))


def test_a_job_that_fails(shared: Api, studio: Studio) -> None:
    studio.failing = True
    assert "engine failed" in sdapi_error(draw(shared), 500, "engine_error")


def test_a_client_that_leaves_cancels(shared: Api, studio: Studio) -> None:
    studio.go.clear()
    before = studio.worker.ids()
    with pytest.raises(httpx2.TimeoutException):
        shared.client.post("/sdapi/v1/txt2img", json={"prompt": "a cat"}, timeout=0.5)
    (id,) = eventually(lambda: studio.worker.ids() - before)
    eventually(lambda: studio.worker.is_(id, JobState.CANCELLED))


def test_the_paths_are_there_with_the_setting_only(shared: Api) -> None:
    check_error(shared.get("/sdapi/v1/nothing"), 404, code="not_found")
    assert "/sdapi/v1/txt2img" in shared.get("/openapi.json").json()["paths"]


def test_what_is_told_of_a_request_is_a_request(shared: Api, studio: Studio) -> None:
    """`info` and `parameters`, which clients send back to draw a picture again; and all options that were read."""
    body = {"prompt": "a cat", "negative_prompt": "fog", "steps": 3, "sampler_name": "DPM++ 2M", "scheduler": "Karras"}
    first = shared.post("/sdapi/v1/txt2img", **body, seed=2**53 - 1, cfg_scale=4.5, width=96, height=168, batch_size=2)
    drawn = info(first)
    for told in (drawn, {**first.json()["parameters"], "seed": drawn["seed"]}):
        then = info(shared.post("/sdapi/v1/txt2img", **told))
        for name in (*body.keys() - {"scheduler"}, "seed", "all_seeds", "cfg_scale", "width", "height"):
            assert then[name] == drawn[name], name
        assert all(" not read" in warning for warning in then["warnings"])  # what only `info` has
    options = shared.get("/sdapi/v1/options").json()
    assert shared.post("/sdapi/v1/options", **options).status_code == 200
    assert shared.get("/sdapi/v1/options").json() == options
    for model in shared.get("/sdapi/v1/sd-models").json():
        assert shared.post("/sdapi/v1/options", sd_model_checkpoint=model["title"]).status_code == 200
    assert shared.post("/sdapi/v1/options", **options).status_code == 200
