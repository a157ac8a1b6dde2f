"""What passes for an address on the web, whatever is written: nothing that a client of HTTP would stumble over."""

from __future__ import annotations

import http.client
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import urls

labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
hosts = (
    st.lists(labels, min_size=1, max_size=4).map(".".join)
    | st.ip_addresses(v=4).map(str)
    | st.ip_addresses(v=6).map(lambda address: f"[{address}]")
)


@given(hosts, st.none() | st.integers(1, 65535), st.sampled_from(["", "/", "/a/b?c=d", "?x"]))
def test_addresses_are_taken(host: str, port: int | None, rest: str) -> None:
    parts = urls.parse(f"https://{host}{'' if port is None else f':{port}'}{rest}")
    assert (parts.hostname, parts.port) == (host.strip("[]"), port)


@given(
    st.text(max_size=30) | st.text(alphabet="htps:/[]@.%#?& 01ab\n\\", max_size=30), st.sampled_from(["", "http://"])
)
def test_what_is_taken_has_a_host_and_no_blanks(text: str, before: str) -> None:
    url = before + text
    try:
        parts = urls.parse(url)
    except ValueError as error:
        assert str(error).startswith("must ") and (len(text) < 8 or text not in str(error))
        return
    assert parts.scheme in ("http", "https") and url.isascii() and url.isprintable() and " " not in url
    host = parts.hostname or ""
    if ":" in host:
        ipaddress.IPv6Address(host)
    http.client.HTTPConnection(host, parts.port or 80)._validate_host(host)  # type: ignore[attr-defined]
    assert host.encode("idna")


@pytest.mark.parametrize(
    ("url", "why"),
    [("http://a b", "spaces"), ("http://a/b c", "spaces"), ("http://a\n", "spaces"), ("http://é", "ASCII"),
     ("http://", "host"), ("http:///path", "host"), ("http://:80/", "host"), ("http://u@:80/", "host"),
     ("http:a", "begin with http:// or https://"), ("a.example", "begin with"), ("redis://a", "begin with"),
     ("http://a:0", "port"), ("http://a:", "port"), ("http://a:99999", "port"), ("http://a:b", "port"),
     ("http://[::1", "host"), ("http://[a]", "host"), ("http://[::1%25eth0]/", "host"), ("http://a..b", "host"),
     ("http://-a", "host"), ("http://a%20b", "host"), ("http://" + "a" * 64, "host")],
)  # fmt: skip
def test_why_not_is_told(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        urls.parse(url)


def test_other_schemes_are_asked_for_by_name() -> None:
    assert urls.parse("redis://:secret@[::1]:6379/0", ("redis", "rediss")).hostname == "::1"
    with pytest.raises(ValueError, match="begin with redis://"):
        urls.parse("http://a", ("redis",))
