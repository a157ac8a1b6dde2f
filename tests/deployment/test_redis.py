"""The embedded Redis: its file outlives it, nobody else gets in, and two never share a folder."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from deployment import redis as deployment_redis
from deployment.redis import NoRoom, RedisServer, free_port
from deployment.redis_programs import NAMES, RedisError
from tests.children import ROOT
from tests.disks import small_disk


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """In a folder that has any name."""
    with running(tmp_path / 'a "b" \\ ü\n#', "maxmemory 512mb") as server:
        yield server


def client(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


@pytest.mark.parametrize("end", [RedisServer.stop, RedisServer.kill])
def test_what_was_written_outlives_the_server_at_the_same_address(
    server: RedisServer, end: Callable[[RedisServer], None]
) -> None:
    url = server.url
    with client(server) as before:
        before.set("key", "value")
    end(server)
    assert not server.running and not server.answers()
    server.start()
    assert server.url == url
    with client(server) as after:
        assert after.get("key") == "value"
        promised = {
            "maxmemory": str(512 * 2**20), "maxmemory-policy": "noeviction", "appendonly": "yes",
            "appendfsync": "always", "save": "", "bind": "127.0.0.1",
        }  # fmt: skip
        assert after.config_get("*").items() >= promised.items()


def test_only_who_knows_the_password_gets_in_and_no_list_of_processes_tells_it(server: RedisServer) -> None:
    with (
        redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()
    assert server.process is not None
    seen = " ".join(psutil.Process(server.process.pid).cmdline())
    assert server.password not in seen and server.password not in repr(server)


def test_two_never_write_into_one_folder(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment_redis, "_FORMER_S", 0.1)
    other = RedisServer(server.folder)
    with pytest.raises(RedisError, match="another Redis still uses the folder"):
        other.start()
    server.kill()
    other.start()
    other.kill()


def aof(server: RedisServer) -> Path:
    (path,) = [*server.folder.rglob("*.incr.aof"), *server.folder.glob("appendonly.aof")]
    return path


@pytest.mark.parametrize("torn", [b"", b"*3\r\n$3\r\nSET\r\n$5\r\nother\r\n$7\r\nhal"], ids=["whole", "torn"])
def test_zeros_that_a_power_cut_left_at_the_end_of_the_file_are_cut_off(server: RedisServer, torn: bytes) -> None:
    with client(server) as before:
        before.set("key", b"ends in zeros" + bytes(100))
    server.kill()
    with aof(server).open("ab") as stream:
        stream.write(torn + bytes(4096))
    server.start()
    with redis.Redis.from_url(server.url) as after:
        assert after.get("key") == b"ends in zeros" + bytes(100)
        assert after.get("other") is None
    assert "4096 zeros at the end of" in (server.folder / "redis.log").read_text()


def test_a_file_that_is_whole_is_left_alone(server: RedisServer) -> None:
    with client(server) as before:
        before.set("key", bytes(5000))
    server.kill()
    whole = aof(server).read_bytes()
    server._cut_zeros()
    assert aof(server).read_bytes() == whole


def modes(folder: Path) -> set[str]:
    return {oct(path.stat().st_mode & 0o777) for path in (folder, *folder.rglob("*")) if path.exists()}


def test_nobody_else_reads_its_files(tmp_path: Path) -> None:
    """Prompts lie in them, and the secret of links. Those of before are closed, too."""
    folder = tmp_path / "redis"
    before = os.umask(0)
    try:
        folder.mkdir(mode=0o777)
        (folder / "appendonlydir").mkdir(mode=0o777)
        with running(folder) as server, client(server) as connection:
            connection.set("prompt", "a secret")
            assert modes(folder) == {"0o700", "0o600"}
    finally:
        os.umask(before)


def test_a_full_disk_ends_it_and_it_is_not_started_before_there_is_room(tmp_path: Path) -> None:
    """What was acknowledged is there again afterwards."""
    with small_disk(tmp_path / "little", "4m") as little, running(little / "redis") as server:
        acknowledged = []
        with client(server) as connection, contextlib.suppress(redis.ConnectionError):
            for number in range(1000):
                connection.set(f"key {number}", "x" * 20_000)
                acknowledged.append(f"key {number}")
        assert server.process is not None
        assert server.process.wait(60) == 1
        assert "Can't recover from AOF write error" in (server.folder / "redis.log").read_text()
        for _ in range(3):
            with pytest.raises(NoRoom, match="cannot be written: no space left on device"):
                server.start()
        subprocess.run(["mount", "-o", "remount,size=16m", str(little)], check=True)
        server.start()
        with client(server) as connection:
            assert connection.exists(*acknowledged) == len(acknowledged) > 10


def test_why_it_does_not_start_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = RedisServer(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(RedisError, match="Address already in use"):
            server.start()
    assert not server.running


def test_a_log_that_has_grown_begins_anew(server: RedisServer) -> None:
    log = server.folder / "redis.log"
    server.stop()
    log.write_bytes(b"x" * (2**20 + 1))
    server.start()
    assert log.stat().st_size < 2**20


def test_ports_are_none_that_clients_are_given() -> None:
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    low = int(ports.read_text().split()[0]) if ports.exists() else 49_152
    assert all(1024 < free_port() < low for _ in range(20))


_PARENT = """
import sys, time
from pathlib import Path
from deployment.redis import RedisServer
server = RedisServer(Path(sys.argv[1]), tied=True)
server.start()
print(server.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel has it")
def test_one_that_is_tied_ends_with_a_parent_that_is_killed_and_the_next_takes_over(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PARENT, str(tmp_path)]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
    assert child.name().startswith(NAMES) and os.getsid(child.pid) == child.pid
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    heir = RedisServer(tmp_path)  # at once: it waits until the other has let go of the file
    heir.start()
    heir.kill()
    child.wait(30)
