"""`rediss://`: the server's certificate is verified by whatever speaks to it, on a real redis-server with TLS.

It vouches for itself; a second certificate, which nobody should trust, vouches for nothing here.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import cli
from api.jobs.queue import MessageProducer
from core.config import SettingsError, read
from core.jobs.broker import Envelope
from core.jobs.connection import StoreDown
from core.jobs.events import EventReader
from core.jobs.keyring import Keyring
from core.jobs.store import JobStore
from deployment.redis import free_port
from deployment.redis_programs import NAMES
from tests.https_server import make_certificate

PATIENCE_S = 60.0
PASSWORD = "nobody-else-is-told"
OURS, OTHERS = "certificate.pem", "other/certificate.pem"


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Port and folder of a server that speaks nothing but TLS."""
    server = next(filter(None, map(shutil.which, NAMES)), None)
    if server is None:
        pytest.skip("there is no Redis with TLS (apt install redis-server)")
    folder, port = tmp_path_factory.mktemp("tls"), free_port()
    (folder / "other").mkdir()
    for place in (folder, folder / "other"):
        make_certificate(place)
    process = subprocess.Popen(
        [server, "--port", "0", "--tls-port", str(port), "--tls-cert-file", OURS, "--tls-key-file", "key.pem",
         "--tls-ca-cert-file", OURS, "--tls-auth-clients", "no", "--save", "", "--requirepass", PASSWORD],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
    )  # fmt: skip
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            if process.poll() is not None:
                pytest.skip("the Redis on the PATH was built without TLS (apt install redis-server)")
            assert time.monotonic() < until
            time.sleep(0.02)
    yield port, folder
    process.kill()
    process.communicate()


def url(encrypted: tuple[int, Path], authority: str = "", host: str = "127.0.0.1") -> str:
    port, folder = encrypted
    query = f"?ssl_ca_certs={folder / authority}" if authority else ""
    return f"rediss://:{PASSWORD}@{host}:{port}/0{query}"


def passwords_told(encrypted: tuple[int, Path]) -> int:
    """How often anybody has logged in, this question too."""
    with redis.Redis.from_url(url(encrypted, OURS)) as client:
        counted = client.info("commandstats")
    return sum(int(counted.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("auth", "hello"))


def test_the_right_authority_is_believed_by_all(encrypted: tuple[int, Path]) -> None:
    for host in ("127.0.0.1", "localhost"):
        right = url(encrypted, OURS, host)
        keyring, queue = Keyring(right), MessageProducer(right)
        assert keyring.guard().keys == {}
        queue.send(Envelope(f"by-{host}", "image", 0))
        keyring.close()
        queue.close()
    with redis.Redis.from_url(url(encrypted, OURS)) as client:
        assert client.llen("image") == 2, "kombu's too"


@pytest.mark.quick(0)
@pytest.mark.parametrize("authority", [OTHERS, ""])
def test_a_server_that_somebody_else_vouches_for_is_told_no_password(
    encrypted: tuple[int, Path], authority: str
) -> None:
    """By the API's and the worker's stores, by Celery's producers and consumers, and by the reader of events."""
    import asyncio

    before = passwords_told(encrypted)
    wrong = url(encrypted, authority)
    store, keyring, queue = JobStore(wrong), Keyring(wrong), MessageProducer(wrong)
    with pytest.raises(StoreDown):
        store.get("job")
    with pytest.raises(StoreDown):
        keyring.all()
    with pytest.raises(Exception, match=r"(?i)certificate|connect"):
        queue.send(Envelope("job", "image", 0))
    with pytest.raises(Exception, match=r"(?i)certificate|connect"), queue._celery.connection_for_read() as connection:
        connection.default_channel.client.ping()

    async def ask() -> None:
        with pytest.raises((redis.ConnectionError, OSError)):
            await EventReader(wrong)._reading.ping()

    asyncio.run(ask())
    assert passwords_told(encrypted) == before + 1, "but ours"
    store.close()
    keyring.close()
    queue.close()


def test_the_command_line_refuses_it(
    encrypted: tuple[int, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", url(encrypted, OURS))
    assert cli.main(["keys", "list"]) == 0
    monkeypatch.setenv("DIPTYCH_REDIS_URL", url(encrypted, OTHERS))
    assert cli.main(["keys", "list"]) == 1
    assert "certificate" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    ["rediss://a/0?ssl_cert_reqs=none", "rediss://a?ssl_cert_reqs=optional", "rediss://a?ssl_check_hostname=false",
     "rediss://a?ssl_ca_certs=", "redis://a?ssl_ca_certs=/a", "redis://a/0?socket_timeout=1", "unix:///tmp/redis.sock",
     "rediss://a?ssl_ca_certs=/a&ssl_ca_certs=/b", "redis://a/0#part"],
)  # fmt: skip
def test_what_would_not_be_verified_or_not_be_understood_by_all_is_refused(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", wrong)
    with pytest.raises(SettingsError, match=r"^DIPTYCH_REDIS_URL: "):
        read()


@pytest.mark.parametrize("good", ["rediss://a/0?ssl_cert_reqs=required", "rediss://a?ssl_ca_certs=/a&ssl_certfile=/b"])
def test_what_may_be_said(monkeypatch: pytest.MonkeyPatch, good: str) -> None:
    monkeypatch.setenv("DIPTYCH_REDIS_URL", good)
    assert read().redis_url == good
