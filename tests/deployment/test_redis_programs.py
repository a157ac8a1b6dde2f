"""Which server is started: the system's before the bundled one, and never one that cannot read what is there."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import redis

from deployment import redis_programs
from deployment.redis import RedisServer
from deployment.redis_programs import Program, RedisError, Version, choose, record, written_by
from tests.stores import stores


def stand_in(folder: Path, name: str, says: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of the PATH; nothing is bundled."""
    (folder := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(redis_programs, "bundled", lambda: None)
    return folder


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundled server, of Valkey 9.1."""
    carried = stand_in(tmp_path, "carried", "Valkey server v=9.1.2 sha=00000000:1")
    monkeypatch.setattr(redis_programs, "bundled", lambda: carried)
    return carried


def test_this_machines_own_is_bundled_whatever_is_on_the_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(path))
    program = choose()
    assert program.bundled and program.version is not None
    assert program.version.kind == "Valkey" and program.version.numbers >= (9, 1)
    assert str(program) == f"{program.version} (bundled)"


@pytest.mark.parametrize(
    ("redis_says", "valkey_says", "expected"),
    [
        ("Redis server v=6.2.0 sha=00000000:0", None, "redis-server"),
        ("Redis server v=8.0.2 sha=00000000:0", "Valkey server v=8.1.1 sha=00000000:0", "redis-server"),
        ("Redis server v=6.0.16 sha=00000000:0", "Valkey server v=8.1.1 sha=00000000:0", "valkey-server"),
        ("Redis server v=6.0.16 sha=00000000:0", None, "carried"),
        (None, "Valkey server v=7.2.5 sha=00000000:0", "valkey-server"),
        ("Another server 1.0", None, "redis-server"),  # a fork that numbers its versions otherwise
        (None, None, "carried"),
    ],
)
def test_the_systems_own_is_taken_unless_it_is_too_old(
    path: Path, carried: Path, redis_says: str | None, valkey_says: str | None, expected: str
) -> None:
    for name, says in (("redis-server", redis_says), ("valkey-server", valkey_says)):
        if says:
            stand_in(path, name, says)
    assert choose().path.name == expected


def test_a_machine_without_any_is_told_in_one_line_what_is_missing_and_what_to_install(path: Path) -> None:
    with pytest.raises(RedisError, match=r"no redis-server or valkey-server on the PATH, .*: apt install") as error:
        choose()
    stand_in(path, "redis-server", "Redis server v=5.0.14 sha=00000000:0")
    with pytest.raises(RedisError, match=r"^Redis 5\.0\.14 \(.*redis-server\) is older than 6\.2: apt install") as old:
        choose()
    for caught in (error, old):
        assert "brew install" in str(caught.value) and "\n" not in str(caught.value)


REDIS6, REDIS7, REDIS72, REDIS8 = (Version("Redis", numbers) for numbers in ((6, 2, 14), (7, 0, 15), (7, 2, 1), (8, 0)))
VALKEY7, VALKEY9, KEYDB = Version("Valkey", (7, 2, 5)), Version("Valkey", (9, 1, 2)), Version("KeyDB", (6, 3, 4))


@pytest.mark.parametrize(
    ("reader", "reads"),
    [
        (REDIS6, {REDIS6}),
        (REDIS7, {REDIS6, REDIS7}),
        (REDIS8, {REDIS6, REDIS7, REDIS72, REDIS8}),
        (VALKEY7, {REDIS6, REDIS7, REDIS72, VALKEY7}),
        (VALKEY9, {REDIS6, REDIS7, REDIS72, VALKEY7, VALKEY9}),
        (KEYDB, {KEYDB}),
    ],
)
def test_a_server_reads_what_older_ones_of_its_line_wrote(reader: Version, reads: set[Version]) -> None:
    writers = (REDIS6, REDIS7, REDIS72, REDIS8, VALKEY7, VALKEY9, KEYDB)
    assert {writer for writer in writers if reader.reads(writer)} == reads


def test_a_server_that_cannot_read_what_is_there_is_passed_over(tmp_path: Path, path: Path, carried: Path) -> None:
    """Somebody installs a Redis of the system beside jobs that the bundled Valkey wrote, or removes a newer one."""
    (folder := tmp_path / "redis").mkdir()
    record(folder, choose())
    system = stand_in(path, "redis-server", "Redis server v=7.0.15 sha=00000000:0")
    assert choose().path == system and choose(folder).path == carried
    record(folder, Program(system, Version("Redis", (8, 0, 2))))
    with pytest.raises(RedisError) as error:
        choose(folder)
    for sentence in (
        "Redis 7.0.15 (",
        "Valkey 9.1.2 (bundled) cannot read the files of Redis 8.0.2 in ",
        ": apt install",
    ):
        assert sentence in str(error.value)


def test_files_from_before_servers_were_recorded_are_read_by_none_that_is_too_old(tmp_path: Path, path: Path) -> None:
    """Redis 6.2 would begin empty beside the folder of files of Redis 7."""
    assert written_by(tmp_path) is None
    stand_in(path, "redis-server", "Redis server v=6.2.14 sha=00000000:0")
    (tmp_path / "appendonly.aof").touch()
    assert choose(tmp_path).version == REDIS6
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").touch()
    with pytest.raises(RedisError, match=r"6\.2\.14 .* cannot read the files of Redis 7\.0 in "):
        choose(tmp_path)
    (tmp_path / "server").write_bytes(b"\xff torn")
    assert written_by(tmp_path) == Version("Redis", (7, 0))


@pytest.mark.parametrize("later", stores(), ids=lambda program: str(program.version))
@pytest.mark.parametrize("first", stores(), ids=lambda program: str(program.version))
def test_what_is_said_of_versions_is_true_of_this_machines_servers(
    tmp_path: Path, first: Program, later: Program
) -> None:
    """A server that is passed over would refuse the files or begin empty; any other finds what was written."""
    assert first.version is not None and later.version is not None
    server = RedisServer(tmp_path, program=first)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
    server.kill()
    assert written_by(tmp_path) == first.version
    server.program = later
    with contextlib.nullcontext() if later.version.reads(first.version) else contextlib.suppress(RedisError):
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("key") == (b"value" if later.version.reads(first.version) else None)
        server.kill()
        assert written_by(tmp_path) == later.version


def test_a_server_that_does_not_run_is_passed_over(path: Path, carried: Path, tmp_path: Path) -> None:
    """One that misses a library, for example; and one of an unknown version is tried on an empty folder alone."""
    broken = path / "redis-server"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    assert choose().path == carried
    stand_in(path, "redis-server", "Another server 1.0")
    assert choose(tmp_path).path == broken
    record(tmp_path, Program(carried, Version("Valkey", (9, 1, 2)), bundled=True))
    assert choose(tmp_path).path == carried


def test_a_server_is_noted_once_it_has_read_what_is_there(tmp_path: Path, carried: Path) -> None:
    """One that does not start would lock out the one whose files these are."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder, program=Program(carried, Version("Valkey", (9, 1, 2)), bundled=True))
    with pytest.raises(RedisError):
        server.start()
    assert written_by(folder) is None
