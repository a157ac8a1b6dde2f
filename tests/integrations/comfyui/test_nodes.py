"""The nodes as ComfyUI runs them, against a real API: requests, pictures, progress, the stop button, errors."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from core.jobs.keyring import Keyring
from core.jobs.record import JobState
from tests.api.dialects.sdapi.studio import CARD
from tests.api.easel import Easel
from tests.api.pictures.test_edits import handed_on, pixels
from tests.api.world import Api, Worker, eventually, opened, settings_of
from tests.http_server import Handler, LocalServer
from tests.integrations.comfyui.host import SAMPLER, Host, Interrupted


def tensor(array: np.ndarray) -> torch.Tensor:
    """An IMAGE, as ComfyUI's LoadImage makes it."""
    return torch.from_numpy(array.astype(np.float32) / 255.0)[None]


def levels(images: torch.Tensor) -> np.ndarray:
    """The 8-bit pixels of an IMAGE, as ComfyUI's SaveImage writes them."""
    return np.clip(255.0 * images.numpy(), 0, 255).astype(np.uint8)


def left_over(api: Api) -> list[dict[str, Any]]:
    return list(api.client.get("/v1/files").json()["data"])


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_images_and_job_are_those_of_the_api(comfy: Host, api: Api, easel: Easel) -> None:
    images, facts = comfy.draw(seed=5, n=2, width=64, height=128)
    answer = api.draw(prompt="a cat", seed=5, n=2, size="64x128", preview_every=4, deadline_s=600).json()
    expected = [Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))) for image in answer["data"]]
    assert images.dtype == torch.float32 and images.shape == (2, 64, 64, 3)  # the easel draws squares
    assert np.array_equal(levels(images), np.stack([np.asarray(image) for image in expected]))
    assert (facts["service"], facts["model"], facts["seeds"]) == ("default", "emoji-xl", [5, 6])
    assert facts["request"]["prompt"] == "a cat"
    comfy.draw(preview_every=0)  # what is left open is left to the service
    api.draw(prompt="a cat", seed=0, deadline_s=600)
    ours, theirs, open_ours, open_theirs = (claim.parameters for claim in easel.seen)
    assert ours == theirs and open_ours == open_theirs


def test_of_a_job_with_a_refused_image_the_others_are_returned(comfy: Host, easel: Easel) -> None:
    whole, _ = comfy.draw(seed=5, n=3)
    easel.refused = {1}
    images, facts = comfy.draw(seed=5, n=3)
    assert np.array_equal(levels(images), levels(whole)[::2]) and facts["seeds"] == [5, 7]
    assert comfy.texts == [("7", "1 of the images are refused by the service's checker of contents")]


def test_every_input_reaches_the_job(comfy: Host, easel: Easel) -> None:
    (loras,) = comfy.run("DiptychLora", lora="sepia", strength=0.8)
    (loras,) = comfy.run("DiptychLora", lora="pixel-art", strength=-0.25, loras=loras)
    (loras,) = comfy.run("DiptychLora", loras=loras)  # "none"
    given = {"negative_prompt": "fog", "width": 128, "height": 64, "steps": 6, "n": 3}
    comfy.draw(
        **given, model="emoji-xl", seed=2**63 + 7, guidance=0.0, sampler="dpm++2m", plan="off", deepcache="auto",
        preview_every=0, timeout_s=99, loras=loras, options='{"clip_skip": 1, "vae": "tiny"}',
    )  # fmt: skip
    expected = given | {
        "prompt": "a cat", "seed": 7, "guidance_scale": 0.0, "scheduler": "dpm++2m", "clip_skip": 1, "vae": "tiny",
        "lora": "sepia:0.8,pixel-art:-0.25",
    }  # fmt: skip
    parameters = easel.seen[-1].parameters
    assert parameters.items() >= expected.items() and parameters["deepcache"] != "off"


def test_pictures_reach_the_job_unchanged_and_leave_no_files(
    comfy: Host, api: Api, easel: Easel, worker: Worker
) -> None:
    """White of a mask is what is drawn anew, and is resized like ComfyUI's own masks."""
    array = pixels()
    image, mask = tensor(array), torch.zeros(1, 128, 128)
    mask[:, :40] = 1.0
    mask[:, 40:50] = 0.4  # kept: less than half
    canny = {"preprocessor": "canny", "strength": 0.5}
    (controls,) = comfy.run("DiptychControl", image=tensor(array[::2]), control="edges", **canny)
    part = {"start": 0.25, "end": 0.75, "mode": 3}
    (controls,) = comfy.run("DiptychControl", image=image, control="union", controls=controls, **part)
    (prompts,) = comfy.run("DiptychImagePrompt", image=image, adapter="face", strength=2.0, end=0.5)
    edit = {"image": image, "mask": mask, "strength": 0.5, "steps": 4}

    def drawn(**given: Any) -> tuple[np.ndarray, np.ndarray]:
        comfy.draw(**{**edit, **given})
        source, white = handed_on(worker, easel.seen[-1])
        assert white is not None
        return source, white

    for given in {"controls": controls, "image_prompts": prompts}, {"image": image[0]}:  # the last without a batch
        source, white = drawn(**given)
        assert np.array_equal(source, array) and (white[:40] == 255).all() and not white[40:].any()
    parameters = easel.seen[0].parameters
    assert parameters["edit"]["strength"] == 0.5
    edges, second = parameters["control"]
    assert edges.items() >= {"model": "edges", **canny}.items()
    assert second.items() >= {"model": "union", **part}.items()
    assert parameters["image_prompts"][0].items() >= {"model": "face", "strength": 2.0, "end": 0.5}.items()
    _, soft = drawn(mask=mask[0, ::2, ::2], soft_mask=True)  # of another size, without a batch
    assert (soft[:39] == 255).all() and (soft[41:48] == 102).all() and not soft[51:].any()
    eventually(lambda: not left_over(api), "files are left over")


def test_progress_and_previews_are_shown(comfy: Host, easel: Easel) -> None:
    easel.looked.clear()
    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(comfy.draw, steps=5, n=2, preview_every=2)
        eventually(lambda: comfy.previews or drawing.done())
        easel.looked.set()
        drawing.result()
    assert comfy.progress == sorted(set(comfy.progress)) and comfy.progress[-1] == (10, 10)
    assert len(comfy.progress) >= 3
    assert {picture.size for picture in comfy.previews} == {(8, 8)}


def test_warnings_are_shown_at_the_node(comfy: Host, easel: Easel) -> None:
    (warning,) = comfy.draw(options='{"quality": "high"}')[1]["warnings"]
    assert "quality" in warning and comfy.texts == [("7", warning)]


def test_a_stream_that_breaks_is_resumed(comfy: Host, easel: Easel, monkeypatch: pytest.MonkeyPatch) -> None:
    part, after = comfy.part("service"), []
    events = part.Client.events

    def broken(client: Any, id: str, last: str) -> Any:
        after.append(last)
        for count, event in enumerate(events(client, id, last)):
            if count == 2 and len(after) == 1:
                raise part.Unreachable("broken")
            yield event

    monkeypatch.setattr(part.Client, "events", broken)
    monkeypatch.setattr(comfy.part("drawing"), "RETRY_S", 0.01)
    easel.step_s = 0.05
    comfy.draw(steps=6)
    assert after[0] == "" and after[1] and len(after) == 2
    assert comfy.progress == sorted(set(comfy.progress)) and comfy.progress[-1] == (6, 6)


# -- the stop button ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [True, False], ids=["running", "queued"])
def test_a_stop_cancels_all_jobs_of_the_workflow(comfy: Host, easel: Easel, worker: Worker, running: bool) -> None:
    """Also of a queued job, of which no event comes."""
    before = worker.ids()
    state = JobState.RUNNING if running else JobState.QUEUED
    if running:
        easel.step_s = 60.0
    else:
        easel.go.clear()

    def stop() -> None:
        eventually(lambda: [worker.job(id).state for id in worker.ids() - before].count(state) >= 1)
        eventually(lambda: len(worker.ids() - before) == 2)
        comfy.interrupt()

    stopper = threading.Thread(target=stop)
    stopper.start()
    call = (SAMPLER, {"prompt": "a cat", "steps": 20, "preview_every": 0})
    with pytest.raises(Interrupted):
        comfy.run_all(call, call)
    stopper.join()
    eventually(lambda: {worker.job(id).state for id in worker.ids() - before} == {JobState.CANCELLED})


def test_a_stop_while_the_job_is_created_cancels_it(
    comfy: Host, easel: Easel, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    easel.go.clear()
    before, client = worker.ids(), comfy.part("service").Client
    call = client.json

    def slow(self: Any, method: str, *given: Any) -> Any:
        if method == "PUT":
            comfy.interrupt()
            assert comfy.noticed.wait(60)
        return call(self, method, *given)

    monkeypatch.setattr(client, "json", slow)
    with pytest.raises(Interrupted):
        comfy.draw()
    (id,) = worker.ids() - before
    assert worker.is_(id, JobState.CANCELLED)


@pytest.mark.parametrize(
    ("timeout_s", "grace_s", "message", "state"),
    [(1, 60.0, "deadline", JobState.EXPIRED), (60, -59.5, "timeout_s: ", JobState.CANCELLED)],
    ids=["by the service", "by the node"],
)
def test_time_is_bounded(
    comfy: Host, easel: Easel, worker: Worker, monkeypatch: pytest.MonkeyPatch, timeout_s: int, grace_s: float,
    message: str, state: JobState,
) -> None:  # fmt: skip
    monkeypatch.setattr(comfy.part("drawing"), "GRACE_S", grace_s)
    easel.go.clear()
    before = worker.ids()
    with pytest.raises(comfy.error, match=message):
        comfy.draw(timeout_s=timeout_s, width=64, height=64, steps=1)
    (id,) = worker.ids() - before
    eventually(lambda: worker.is_(id, state))


def test_a_busy_service_is_asked_again(comfy: Host, easel: Easel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a 429, of the same job; and a stop ends the wait."""
    part, ids = comfy.part("service"), []
    call = part.Client.json

    def busy(self: Any, method: str, path: str, *given: Any) -> Any:
        if method == "PUT":
            ids.append(path)
            if len(ids) < 3:
                raise part.Busy("queue_full", 0.01)
        return call(self, method, path, *given)

    monkeypatch.setattr(part.Client, "json", busy)
    assert len(comfy.draw()[0]) == 1
    assert len(ids) == 3 and len({*ids}) == 1

    def full(self: Any, method: str, path: str, *given: Any) -> Any:
        comfy.interrupt()
        raise part.Busy("queue_full", 3600.0)

    monkeypatch.setattr(part.Client, "json", full)
    with pytest.raises(Interrupted):
        comfy.draw()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": " "}, r"prompt: .*invalid_value, HTTP 400"),

        ({"model": "nobody"}, r"model.*model_not_found, HTTP 404"),

        ({"options": "{"}, "options: is not JSON"),
        ({"options": "[1]"}, "options: must be an object"),
        ({"options": '{"seed": 1}'}, "options: seed"),
        ({"options": '{"webhook_url": "https://example.com"}'}, "options: webhook_url"),

        ({"options": '{"size": "64x64"}', "width": 128, "height": 128}, "options: size"),
        ({"options": '{"strength": 0.5}'}, "options: strength"),
        ({"width": 64}, "width, height"),
        ({"mask": torch.ones(1, 8, 8)}, "mask: needs an image"),
        ({"image": torch.zeros(1, 8, 8, 3), "mask": torch.zeros(1, 64, 64)}, "mask: is empty"),
        ({"image": torch.zeros(2, 8, 8, 3)}, "image: .*a batch of 2"),
    ],
)  # fmt: skip
def test_errors_name_the_field(comfy: Host, easel: Easel, given: dict[str, Any], message: str) -> None:
    with pytest.raises(comfy.error, match=message):
        comfy.draw(**given)


def test_a_job_that_fails_is_an_error(comfy: Host, easel: Easel) -> None:
    easel.failing = True
    with pytest.raises(comfy.error, match=r"the engine failed at this job \(engine_error, job comfyui-"):
        comfy.draw()


def test_without_a_service_the_nodes_load_and_say_so(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_URL", "http://127.0.0.1:9")
    assert host.choices(SAMPLER)["model"] == ["default"]
    with pytest.raises(host.error, match=r"at http://127\.0\.0\.1:9 does not answer .*DIPTYCH_URL"):
        host.draw()


def test_what_is_no_diptych_is_said_to_be_none(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(b"<html>", 404) as server:
        monkeypatch.setenv("DIPTYCH_URL", server.url)
        with pytest.raises(host.error, match="HTTP 404, but not as a Diptych service"):
            host.draw()


# -- answers of strangers ----------------------------------------------------------------------------------------------


@contextmanager
def answering(
    data: bytes, status: int = 200, headers: dict[str, str] | None = None, *, events: bytes = b""
) -> Iterator[LocalServer]:
    """A server that answers all with this, and a job's events, if there are any, with those."""

    class Other(Handler):
        def respond(self) -> None:
            of_events = events and self.path.endswith("/events")
            self.answer(status, events if of_events else data, headers)

    with LocalServer(Other) as server:
        yield server


def client_of(host: Host, url: str, **options: Any) -> Any:
    part = host.part("service")
    return part.Client(part.Service("default", url, ""), **options)


JOB = {"id": "1", "status": "succeeded"}
WHOLE = b'id: 7\nevent: progress\ndata: {"a": 1}\n\n'


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (WHOLE + b": ping\n\n" + WHOLE, [("7", "progress", {"a": 1})] * 2),
        (WHOLE.replace(b"\n", b"\r\n"), [("7", "progress", {"a": 1})]),
        (b'retry: 5\ndata:{"a":\n: ping\ndata: 1}\nid:7\nevent:progress\n\n', [("7", "progress", {"a": 1})]),
        (b"id: 8\nevent: other\n\ndata: {}\n\n", [("", "", {})]),
        (b'data: {"a": "\xff"}\n\n', [("", "", {"a": "\ufffd"})]),
        (WHOLE + b'data: {"a": 2}\n', [("7", "progress", {"a": 1})]),
    ],
    ids=["comments", "CRLF", "several lines", "without data", "no UTF-8", "cut off"],
)
def test_streams_of_events_are_read(host: Host, stream: bytes, expected: list[tuple[str, str, Any]]) -> None:
    with answering(stream) as server:
        events = list(client_of(host, server.url).events("1", ""))
    assert [(event.id, event.type, event.data) for event in events] == expected


@pytest.mark.parametrize("stream", [b"data: " + b"a" * 2**20, b"data: a\n", b"x" * 5000 + b"\n", b"data: [1]\n\n"])
def test_events_are_bounded(host: Host, stream: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.part("service"), "_MAX_EVENT", 100_000)
    times = 1 if stream.endswith(b"\n\n") else 20_000 // len(stream) * 8 + 1
    with answering(stream * times) as server, pytest.raises(host.error, match=r"100000 bytes|no JSON object"):
        list(client_of(host, server.url).events("1", ""))


@pytest.mark.parametrize("answer", [{}, {**JOB, "images": 5}, {**JOB, "images": [{}]}])
def test_a_job_of_another_form_is_an_error(host: Host, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]) -> None:
    monkeypatch.setattr(host.part("drawing"), "RETRY_S", 0.01)
    stream = f"event: {answer.get('status')}\ndata: {json.dumps(answer)}\n\n".encode()
    with answering(json.dumps(answer).encode(), events=stream) as server:
        monkeypatch.setenv("DIPTYCH_URL", server.url)
        with pytest.raises(host.error, match="answers otherwise than Diptych does"):
            host.draw()


@pytest.mark.parametrize(
    ("headers", "busy"), [({"Retry-After": "900"}, 120.0), ({"Retry-After": "2"}, 2.0), ({}, None),
                          ({"Retry-After": "2", "x-should-retry": "false"}, None), ({"Retry-After": "soon"}, None)]
)  # fmt: skip
def test_a_service_that_takes_no_more_says_for_how_long(
    host: Host, headers: dict[str, str], busy: float | None
) -> None:
    body = b'{"error": {"message": "The queue is full.", "code": "queue_full"}}'
    with answering(body, 429, headers) as server, pytest.raises(host.error, match="HTTP 429") as error:
        client_of(host, server.url).json("PUT", "/v1/jobs/1", {})
    assert getattr(error.value, "retry_s", None) == busy


def bomb() -> bytes:
    """A PNG's head of 10^10 pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


def picture(form: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, form)
    return stream.getvalue()


@pytest.mark.parametrize(
    "file",
    [bomb(), b"<html>", picture("PNG")[:60], picture("GIF")],
    ids=["bomb", "page", "cut off", "GIF"],
)
def test_pictures_that_cannot_be_read_are_an_error(host: Host, file: bytes) -> None:
    with pytest.raises(host.error, match="cannot be read"):
        host.part("pictures").as_image([file])


def test_a_call_that_drips_ends(host: Host) -> None:
    over = threading.Event()

    class Drip(Handler):
        def respond(self) -> None:
            with suppress(OSError):
                while not over.wait(0.02):
                    self.wfile.write(b"H")

    with LocalServer(Drip) as server:
        try:
            with pytest.raises(host.part("service").Unreachable):
                client_of(host, server.url, total_s=0.3).json("GET", "/v1/models")
            assert not over.is_set()
        finally:
            over.set()


def test_models_of_another_form_are_left_out(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"schedulers": ["euler"], "plans": "abc", "loras": 5}
    models = [1, {}, {"id": 5, "diptych": card}, {"id": "y", "diptych": 1}, {"id": "x", "diptych": card}, {"id": "z"}]
    for listed, expected in ((models, ["default", "x"]), ({"a": 1}, ["default"])):
        with answering(json.dumps({"data": listed}).encode()) as server:
            monkeypatch.setenv("DIPTYCH_URL", server.url)
            monkeypatch.setattr(host.part("nodes").catalogue, "_read_at", -9.0)
            choices = host.choices(SAMPLER)
            assert choices["model"] == expected and choices["plan"] == ["default", "auto", "off"]
            assert host.choices("DiptychLora")["lora"] == ["none"]


def test_a_silent_service_hides_no_other(host: Host, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it has is listed once it answers."""
    monkeypatch.setattr(host.part("service"), "_CATALOGUE_WAIT_S", 0.5)
    catalogue = host.part("nodes").catalogue
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        host.services.write_text(json.dumps({"default": {"url": url}, "other": {"url": api.url}}))
        eventually(lambda: catalogue.names("id") == [CARD.name])
    monkeypatch.setattr(catalogue, "_read_at", -9.0)
    host.services.write_text(json.dumps({"default": {"url": api.url}}))
    eventually(lambda: catalogue.names("id") == [CARD.name])


# -- services and keys -------------------------------------------------------------------------------------------------


def test_choices_are_those_of_the_service(comfy: Host) -> None:
    required = comfy.choices(SAMPLER)
    assert required["model"] == ["default", CARD.name] and required["sampler"] == ["default", *CARD.schedulers]
    for node, name, expected in (
        ("DiptychLora", "lora", CARD.loras), ("DiptychControl", "control", CARD.controls),
        ("DiptychControl", "preprocessor", CARD.preprocessors), ("DiptychImagePrompt", "adapter", CARD.image_prompts),
    ):  # fmt: skip
        assert comfy.choices(node)[name] == ["none", *expected]
    comfy.inputs("DiptychLora", {"lora": "not listed: the service decides"})


def test_a_service_that_another_node_outputs_is_looked_up_when_the_node_runs(comfy: Host) -> None:
    """ComfyUI checks it as None."""
    node = comfy.nodes[SAMPLER]
    assert node.VALIDATE_INPUTS(None, "default", "default", "default") is True  # type: ignore[attr-defined]
    told = node.VALIDATE_INPUTS("nobody", "default", "default", "default")  # type: ignore[attr-defined]
    assert told.startswith("service: 'nobody' is not configured on this machine")


def test_an_empty_variable_is_none(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compose files set it: the file's service is the default, with its own key."""
    monkeypatch.setenv("DIPTYCH_URL", "")
    monkeypatch.setenv("DIPTYCH_API_KEY", "dpt_of_the_environment")
    assert host.part("service").find("default").url == "http://127.0.0.1:8000"
    host.services.write_text(json.dumps({"default": {"url": "http://gpu:8000", "api_key": "dpt_own"}}))
    service = host.part("service").find("default")
    assert (service.url, service.key) == ("http://gpu:8000", "dpt_own")


def test_a_key_opens_its_service_and_is_shown_nowhere(
    host: Host, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(api.settings.redis_url, tmp_path / "data")
    with opened(settings, CARD) as (guarded, worker), closing(Keyring.of(settings)) as keyring, Easel(worker):
        try:
            token = keyring.add("me", ("images", "files"))[1]
            wrong = "dpt_wrong"
            entry = {"url": f"{guarded.url}/v1/", "api_key": token}
            host.services.write_text(json.dumps({"gpu": entry, "typo": {**entry, "api_key": wrong}}))
            image = tensor(pixels())
            images, facts = host.draw(service="gpu", image=image)
            assert len(images) == 1
            with pytest.raises(host.error, match=r"invalid_api_key, HTTP 401") as refused:
                host.draw(service="typo", image=image)
            known = host.part("service").find("gpu")
            shown = f"{facts} {caplog.text} {known!r} {host.choices(SAMPLER)} {refused.value}"
            assert token not in shown and wrong not in shown
        finally:
            worker.redis.flushall()


def test_a_workflow_sends_no_key_elsewhere(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can name configured services only; none of them gets the key of another, and a redirect gets none."""
    seen: list[tuple[str, str | None]] = []

    class Thief(Handler):
        def respond(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            self.answer(307, headers={"Location": f"{thief.url}/stolen"})

    with LocalServer(Thief) as thief:
        monkeypatch.setenv("DIPTYCH_API_KEY", "dpt_secret")
        for name in (thief.url, "thief", ""):
            with pytest.raises(ValueError, match="not configured on this machine"):
                host.inputs(SAMPLER, {"service": name, "prompt": "a cat"})
            with pytest.raises(host.error, match="not configured on this machine"):
                host.part("service").find(name)
        assert seen == []
        # The environment's key is not that of the file's services, and is not sent to the target of a redirect.
        host.services.write_text(json.dumps({"default": {"url": thief.url}, "other": {"url": thief.url}}))
        for name in ("default", "other"):
            with pytest.raises(host.error, match="redirect, which is not followed"):
                host.draw(service=name)
        monkeypatch.setenv("DIPTYCH_URL", thief.url)
        with pytest.raises(host.error, match="redirect"):
            host.draw()
    assert all(path != "/stolen" for path, _ in seen)
    keys = [key for path, key in seen if path.startswith("/v1/jobs")]
    assert keys == [None, None, "Bearer dpt_secret"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("{", "is not JSON"), ("[]", "must be an object"), ('{"a": 1}', "service a: must be"),

        ('{"a": {"url": "http://me:key@x"}}', "service a: its url"),
        ('{"a": {"url": "http://x:y"}}', "service a: its url"),
        ('{"a": {"url": "http://x", "api_key": "dpt_\\n"}}', "service a: must be"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_services_is_told_when_a_node_runs(host: Host, file: str, message: str) -> None:
    host.services.write_text(file)
    host.choices(SAMPLER)
    with pytest.raises(ValueError, match=message):
        host.inputs(SAMPLER, {"prompt": "a cat"})
