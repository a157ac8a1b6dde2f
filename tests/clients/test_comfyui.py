"""A real ComfyUI with the nodes, against a real service: COMFYUI names its folder, which nothing here installs.

Its Python is COMFYUI_PYTHON, or that of `venv` or `.venv` in or beside the folder.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import socket
import struct
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser

from deployment.redis import free_port
from tests.api.conftest import browser
from tests.clients.programs import running
from tests.deployment.served import READY_S, ROOT, Served, wait_until

__all__ = ["browser"]

COMFYUI = os.environ.get("COMFYUI", "")
FOLDER = ROOT / "integrations" / "comfyui"
SECRET = "dpt_a_secret_of_this_machine"
MODELS = ROOT / "models"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not COMFYUI, reason="COMFYUI is not set: the folder of a ComfyUI, with its requirements"),
]


def python() -> str:
    folder = Path(COMFYUI)
    places = [top / name / "bin" / "python" for top in (folder, folder.parent) for name in ("venv", ".venv")]
    return os.environ.get("COMFYUI_PYTHON") or str(next(filter(Path.exists, places)))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Emoji-xl with its LoRAs, control network and IP-Adapter."""
    folders = {
        "DIPTYCH_LORA_DIR": "emoji-xl-loras", "DIPTYCH_CONTROL_DIR": "emoji-xl-controls",
        "DIPTYCH_IP_ADAPTER_DIR": "emoji-xl-ip-adapters",
    }  # fmt: skip
    variables = {name: str(MODELS / folder) for name, folder in folders.items()}
    service = Served(tmp_path_factory.mktemp("served"), model="emoji-xl", variables=variables)
    try:
        service.ready()
        yield service
    finally:
        service.close()


class Comfy:
    """A ComfyUI, by its own HTTP and WebSocket API."""

    def __init__(self, folder: Path, client: httpx2.Client) -> None:
        self.folder, self.client, self.url = folder, client, str(client.base_url).rstrip("/")

    def info(self, node: str) -> dict[str, Any]:
        return dict(self.client.get(f"/object_info/{node}").json()[node])

    def upload(self, picture: Image.Image) -> str:
        stream, name = io.BytesIO(), f"{uuid.uuid4().hex}.png"
        picture.save(stream, "PNG")
        answer = self.client.post("/upload/image", files={"image": (name, stream.getvalue(), "image/png")})
        return str(answer.json()["name"])

    def run(self, prompt: Mapping[str, Any], *, interrupt_at: str = "") -> Run:
        """Run a workflow, and interrupt it at the first message of this type."""
        run = Run()
        with Socket(self.url, uuid.uuid4().hex) as messages:
            answer = self.client.post("/prompt", json={"prompt": prompt, "client_id": messages.client})
            assert answer.status_code == 200, answer.text
            for type, data in messages:
                run.messages.append((type, data))
                if type == interrupt_at:
                    self.client.post("/interrupt", json={})
                    interrupt_at = ""
                if type in ("execution_success", "execution_error", "execution_interrupted"):
                    break
        id = answer.json()["prompt_id"]  # its history is written behind the last message
        history = wait_until(lambda: self.client.get(f"/history/{id}").json().get(id), f"the history of {run}")
        saved = history["outputs"]
        run.pictures = [
            self.client.get("/view", params=image).content
            for node in saved.values()
            for image in node.get("images", [])
        ]
        return run


class Run:
    """What a client of ComfyUI sees of a workflow: the messages by type, and the saved files."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []
        self.pictures: list[bytes] = []

    def __repr__(self) -> str:
        errors = self.of("execution_error")
        return f"<{len(self.messages)} messages, {[error['exception_message'] for error in errors]}>"

    def of(self, type: str) -> list[Any]:
        return [data for name, data in self.messages if name == type]

    @property
    def pixels(self) -> list[np.ndarray]:
        return [np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")) for picture in self.pictures]


class Socket:
    """The messages of `/ws`: of text by their type, a preview as `preview` with its picture."""

    def __init__(self, url: str, client: str) -> None:
        self.client = client
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), READY_S)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET /ws?clientId={client} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._file = self._socket.makefile("rb")
        assert b"101" in self._file.readline()
        while self._file.readline().strip():
            pass

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        while True:
            first, second = self._file.read(2)
            length = second & 127
            if length >= 126:
                length = int.from_bytes(self._file.read(2 if length == 126 else 8), "big")
            data = self._file.read(length)
            if first & 15 == 1:
                message = json.loads(data)
                yield message["type"], message["data"]
            elif first & 15 == 2:
                (kind,) = struct.unpack(">I", data[:4])
                yield ("preview", Image.open(io.BytesIO(data[8:]))) if kind == 1 else ("text", data[4:])
            else:  # ComfyUI sends nothing else
                raise AssertionError(first)


@pytest.fixture(scope="module")
def comfy(service: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comfy]:
    folder, port = tmp_path_factory.mktemp("comfyui"), free_port()
    (folder / "custom_nodes").mkdir()
    shutil.copytree(FOLDER, folder / "custom_nodes" / "diptych")
    words = ["--cpu", "--base-directory", str(folder), "--port", str(port), "--disable-api-nodes"]
    words += ["--database-url", "sqlite:///:memory:"]
    environment = {"DIPTYCH_URL": service.url, "DIPTYCH_API_KEY": SECRET, "HF_HUB_OFFLINE": "1"}
    with running([python(), "main.py", *words], folder, COMFYUI, port, "/system_stats", environment) as client:
        yield Comfy(folder, client)


def workflow(comfy: Comfy, nodes: Mapping[str, Any] = {}, **inputs: Any) -> dict[str, Any]:
    """The sampler with the page's values and these, and SaveImage. `nodes` are further ones."""
    schema = comfy.info("DiptychSampler")["input"]
    values: dict[str, Any] = {}
    for name, (kind, *options) in {**schema["required"], **schema["optional"]}.items():
        if isinstance(kind, list) or "default" in (options[0] if options else {}):
            values[name] = kind[0] if isinstance(kind, list) else options[0]["default"]
    values |= {"prompt": "a slice of pizza", "steps": 4, "seed": 7, **inputs}
    save = {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}}
    return {"1": {"class_type": "DiptychSampler", "inputs": values}, "9": save, **nodes}


def drawn(service: Served, **fields: Any) -> list[np.ndarray]:
    """The same by the service's own API."""
    answer = service.json("/v1/images/generations", {"prompt": "a slice of pizza", "steps": 4, "seed": 7, **fields})
    files = [base64.b64decode(image["b64_json"]) for image in answer["data"]]
    return [np.asarray(Image.open(io.BytesIO(file))) for file in files]


def picture(side: int = 128) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))


def jobs(service: Served) -> list[dict[str, Any]]:
    return list(service.json("/v1/jobs?limit=100")["data"])


def test_nodes_offer_what_the_service_has(comfy: Comfy) -> None:
    required = comfy.info("DiptychSampler")["input"]["required"]
    assert required["model"][0] == ["default", "emoji-xl"] and "euler" in required["sampler"][0]
    assert comfy.info("DiptychLora")["input"]["required"]["lora"][0] == ["none", "mosaic", "pencil"]
    assert comfy.info("DiptychControl")["input"]["required"]["control"][0] == ["none", "edges"]
    assert comfy.info("DiptychImagePrompt")["input"]["required"]["adapter"][0] == ["none", "scenes"]


def test_text_to_image_with_progress_and_previews(comfy: Comfy, service: Served) -> None:
    """Pixels are the service's; the file that ComfyUI saves has the workflow in it, and neither key nor address."""
    run = comfy.run(workflow(comfy, n=2, preview_every=1, steps=8, options='{"deterministic": true}'))
    assert run.of("execution_success") and len(run.pictures) == 2, run
    for ours, theirs in zip(run.pixels, drawn(service, n=2, steps=8, deterministic=True), strict=True):
        assert np.array_equal(ours, theirs)
    steps = [(data["value"], data["max"]) for data in run.of("progress") if data["node"] == "1"]
    assert steps == sorted(steps) and steps[-1] == (16, 16) and len(set(steps)) >= 3
    assert run.of("preview")
    for file in run.pictures:
        assert b"DiptychSampler" in file
        assert SECRET.encode() not in file and service.url.encode() not in file


def test_the_same_workflow_is_not_drawn_again_and_another_seed_is(comfy: Comfy, service: Served) -> None:
    before = len(jobs(service))
    first = comfy.run(workflow(comfy, seed=11))
    again = comfy.run(workflow(comfy, seed=11))
    assert "1" in again.of("execution_cached")[0]["nodes"] and len(jobs(service)) == before + 1
    other = comfy.run(workflow(comfy, seed=12))
    assert len(jobs(service)) == before + 2 and not np.array_equal(first.pixels[0], other.pixels[0])


def test_edits_keep_what_the_mask_keeps(comfy: Comfy) -> None:
    """LoadImage's mask is white where the picture is transparent: that is drawn anew."""
    source = picture()
    whole = {"5": {"class_type": "LoadImage", "inputs": {"image": comfy.upload(source)}}}
    (edited,) = comfy.run(workflow(comfy, whole, image=["5", 0], strength=0.5)).pixels
    assert not np.array_equal(edited, np.asarray(source))
    alpha = np.full((128, 128), 255, np.uint8)
    alpha[:64] = 0
    holed = source.copy()
    holed.putalpha(Image.fromarray(alpha))
    nodes = {
        **whole,
        "6": {"class_type": "LoadImageMask", "inputs": {"image": comfy.upload(holed), "channel": "alpha"}},
    }
    (edited,) = comfy.run(workflow(comfy, nodes, image=["5", 0], mask=["6", 0], strength=1.0)).pixels
    assert np.array_equal(edited[64:], np.asarray(source)[64:])
    assert (edited[:64] != np.asarray(source)[:64]).mean() > 0.5


def test_loras_controls_and_image_prompts_take_part(comfy: Comfy, service: Served) -> None:
    load = {"class_type": "LoadImage", "inputs": {"image": comfy.upload(picture())}}
    share = {"strength": 1.0, "start": 0.0, "end": 1.0}
    nodes = {
        "2": {"class_type": "DiptychLora", "inputs": {"lora": "mosaic", "strength": 0.8}},
        "3": {"class_type": "DiptychLora", "inputs": {"lora": "pencil", "strength": 0.5, "loras": ["2", 0]}},
        "4": {
            "class_type": "DiptychControl",
            "inputs": {"image": ["5", 0], "control": "edges", "preprocessor": "canny", **share},
        },
        "5": load,
        "6": {"class_type": "DiptychImagePrompt", "inputs": {"image": ["5", 0], "adapter": "scenes", **share}},
    }
    (plain,) = drawn(service)
    seen = [plain]
    for links in ({"loras": ["3", 0]}, {"controls": ["4", 0]}, {"image_prompts": ["6", 0]}):
        (pixels,) = comfy.run(workflow(comfy, nodes, **links, options='{"deterministic": true}')).pixels
        assert not any(np.array_equal(pixels, other) for other in seen)
        seen.append(pixels)
    assert np.array_equal(seen[1], drawn(service, lora="mosaic:0.8,pencil:0.5", deterministic=True)[0])


def test_interrupt_cancels_the_jobs(comfy: Comfy, service: Served) -> None:
    """Two samplers of one workflow are in the service at once; ComfyUI's button stops both."""
    both = workflow(comfy, n=10, steps=500, seed=21, timeout_s=86400)
    both["2"] = {**both["1"], "inputs": {**both["1"]["inputs"], "seed": 99}}
    both["8"] = {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "x"}}
    before = {job["id"] for job in jobs(service)}
    run = comfy.run(both, interrupt_at="progress")
    assert run.of("execution_interrupted") and not run.pictures, run

    def states() -> list[str]:
        return [job["status"] for job in jobs(service) if job["id"] not in before]

    wait_until(lambda: states() == ["cancelled", "cancelled"], f"the end of {states()}", 30)
    assert comfy.run(workflow(comfy, seed=31)).pictures, "the next workflow runs"


def test_errors_are_the_nodes(comfy: Comfy) -> None:
    nodes = {"2": {"class_type": "DiptychLora", "inputs": {"lora": "nobody", "strength": 1.0}}}
    (error,) = comfy.run(workflow(comfy, nodes, loras=["2", 0])).of("execution_error")
    assert error["node_id"] == "1" and error["exception_type"].endswith("ServiceError")
    assert "lora" in error["exception_message"] and "HTTP 400" in error["exception_message"]
    answer = comfy.client.post("/prompt", json={"prompt": workflow(comfy, service="http://example.com")})
    assert answer.status_code == 400 and "not configured on this machine" in answer.text


@pytest.mark.parametrize("example", ["text_to_image", "inpaint_with_lora"])
def test_examples_run_in_the_page(comfy: Comfy, browser: Browser, example: str) -> None:
    """Each in both of ComfyUI's formats: the page loads the one, its button draws, and its export is the other."""
    picture().save(comfy.folder / "input" / "example.png")
    called = json.loads((FOLDER / "api_workflows" / f"{example}.json").read_text("utf-8"))
    assert comfy.run(called).pictures
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    page.goto(comfy.url)
    page.wait_for_function("window.app && window.app.graph && window.app.vueAppReady", timeout=READY_S * 1000)
    workflow = json.loads((FOLDER / "example_workflows" / f"{example}.json").read_text("utf-8"))
    page.evaluate("async graph => await window.app.loadGraphData(graph)", workflow)
    exported = page.evaluate("async () => (await window.app.graphToPrompt()).output")
    simple = lambda nodes: {id: (node["class_type"], node["inputs"]) for id, node in nodes.items()}  # noqa: E731
    assert simple(exported) == simple(called)
    page.evaluate("async () => await window.app.queuePrompt(0)")
    page.wait_for_function(
        "() => window.app.graph.nodes.some(node => node.type === 'SaveImage' && node.imgs && node.imgs.length)",
        timeout=READY_S * 1000,
    )
    if shots := os.environ.get("SCREENSHOTS"):
        page.keyboard.press("Escape")  # the templates that a first visit is shown
        page.wait_for_timeout(1000)
        page.screenshot(path=Path(shots) / f"comfyui-{example}.png")
    page.close()
