"""Clients of AUTOMATIC1111's API: `webuiapi` as it is, and the calls that others make, by their fields.

The calls are written down here from their public source: Open WebUI, LibreChat, SillyTavern, Auto-Photoshop, Cyanic for
Krita.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.dialects.sdapi.studio import Studio
from tests.api.dialects.sdapi.test_generation import half, opened, picture
from tests.api.world import Api, ok


@pytest.fixture(autouse=True)
def _drawing(studio: Studio) -> None:
    """A worker draws what the clients ask for."""


# -- webuiapi --------------------------------------------------------------------------------------------------------


@pytest.fixture
def webui(shared: Api) -> Iterator[Any]:
    module = pytest.importorskip("webuiapi", reason="the package webuiapi is not installed")
    client = module.WebUIApi(host="127.0.0.1", port=shared.port)
    client.session.trust_env = False
    yield client
    client.session.close()


def test_webuiapi_draws(webui: Any) -> None:
    result = webui.txt2img(
        prompt="a cute squirrel", negative_prompt="ugly", seed=1003, cfg_scale=7, width=128, height=128
    )
    assert result.image.size == (128, 128) and result.info["all_seeds"] == [1003]
    assert result.info["warnings"] == [] and result.parameters["prompt"] == "a cute squirrel"
    again = webui.img2img(images=[result.image], prompt="a dog", seed=5, denoising_strength=0.5, width=128, height=128)
    assert again.image.size == (128, 128) and again.info["denoising_strength"] == 0.5
    mask = half(size=result.image.size)
    inpainted = webui.img2img(images=[result.image], mask_image=mask, inpainting_fill=1, prompt="a fox", steps=4)
    assert inpainted.image.size == (128, 128)


def test_webuiapi_controls(webui: Any, studio: Studio) -> None:
    import webuiapi

    units = [
        webuiapi.ControlNetUnit(image=opened(picture()), module="canny", model="edges [0123abcd]", weight=0.7),
        webuiapi.ControlNetUnit(image=opened(picture(64, 48)), module="ip-adapter-auto", model="face"),
    ]
    result = webui.txt2img(prompt="a cat", controlnet_units=units, steps=3)
    assert result.image.size == (128, 128)
    parameters = studio.last
    assert [entry["model"] for entry in (*parameters["control"], *parameters["image_prompts"])] == ["edges", "face"]
    webui.txt2img(prompt="a cat", steps=3)
    assert not {"control", "image_prompts"} & studio.last.keys(), "none of the call before"


def test_webuiapi_asks_and_sets(webui: Any, studio: Studio) -> None:
    assert {model["title"] for model in webui.get_sd_models()} >= {"emoji-xl", "emoji-z"}
    assert [sampler["name"] for sampler in webui.get_samplers()][:2] == ["Euler", "Euler a"]
    for ask in ("get_sd_vae", "get_upscalers", "get_loras", "get_schedulers", "get_embeddings", "get_scripts"):
        assert getattr(webui, ask)()
    for ask in ("get_latent_upscale_modes", "get_hypernetworks", "get_face_restorers", "get_realesrgan_models",
                "get_prompt_styles"):  # fmt: skip
        assert getattr(webui, ask)() == []
    assert webui.get_cmd_flags()["api"] and "ram" in webui.get_memory()
    assert webui.get_progress()["progress"] == 0 and webui.interrupt() == {} and webui.skip() is None
    before = webui.util_get_current_model()
    assert before == "emoji-xl" and set(webui.util_get_model_names()) >= {"emoji-xl", "emoji-z"}
    webui.util_set_model("emoji-z")
    assert webui.util_get_current_model() == "emoji-z"
    assert webui.txt2img(prompt="a cat", steps=3).info["sd_model_name"] == "emoji-z"
    assert studio.last.get("scheduler") in (None, "flow-euler")
    webui.util_set_model(before)
    webui.util_wait_for_ready()
    assert webui.refresh_checkpoints() is None


def test_webuiapi_reads_and_enlarges(webui: Any) -> None:
    result = webui.txt2img(prompt="a cat", seed=9, steps=3)
    assert webui.png_info(result.image).info == result.info["infotexts"][0]
    enlarged = webui.extra_single_image(image=result.image, upscaler_1="None", upscaling_resize=1.5)
    assert enlarged.image.size == (192, 192)
    for upscaler in ("Latent", "Lanczos"):  # the former by default
        drawn = webui.txt2img(prompt="a cat", enable_hr=True, hr_upscaler=upscaler)
        assert ("hr_upscaler" in str(drawn.info["warnings"])) == (upscaler == "Latent")
    with pytest.raises(RuntimeError, match="hires fix"):
        webui.txt2img(prompt="a cat", enable_hr=True, hr_upscaler="R-ESRGAN 4x+")


# -- the calls of others ---------------------------------------------------------------------------------------------


def get(api: Api, path: str) -> Any:
    answer = ok(api.get(path))
    return answer.json()


def post(api: Api, path: str, body: Any) -> Any:
    answer = ok(api.client.post(path, json=body))
    return answer.json()


CAT = {"prompt": "a cat", "negative_prompt": "blur", "steps": 4, "width": 128, "height": 128}
UNIT = {"enabled": False, "input_image": "", "mask": "", "module": "", "model": "", "weight": 1.0}
OPTIONS = {"sd_model_checkpoint": "emoji-xl", "sd_vae": "Automatic", "img2img_color_correction": True}
KRITA = {
    **CAT, "sampler_name": "Euler a", "cfg_scale": 7.5, "seed": -1, "batch_size": 1, "n_iter": 1,
    "override_settings": OPTIONS, "override_settings_restore_afterwards": False, "save_images": False,
}  # fmt: skip
DRAWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "open-webui": ("options sd-models", "txt2img", {**CAT, "batch_size": 1, "width": 512, "height": 512}),
    "open-webui-2025": (
        "", "txt2img",
        {**CAT, "width": 512, "height": 512, "cfg_scale": 7.0, "sampler_name": "Euler a", "scheduler": "Karras"},
    ),
    "librechat": ("", "txt2img", {**CAT, "cfg_scale": 4.5, "width": 1024, "height": 1024}),
    "auto-photoshop": (
        "options sd-models samplers upscalers loras hypernetworks embeddings progress?skip_current_image=false",
        "img2img",
        {**CAT, "n_iter": 1, "sampler_index": "Euler a", "denoising_strength": 0.7, "batch_size": 2, "cfg_scale": 7,
         "seed": "-1", "mask_blur": 8, "use_sharp_mask": False, "use_prompt_shortcut": False,
         "prompt_shortcut_ui_dict": {}, "uniqueDocumentId": "1", "mode": "inpaint", "inpaint_full_res": True,
         "inpaint_full_res_padding": 32, "inpainting_fill": 1, "inpainting_mask_invert": False,
         "restore_faces": False, "init_images": [picture()], "mask": picture(mode="L"),
         "alwayson_scripts": {"controlnet": {"args": [UNIT, UNIT]}}},
    ),
    "krita": (
        "sd-models sd-vae samplers upscalers face-restorers prompt-styles scripts loras embeddings hypernetworks "
        "options", "txt2img", KRITA,
    ),
    "krita-img2img": ("", "img2img", {**KRITA, "init_images": [picture()], "denoising_strength": 0.75}),
    "krita-controlnet": ("", "txt2img", {**KRITA, "alwayson_scripts": {"controlnet": {"args": [
        {"input_image": picture(), "module": "canny", "model": "edges", "weight": 1, "enabled": True,
         "resize_mode": 1, "lowvram": False, "processor_res": 512, "threshold_a": 100, "threshold_b": 200,
         "guidance_start": 0.0, "guidance_end": 1.0, "control_mode": 0, "pixel_perfect": True}]}}}),
}  # fmt: skip


@pytest.mark.parametrize("client", DRAWN)
def test_a_client_asks_draws_and_reads_how(shared: Api, studio: Studio, client: str) -> None:
    paths, path, body = DRAWN[client]
    for each in paths.split():
        get(shared, f"/sdapi/v1/{each}")
    answer = post(shared, f"/sdapi/v1/{path}", body)
    said = json.loads(answer["info"])
    assert len(answer["images"]) == len(said["all_seeds"]) == body.get("batch_size", 1)
    for image, text in zip(answer["images"], said["infotexts"], strict=True):
        assert opened(image).size == (128, 128)
        read = post(shared, "/sdapi/v1/png-info", {"image": "data:image/png;base64," + image})
        assert read["info"] == text and text.rpartition("\n")[2].startswith("Steps: 4, ")
    assert body["width"] == 128 or any(f"{body['width']}x{body['width']}" in warning for warning in said["warnings"])
    parameters = studio.last
    assert ("mask" in body) == ("mask" in parameters.get("edit", {}))
    assert ("controlnet" in client) == ("control" in parameters)


@pytest.mark.parametrize("authorization", ["", "Basic", "Basic dXNlcjpwYXNzd29yZA=="])
def test_open_webui_sets_a_model(shared: Api, authorization: str) -> None:
    """Also with the empty credentials of one that has none."""
    headers = {"authorization": authorization}
    options = shared.get("/sdapi/v1/options", headers=headers).json()
    assert options["sd_model_checkpoint"] in [model["title"] for model in get(shared, "/sdapi/v1/sd-models")]
    options["sd_model_checkpoint"] = "emoji-xl"
    assert shared.client.post("/sdapi/v1/options", json=options, headers=headers).json() is None


def test_what_extensions_ask_of_controlnet_and_scripts(shared: Api) -> None:
    assert get(shared, "/controlnet/model_list")["model_list"] == ["edges", "union", "face"]
    modules = get(shared, "/controlnet/module_list?alias_names=1")
    assert modules["module_list"] == ["none", "canny"] and "canny" in modules["module_detail"]
    types = get(shared, "/controlnet/control_types")["control_types"]
    assert set(types["All"]) == {"module_list", "model_list", "default_option", "default_model"}
    assert post(shared, "/sdapi/v1/options", {"inpainting_mask_weight": 0.5}) is None
    assert get(shared, "/queue/status") is not None, "Krita's first question"
    assert "controlnet" in get(shared, "/sdapi/v1/scripts")["txt2img"]
    assert list(get(shared, "/sdapi/v1/embeddings")["loaded"]) == ["charturner"]


def test_sillytavern(shared: Api, studio: Studio) -> None:
    assert get(shared, "/sdapi/v1/upscalers")[0]["name"] == "None"
    sepia, pixels = get(shared, "/sdapi/v1/loras")
    assert sepia == {"name": "sepia", "alias": "sepia", "path": "sepia", "metadata": {}}
    assert (pixels["name"], pixels["alias"], pixels["metadata"]["ss_output_name"]) == (
        "pixel-art",
        "MyStyle",
        "MyStyle",
    )
    assert get(shared, "/sdapi/v1/latent-upscale-modes") == []
    assert [vae["model_name"] for vae in get(shared, "/sdapi/v1/sd-vae")]
    assert shared.get("/sdapi/v1/sd-modules").status_code == 404, "this is Forge's"
    samplers, schedulers = ([each["name"] for each in get(shared, f"/sdapi/v1/{path}")]
                            for path in ("samplers", "schedulers"))  # fmt: skip
    now = get(shared, "/sdapi/v1/progress")
    assert (now["progress"], now["state"]["job_count"]) == (0.0, 0), "it waits for this after it has set a model"
    assert "forge_preset" not in get(shared, "/sdapi/v1/options")
    body = {
        **CAT, "url": "http://127.0.0.1:7860", "auth": "user:password", "cfg_scale": 7, "restore_faces": False,
        "enable_hr": False, "hr_upscaler": "Latent", "hr_scale": 2, "denoising_strength": 0.7,
        "hr_second_pass_steps": 0, "override_settings": {"CLIP_stop_at_last_layers": 1, "sd_vae": "full"},
        "override_settings_restore_afterwards": True, "clip_skip": 1, "save_images": True, "send_images": True,
        "do_not_save_grid": False, "do_not_save_samples": False,
    }  # fmt: skip
    for sampler, scheduler in [(name, "karras") for name in samplers] + [("Euler", name) for name in schedulers]:
        fields = {**body, "sampler_name": sampler, "scheduler": scheduler, "steps": 2}
        assert len(post(shared, "/sdapi/v1/txt2img", fields)["images"]) == 1
    answer = post(shared, "/sdapi/v1/txt2img", {**body, "sampler_name": "DPM++ 2M", "scheduler": "karras"})
    assert json.loads(answer["info"])["warnings"] == ["clip_skip: is not read"]
    assert studio.last["schedule_type"] == "karras"
    assert post(shared, "/sdapi/v1/interrupt", None) == {}
