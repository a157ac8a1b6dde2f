"""Forms and pictures that cost far more than they look, at a real API process: bounded by CPU seconds and memory.

CPU seconds are those of the API and its children: they do not depend on the machine's load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from core.artifacts import Artifacts
from core.config import Settings
from core.jobs.files import FileStore
from tests.api.world import SERVE, Worker, check_error, eventually, process
from tests.faults.monitor import Monitor, usage
from tests.faults.payloads import CARD_OF_NINE, nine_times, png_of_empty_chunks, punycode_form, small_png

EDITS = "/v1/images/edits"
MIB = 2**20
LIMIT_CPU_S = 4.0  # before, one request took six to fifteen


class Hosted:
    """An API process, its client and its settings."""

    def __init__(self, client: httpx2.Client, pid: int, settings: Settings) -> None:
        self.client, self.pid, self.settings = client, pid, settings

    def stored(self, data: bytes) -> str:
        """The id of a vision file that was stored before files were checked."""
        key = Artifacts(self.settings.artifacts).put(data, "image/png")
        with closing(FileStore(self.settings.redis_url)) as files:
            return files.add("", "x.png", "vision", len(data), key).id

    def cpu_s(self) -> float:
        return usage(self.pid)[1]


@pytest.fixture(scope="module")
def hosted(module_settings: Settings) -> Iterator[Hosted]:
    with Worker(module_settings) as worker, process(SERVE, module_settings) as (child, client):
        worker.announce(card=CARD_OF_NINE)
        eventually(lambda: client.get("/readyz").status_code == 200)
        yield Hosted(client, child.pid, module_settings)


@pytest.mark.parametrize("path", [EDITS, "/v1/files"])
@pytest.mark.parametrize("charset", ["punycode", "idna", "utf-7", "latin-1", "utf_16"])
def test_a_form_is_in_utf8(hosted: Hosted, path: str, charset: str) -> None:
    """Any other codec is a client's choice of what its bytes cost: this one is quadratic, and ran on the event loop."""
    body = punycode_form(600_000)
    before = hosted.cpu_s()
    headers = {"Content-Type": f"multipart/form-data; boundary=edge; charset={charset}"}
    answer = hosted.client.post(path, content=body, headers=headers)
    assert hosted.cpu_s() - before < LIMIT_CPU_S
    check_error(answer, 415, "content-type", "unsupported_media_type")


def test_a_picture_of_a_million_chunks_is_refused_before_it_is_opened(hosted: Hosted) -> None:
    data, before = png_of_empty_chunks(1_390_000), hosted.cpu_s()
    answer = hosted.client.post("/v1/files", data={"purpose": "vision"}, files={"file": ("x.png", data)})
    check_error(answer, 400, "file", "invalid_value")
    check_error(hosted.client.post(EDITS, data={"prompt": "x"}, files={"image": data}), 400, "image", "invalid_value")
    fields = nine_times(hosted.stored(data))
    check_error(hosted.client.post(EDITS, json=fields), 400, "images", "invalid_value")
    assert hosted.cpu_s() - before < LIMIT_CPU_S


def test_pictures_are_loaded_one_after_the_other(hosted: Hosted) -> None:
    """Each request of some hundred bytes names 16 MiB nine times; all wait at once, and hold nothing meanwhile."""
    data = small_png() + bytes(16 * MIB - 200)
    fields = {"type": "edit", **nine_times(hosted.stored(data))}
    assert len(json.dumps(fields)) < 1000

    before = usage(hosted.pid)[0]
    with Monitor(str(hosted.client.base_url), hosted.pid) as monitor, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: hosted.client.post("/v1/jobs", json=fields), range(12)))
    assert {answer.status_code for answer in answers} == {202}
    assert monitor.peak_mib() - before < 200


def test_what_is_refused_loads_nothing(hosted: Hosted, folder: Path) -> None:
    """The card is asked first: the file's bytes are gone, and nobody notices."""
    id = hosted.stored(small_png(side=40))
    key = FileStore(hosted.settings.redis_url).file(id)
    assert key is not None
    Artifacts(hosted.settings.artifacts).delete(key.key)
    for more, param in (({"steps": 100_000}, "steps"), ({"scheduler": "none"}, "scheduler"), ({"size": "9x9"}, "size")):
        check_error(hosted.client.post(EDITS, json={**nine_times(id), **more}), 400, param)
    check_error(hosted.client.post(EDITS, json=nine_times(id)), 404, "images.file_id", "file_not_found")
