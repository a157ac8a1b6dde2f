"""Pictures in an object store that speaks S3, moto's real server: put, fetched by signed links, deleted in the end."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import boto3
import httpx2
import pytest
from moto.server import ThreadedMotoServer

from core.artifacts import ArtifactError, Artifacts, NoArtifact
from core.config import Settings
from core.jobs.record import record_id
from tests.api.world import CARD, PATIENCE_S, bearer, changed, check_error, eventually, opened, token_of, use_s3

BUCKET = "pictures"
PNG = b"\x89PNG of a cat"
URL = f"s3://{BUCKET}/of/cats"


class Bucket:
    """What lies in the bucket, by another client of S3 than ours."""

    def __init__(self, endpoint: str) -> None:
        self._s3 = boto3.client("s3", endpoint_url=endpoint)
        self._s3.create_bucket(Bucket=BUCKET)

    def keys(self) -> set[str]:
        return {entry["Key"] for entry in self._s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])}

    def media_type(self, key: str) -> str:
        return str(self._s3.head_object(Bucket=BUCKET, Key=key)["ContentType"])

    def overwrite(self, key: str, data: bytes) -> None:
        self._s3.put_object(Bucket=BUCKET, Key=key, Body=data)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    use_s3(monkeypatch, url)
    httpx2.post(f"{url}/moto-api/reset")
    yield Bucket(url)
    server.stop()


def test_artifacts_lie_under_their_keys(bucket: Bucket) -> None:
    artifacts = Artifacts(URL)
    key = artifacts.put(PNG, "image/png")
    assert artifacts.put(PNG, "image/png") == key
    assert bucket.keys() == {f"of/cats/{key}"} and bucket.media_type(f"of/cats/{key}") == "image/png"
    assert artifacts.get(key) == PNG
    bucket.overwrite(f"of/cats/{key}", PNG[:-1] + b"?")
    with pytest.raises(ArtifactError, match="damaged"):
        artifacts.get(key)
    for _ in range(2):
        artifacts.delete(key)
        with pytest.raises(NoArtifact):
            artifacts.get(key)
    assert bucket.keys() == set()


def test_a_bucket_that_is_not_there_is_told(bucket: Bucket) -> None:
    with pytest.raises(ArtifactError, match="cannot write an artifact"):
        Artifacts("s3://elsewhere/of/cats").put(PNG, "image/png")


def test_a_server_that_is_away_is_told(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    artifacts = Artifacts(URL)
    with pytest.raises(ArtifactError, match="cannot read an artifact") as caught:
        artifacts.get("sha256/00/" + "0" * 62 + ".png")
    assert not isinstance(caught.value, NoArtifact) and "secret" not in str(caught.value)


def test_a_picture_is_fetched_by_its_link_and_deleted_with_its_job(bucket: Bucket, settings: Settings) -> None:
    settings = changed(settings, artifacts_url=URL)
    token = token_of(settings)
    with (
        opened(settings, CARD) as (api, worker),
        httpx2.Client(base_url=api.url, timeout=PATIENCE_S, headers=bearer(token)) as mine,
    ):
        id = mine.put("/v1/jobs/cat", json={"type": "image", "prompt": "a cat"}).json()["id"]
        (picture,) = worker.work(record_id(token.split("_")[1], id))
        assert len(bucket.keys()) == 1
        link = urlsplit(mine.get(f"/v1/jobs/{id}").json()["images"][0]["url"])
        fetched = api.get(f"{link.path}?{link.query}")
        assert fetched.content == picture and fetched.headers["content-type"] == "image/png"
        check_error(api.get(link.path), 401, code="invalid_api_key")
        assert mine.delete(f"/v1/jobs/{id}").status_code == 200
        check_error(api.get(f"{link.path}?{link.query}"), 403, code="invalid_signature")
        # Its time has come: the API deletes it.
        (lies,) = bucket.keys()
        worker.redis.zadd("diptych:kept", {lies.removeprefix("of/cats/"): 0})
        eventually(lambda: not bucket.keys())
