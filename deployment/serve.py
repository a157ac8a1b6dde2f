"""`diptych serve`: runs Redis, the API and a worker as children of this process until stopped; starts, restarts and
stops them in order.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from core.config import Settings
from core.logs import informs
from deployment.address import forget_url, is_private, listen, url, write_url
from deployment.children import Backoff, ChildProcess, child_environment, end_all, reason
from deployment.devices import worker_environments
from deployment.redis import RedisServer
from deployment.redis_programs import RedisError
from deployment.screen import StatusDisplay
from deployment.signals import StopSignals
from deployment.watch import Readiness, ReadinessWatcher
from deployment.welcome import welcome

_LOOK_S = 0.05
_API_STOP_S = 10.0
_HAND_BACK_S = 15.0  # beyond drain_s, to hand back unfinished jobs
_UNUSABLE = 2  # exit code of a part whose input can never work
NICENESS = 5  # of the worker: the API stays responsive under load, and what reads weight files may be far nicer
REDIS_OPTIONS = ("maxmemory 1gb",)


class DataError(ValueError):
    """The data folder cannot be used. The message names the option."""


class _Unusable(Exception):
    """A part reported that its input can never work."""


def serve(settings: Settings, *, devices: Sequence[str] | None = None, verbose: bool = False) -> int:
    """Serve until a signal comes; returns the exit code.

    `devices`: one worker for each of these GPUs, as CUDA_VISIBLE_DEVICES names them; otherwise one on the settings'
    device. Raises `AddressError` and `DataError` before anything is started, and `RedisError` if no Redis is available.
    """
    _open_standard_descriptors()
    with StopSignals() as stop, listen(settings.host, settings.port) as listener, _lock(settings.data_dir) as folder:
        settings = settings.model_copy(update={"data_dir": folder})
        with StatusDisplay() as screen:
            return _Stack(settings, listener, screen, stop, devices, verbose=verbose).run()


def _open_standard_descriptors() -> None:
    """Open closed standard descriptors: else the next socket would get the number, and every child would lose it to its
    own stdin.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[Path]:
    """Create the data folder, and lock it; returns its absolute path."""
    from filelock import FileLock, Timeout

    folder = folder.expanduser().absolute()
    lock = FileLock(folder / "serve.lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise DataError("--data: another `diptych serve` uses this folder; name another with --data") from None
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        yield folder
    finally:
        lock.release()


def _unusable(folder: Path, error: OSError) -> DataError:
    return DataError(f"--data: {error.filename or folder} cannot be used ({error.strerror})")


def apis_and_workers(
    settings: Settings, listener: socket.socket, devices: Sequence[str] | None, logs: Path, *, verbose: bool = False
) -> tuple[list[ChildProcess], list[ChildProcess]]:
    """The processes of these settings' APIs, which accept from `listener`, and of a worker for each device."""
    # -P: modules in the folder where serve was started must not shadow ours.
    command = [sys.executable, "-P", "-m", "cli", *(["--verbose"] if verbose else [])]
    environment, descriptor = child_environment(settings), listener.fileno()

    def log(name: str) -> Path:
        return logs / f"{name.lower().replace(' ', '-')}.log"

    names = ["API"] if settings.apis == 1 else [f"API {number}" for number in range(1, settings.apis + 1)]
    api = [*command, "api", "--fd", str(descriptor)]
    apis = [ChildProcess(name, api, environment, log(name), descriptors=(descriptor,)) for name in names]
    workers = [
        ChildProcess(name, [*command, "worker"], own, log(name), niceness=NICENESS)
        for name, own in worker_environments(settings, environment, devices)
    ]
    return apis, workers


@dataclass(eq=False)
class _Part:
    """A child and its restart state."""

    name: str
    start: Callable[[], None]
    code: Callable[[], int | None]
    backoff: Backoff = field(default_factory=Backoff)


class _Stack:
    def __init__(
        self, settings: Settings, listener: socket.socket, screen: StatusDisplay, stop: StopSignals,
        devices: Sequence[str] | None, *, verbose: bool,
    ) -> None:  # fmt: skip
        self._screen, self._stop, self._listener, self._verbose = screen, stop, listener, verbose
        self._redis: RedisServer | None = None
        if not settings.redis_url:
            self._redis = RedisServer(settings.data_dir / "redis", REDIS_OPTIONS, tied=True)
            settings = settings.model_copy(update={"redis_url": self._redis.url})
        self._settings = settings
        logs = settings.data_dir / "logs"
        self._apis, self._workers = apis_and_workers(settings, listener, devices, logs, verbose=verbose)
        self._parts = [
            *(_Part(worker.name, partial(self._start_worker, worker), partial(_code, worker))
              for worker in self._workers),
            *(_Part(api.name, api.start, partial(_code, api)) for api in self._apis),
        ]  # fmt: skip
        self._watch: ReadinessWatcher | None = None
        self._announced, self._pending, self._spoken = False, True, False

    def run(self) -> int:
        """Start all parts, and keep them running until a signal comes or a part cannot work; then stop all."""
        try:
            self._begin()
            while not self._stop.asked:
                self._look()
                self._show()
                time.sleep(_LOOK_S)
            return self._stop.exit_code
        except _Unusable:
            return _UNUSABLE
        finally:
            self._end()

    # -- start -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._screen.show_activity("starting")
        if not is_private(self._listener):
            trusted = "whoever reaches it may use it, as DIPTYCH_TRUST_NETWORK says, until there is a key"
            words = trusted if self._settings.trust_network else "they are served once there is a key"
            self._screen.line(f"diptych: other machines can reach the API; {words} (diptych keys add NAME)", "yellow")
        try:
            if self._redis is not None:
                self._begin_redis(self._redis)
            if self._stop.asked:
                return
            write_url(self._settings.data_dir, url(self._listener))
            for child in (*self._workers, *self._apis):  # workers first: they take longest
                child.start()
        except OSError as error:
            raise _unusable(self._settings.data_dir, error) from error
        self._watch = ReadinessWatcher(self._settings, url(self._listener))
        for worker in self._workers:
            self._watch.expect(worker.name, worker.pid)

    def _begin_redis(self, redis: RedisServer) -> None:
        """Start Redis and wait until it answers, however long its file takes to load."""
        redis.spawn()
        redis.write_url()
        self._parts.append(_Part("Redis", redis.spawn, lambda: redis.process.poll() if redis.process else 0))
        while not redis.answers() and not self._stop.asked:
            if not redis.running:
                raise RedisError(f"Redis did not start: {redis.last_words()}")
            time.sleep(0.01)

    def _start_worker(self, worker: ChildProcess) -> None:
        worker.start()
        if self._watch is not None:
            self._watch.expect(worker.name, worker.pid)

    # -- run -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Restart the parts that have ended."""
        self._hear()
        for part in self._parts:
            now = time.monotonic()
            if part.backoff.due is not None:
                if now >= part.backoff.due:
                    self._start_again(part)
            elif (code := part.code()) is not None:
                self._hear()
                if code == _UNUSABLE and part.name != "Redis":
                    raise _Unusable
                if self._watch is not None and part.name != "Redis":
                    self._watch.lost(part.name)
                words = f": {self._redis.last_words()}" if part.name == "Redis" and self._redis and code > 0 else ""
                self._postpone(part, f"ended ({reason(code)}{words})")

    def _start_again(self, part: _Part) -> None:
        try:
            part.start()
        except (OSError, RedisError) as error:
            self._postpone(part, f"cannot be started ({error})")
        else:
            part.backoff.begun(time.monotonic())

    def _postpone(self, part: _Part, name: str) -> None:
        self._spoken = False
        delay_s = part.backoff.ended(time.monotonic())
        article = "" if part.name == "Redis" else "the "
        self._screen.line(f"diptych: {article}{part.name} {name}; starting it again in {delay_s:g} s", "yellow")

    def _hear(self) -> None:
        """Print the children's output, except what belongs in their logs only."""
        for child in (*self._apis, *self._workers):
            for line in child.lines() if child.process is not None else ():
                if self._verbose or not informs(line):
                    self._screen.line(line if line.startswith("diptych: ") else f"{child.name}: {line}")

    def _show(self) -> None:
        """Print the worker's activity while it is not ready, and once that all is ready."""
        sight = self._watch.sight if self._watch is not None else Readiness()
        whole = all(part.backoff.due is None for part in self._parts)  # of several APIs one may answer for another
        if not (sight.ready and whole):
            # No message means that it has not announced itself yet, or has removed its card and is about to say why.
            if sight.message or not self._spoken:
                self._screen.show_activity(f"worker: {sight.message}" if sight.message else "starting")
            self._spoken |= bool(sight.message)
            self._pending = True
        elif self._pending:
            self._pending = False
            self._screen.settle()
            if self._announced:
                self._screen.line("diptych: ready again")
            else:
                self._announced = True
                self._screen.result(welcome(url(self._listener), sight.models))

    # -- stop ------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Stop the API first, so that nothing more comes in; then the worker, which finishes or hands back; then
        Redis.
        """
        forget_url(self._settings.data_dir)
        if self._watch is not None:
            self._watch.close()
        # A part that ended by itself has said why, and that should be the last line.
        say = self._screen.show_activity if self._stop.asked else lambda text: self._screen.settle()
        say("stopping the API")
        end_all(self._apis, self._stop, self._hear, _API_STOP_S, urges=0)
        say("the worker finishes what it has begun (Ctrl-C: hands it back)")
        end_all(self._workers, self._stop, self._hear, self._settings.drain_s + _HAND_BACK_S, urges=1)
        if self._redis is not None:
            say("stopping Redis")
            self._redis.stop()


def _code(child: ChildProcess) -> int | None:
    return child.code
