"""Runs a private Redis, or Valkey: the server that `deployment.redis_programs` finds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from deployment.launch import launched
from deployment.redis_programs import Program, RedisError, choose, record

_START_S = 60.0  # loading a large append-only file takes a while
_FORMER_S = 10.0  # how long the previous server may take to end
_LOG_BYTES = 2**20
_ADDRESS = "address"
_ROOM_BYTES = 2**20  # that must fit on the disk before a server is started
_ZEROS = 16  # at a file's end: fewer may be genuine data


class NoRoom(RedisError):
    """The disk is full, or not writable: a Redis started on it would end at its first write."""


def address_in(folder: Path) -> str:
    """URL of the server that keeps its file in this folder, as written by `RedisServer.write_url`.

    Empty if none runs.
    """
    try:
        return (folder / _ADDRESS).read_text("utf-8").strip()
    except OSError:
        return ""


def free_port() -> int:
    """A free TCP port of 127.0.0.1.

    Not an ephemeral port: a client that keeps connecting to a stopped server could be given the server's own port as
    its source port, would then talk to itself, and the server could never start again.
    """
    for port in random.SystemRandom().sample(range(15_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise RedisError("no TCP port is free on 127.0.0.1")


@dataclass(eq=False)
class RedisServer:
    """One server on 127.0.0.1, with its append-only file in `folder`. `start` again after `kill` or `stop`.

    Port and password stay the same over restarts, so that clients find it again. `options` are further lines of
    redis.conf. A `tied` server ends with the thread that started it (Linux). Without a `program` each start takes the
    first of this machine's that can read the folder.
    """

    folder: Path
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    password: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    tied: bool = False
    program: Program | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _starting: Program | None = field(default=None, repr=False)  # that has not answered yet

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and wait until it answers. Raises `RedisError` with the end of its log."""
        self.spawn()
        until = time.monotonic() + _START_S
        while not self.answers():
            if not self.running or time.monotonic() > until:
                self.kill()
                raise RedisError(f"Redis did not start: {self.last_words()}")
            time.sleep(0.01)

    def spawn(self) -> None:
        """Start the server without waiting. Raises `RedisError`, or OSError if the folder is not writable."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._close_to_others()
        self._check_room()
        lines = (
            "bind 127.0.0.1", f"port {self.port}", f"requirepass {self.password}", "daemonize no",
            'save ""', "appendonly yes", "appendfsync always", "maxmemory-policy noeviction", "tcp-backlog 128",
            *self.options,
        )  # fmt: skip
        with self._lock() as lock, self._appending() as output:
            program = self.program or choose(self.folder)
            command = [str(program.path), "-"]
            self._cut_zeros()
            self._starting = program
            self.process = subprocess.Popen(
                launched(command) if self.tied else command, cwd=self.folder,  # its file is in its working directory
                stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, pass_fds=(lock,),
                umask=0o077,
            )  # fmt: skip
        assert self.process.stdin is not None
        # Over stdin, so that the password shows in no process list.
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(("\n".join(lines) + "\n").encode())

    def _close_to_others(self) -> None:
        """Make the files private: they hold prompts, and the secret that signs links. Older versions may have left them
        readable.
        """
        with contextlib.suppress(PermissionError):  # another user's folder, deliberately configured
            for path in (self.folder, *self.folder.rglob("*")):
                if not path.is_symlink():
                    path.chmod(0o700 if path.is_dir() else 0o600)

    def _check_room(self) -> None:
        """Check the free disk space. Raises `NoRoom`."""
        try:
            with tempfile.TemporaryFile(dir=self.folder) as probe:
                probe.write(bytes(_ROOM_BYTES))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as error:
            raise NoRoom(f"{self.folder} cannot be written: {(error.strerror or '?').lower()}") from error

    def _cut_zeros(self) -> None:
        """Remove zeros that a power cut left at the file's end, which Redis rejects; it drops an incomplete command
        itself.
        """
        for path in (self.folder / "appendonly.aof", *self.folder.glob("appendonlydir/*.incr.aof")):
            if not path.exists():
                continue
            with path.open("r+b") as stream:
                size = end = stream.seek(0, os.SEEK_END)
                head = b""
                while end > 0:
                    start = max(0, end - 2**16)
                    stream.seek(start)
                    head = stream.read(end - start).rstrip(b"\0")
                    end = start + len(head)
                    if head:
                        break
                stream.seek(0)
                # After a snapshot at the file's start (Redis 6) a zero may belong to the snapshot.
                intact = head.endswith(b"\r\n") or stream.read(5) != b"REDIS"
                if size - end >= _ZEROS and intact:
                    stream.truncate(end)
                    os.fsync(stream.fileno())
                    with self._appending() as log:
                        log.write(f"{size - end} zeros at the end of {path.name} were cut off\n".encode())

    @contextlib.contextmanager
    def _lock(self) -> Iterator[int]:
        """A lock on the folder, to be inherited: it lasts as long as the last process that holds its descriptor.

        Two servers appending to one file corrupt it, and a server may briefly outlive the process that started it,
        which then restarts.
        """
        lock = os.open(self.folder / "redis.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + _FORMER_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise RedisError("another Redis still uses the folder; end it first") from None
                    time.sleep(0.02)
            if self._log.exists() and self._log.stat().st_size > _LOG_BYTES:
                self._log.unlink()
            yield lock
        finally:
            os.close(lock)

    def write_url(self) -> None:
        """Write the URL into the folder, for this user's own commands. Raises OSError."""
        path = self.folder / _ADDRESS
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(self.url + "\n")

    def _appending(self) -> BinaryIO:
        """Open the log for appending, readable by its owner only, independent of the umask."""
        return os.fdopen(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")

    @property
    def _log(self) -> Path:
        return self.folder / "redis.log"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def last_words(self) -> str:
        """The end of its log, in one line."""
        try:
            return " | ".join(self._log.read_text("utf-8", "replace").strip().splitlines()[-3:])
        except OSError as error:
            return f"its log cannot be read ({error.strerror})"

    def answers(self) -> bool:
        """Return whether it accepts commands: not while it loads its file."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                reply = b""
                while reply.count(b"\r\n") < 2 and (more := connection.recv(256)):
                    reply += more
        except OSError:
            return False
        if reply != b"+OK\r\n+PONG\r\n":
            return False
        if self._starting is not None:  # it has read what is there: one that cannot is not noted as who writes it
            with contextlib.suppress(OSError):
                record(self.folder, self._starting)
            self._starting = None
        return True

    def stop(self, timeout_s: float = 10.0) -> None:
        """Let it write its file and end."""
        with contextlib.suppress(OSError):
            (self.folder / _ADDRESS).unlink(missing_ok=True)
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it as a power cut would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
