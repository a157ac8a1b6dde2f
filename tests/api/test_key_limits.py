"""Limits of a key by model, and the models that it may use, at every endpoint and across two API processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from api.key_limits import KeyLimits
from core.config import Settings
from core.jobs.keyring import ApiKey, Keyring
from core.jobs.rates import RateLimitCost, RateLimiter
from core.jobs.record import JobState
from tests.api.batches.test_routes import URL, lines
from tests.api.batches.test_text_feeder import CARDS, Scribe
from tests.api.easel import asked
from tests.api.pictures.test_edits import PNG
from tests.api.pictures.test_references import inline
from tests.api.test_access import JOB, Client, Guarded
from tests.api.world import BATCH, CARD, PATIENCE_S, SERVE, Api, changed, check_error, eventually, ok, process

JOBS, CHAT = "/v1/jobs", "/v1/chat/completions"
OTHER = replace(CARD, name="emoji-z")
FULL = replace(CARD, cascades={"emoji-z": 70.0})
ALIASES = "gpt-image-1=emoji-z,best=emoji-lm"
SETTINGS = {"sdapi": True, "model_aliases": ALIASES, "tokens": "emoji-lm=2000/day", "rate": "100000/second"}
ASK = {"messages": [{"role": "user", "content": "hello"}]}


class Fleet(Guarded):
    """Two API processes, a worker of two image models and a text model, and keys."""

    def __init__(
        self, api: Api, keyring: Keyring, clients: ExitStack, second: httpx2.Client, worker: Scribe, rates: RateLimiter
    ) -> None:
        super().__init__(api, keyring, clients, worker)
        self.second, self.scribe, self.rates = second, worker, rates

    def take(self, client: Client, limit: str, unit: str, model: str = "", n: int = 1) -> None:
        """Use a limit of the client's key."""
        (state,) = self.rates.take(RateLimitCost(limit, client.key_id, unit, n, model))
        assert state.allowed

    def jobs(self, client: Client) -> list[dict[str, Any]]:
        return list(client.get(JOBS, params={"limit": 100}).json()["data"])


@pytest.fixture(scope="module")
def fleet(module_settings: Settings) -> Iterator[Fleet]:
    with ExitStack() as stack:
        worker = stack.enter_context(Scribe(module_settings))
        worker.announce_all([FULL, OTHER, CARDS[1]])
        keyring, rates = Keyring.of(module_settings), RateLimiter.of(module_settings)
        stack.callback(keyring.close)
        stack.callback(rates.close)
        keyring.add("the first")
        api = stack.enter_context(Api(module_settings))
        _, second = stack.enter_context(process(SERVE, module_settings))
        clients = stack.enter_context(ExitStack())
        yield Fleet(api, keyring, clients, second, worker, rates)


def message(answer: httpx2.Response) -> str:
    """Of an error, in whichever server's shape."""
    content = answer.json()
    return str(content["error"]["message"] if isinstance(content.get("error"), dict) else content)


def test_a_models_rate_holds_under_every_name(fleet: Fleet) -> None:
    client = fleet.key(rate="emoji-z=3/hour", quota="emoji-lm=1/day")
    for left, model in ((2, "emoji-z"), (1, "gpt-image-1")):
        answer = client.order(model=model)
        assert answer.status_code == 202 and answer.json()["model"] == "emoji-z"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left), "what leaves the least is told"
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
    fleet.take(client, "3/hour", "requests", "emoji-z")
    for name in ("emoji-z", "gpt-image-1"):  # at all doors: see test_charges.py
        answer = client.order(model=name)
        error = check_error(answer, 429, "model", "rate_limit_exceeded")
        assert "limit of 3/hour requests of emoji-z is reached" in error["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    answer = client.order()
    assert answer.status_code == 202 and answer.json()["model"] == "emoji-xl"
    assert answer.headers["x-ratelimit-limit-requests"] == "100000", "the service's own holds for all"
    assert len(fleet.jobs(client)) == 3


def test_images_over_a_models_quota_cost_nothing_of_the_keys_own(fleet: Fleet) -> None:
    client = fleet.key(quota="10/day, emoji-z=3/day")
    answer = client.order(model="emoji-z", n=2)
    assert (answer.status_code, answer.headers["x-ratelimit-remaining-pictures"]) == (202, "1")
    refused = [
        client.order(model="emoji-z", n=2),
        client.post("/v1/images/edits", data={"prompt": "a", "model": "emoji-z", "n": "2"}, files={"image": PNG}),
        client.post(f"{JOBS}/{answer.json()['id']}/cancel") and client.post(f"{JOBS}/{answer.json()['id']}/requeue"),
    ]
    for each in refused:
        error = check_error(each, 429, "model", "quota_exceeded")
        assert error["message"] == "This key's limit of 3/day pictures of emoji-z is reached."
        assert each.headers["x-should-retry"] == "false", "the first of them fades a day later"
    answer = client.order(n=8)
    assert (answer.status_code, answer.headers["x-ratelimit-remaining-pictures"]) == (202, "0")
    check_error(client.order(), 429, code="quota_exceeded")


def test_what_is_larger_than_a_quota_is_refused_and_costs_nothing(fleet: Fleet) -> None:
    """400, as no wait helps; the batch's error names its file, and a line that no window holds fails alone."""
    client = fleet.key("images", "text", "files", quota="9/day, emoji-z=2/day, unborn=1/day", tokens="100/day")
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        (JOBS, {**JOB, "n": 10}, "n", "9/day pictures"),
        (JOBS, {**JOB, "n": 3, "model": "gpt-image-1"}, "n", "2/day pictures of emoji-z"),
        ("/v1/images/generations", {"prompt": "a", "n": 10}, "n", "9/day pictures"),
        (CHAT, {**ASK, "n": 16, "max_tokens": 200}, "max_tokens", "100/day tokens"),
        (CHAT, ASK, "max_tokens", "100/day tokens"),  # as many as an answer without a limit is charged
        ("/v1/responses", {"input": "hello", "max_output_tokens": 101}, "max_output_tokens", "100/day tokens"),
    ]
    for path, body, param, words in cases:
        code = "quota_exceeded" if "pictures" in words else "rate_limit_exceeded"
        error = check_error(client.post(path, json=body), 400, param, code)
        assert f"this key's limit of {words} ever allows" in error["message"]
    edit = client.post("/v1/images/edits", data={"prompt": "a", "n": "10"}, files={"image": PNG})
    check_error(edit, 400, "n", "quota_exceeded")
    foreign = client.post("/sdapi/v1/txt2img", json={"prompt": "a", "batch_size": 5, "n_iter": 2})
    assert foreign.status_code == 422 and "batch_size" in foreign.text and "ever allows" in foreign.text

    def begin(*bodies: dict[str, Any], url: str = URL) -> httpx2.Response:
        file = client.post("/v1/files", files={"file": ("x.jsonl", lines(*bodies, url=url))}, data=BATCH).json()
        fields = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
        return client.post("/v1/batches", json=fields)

    many = [{"prompt": "a cat", "n": 5}] * 2
    check_error(begin(*many), 400, "input_file_id", "quota_exceeded")
    check_error(begin(*[{"prompt": "a cat", "model": "unborn"}] * 2), 400, "input_file_id", "quota_exceeded")
    assert client.order(n=9).headers["x-ratelimit-remaining-pictures"] == "0", "all of it was left"
    check_error(begin(many[0]), 429, code="quota_exceeded")
    chats = begin({**ASK, "max_tokens": 200}, {**ASK, "max_tokens": 60}, url=CHAT).json()["id"]
    job = eventually(lambda: [job for job in fleet.jobs(client) if job["model"] == "emoji-lm"])[0]
    assert eventually(lambda: client.get(f"/v1/batches/{chats}").json()["request_counts"]["failed"] == 1)
    fleet.scribe.answer(job["id"])
    eventually(lambda: client.get(f"/v1/batches/{chats}").json()["status"] == "completed")
    line = client.get(f"/v1/files/{client.get(f'/v1/batches/{chats}').json()['error_file_id']}/content").json()
    assert (line["custom_id"], line["response"]["status_code"]) == ("c0", 400)
    assert line["response"]["body"]["error"]["code"] == "rate_limit_exceeded"


def test_equal_requests_that_come_at_once_are_charged_once(fleet: Fleet) -> None:
    """With pictures, which are charged before they are read, so that all but one of them are given back."""
    client = fleet.key(quota="20/day")
    body = {"prompt": "a cat", "n": 2, "type": "edit", "images": [inline(PNG)]}
    headers = {"Authorization": str(client.headers["authorization"])}

    def edit(k: int) -> httpx2.Response:
        return (fleet.second if k % 2 else client).put(f"{JOBS}/edit-once", json=body, headers=headers)

    with ThreadPoolExecutor(6) as crowd:
        answers = list(crowd.map(edit, range(6)))
    assert {answer.status_code for answer in answers} == {202}, answers[0].text
    assert client.order(n=1).headers["x-ratelimit-remaining-pictures"] == "17"


def test_tokens_of_texts_are_limited_by_what_they_may_take(fleet: Fleet) -> None:
    client = fleet.key(tokens="1000/day", rate="emoji-lm=100/day")
    id, asks = asked(fleet.worker, client.post, CHAT, json={**ASK, "max_tokens": 400, "model": "best"})
    fleet.scribe.answer(id)
    answer = ok(asks.result(PATIENCE_S))
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert 500 < left < 600 and answer.headers["x-ratelimit-limit-tokens"] == "1000", "and of the service's 2000 more"
    for path, body in (
        (CHAT, {**ASK, "max_tokens": 400, "n": 2}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 400, "n": 2}),
        ("/v1/responses", {"input": "hello " * 380, "max_output_tokens": 400}),
    ):
        refused = client.post(path, json={**body, "model": "emoji-lm"})
        error = check_error(refused, 429, code="rate_limit_exceeded")
        assert error["message"] == "This key's limit of 1000/day tokens is reached."
        assert refused.headers["x-ratelimit-remaining-tokens"] == str(left)
    other = fleet.key(tokens="1000000/day", rate="emoji-lm=1/day")
    fleet.take(other, "2000/day", "tokens", "emoji-lm", 1900)
    error = check_error(other.post(CHAT, json=ASK), 429, "model", "rate_limit_exceeded")
    assert "2000/day tokens of emoji-lm" in error["message"], "the service's limit of the model, the key's of all"
    refused = other.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
    check_error(refused, 429, "model")
    assert "1/day requests of emoji-lm" in message(refused), "what was refused was a request"


def test_jobs_at_once_are_exact_across_processes_and_return_however_they_end(fleet: Fleet) -> None:
    client = fleet.key(jobs="9, emoji-z=5", running="2", quota="101/day")
    second = {"Authorization": str(client.headers["authorization"])}

    def create(k: int, model: str = "emoji-z") -> httpx2.Response:
        if k % 2:
            return client.order(model=model)
        return fleet.second.post(JOBS, json={**JOB, "model": model}, headers=second)

    with ThreadPoolExecutor(8) as crowd:
        answers = list(crowd.map(create, range(24)))
    ids = [answer.json()["id"] for answer in answers if answer.status_code == 202]
    assert len(ids) == 5
    for answer in answers:
        if answer.status_code != 202:
            error = check_error(answer, 429, "model", "too_many_jobs")
            assert error["message"] == "This key's limit of 5 jobs at once of emoji-z is reached; try again later."
            assert 1 <= int(answer.headers["retry-after"]) <= 120
    with ThreadPoolExecutor(8) as crowd:
        codes = Counter(answer.status_code for answer in crowd.map(lambda k: create(k, "emoji-xl"), range(12)))
    assert codes == {202: 4, 429: 8}, "nine in all"
    edit = client.post("/v1/images/edits", data={"prompt": "a cat", "n": "5"}, files={"image": PNG})
    check_error(edit, 429, code="too_many_jobs")
    assert "x-ratelimit-remaining-requests" in edit.headers and "x-ratelimit-remaining-pictures" not in edit.headers
    fleet.take(client, "101/day", "pictures", n=91)  # the edit cost none
    error = check_error(create(1, "emoji-xl"), 429, code="too_many_jobs")
    assert error["message"] == "This key's limit of 9 jobs at once in the image queue is reached; try again later."
    assert sum(id in ids for id, _ in fleet.worker.messages()) == 2, "more of a model are not given to workers"
    fleet.worker.work(next(id for id, _ in fleet.worker.messages() if id in ids))
    assert sum(id in ids and fleet.worker.is_(id, JobState.QUEUED) for id, _ in fleet.worker.messages()) == 2
    assert create(0).status_code == 202 and create(1).status_code == 429


def test_lines_of_batches_wait_for_a_models_limits(fleet: Fleet) -> None:
    """Neither refused nor past them; one job is left to other requests; a line of a hidden model fails."""
    client = fleet.key(rate="emoji-z=5/hour", quota="20/day, emoji-z=6/day", jobs="emoji-z=3", models="emoji-z")
    models = ["emoji-xl", "emoji-z", "gpt-image-1", *["emoji-z"] * 4]

    def begin(models: list[str]) -> httpx2.Response:
        data = lines(*({"prompt": "a cat", "steps": 2, "model": model} for model in models))
        file = client.post("/v1/files", files={"file": ("x.jsonl", data)}, data=BATCH).json()
        fields = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        return client.post("/v1/batches", json=fields)

    batch = begin(models)
    assert batch.headers["x-ratelimit-remaining-pictures"] == "0", "the model's; all of its lines are counted at once"
    check_error(begin(models[1:2]), 429, "model", "quota_exceeded")

    def queued() -> list[str]:
        return [job["id"] for job in fleet.jobs(client) if job["status"] == "queued"]

    eventually(lambda: len(queued()) == 2)
    assert client.order(model="emoji-z").status_code == 429, "the quota; counts as a request"
    for k in range(3):
        (id, *_) = eventually(lambda k=k: len(fleet.jobs(client)) >= k + 1 and queued())
        fleet.worker.work(id)
    eventually(lambda: len(queued()) == 1)
    assert len(fleet.jobs(client)) == 4, "five requests an hour"
    fleet.worker.redis.delete(*fleet.worker.redis.keys(f"diptych:limits:*{client.key_id}/emoji-z/5*"))

    def now() -> dict[str, Any]:
        return dict(client.get(f"/v1/batches/{batch.json()['id']}").json())

    while eventually(lambda: queued() or now()["status"] == "completed") is not True:
        for id in queued():
            fleet.worker.work(id)
    assert now()["request_counts"] == {"total": 7, "completed": 6, "failed": 1}
    errors = client.get(f"/v1/files/{now()['error_file_id']}/content").json()
    assert errors["custom_id"] == "c0" and errors["response"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("jobs", ["3", "emoji-xl=3"])
def test_lines_of_batches_leave_a_job_to_other_requests(fleet: Fleet, jobs: str) -> None:
    client = fleet.key(jobs=jobs)
    data = lines(*({"prompt": "a cat", "steps": 2} for _ in range(5)))
    file = ok(client.post("/v1/files", files={"file": ("x.jsonl", data)}, data=BATCH)).json()["id"]
    ok(client.post("/v1/batches", json={"input_file_id": file, "endpoint": URL, "completion_window": "24h"}))
    eventually(lambda: len(fleet.jobs(client)) == 2)
    assert client.order().status_code == 202
    check_error(client.order(), 429, code="too_many_jobs")


def test_a_key_knows_of_no_models_but_its_own(fleet: Fleet) -> None:
    client = fleet.key(
        models="gpt-image-1, best", jobs="gpt-image-1=4", running="50%,emoji-z=2", rate="emoji-xl=1/hour"
    )
    listed = {model["id"]: model["diptych"] for model in client.get("/v1/models").json()["data"]}
    assert [*listed] == ["emoji-lm", "emoji-z", "gpt-image-1", "best"]
    assert listed["gpt-image-1"]["key_limits"] == {"jobs": "4", "running": "2"}
    assert listed["emoji-lm"]["key_limits"] == {"tokens": "2000/day", "running": "50%"}
    assert [each["title"] for each in client.get("/sdapi/v1/sd-models").json()] == ["emoji-z"]
    assert client.order().json()["model"] == "emoji-z", "the first that it may use"
    for path in ("/v1/models/{}", "/v1/models/x/{}", "/v2/models/{}/ready", "/v1/models/x/{}/versions"):
        hidden, unknown = (client.get(path.format(name)) for name in ("emoji-xl", "nobody's"))
        assert (hidden.status_code, hidden.content) == (unknown.status_code, unknown.content)
        assert hidden.status_code == 404
    check_error(client.order(model="emoji-xl"), 404, "model", "model_not_found")
    assert [client.order(model=model).status_code for model in ("emoji-z", "gpt-image-1")] == [202, 202]
    own = fleet.key(models="emoji-xl")
    assert own.get("/v1/models/emoji-xl").json()["diptych"]["cascades"] == {}
    cascade = {"model": "emoji-xl", "cascade": {"draft": "emoji-z"}}
    check_error(own.order(**cascade), 400, "cascade.draft")
    expanded = {"model": "emoji-xl", "expand_prompt": True}
    check_error(own.order(**expanded), 400, "expand_prompt", "no_text_model")
    error = check_error(own.post(CHAT, json=ASK), 404, "model", "model_not_found")
    assert error["message"] == "model: this key may use none of this kind; see GET /v1/models"
    everything = fleet.key()
    assert [everything.order(**body).status_code for body in (cascade, expanded)] == [202, 202]
    assert everything.order().json()["model"] == "emoji-xl"


def test_a_keys_own_limit_replaces_the_services_whatever_name_each_uses(settings: Settings) -> None:
    settings = changed(settings, model_aliases=ALIASES, tokens="emoji-lm=10/day, best=20/day")
    key = ApiKey("id", "someone", "", ("text",), "", "", 0, tokens="emoji-lm=5/day")
    assert KeyLimits.of("id", key, settings).tokens == {"emoji-lm": "5/day"}
