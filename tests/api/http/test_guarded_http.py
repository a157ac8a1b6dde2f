"""What no URL of a client leads to, for both that call them: webhooks, and pictures that are fetched."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from api.errors import ApiError
from api.http import guarded_http
from api.http.guarded_http import Unreachable
from api.jobs import webhooks
from api.pictures import fetcher as picture_fetcher
from tests.http_server import Handler
from tests.https_server import Certificate, SecureServer, make_certificate

PRIVATE = ["127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "[::1]", "[fd00::1]", "[fe80::1]",
           "[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "224.0.0.1", "100.64.0.1", "[2002:7f00:1::]",
           "[64:ff9b::7f00:1]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::7f00:1]", "192.0.0.192", "168.63.129.16",
           "[fec0::1]", "[::7f00:1]", "[::ffff:0:7f00:1]"]  # fmt: skip

Call = Callable[[str, bool], object]
Server = tuple[SecureServer, list[str]]


@pytest.fixture(params=["webhook", "picture"])
def call(request: pytest.FixtureRequest) -> Call:
    if request.param == "webhook":
        return lambda url, private: webhooks.call(url, {}, b"{}", private=private)
    return lambda url, private: picture_fetcher.fetch(url, private=private, claim=lambda _: None)


@pytest.fixture(params=["webhook", "picture"])
def check(request: pytest.FixtureRequest) -> Call:
    if request.param == "webhook":
        return lambda url, private: webhooks.check(url, private=private)
    return lambda url, private: picture_fetcher.check_url("webhook_url", url, private=private)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with TLS that answers 200 to all, and the hosts that its requests named."""
    hosts: list[str] = []

    class Page(Handler):
        def respond(self) -> None:
            hosts.append(self.headers["Host"])
            self.answer(200, b"picture")

    monkeypatch.setattr(guarded_http, "_tls", lambda: certificate.trusting)
    with SecureServer(Page, certificate) as server:
        yield server, hosts


@pytest.mark.parametrize(
    "url",
    ["", "ftp://a.example", "https://", "https://user@a.example/", "https://a b", "https://a.example:0",
     "https://é.example", "https://[", "javascript:1", "//a.example", "https://:80/", "https://a/b c",
     "https://[::1]x/", "https://a..b/", "https://a%20b/", "https://a\\b/", "https://a:", "gopher://a.example/",
     "file:///etc/passwd"],
)  # fmt: skip
def test_what_is_no_address(check: Call, url: str) -> None:
    with pytest.raises(ApiError) as caught:
        check(url, True)
    assert caught.value.param == "webhook_url" and (len(url) < 9 or url not in str(caught.value))


@pytest.mark.parametrize("host", [*PRIVATE, "localhost", "a.localhost"])
def test_private_addresses_are_refused_before_any_call(check: Call, host: str) -> None:
    with pytest.raises(ApiError, match="must be a public address"):
        check(f"https://{host}/x.png", False)
    check(f"https://{host}/x.png", True)


@pytest.mark.parametrize("host", [*PRIVATE, "127.1", "2130706433", "0x7f.1"])
def test_and_when_a_name_leads_there(call: Call, host: str) -> None:
    """Also in the spellings that only the resolver understands."""
    with pytest.raises(Unreachable, match=r"private address|host name does not resolve"):
        call(f"https://{host}:1/", False)


def resolving(monkeypatch: pytest.MonkeyPatch, name: str, addresses: list[list[str]]) -> list[str]:
    """Let a name mean these addresses, each time others; return the list of its look-ups."""
    real, asked = socket.getaddrinfo, list[str]()

    def resolve(host: str, port: Any, *more: Any, **options: Any) -> Any:
        if host != name:
            return real(host, port, *more, **options)
        asked.append(host)
        now = addresses[min(len(asked), len(addresses)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in now]

    monkeypatch.setattr(guarded_http.socket, "getaddrinfo", resolve)
    return asked


def test_the_address_that_was_looked_at_is_the_one_that_is_called(
    call: Call, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that means something else the second time it is asked for. The certificate is the name's."""
    asked = resolving(monkeypatch, "pictures.example", [["127.0.0.1"], ["10.255.255.1"]])
    call(f"https://pictures.example:{server[0].port}/", True)
    assert asked == ["pictures.example"] and server[1] == [f"pictures.example:{server[0].port}"]


def test_a_host_is_called_at_the_first_address_that_answers(
    call: Call, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the same bound."""
    resolving(monkeypatch, "pictures.example", [["127.0.0.2", "127.0.0.3", "127.0.0.2", "127.0.0.1"]])
    call(f"https://pictures.example:{server[0].port}/", True)
    assert server[1] == [f"pictures.example:{server[0].port}"]
    resolving(monkeypatch, "pictures.example", [["127.0.0.2", "127.0.0.3"]])
    with pytest.raises(Unreachable, match="ConnectionRefusedError"):
        call(f"https://pictures.example:{server[0].port}/", True)


def test_mixed_names_are_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "mixed.example", [["93.184.216.34", "127.0.0.1"]])
    with pytest.raises(Unreachable, match="private address"):
        call("https://mixed.example/", False)


def test_another_names_certificate_is_refused(call: Call, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "other.example", [["127.0.0.1"]])
    with pytest.raises(Unreachable, match="SSLCertVerificationError"):
        call(f"https://other.example:{server[0].port}/", True)
    assert not server[1]


def test_who_does_not_answer_is_unreachable(call: Call) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(Unreachable, match="does not answer"):
            call(f"https://127.0.0.1:{closed.getsockname()[1]}/", True)
