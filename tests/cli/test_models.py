"""`diptych models` where no service answers, or something else does. A running one is asked in tests/deployment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.config import EMBEDDED_MODEL
from deployment.redis import free_port
from tests.cli.shell import Shell
from tests.http_server import Handler, LocalServer


@pytest.fixture(params=[b"<html>hello</html>", b"[]", b'{"data": 1}', b'{"data": [{"id": "gpt"}]}', b"\xff"])
def stranger(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that is no Diptych."""

    class Page(Handler):
        def respond(self) -> None:
            self.answer(200, request.param)

    with LocalServer(Page) as server:
        yield server.url


def test_without_a_service_it_names_what_would_be_loaded(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("DIPTYCH_PORT", str(port))
    said = shell("models")
    assert said.code == 0 and said.err == ""
    assert said.out == f"{EMBEDDED_MODEL}  (would be loaded here; no service answers at http://127.0.0.1:{port})\n"


def test_a_service_that_is_named_must_answer(shell: Shell) -> None:
    said = shell("models", "--url", f"http://127.0.0.1:{free_port()}/")
    assert said.code == 1 and said.out == ""
    assert said.err.startswith("diptych: --url: no service answers (") and "refused" in said.err


def test_what_is_no_diptych_is_seen(shell: Shell, stranger: str) -> None:
    said = shell("models", "--url", stranger)
    assert said.code == 2 and said.err == "diptych: --url: the server there is not Diptych\n"


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8000", "file:///etc/passwd", ""])
def test_what_is_no_url_is_refused(shell: Shell, url: str) -> None:
    said = shell("models", f"--url={url}")
    assert said.code == 2 and said.err == "diptych: --url: must begin with http:// or https://\n"


@pytest.mark.parametrize("url", ["http://", "http://[", "http://a b", "http://x:y"])
def test_what_is_half_a_url_is_no_traceback(shell: Shell, url: str) -> None:
    said = shell("models", "--url", url)
    assert said.code in (1, 2) and said.err.startswith("diptych: --url: ")
