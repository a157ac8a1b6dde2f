"""Where the API listens: what cannot be listened on is named by its option, and the URL leads there."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deployment.address import AddressError, is_private, listen, url
from deployment.redis import free_port
from tests.children import ROOT


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("host", "shown", "private"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", False),
        pytest.param("::1", "[::1]", True, marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
        pytest.param("::", "127.0.0.1", False, marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
    ],
)
def test_the_url_leads_to_the_socket(host: str, shown: str, private: bool) -> None:
    port = free_port()
    with listen(host, port) as listener:
        assert url(listener) == f"http://{shown}:{port}"
        assert is_private(listener) is private
        with socket.create_connection((shown.strip("[]"), port), timeout=10) as client, listener.accept()[0] as served:
            client.sendall(b"hello")
            assert served.recv(5) == b"hello"


def test_a_port_in_use_is_named() -> None:
    port = free_port()
    with listen("127.0.0.1", port), pytest.raises(AddressError, match=rf"^--port: {port} is in use"):
        listen("127.0.0.1", port)


def test_a_port_that_was_just_let_go_can_be_taken() -> None:
    port = free_port()
    for _ in range(2):
        with listen("127.0.0.1", port) as listener:
            assert listener.getsockname() == ("127.0.0.1", port)
            client = socket.create_connection(("127.0.0.1", port), timeout=10)
            listener.accept()[0].close()  # this side closes first, and its end of the connection lingers
            client.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "x" * 300, "\udcff"])
def test_a_host_that_is_not_ours_is_named_and_not_echoed(host: str) -> None:
    with pytest.raises(AddressError, match=r"^--host: is no address of this machine \(.+\)$") as error:
        listen(host, free_port())
    assert host not in str(error.value)


def test_a_port_that_needs_rights_is_named() -> None:
    low = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if not low.exists() or int(low.read_text()) <= 80:
        pytest.skip("every port is for everyone here")
    program = (
        "import os\nfrom deployment.address import AddressError, listen\n"
        "''.encode('idna')\n"  # while its module can be read
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: listen('127.0.0.1', 80)\nexcept AddressError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("--port: 80 is not for everyone"), done.stderr
