"""Downloads from a real server of this machine: whole, broken, resumed, refused early, and never mixed of two files."""

from __future__ import annotations

import fcntl
import http.server
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoints import download as module
from pipeline.checkpoints.download import DownloadOptions, download
from pipeline.checkpoints.folder import ModelError
from tests.http_server import Handler, LocalServer
from tests.https_server import SecureServer, make_certificate

MIB = 1 << 20


@dataclass
class Site:
    """What the server has, and how it fails."""

    data: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"one"'})
    break_after: list[int] = field(default_factory=list)  # bytes of each of the first answers
    ranges: bool = True
    sized: bool = True
    statuses: list[int] = field(default_factory=list)  # of the first answers
    asked: list[str] = field(default_factory=list)  # the ranges
    redirect: str = ""  # from /moved/
    url: str = ""


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site(np.random.default_rng(0).bytes(3 * MIB + 17))

    class Page(Handler):
        def respond(self) -> None:
            serve(found, self)

    with LocalServer(Page) as server:
        found.url = f"{server.url}/files/my%20model.safetensors?token=secret"
        yield found


def serve(site: Site, handler: Any) -> None:
    site.asked.append(handler.headers.get("Range", ""))
    if site.redirect and handler.path.startswith("/moved/"):
        handler.answer(302, headers={"Location": site.redirect})
        return

    if site.statuses:
        handler.answer(site.statuses.pop(0))
        return
    span = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    same = handler.headers.get("If-Range") in (site.headers.get("ETag"), site.headers.get("Last-Modified"))
    begin = int(span[1]) if span and site.ranges and same else 0
    if begin > len(site.data):
        handler.answer(416)
        return
    handler.send_response(206 if begin else 200)
    if begin:
        handler.send_header("Content-Range", f"bytes {begin}-{len(site.data) - 1}/{len(site.data)}")
    if site.sized:
        handler.send_header("Content-Length", str(len(site.data) - begin))
    for name, value in site.headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    end = begin + site.break_after.pop(0) if site.break_after else len(site.data)
    handler.wfile.write(site.data[begin:end])
    handler.close_connection = True


def options(**changed: Any) -> DownloadOptions:
    usual = DownloadOptions(8 * MIB, lambda file, size: None, lambda start: 1024, pause_s=0.001)
    return replace(usual, **changed)


def test_a_file_arrives_whole_and_once(site: Site, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = download(site.url, tmp_path / "new", options(count=lambda done, total: seen.append((done, total))))
    assert found.file.read_bytes() == site.data and found.name == "my model"
    assert seen[-1] == (len(site.data), len(site.data)) and seen == sorted(seen)
    assert download(site.url, tmp_path / "new", options()) == found
    assert len(site.asked) == 1, "what is whole is not asked for again"
    module.remove(found.file)
    assert not list((tmp_path / "new").iterdir())


def test_a_broken_download_goes_on_where_it_was(site: Site, tmp_path: Path) -> None:
    site.break_after = [MIB, 5, 0, 2 * MIB]
    found = download(site.url, tmp_path, options())
    assert found.file.read_bytes() == site.data
    begun = [int(asked[6:-1]) for asked in site.asked[1:]]
    assert site.asked[0] == "" and begun == [MIB, MIB + 5, MIB + 5, 3 * MIB + 5]


def test_it_goes_on_in_another_process_after_giving_up(site: Site, tmp_path: Path) -> None:
    site.break_after = [1000, 0, 0, 0]
    with pytest.raises(ModelError, match=r"broke 3 times .*; 1000 bytes are kept, and the same command") as caught:
        download(site.url, tmp_path, options(attempts=3))
    assert "secret" not in str(caught.value)
    site.break_after = []
    assert download(site.url, tmp_path, options()).file.read_bytes() == site.data
    assert site.asked[-1] == "bytes=1000-"


@pytest.mark.parametrize(
    ("validator", "versions"),
    [
        ("ETag", ('"one"', '"two"')),
        ("Last-Modified", ("Mon, 23 Nov 2026 10:00:00 GMT", "Tue, 24 Nov 2026 10:00:00 GMT")),
        ("ETag", ('"one"', '"one"')),  # of a file that became shorter
    ],
)
def test_two_versions_of_a_file_are_never_mixed(
    site: Site, tmp_path: Path, validator: str, versions: tuple[str, str]
) -> None:
    site.headers, site.break_after = {validator: versions[0]}, [2 * MIB]
    with pytest.raises(ModelError):
        download(site.url, tmp_path, options(attempts=1))
    site.headers, site.data = {validator: versions[1]}, np.random.default_rng(1).bytes(MIB)
    assert download(site.url, tmp_path, options()).file.read_bytes() == site.data


@pytest.mark.parametrize("change", [{"headers": {}}, {"headers": {"ETag": 'W/"weak"'}}, {"ranges": False}])
def test_without_ranges_or_a_version_it_begins_anew(site: Site, tmp_path: Path, change: dict[str, Any]) -> None:
    for name, value in change.items():
        setattr(site, name, value)
    site.break_after = [MIB, 2 * MIB]
    assert download(site.url, tmp_path, options()).file.read_bytes() == site.data
    assert len(site.asked) == 3


def test_a_server_that_always_breaks_is_given_up(site: Site, tmp_path: Path) -> None:
    site.headers, site.break_after = {}, [5, 4, 5, 4] * 10
    with pytest.raises(ModelError, match="broke 4 times"):
        download(site.url, tmp_path, options(attempts=4))


@pytest.mark.parametrize("sized", [True, False])
def test_more_than_the_limit_is_refused_and_not_kept(site: Site, tmp_path: Path, sized: bool) -> None:
    """Without a length a file ends with the connection."""
    site.sized = sized
    with pytest.raises(ModelError, match=f"more than the {MIB} bytes allowed"):
        download(site.url, tmp_path, options(max_bytes=MIB))
    assert not list(tmp_path.iterdir())
    assert download(site.url, tmp_path, options()).file.read_bytes() == site.data


def test_what_begins_wrongly_is_refused_before_the_rest_is_sent(site: Site, tmp_path: Path) -> None:
    seen: list[tuple[bytes, int]] = []

    def refuse(file: Path, size: int) -> None:
        seen.append((file.read_bytes(), size))
        raise ModelError("it: is something else")

    with pytest.raises(ModelError, match="something else"):
        download(site.url, tmp_path, options(check_start=refuse, start_bytes=lambda start: 0))
    ((start, size),) = seen
    assert len(start) <= MIB and site.data.startswith(start) and size == len(site.data)
    assert not list(tmp_path.iterdir())
    site.data = b"short"
    with pytest.raises(ModelError, match="something else"):
        download(site.url, tmp_path, options(check_start=refuse))


def test_servers_that_say_no_are_quoted_and_busy_ones_asked_again(site: Site, tmp_path: Path) -> None:
    site.statuses = [404]
    with pytest.raises(ModelError, match=r"my%20model\.safetensors: the server answers 404 Not Found$"):
        download(site.url, tmp_path, options())
    site.statuses = [503, 429]
    site.headers["Content-Disposition"] = 'attachment; filename="../../juggernaut.safetensors"'
    found = download(site.url, tmp_path, options())
    assert found.file.read_bytes() == site.data
    assert found.name == "juggernaut", "the name that the server gives goes before the address's"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        *((url, "must begin with https://") for url in ("http://example.com/x", "ftp://127.0.0.1/x", "file://host/x")),
        *((url, "is not an address") for url in ("https://", "file:///etc/passwd", "https://[", "https://a:b/")),
        ("https://a b/", "is not an address"),
    ],
)
def test_only_encrypted_addresses_are_taken(url: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=told):
        download(url, tmp_path, options())


def test_two_processes_do_not_write_one_file(site: Site, tmp_path: Path) -> None:
    found = download(site.url, tmp_path, options())
    with found.file.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="is being downloaded by another process"):
            download(site.url, tmp_path, options())


def test_nobody_listening_is_said(tmp_path: Path) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.server_close()
    with pytest.raises(ModelError, match=r"the connection broke 2 times \(.*refused"):
        download(f"http://127.0.0.1:{server.server_port}/x", tmp_path, options(attempts=2))


def test_a_redirect_within_this_machine_is_followed_where_the_user_named_it(site: Site, tmp_path: Path) -> None:
    site.redirect = "http://example.com/x"
    with pytest.raises(ModelError, match=r"http://example\.com/x: must begin with https://"):
        download(site.url.replace("/files/", "/moved/"), tmp_path, options())
    site.redirect = site.url
    assert download(site.url.replace("/files/", "/moved/"), tmp_path, options()).file.read_bytes() == site.data


@pytest.mark.parametrize(
    ("scheme", "host"),
    [
        ("http", "localhost"), ("https", "LOCALHOST."), ("http", "127.0.0.1"), ("https", "127.1"),
        ("https", "2130706433"), ("http", "[::1]"), ("https", "[::ffff:127.0.0.1]"), ("https", "0.0.0.0"),
    ],
)  # fmt: skip
def test_no_other_server_leads_to_this_machine(
    scheme: str, host: str, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encrypted server of another name, which only this process believes to be elsewhere."""
    port = site.url.split(":")[2].split("/")[0]
    site.redirect = f"{scheme}://{host}:{port}/files/x"
    with encrypted(site, tmp_path, monkeypatch) as url, pytest.raises(ModelError) as refused:
        download(url, tmp_path / "store", options(attempts=1))
    assert str(refused.value) == f"{url}: leads to {site.redirect}, an address of this machine"
    assert len(site.asked) == 1, "and it was not asked"


def test_an_encrypted_server_leads_to_no_unencrypted_one(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.redirect = "http://pictures.example/x"
    with encrypted(site, tmp_path, monkeypatch) as url:
        with pytest.raises(ModelError, match="must begin with https://"):
            download(url, tmp_path / "store", options(attempts=1))
        site.redirect = ""
        assert download(url, tmp_path / "store", options()).file.read_bytes() == site.data


@contextmanager
def encrypted(site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the site at pictures.example, over TLS with a certificate that this process trusts."""
    certificate = make_certificate(folder)

    class Page(Handler):
        def respond(self) -> None:
            serve(site, self)

    resolve = socket.getaddrinfo

    def here(host: str, *given: Any, **named: Any) -> Any:
        return resolve("127.0.0.1" if host == "pictures.example" else host, *given, **named)

    with monkeypatch.context() as patch, SecureServer(Page, certificate) as server:
        patch.setattr(socket, "getaddrinfo", here)
        patch.setenv("SSL_CERT_FILE", str(certificate.file))
        yield f"https://pictures.example:{server.port}/moved/x"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Content-Length", "\u00b2"),
        ("Content-Length", "9" * 5_000),
        ("Content-Length", "-5"),
        ("Content-Range", f"bytes {'9' * 5_000}-1/{'9' * 5_000}"),
        ("Content-Range", "bytes \u00b2-1/2"),
        ("ETag", '"folded\r\n tag"'),
        ("ETag", '"\x1b[31m"'),
        ("Content-Disposition", "attachment; filename*=none''%ff"),
        ("Location", "https://[half"),
    ],
)
def test_headers_that_are_no_numbers_are_no_tracebacks(name: str, value: str, site: Site, tmp_path: Path) -> None:
    """The file arrives, or one `ModelError` says why it does not."""
    site.headers = {"ETag": '"one"', name: value}
    site.sized = name != "Content-Length"
    site.break_after = [MIB]
    site.redirect = value if name == "Location" else ""
    address = site.url.replace("/files/", "/moved/") if site.redirect else site.url
    try:
        found = download(address, tmp_path, options(attempts=3))
    except Exception as error:
        assert type(error) is ModelError and str(error).isprintable()
    else:
        assert found.file.read_bytes() in (site.data, site.data[:MIB])
