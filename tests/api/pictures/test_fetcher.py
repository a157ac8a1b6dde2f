"""Pictures by https URL, from a real server with TLS: what is fetched when, how often, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from api.batches import feeder as batch_feeder
from api.batches.feeder import BatchFeeder
from api.concurrency.held_bytes import HeldBytes
from api.errors import ApiError
from api.http import guarded_http
from api.http.guarded_http import Unreachable
from api.pictures import fetcher as picture_fetcher
from api.pictures.fetcher import PictureFetcher, fetch
from api.pictures.uploads import MAX_BYTES, PictureUploads, Upload
from api.pictures.urls import picture_of
from core.config import Settings
from core.jobs.batches import BatchRecord
from tests.api.batches.test_routes import ended
from tests.api.batches.test_text_batches import begin
from tests.api.easel import Easel
from tests.api.http.test_guarded_http import resolving
from tests.api.pictures.test_decoder import service_of
from tests.api.pictures.test_edits import PNG, as_file, bomb, handed_on, hole, pixels
from tests.api.world import CARD, PATIENCE_S, Api, Worker, bearer, changed, check_error, ok, opened, token_of
from tests.faults.payloads import CARD_OF_NINE
from tests.http_server import Handler
from tests.https_server import Certificate, SecureServer, make_certificate

EDITS, DRAW = "/v1/images/edits", "/v1/images/generations"
ARRAY = pixels(seed=8)
OFFERED = CARD_OF_NINE
SETTINGS = {"fetch_images": "private"}
PICTURES = {
    "/a.png": as_file(ARRAY), "/hole.png": as_file(hole()), "/bomb.png": bomb(20_000, 20_000), "/page": b"<html>",
    "/empty": b"", "/large": PNG + bytes(MAX_BYTES), "/turned.jpg": as_file(pixels(40, 20), "JPEG"),
}  # fmt: skip


OK, CHUNKED, GONE = (
    b"HTTP/1.1 200 OK\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n",
)
WRITTEN: dict[str, list[bytes]] = {
    "/chunked": [OK, CHUNKED, *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in
                                (PICTURES["/a.png"][:1000], PICTURES["/a.png"][1000:], b""))],
    "/short-large": [OK, b"Content-Length: 3000001\r\n\r\n", bytes(3_000_000)],
    "/short": [OK, b"Content-Length: 9999\r\n\r\nabc"],
    "/endless": [OK, b"\r\n", *[bytes(2**16)] * (MAX_BYTES // 2**16 + 2)],
    "/crumbs": [OK, CHUNKED, *[b"1\r\nx\r\n" * 2**14] * (MAX_BYTES // 2**14), b"0\r\n\r\n"],
    "/dribble": [OK, b"Content-Length: 50000\r\n\r\n", *[b"x"] * 50_000],
    "/continue": [b"HTTP/1.1 100 x\r\n\r\n", *[b"HTTP/1.1 100 Continue\r\n\r\n" * 1000] * 100, GONE],
    "/trailers": [OK, CHUNKED, b"0\r\n", *[b"a: b\r\n" * 1000] * 100, GONE],
    "/nonsense": [b"220 smtp.example ESMTP\r\n"],
}  # fmt: skip


class Site(SecureServer):
    """Serves `PICTURES`, redirects `/to/…`, and misbehaves by path. `seen` counts the requests of each path."""

    def __init__(self, certificate: Certificate) -> None:
        self.seen = Counter[str]()
        site = self

        class Page(Handler):
            def respond(self) -> None:
                site.seen[self.path] += 1
                with contextlib.suppress(OSError):  # a client that has read enough
                    self.serve()

            def serve(self) -> None:
                if self.path.startswith("/to/"):
                    self.answer(302, headers={"Location": self.path.removeprefix("/to/")})
                elif self.path.startswith("/loop"):
                    self.answer(307, headers={"Location": "/loop"})
                elif self.path.startswith("/status/"):
                    self.answer(int(self.path[-3:]), PNG)
                elif self.path == "/zipped":
                    self.answer(200, PNG, {"Content-Encoding": "gzip"})
                elif self.path == "/hangs":
                    self.wfile.write(OK + b"Content-Length: 999\r\n\r\nabc")
                    site.seen["hangs"] += 1
                    with contextlib.suppress(OSError):
                        self.rfile.read(1)
                    site.seen["left"] += 1
                elif self.path in WRITTEN:
                    for piece in WRITTEN[self.path]:
                        self.wfile.write(piece)
                    self.close_connection = True
                else:
                    known = PICTURES.get(self.path)
                    self.answer(404 if known is None else 200, known or b"")

        super().__init__(Page, certificate)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def site(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(guarded_http, "_tls", lambda: certificate.trusting)
    with Site(certificate) as site:
        yield site


def by_url(site: Site, path: str = "/a.png") -> dict[str, str]:
    return {"image_url": site.url + path}


# -- a fetch alone -----------------------------------------------------------------------------------------------------


def get(url: str, claim: Callable[[int], None] = lambda _: None) -> bytes:
    return fetch(url, private=True, claim=claim)


@pytest.mark.parametrize(
    "path", ["/a.png", "/a.png?x=1", "/to//a.png", "/to//to//to//a.png", "/chunked", "/a.png#part"]
)
def test_a_picture_is_fetched_through_redirects(site: Site, path: str) -> None:
    PICTURES["/a.png?x=1"] = PICTURES["/a.png"]
    claimed: list[int] = []
    data = get(site.url + path.partition("#")[0], claimed.append)
    assert data == PICTURES["/a.png"] and sum(claimed) == len(data)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/gone", "answered 404"), ("/status/500", "answered 500"), ("/status/204", "answered 204"),
     ("/loop", "redirects more than 3 times"), ("/zipped", "compressed"), ("/short", "ended early"),
     ("/crumbs", "too many small parts"), ("/dribble", "too many small parts"), ("/continue", "too many small parts"),
     ("/trailers", "too many small parts"), ("/nonsense", "is not HTTP"),
     ("/to/http://127.0.0.1/a.png", "must begin with https"),
     ("/to/file:///etc/passwd", "must begin with https"), ("/to/https://127.0.0.1:25/", "must have the port 443"),
     ("/to/https://user@127.0.0.1/", "no user"), ("/to/https://[", "redirects"), ("/to/https://", "redirects")],
)  # fmt: skip
def test_what_is_not_fetched_says_why(site: Site, path: str, reason: str) -> None:
    with pytest.raises(Unreachable, match=reason):
        get(site.url + path)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "169.254.169.254", "localhost", "10.0.0.1"])
def test_a_redirect_to_a_private_address_is_not_followed(
    site: Site, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """From a public one: the first call is let through, as if its address were public."""
    public = guarded_http._public
    calls: list[object] = []

    def first_is_public(address: Any) -> bool:
        calls.append(address)
        return len(calls) == 1 or public(address)

    resolving(monkeypatch, "pictures.example", [["127.0.0.1"]])
    monkeypatch.setattr(guarded_http, "_public", first_is_public)
    with pytest.raises(Unreachable, match="it redirects, and the address must be a public address"):
        fetch(f"https://pictures.example:{site.port}/to/https://{host}:{site.port}/a.png", private=False, claim=print)
    assert "/a.png" not in site.seen


@pytest.mark.parametrize("path", ["/large", "/endless"])
def test_what_is_too_large_is_left(site: Site, path: str) -> None:
    claimed: list[int] = []
    with pytest.raises(picture_fetcher._TooLarge):
        get(site.url + path, claimed.append)
    assert sum(claimed) <= MAX_BYTES


# -- in requests -------------------------------------------------------------------------------------------------------


def test_an_edit_takes_urls_wherever_it_takes_pictures(shared: Api, easel: Easel, worker: Worker, site: Site) -> None:
    image = by_url(site)
    ok(shared.post(
        EDITS, prompt="a hat", size="128x128", images=[image, image], mask=by_url(site, "/hole.png"),
        control=[{"model": "edges", "image": image}], image_prompts=[{"model": "base", "image": image}],
    ))  # fmt: skip
    claim = easel.seen[-1]
    source, mask = handed_on(worker, claim)
    assert np.array_equal(source, ARRAY) and mask is not None and mask.max() == 255
    assert len(claim.parameters["control"]) == 1 and len(claim.parameters["image_prompts"]) == 2
    assert site.seen == {"/a.png": 1, "/hole.png": 1}, "equal ones once"


def test_a_job_run_again_and_a_repeated_request_fetch_nothing(shared: Api, worker: Worker, site: Site) -> None:
    fields = {"type": "edit", "prompt": "x", "images": [by_url(site)]}
    put = lambda **more: shared.client.put("/v1/jobs/by-url", json={**fields, **more})  # noqa: E731
    assert [put().status_code, put().status_code] == [202, 202] and site.seen == {"/a.png": 1}
    check_error(put(images=[by_url(site, "/turned.jpg")]), 422, code="idempotency_conflict")
    claim = worker.take("by-url")
    assert np.array_equal(handed_on(worker, claim)[0], ARRAY)
    worker.store.leases.fail("by-url", claim.attempt, "engine_error", "no")
    again = shared.client.post("/v1/jobs/by-url/requeue").json()["id"]
    assert worker.job(again).inputs == worker.job("by-url").inputs and site.seen == {"/a.png": 1}
    worker.work(again)


@pytest.mark.parametrize(
    ("path", "status", "code", "said"),
    [("/gone", 400, "fetch_failed", "it answered 404"), ("/bomb.png", 400, None, "wider or higher"),
     ("/page", 400, None, "must be a PNG, JPEG or WebP"), ("/empty", 400, None, "must not be empty"),
     ("/large", 413, "body_too_large", "larger than")],
)  # fmt: skip
def test_what_a_url_leads_to_is_refused_by_field(
    shared: Api, worker: Worker, site: Site, path: str, status: int, code: str | None, said: str
) -> None:
    known = worker.ids()
    for field, body in (
        ("images", {"images": [by_url(site, path)]}),
        ("mask", {"images": [by_url(site)], "mask": by_url(site, path)}),
    ):
        answer = shared.post(EDITS, prompt="x", **body)
        check_error(answer, status, field, code)
        assert said in answer.json()["error"]["message"] and site.url not in answer.text
    assert worker.ids() == known and service_of(shared).fetcher._held.count == 0


@pytest.mark.parametrize(("host", "said"), [("a.example:22", "port 443"), ("user:word@a.example", "no user")])
def test_urls_that_are_never_fetched_are_refused_at_once(shared: Api, host: str, said: str) -> None:
    answer = shared.post(EDITS, prompt="x", images=[{"image_url": f"https://{host}/a.png"}])
    assert said in check_error(answer, 400, "images.image_url")["message"]


def test_memory_that_others_hold_is_a_503_and_too_many_pictures_are_a_413(
    shared: Api, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose length is declared, and whose is not."""
    share = HeldBytes(len(PICTURES["/a.png"]) + 10)
    monkeypatch.setattr(service_of(shared).fetcher, "_of_tenant", {"": share})
    fields = {"type": "edit", "prompt": "x", "images": [by_url(site)]}
    assert shared.post("/v1/jobs", **fields).status_code == 202
    share.claim(11)
    answer = shared.post("/v1/jobs", **fields)
    check_error(answer, 503, code="fetch_overloaded")
    share.give(11)
    assert answer.headers["retry-after"]
    for mask in ("/hole.png", "/chunked"):
        check_error(shared.post("/v1/jobs", **fields, mask=by_url(site, mask)), 413, code="body_too_large")
    assert share.count == service_of(shared).fetcher._held.count == 0


def test_a_batch_pauses_while_others_hold_the_memory(
    shared: Api, client: openai.OpenAI, easel: Easel, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a line that never fits is refused: the next one is drawn."""
    share = HeldBytes(len(PICTURES["/a.png"]) + 10)
    monkeypatch.setattr(service_of(shared).fetcher, "_of_tenant", {"": share})
    pauses = list[float]()
    monkeypatch.setattr(batch_feeder, "_PAUSES_S", (0.01,))
    failed = BatchFeeder._failed

    def paused(feeder: BatchFeeder, batch: BatchRecord, error: Exception) -> None:
        failed(feeder, batch, error)
        pauses.append(feeder._retries[batch.id][1])
        if len(pauses) == 2:
            share.give(11)

    monkeypatch.setattr(BatchFeeder, "_failed", paused)
    share.claim(11)
    small = {"prompt": "x", "images": [by_url(site)]}
    done = ended(client, begin(client, EDITS, small, {**small, "mask": by_url(site, "/chunked")}, small).id)
    assert (done.request_counts.completed, done.request_counts.failed, len(pauses)) == (2, 1, 2)
    assert np.array_equal(handed_on(easel.worker, easel.seen[-1])[0], ARRAY)


def test_of_equal_urls_the_first_field_is_named(shared: Api, site: Site) -> None:
    answer = shared.post(EDITS, prompt="x", images=[by_url(site, "/gone")], mask=by_url(site, "/gone"))
    check_error(answer, 400, "images", "fetch_failed")


def upload_of(site: Site, path: str) -> Upload:
    return Upload(picture_of("images", site.url + path))


def test_a_fetch_ends_with_its_request_and_with_one_that_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at its limit: the server sees it leave, and its place is free."""
    monkeypatch.setattr(picture_fetcher, "ITEM_S", 1000.0)

    async def go() -> None:
        fetcher = PictureFetcher("private")
        try:
            hanging = PictureUploads(upload_of(site, "/hangs"))
            for _ in range(2):
                request = asyncio.ensure_future(fetcher.fetched("a", hanging).__aenter__())
                while not site.seen["hangs"]:
                    await asyncio.sleep(0.01)
                request.cancel()
                await asyncio.wait([request])
                while not site.seen["left"]:
                    await asyncio.sleep(0.01)
                site.seen.clear()
            failing = PictureUploads(hanging.source, {}, (upload_of(site, "/gone"),))
            with pytest.raises(ApiError, match="answered 404"):
                async with fetcher.fetched("a", failing):
                    pass
            while fetcher._pool.room < 32:
                await asyncio.sleep(0.01)
        finally:
            fetcher.stop()

    asyncio.run(asyncio.wait_for(go(), PATIENCE_S))


@pytest.mark.parametrize("end", ["", "fails", "/short-large"])
def test_fetched_bytes_are_freed_with_the_context(site: Site, end: str) -> None:
    """Whether the request succeeds, fails, or one of its fetches does; nothing waits for garbage to be collected."""
    PICTURES["/0"] = PICTURES["/1"] = bytes(3_000_000)

    async def go() -> None:
        fetcher, before = PictureFetcher("private"), tracemalloc.get_traced_memory()[0]
        further = upload_of(site, end if end.startswith("/") else "/1")
        errors = list[ApiError]()  # as their traceback may be kept
        try:
            async with fetcher.fetched("a", PictureUploads(upload_of(site, "/0"), {}, (further,))) as local:
                assert local.source is not None and local.source.image.read() == PICTURES["/0"]
                assert tracemalloc.get_traced_memory()[0] - before > 6_000_000
                if end:
                    raise ApiError(400, "No.")
        except ApiError as error:
            errors.append(error)
        while fetcher._pool._idle < len(fetcher._pool._alive) or fetcher._pool.room < 32:
            await asyncio.sleep(0.01)
        while tracemalloc.get_traced_memory()[0] - before >= 2_000_000:  # a thread may be about to let go of its part
            await asyncio.sleep(0.01)
        assert len(errors) == bool(end)
        fetcher.stop()

    gc.disable()
    tracemalloc.start()
    try:
        asyncio.run(asyncio.wait_for(go(), PATIENCE_S))
    finally:
        tracemalloc.stop()
        gc.enable()


def test_rate_and_quota_come_before_a_fetch(settings: Settings, site: Site) -> None:
    settings = changed(settings, fetch_images="private")
    headers = bearer(token_of(settings, "a", ["images"], quota="1/day"))
    with opened(settings, CARD) as (api, _):

        def edit(**more: Any) -> httpx2.Response:
            fields = {"type": "edit", "prompt": "x", "images": [by_url(site)], **more}
            return api.client.post("/v1/jobs", json=fields, headers=headers)

        check_error(edit(steps=100_000), 400, "steps")
        assert not site.seen
        assert edit().status_code == 202
        check_error(edit(), 429, code="quota_exceeded")
    assert site.seen == {"/a.png": 1}


@pytest.mark.parametrize(("setting", "code"), [("off", "fetch_off"), ("public", "fetch_private")])
def test_the_setting_says_what_is_fetched(settings: Settings, site: Site, setting: str, code: str) -> None:
    with opened(changed(settings, fetch_images=setting), CARD) as (api, _):
        for url in (site.url + "/a.png", "https://localhost/x"):
            check_error(api.post(EDITS, prompt="x", images=[{"image_url": url}]), 400, "images.image_url", code)
    assert not site.seen
