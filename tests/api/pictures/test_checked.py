"""A real service with a checker of contents and keys of every action: what each endpoint answers, and that of a refused
picture nothing is kept, shown or said in any of them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np
import pytest
import redis
import torch
from PIL.Image import fromarray

from contract.content import REFUSED
from contract.image import ImageParameters
from core import pictures
from core.config import Settings
from core.jobs.keyring import Keyring
from deployment.redis import address_in
from pipeline import content
from pipeline.checkpoints import tiny
from tests.api.batches.test_routes import begin, ended, lines, told
from tests.api.world import PATIENCE_S, Sent, bearer, check_error, client_of, eventually, ok, parsed
from tests.deployment.served import Served
from tests.pipeline import checkers
from workers import draw
from workers.build import build

SERVICE = "blur"
KEYS = {"lax": "off", "tagging": "tag", "usual": "", "strict": "refuse"}
SEEDS = range(12)
DRAW = "/v1/images/generations"
PLAIN = {"num_inference_steps": 3, "width": 32, "height": 32}
FIELDS: dict[str, Any] = {"prompt": "a fox", "steps": 3, "size": "32x32"}


@dataclass
class Checked:
    """The service, a client for each key, and which pictures its checker flags."""

    served: Served
    clients: dict[str, httpx2.Client]
    flagged: dict[int, bool]
    whole: dict[int, Any]
    redis: redis.Redis

    def post(self, key: str, path: str = DRAW, **fields: Any) -> httpx2.Response:
        return self.clients[key].post(path, json={**FIELDS, **fields})

    def ended(self, key: str, **fields: Any) -> dict[str, Any]:
        """A job when it has ended."""
        id = self.post(key, "/v1/jobs", type="image", **fields).json()["id"]
        job = lambda: self.clients[key].get(f"/v1/jobs/{id}").json()  # noqa: E731
        return eventually(lambda: (seen := job())["status"] not in ("queued", "running") and seen)

    def events(self, key: str, method: str, path: str, **fields: Any) -> list[Sent]:
        with self.clients[key].stream(method, path, json=fields or None) as answer:
            return [*parsed(answer.iter_lines())]

    def sdapi(self, **fields: Any) -> httpx2.Response:
        """The answer to the key `strict` by AUTOMATIC1111's API."""
        asked = {"prompt": "a fox", "steps": 3, "width": 32, "height": 32, **fields}
        return self.clients["strict"].post("/sdapi/v1/txt2img", json=asked)

    def predict(self, **fields: Any) -> dict[str, Any]:
        """The prediction of the key `strict` by Replicate's API."""
        asked = {"input": {"prompt": "a fox", **PLAIN, **fields}}
        answer = self.clients["strict"].post("/predictions", json=asked, headers={"Prefer": "wait=60"})
        return dict(answer.json())

    @property
    def unsafe(self) -> int:
        """The seed of a flagged picture."""
        return next(seed for seed in SEEDS if self.flagged[seed])

    @property
    def mixed(self) -> int:
        """The first of two seeds of which one picture is flagged."""
        return next(seed for seed in SEEDS[:-1] if self.flagged[seed] != self.flagged[seed + 1])

    def stored(self) -> set[str]:
        """Every file that the service keeps."""
        return {str(path) for path in (self.served.folder / "data" / "artifacts").rglob("*") if path.is_file()}

    def is_whole(self, data: bytes, seed: int) -> bool:
        """Whether the file shows the picture of a seed."""
        return bool(abs(pixels(data) - self.whole[seed]).max() <= 1)

    def is_blurred(self, data: bytes, seed: int) -> bool:
        blurred = content.blurred(fromarray(self.whole[seed].astype(np.uint8)))
        return bool(abs(pixels(data) - np.asarray(blurred).astype(int)).max() <= 4)


def pixels(data: bytes) -> Any:
    return np.asarray(pictures.read(data)).astype(int)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    folder = tmp_path_factory.mktemp("checked")
    model = tiny.save(folder / "tiny", tiny.SHAPES[tiny.TINY])
    settings = Settings(model=str(model), compile=False, kernels=False, threads=1, data_dir=folder, text_model="off")
    with build(settings) as runtime:
        drawn = [
            draw.submit(runtime.engine, ImageParameters("a fox", seed, 32, 32, steps=3), lambda: None) for seed in SEEDS
        ]
        seen = [future.result(PATIENCE_S).image for future in drawn]
    checkers.safety_checker(folder / "safety", seen)
    network = content.load(folder / "safety", torch.device("cpu"), {})
    flagged = {seed: network.verdicts(network.prepare(image)[None])[0].flagged for seed, image in enumerate(seen)}
    variables = {"DIPTYCH_CHECKER": str(folder / "safety"), "DIPTYCH_CHECKER_ACTION": SERVICE, "DIPTYCH_SDAPI": "1"}
    whole = {seed: np.asarray(image).astype(int) for seed, image in enumerate(seen)}
    with ExitStack() as stack:
        served = stack.enter_context(closing(Served(folder / "service", model=str(model), variables=variables)))
        served.ready()
        url = address_in(served.folder / "data" / "redis")
        assert url
        keyring, store = stack.enter_context(closing(Keyring(url))), stack.enter_context(redis.Redis.from_url(url))
        clients = {}
        for name, action in KEYS.items():
            headers = bearer(keyring.add(name, checker=action)[1])
            client = httpx2.Client(base_url=served.url, headers=headers, timeout=PATIENCE_S, verify=False)
            clients[name] = stack.enter_context(client)
        eventually(lambda: clients["strict"].get("/v1/models").status_code == 200)
        yield Checked(served, clients, flagged, whole, store)


def test_every_key_has_its_action_while_they_draw_together(checked: Checked) -> None:
    names = [*KEYS] * 2
    with ThreadPoolExecutor(len(names)) as pool:
        answers = [*pool.map(lambda name: checked.post(name, seed=checked.mixed, n=2, steps=3), names)]
    for name, answer in zip(names, answers, strict=True):
        data, action = ok(answer).json()["data"], KEYS[name] or SERVICE
        for seed, image in enumerate(data, checked.mixed):
            flagged = checked.flagged[seed]
            if action == "off":
                assert "content" not in image
            else:
                labels = image["content"].pop("labels")
                assert labels and image["content"] == {"flagged": flagged, "action": action if flagged else None}
            if flagged and action == "refuse":
                assert image["error"]["code"] == REFUSED and not {"b64_json", "url"} & {*image}
                continue
            file = base64.b64decode(image["b64_json"])
            assert (checked.is_blurred if flagged and action == "blur" else checked.is_whole)(file, seed)


def test_nothing_of_a_refused_picture_is_in_any_answer_or_store(checked: Checked) -> None:
    client, seed = checked.clients["strict"], checked.unsafe
    before = checked.stored()
    for more in ({}, {"response_format": "url"}, {"output_format": "jpeg"}, {"moderation": "low"}, {"checker": "tag"}):
        check_error(checked.post("strict", seed=seed, **more), 400, None, REFUSED)
    events = checked.events("strict", "POST", DRAW, **FIELDS, seed=seed, stream=True, partial_images=3)
    assert [event.type for event in events] == ["error"] and events[0].data["error"]["code"] == REFUSED
    job = checked.ended("strict", seed=seed, preview_every=1)
    assert job["status"] == "failed" and job["error"]["code"] == REFUSED and job["images"] is None
    assert "previews" not in (job["progress"] or {})
    for path, status in (("images/0", 404), ("preview", 204)):
        assert client.get(f"/v1/jobs/{job['id']}/{path}").status_code == status
    heard = checked.events("strict", "GET", f"/v1/jobs/{job['id']}/events")
    assert heard and not any("previews" in event.data for event in heard)
    alone = client.post("/", json={"inputs": "a fox", "parameters": {**PLAIN, "seed": seed}})
    assert alone.status_code == 400 and alone.json()["code"] == REFUSED
    assert checked.sdapi(seed=seed).status_code == 400
    assert client.get("/sdapi/v1/progress").json()["current_image"] is None
    prediction = checked.predict(seed=seed, disable_safety_checker=True)
    assert prediction["status"] == "failed" and prediction["output"] is None and "refused" in prediction["error"]
    assert checked.stored() == before and not [*checked.redis.scan_iter("diptych:preview:*")]


def test_a_request_may_ask_for_more_and_not_for_less(checked: Checked) -> None:
    for name, asked in (("lax", "refuse"), ("tagging", "refuse"), ("usual", "refuse"), ("strict", "blur")):
        check_error(checked.post(name, seed=checked.unsafe, checker=asked), 400, None, REFUSED)
    (image,) = checked.post("usual", seed=checked.unsafe, checker="tag").json()["data"]
    assert image["content"]["action"] == SERVICE
    check_error(checked.post("strict", seed=1, checker="off"), 400, "checker", "invalid_value")
    (model,) = checked.clients["strict"].get("/v1/models").json()["data"]
    assert model["diptych"]["checker"] == SERVICE


@pytest.mark.parametrize(("name", "previews"), [("lax", True), ("tagging", True), ("usual", False), ("strict", False)])
def test_previews_are_of_keys_whose_pictures_are_never_hidden(checked: Checked, name: str, previews: bool) -> None:
    job = checked.ended(name, seed=checked.mixed, n=2, preview_every=1)
    events = checked.events(name, "GET", f"/v1/jobs/{job['id']}/events")
    assert any("previews" in event.data for event in events) is previews


def test_of_a_job_with_a_refused_picture_every_endpoint_shows_the_other(checked: Checked) -> None:
    client, first = checked.clients["strict"], checked.mixed
    at = next(k for k in range(2) if checked.flagged[first + k])
    job = checked.ended("strict", seed=first, n=2)
    refused, shown = job["images"][at], job["images"][1 - at]
    assert refused["url"] is None and refused["error"]["code"] == REFUSED and refused["fingerprint"] is None
    assert checked.is_whole(client.get(shown["url"]).content, first + 1 - at)
    record = json.loads(checked.redis.hget(f"diptych:job:{job['id']}", "result") or "")
    assert [image["seed"] for image in record["images"] if image["key"]] == [first + 1 - at], "for older APIs"
    for url in (f"/v1/jobs/{job['id']}/images/{at}", shown["url"].replace(f"images/{1 - at}", f"images/{at}")):
        assert client.get(url).status_code in (400, 403) and b"PNG" not in client.get(url).content
    events = checked.events("strict", "POST", DRAW, **FIELDS, seed=first, n=2, stream=True)
    kinds = {event.data["image_index"]: event for event in events}
    assert kinds[at].type == "image_generation.refused" and "b64_json" not in kinds[at].data
    assert kinds[1 - at].type == "image_generation.completed"
    answer = checked.sdapi(seed=first, batch_size=2).json()
    info = json.loads(answer["info"])
    assert len(answer["images"]) == len(info["infotexts"]) == len(info["all_seeds"]) == 1
    assert any("refused" in warning for warning in info["warnings"])
    prediction = checked.predict(seed=first, num_outputs=2)
    assert prediction["status"] == "succeeded" and len(prediction["output"]) == 1 and "refused" in prediction["logs"]


def test_openais_own_client_gets_an_image_without_bytes(checked: Checked) -> None:
    token = checked.clients["strict"].headers["Authorization"].removeprefix("Bearer ")
    with client_of(checked.served.url, token) as client:
        more = {"steps": 3, "seed": checked.mixed}
        fields: dict[str, Any] = {"prompt": "a fox", "size": "32x32", "n": 2, "extra_body": more}
        images = client.images.generate(**fields).data
        assert [image.b64_json is None for image in images] == [checked.flagged[checked.mixed + k] for k in range(2)]
        events = [*client.images.generate(**fields, stream=True)]
        done = [event for event in events if event.type == "image_generation.completed"]
        assert len(events) == 2 and len(done) == 1 and base64.b64decode(done[0].b64_json)


def test_lines_of_a_batch_obey_their_key(checked: Checked) -> None:
    token = checked.clients["strict"].headers["Authorization"].removeprefix("Bearer ")
    mixed = {**FIELDS, "seed": checked.mixed, "n": 2, "response_format": "b64_json"}
    with client_of(checked.served.url, token) as client:
        batch = ended(client, begin(client, lines({**FIELDS, "seed": checked.unsafe}, mixed)).id)
        (line,), (error,) = told(client, batch.output_file_id), told(client, batch.error_file_id)
    assert error["response"]["body"]["error"]["code"] == REFUSED
    bytes_of = ["b64_json" in image for image in line["response"]["body"]["data"]]
    assert bytes_of == [not checked.flagged[checked.mixed + k] for k in range(2)]
    assert not any("url" in image for image in line["response"]["body"]["data"])
