"""Lists in pages, as OpenAI's client asks for them; and the words for a model, or an address, of another kind."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from api import files
from core.config import Settings
from tests.api.batches.test_routes import begin
from tests.api.pictures.test_edits import PNG
from tests.api.world import TEXT, Api, Worker, check_error, client_of, eventually

COUNT = 7


@pytest.fixture(scope="module")
def client(shared: Api) -> Iterator[openai.OpenAI]:
    with client_of(shared.url) as client:
        yield client


@pytest.fixture(scope="module")
def made(client: openai.OpenAI, shared: Api) -> tuple[list[str], list[str]]:
    """Ids of batches, and of all files, oldest first."""
    batches, uploads = [], []
    for k in range(COUNT):
        batch = begin(client, b"no json")  # which has failed at once
        batches.append(batch.id)
        uploads += [batch.input_file_id, client.files.create(file=(f"{k}.png", PNG), purpose="vision").id]
    return batches, uploads


@pytest.mark.parametrize("limit", [1, 3, COUNT, 100])
def test_every_batch_comes_once(client: openai.OpenAI, made: tuple[list[str], list[str]], limit: int) -> None:
    pages = list(client.batches.list(limit=limit).iter_pages())
    assert [batch.id for page in pages for batch in page.data] == made[0][::-1]
    assert all(len(page.data) == limit for page in pages[:-1]) and len(pages) == -(-COUNT // limit)
    assert [page.has_more for page in pages] == [True] * (len(pages) - 1) + [False]


@pytest.mark.parametrize("limit", [1, 5, 2 * COUNT, 10_000])
def test_every_file_comes_once(client: openai.OpenAI, made: tuple[list[str], list[str]], limit: int) -> None:
    assert [file.id for file in client.files.list(limit=limit)] == made[1][::-1]
    assert [file.id for file in client.files.list(limit=limit, order="asc")] == made[1]
    pictures = list(client.files.list(limit=limit, purpose="vision"))
    assert len(pictures) == COUNT and {file.purpose for file in pictures} == {"vision"}


def test_a_page_of_files_is_bounded(
    client: openai.OpenAI, made: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its limit, and although the default is OpenAI's; the client goes on by itself."""
    monkeypatch.setattr(files, "_MOST_LISTED", 4)
    pages = list(client.files.list().iter_pages())
    assert [len(page.data) for page in pages] == [4, 4, 4, 2]
    assert [file.id for page in pages for file in page.data] == made[1][::-1]


def test_what_comes_meanwhile_moves_no_page(client: openai.OpenAI, made: tuple[list[str], list[str]]) -> None:
    first = client.batches.list(limit=2)
    new = begin(client, b"no json")
    rest = list(first.get_next_page())
    assert [batch.id for batch in (*first.data, *rest)] == made[0][::-1]
    assert client.batches.list(limit=1).data[0].id == new.id
    made[0].append(new.id)
    client.files.delete(new.input_file_id)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/batches", "/v1/files"])
def test_what_is_refused(shared: Api, path: str) -> None:
    for limit in ("", "0", "-1", "1.0", "1e1", "100000", "x"):
        check_error(shared.get(path, params={"limit": limit}), 400, "limit")
    for after in ("", "x y", "é", "file-1\n"):
        check_error(shared.get(path, params={"after": after}), 400, "after")
    for kind in ("job_", "batch_", "file-"):
        check_error(shared.get(path, params={"after": kind + "0" * 24}), 400, "after")

    if path == "/v1/files":
        check_error(shared.get("/v1/files?purpose=fine-tune"), 400, "purpose")
        check_error(shared.get("/v1/files?order=up"), 400, "order")


def test_models_of_the_other_kind(settings: Settings) -> None:
    """A request says what the model that it names is, and where to ask it; also as a stream and as a job."""
    with Worker(settings) as worker, Worker(settings, "worker-2") as other, Api(settings) as api:
        worker.announce()
        other.announce(card=TEXT)
        eventually(lambda: len(api.get("/v1/models").json()["data"]) == 2)
        drawn = {"prompt": "a cat", "model": TEXT.name}
        chat = {"messages": [{"role": "user", "content": "a cat"}], "model": "emoji-xl"}
        text = f"model: {TEXT.name} is a text model; use POST /v1/chat/completions"
        image = "model: emoji-xl is an image model; use POST /v1/images/generations"
        for answer, message in (
            (api.draw(**drawn), text), (api.draw(**drawn, stream=True), text),
            (api.post("/v1/jobs", type="image", **drawn), text), (api.post("/v1/chat/completions", **chat), image),
            (api.post("/v1/chat/completions", **chat, stream=True), image),
            (api.post("/v1/completions", prompt="a", model="emoji-xl"), image),
        ):  # fmt: skip
            assert check_error(answer, 400, "model", "wrong_modality")["message"] == message
        check_error(api.post("/v1/completions", prompt="a", model="none"), 404, "model", "model_not_found")


def test_what_is_not_offered_says_what_is(shared: Api, client: openai.OpenAI) -> None:
    path = "/v1/images/variations"
    for answer in (shared.post(path, input="a"), shared.get(path)):
        assert "/v1/images/edits" in check_error(answer, 404, code="not_offered")["message"]
    check_error(shared.get(f"{path}/x"), 404, code="not_found")
    with pytest.deprecated_call(), pytest.raises(openai.NotFoundError, match="not offered"):
        client.images.create_variation(image=b"x", model="emoji-xl")
