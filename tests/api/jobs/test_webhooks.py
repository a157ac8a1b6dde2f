"""Webhooks against real receivers: signed, tried again, told once it went well; and what is never called."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from api.http.guarded_http import Unreachable
from api.jobs.webhook_sender import WebhookSender
from api.jobs.webhooks import call
from core.config import Settings
from core.jobs.keyring import Keyring
from tests.api.http.test_guarded_http import PRIVATE
from tests.api.world import CARD, Api, Worker, changed, check_error, eventually, opened
from tests.http_server import Handler, LocalServer


class Receiver(LocalServer):
    """A server that answers what it is told to, and remembers what it was told."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.heard: list[tuple[str, dict[str, str], bytes]] = []
        receiver = self

        class Webhook(Handler):
            def respond(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                status = receiver.answers.pop(0) if receiver.answers else 204
                receiver.heard.append((self.path, headers, self.body()))
                self.answer(status, headers={"Location": f"{receiver.url}/elsewhere"} if status in (301, 307) else {})

        super().__init__(Webhook)


@pytest.fixture(scope="module")
def world(module_settings: Settings) -> Iterator[tuple[Api, Worker]]:
    """One for the module: each test's receiver hears of its own job alone, and leaves nobody to be told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WebhookSender.__init__, "__defaults__", ((0.1, 0.2),))
        with opened(changed(module_settings, webhook_private=True), CARD) as world:
            yield world


def left(worker: Worker) -> int:
    """Keys, seen at one moment: a scan may miss what goes from one key to another meanwhile."""
    return len(worker.redis.keys("diptych:webhook*"))


def test_a_receiver_that_fails_twice_is_told(world: tuple[Api, Worker]) -> None:
    api, worker = world
    with Receiver(500, 429) as receiver:
        id = api.order(webhook_url=f"{receiver.url}/hook?a=b")
        worker.work(id)
        eventually(lambda: len(receiver.heard) == 3 and not left(worker))
    paths, headers, bodies = zip(*receiver.heard, strict=True)
    assert set(paths) == {"/hook?a=b"} and len(set(bodies)) == 1
    assert {h["webhook-id"] for h in headers} == {f"msg_{id}_{worker.job(id).incarnation}"}, (
        "by which who hears it twice knows it"
    )
    told = json.loads(bodies[0])
    assert told["type"] == "job.succeeded" and told["data"] == api.job(id)
    with closing(Keyring(api.settings.redis_url)) as keyring:
        secret = base64.b64decode(keyring.webhook_secret("").removeprefix("whsec_"))
    signed = f"{headers[2]['webhook-id']}.{headers[2]['webhook-timestamp']}.".encode() + bodies[2]
    wanted = base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()
    assert headers[2]["webhook-signature"] == f"v1,{wanted}"


@pytest.mark.parametrize("end", ["failed", "cancelled", "expired"])
def test_every_end_is_told_once(world: tuple[Api, Worker], end: str) -> None:
    api, worker = world
    with Receiver() as receiver:
        id = api.order(webhook_url=receiver.url)
        if end == "cancelled":
            api.client.post(f"/v1/jobs/{id}/cancel")
        else:
            claim = worker.take(id)
            leases = worker.store.leases
            leases.fail(id, claim.attempt, "a", "b") if end == "failed" else leases.expire(id, claim.attempt)
        eventually(lambda: receiver.heard and not left(worker))
    assert [json.loads(body)["type"] for _, _, body in receiver.heard] == [f"job.{end}"]


def test_it_is_given_up_in_the_end(world: tuple[Api, Worker]) -> None:
    api, worker = world
    with Receiver(*[500] * 9) as receiver:
        worker.work(api.order(webhook_url=receiver.url))
        eventually(lambda: not left(worker))
    assert len(receiver.heard) == 3


def test_a_job_that_was_erased_is_not_told(world: tuple[Api, Worker]) -> None:
    api, worker = world
    with Receiver(500, 500) as receiver:
        id = api.order(webhook_url=receiver.url)
        worker.work(id)
        eventually(lambda: receiver.heard)
        api.delete(f"/v1/jobs/{id}")
        eventually(lambda: not left(worker))
    assert len(receiver.heard) < 3


def test_no_redirect_is_followed() -> None:
    with Receiver(307, 301) as receiver:
        for _ in range(2):
            with pytest.raises(Unreachable, match="it answered 30"):
                call(receiver.url + "/here", {}, b"{}", private=True)
    assert [path for path, _, _ in receiver.heard] == ["/here"] * 2


@pytest.mark.parametrize("host", [*PRIVATE, "localhost", "a.localhost"])
def test_private_addresses_are_refused_at_once(shared: Api, host: str) -> None:
    answer = shared.post("/v1/jobs", type="image", prompt="a cat", webhook_url=f"http://{host}/hook")
    check_error(answer, 400, "webhook_url", "webhook_private")
