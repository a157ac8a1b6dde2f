"""Pictures and files are sent piece by piece: what a client has not received is in the store, not in memory."""

from __future__ import annotations

import contextlib
import random

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.http.stored_bytes import PIECE
from core.artifacts import Artifacts
from core.jobs.record import JobDraft
from tests.api.http.test_protocol import connected
from tests.api.world import Api, Worker, check_error, eventually

SIZES = (1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 7)
LARGE = 32 * 2**20


class Reads:
    """What is read from the store, by its calls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        for name in ("get", "read_part"):
            patch.setattr(Artifacts, name, self._counted(getattr(Artifacts, name)))

    def _counted(self, read):  # type: ignore[no-untyped-def]
        def counted(*given):  # type: ignore[no-untyped-def]
            data = read(*given)
            self.sizes.append(len(data))
            return data

        return counted


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def drawn(worker: Worker, name: str, data: bytes) -> str:
    """The address of a job's picture with these bytes."""
    if not worker.store.get(name):
        worker.store.create(JobDraft(name, "image", "emoji-xl", {"n": 1, "width": 64, "height": 64}))
        worker.finish(worker.take(name), data)
    return f"/v1/jobs/{name}/images/0"


@pytest.mark.parametrize("size", SIZES)
def test_whole_pictures_come_as_they_are_stored(shared: Api, worker: Worker, reads: Reads, size: int) -> None:
    data = content(size)
    path = drawn(worker, f"whole-{size}", data)
    answer = shared.get(path)
    assert (answer.status_code, answer.content) == (200, data)
    assert answer.headers["content-length"] == str(size) and answer.headers["accept-ranges"] == "bytes"
    assert sum(reads.sizes) == size and max(reads.sizes) <= PIECE
    head = shared.head(path)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(size), b"")
    assert sum(reads.sizes) == size, "nothing is read for HEAD"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.sampled_from(SIZES), st.data())
def test_ranges_are_those_of_the_content(
    shared: Api, worker: Worker, reads: Reads, size: int, data: st.DataObject
) -> None:
    """And only they are read. Without a first byte a range is of the last ones."""
    whole = content(size)
    path = drawn(worker, f"range-{size}", whole)
    edges = st.sampled_from([0, 1, PIECE - 1, PIECE, PIECE + 1, size - 1, size, size + 1]) | st.integers(0, 2 * size)
    first, last = data.draw(st.tuples(edges, edges) | st.tuples(edges, st.just("")) | st.tuples(st.just(""), edges))
    reads.sizes.clear()
    answer = shared.get(path, headers={"Range": f"bytes={first}-{last}"})
    if first != "" != last and last < first:  # not a range
        assert (answer.status_code, answer.content) == (200, whole)
        return
    if first == "":
        first, last = max(0, size - last), ""
    if first >= size:
        check_error(answer, 416, param="range", code="range_not_satisfiable")
        assert reads.sizes == [] and answer.headers["content-range"] == f"bytes */{size}"
    else:
        end = size - 1 if last == "" else min(last, size - 1)
        assert (answer.status_code, answer.content) == (206, whole[first : end + 1])
        assert answer.headers["content-range"] == f"bytes {first}-{end}/{size}"
        assert sum(reads.sizes) == end + 1 - first and max(reads.sizes) <= PIECE


def test_slow_readers_hold_pieces(shared: Api, worker: Worker, reads: Reads) -> None:
    """Beside what the kernel holds for them: most of what they have not received has not been read."""
    path = drawn(worker, "slow", content(LARGE))
    ask = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with contextlib.ExitStack() as opened:
        for _ in range(8):
            client = opened.enter_context(connected(shared, small=True))
            client.sendall(ask)
            assert client.recv(15) == b"HTTP/1.1 200 OK"
        settled(reads)
        assert sum(reads.sizes) < 8 * LARGE / 2
        assert max(reads.sizes) <= PIECE


def settled(reads: Reads) -> None:
    """Wait until no more is read."""
    seen: list[int] = []

    def same() -> bool:
        seen.append(len(reads.sizes))
        return len(seen) > 20 and len(set(seen[-20:])) == 1

    eventually(same)


def test_damage_is_noticed(shared: Api, worker: Worker) -> None:
    """A small picture is not sent, and of a large one the last piece is not."""
    for size in (PIECE, 3 * PIECE):
        path = drawn(worker, f"damaged-{size}", content(size))
        key = worker.job(f"damaged-{size}").result["images"][0]["key"]  # type: ignore[index]
        stored = shared.settings.data_dir / "artifacts" / key
        stored.write_bytes(content(size)[:-1] + b"?")
        if size <= PIECE:
            check_error(shared.get(path), 500, code="artifact_unreadable")
        else:
            with pytest.raises(httpx2.RemoteProtocolError):
                shared.get(path)


def test_files_are_sent_alike(shared: Api, worker: Worker, reads: Reads) -> None:
    data = content(3 * PIECE)
    sent = shared.client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", data)})
    reads.sizes.clear()
    answer = shared.get(f"/v1/files/{sent.json()['id']}/content")
    assert (answer.status_code, answer.content) == (200, data)
    assert sum(reads.sizes) == len(data) and max(reads.sizes) <= PIECE
