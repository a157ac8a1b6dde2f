"""Runs the service of a history: two APIs, two workers, Redis and its replica, all behind proxies.

faults.py injects the faults.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import httpx2
import redis

from core.config import Settings
from core.jobs.keyring import Keyring
from core.jobs.registry import Registry
from core.jobs.store import JobStore
from deployment.address import listen, url
from deployment.redis import RedisServer
from deployment.redis_programs import RedisError
from tests.api.world import SERVE
from tests.faults.guard import Guard
from tests.faults.histories.clocks import Clocks
from tests.faults.histories.gallery import Drawn, Gallery, loras
from tests.faults.histories.others import Receiver, Storage
from tests.faults.histories.proxy import Proxy
from tests.faults.parts import ROOT, Part, wait_for
from tests.forks import API, REAL, WORKER

START_S = 120.0
_FILES = 4  # that a worker's stand-in has in memory
_OFTEN = 10  # starts without ever being ready
TENANTS = ("anna", "bert", "carl")
HOSTILE = "attacker"  # a tenant without clients, whose key hostile faults use
RATES = {"bert": ("12/second", "10/second"), "carl": ("90/minute", "40/minute")}  # requests and pictures
QUOTAS = {"bert": 2**20}  # bytes of files
SHARE = 20  # jobs of a tenant that may wait in a queue
SETTINGS = {
    "lease_s": "2", "drain_s": "0.3", "max_attempts": "8", "max_queued": "60", "image_jobs": "4", "text_jobs": "4",
    "model": "random:tiny", "kernels": "false", "compile": "false", "threads": "1", "webhook_private": "true",
    "rate": "", "retention_s": "1800", "key_queued": str(SHARE), "storage_s": "6",
}  # fmt: skip


def checkout(commit: str, folder: Path) -> Path:
    """The code of another version, for parts to be started from. Raises `CalledProcessError` without a git history."""
    place = folder / f"code-{commit}"
    if not place.exists():
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        place.mkdir(parents=True)
        subprocess.run(["tar", "-x", "-C", str(place)], input=packed, check=True)
        # What starts a worker of histories is this version's, which changes nothing of the product.
        ours = place / "tests" / "faults" / "histories"
        if not ours.exists():
            ours.symlink_to(ROOT / "tests" / "faults" / "histories")
    return place


@dataclass(eq=False)
class World:
    """Starts on `with`, and leaves no process and no mount behind. Parts are started by the thread that enters it.

    `objects`: artifacts lie in an object store, else in a folder. `bug`: the file that names what is planted.
    `other`: a checkout of another version, which parts may be started from; `mixed`: the last API and the last worker
    are. `real`: pictures by a tiny model of noise, which takes torch's time to start, else by the stand-in. `preload`:
    parts are forked from processes that have imported what they need, and their clocks cannot be set. `switches` go to
    every worker, `settings` over `SETTINGS`. `keyed`: tenants have keys, else nobody needs one.
    """

    folder: Path
    objects: bool = False
    bug: Path | None = None
    other: Path | None = None
    replica: bool = True
    real: bool = False
    preload: bool = False
    mixed: bool = False
    keyed: bool = True
    workers: int = 2
    switches: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    histories: int = 0
    redis_away: bool = False  # on purpose: nobody starts it again
    redis_paused: bool = False
    redis_limited: bool = False  # to no memory at all
    attacked: bool = False  # something hostile was sent, and may have left jobs behind
    threads: list[threading.Thread] = field(default_factory=list)  # that send it
    miscounted: set[str] = field(default_factory=set)  # what no look at Redis should have shown
    statuses: list[tuple[float, float, str, int]] = field(default_factory=list)  # answers: from, to, kind, status
    unread: list[tuple[float, str, str]] = field(default_factory=list)  # requests that nobody reads: from, tenant, id
    # For the windows of rates to pass, for connections and memory to be given back, and for twice DIPTYCH_STORAGE_S.
    patience_s: float = 20.0
    parts: list[Part] = field(default_factory=list)
    warm: dict[str, tuple[int, float]] = field(default_factory=dict)  # kind of part → descriptors and MiB, once warm

    def __enter__(self) -> Self:
        self.guard = Guard()
        self._closing: list[Any] = []
        try:
            self._start()
        except BaseException as error:
            error.add_note(self.logs())
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(self.logs())
        self.close()

    def logs(self) -> str:
        """The end of what each part has said."""
        return "\n".join(part.tail() for part in self.parts)

    def _start(self) -> None:
        self.clocks = Clocks(self.folder / "clocks")
        self.heard: list[tuple[float, str, dict[str, Any]]] = []
        self.receiver = Receiver(lambda path, told: self.heard.append((time.monotonic(), path, told)))
        self.storage = Storage()
        sizes = {"redis": "64m", "data": "96m", "cache": "64m"}
        self.disks = {name: self._disk(name, size) for name, size in sizes.items()}
        self._redis()
        primary = self.servers[0].port
        self.links = {name: Proxy(primary) for name in ("api", "worker", "own")}
        self.links["storage"] = Proxy(self.storage.port)
        self.listeners = [listen("127.0.0.1", 0) for _ in range(2)]
        self._closing += [self.receiver, self.storage, *self.links.values(), *self.listeners]
        for k, listener in enumerate(self.listeners):
            self._part("api", k, [*self._command("api", "-c", SERVE), str(listener.fileno())], API, listener.fileno())
        words = ["--text", "--files", str(_FILES), *(["--real"] if self.real else []), *self.switches]
        worker = [*self._command("worker", "-m", "tests.faults.histories.worker"), *words]
        for k in range(self.workers):
            self._part("worker", k, worker, REAL if self.real else WORKER)
        self.apis, self.crew = self.parts[:2], self.parts[2:]
        if self.mixed and self.other is not None:
            self.apis[-1].root = self.crew[-1].root = self.other
        if self.real:
            loras(self.folder / "loras")
        own = self._settings("own")
        self.max_attempts, self.max_queued = own.max_attempts, own.max_queued
        self.store, self.registry = JobStore.of(own), Registry.of(own)
        self._closing += [self.store, self.registry]
        keyring = Keyring.of(own)
        self.tokens, self.owners = {}, {}
        for name in (*TENANTS, HOSTILE) if self.keyed else ():
            rate, quota = RATES.get(name, ("", ""))
            key, self.tokens[name] = keyring.add(name, rate=rate, quota=quota, file_bytes=QUOTAS.get(name, 0))
            self.owners[name] = key.id
        keyring.close()
        for part in self.parts:
            part.start()
        self.settle()

    @cached_property
    def gallery(self) -> Gallery:
        return Drawn(self.urls()[0], self.tokens["anna"]) if self.real else Gallery()

    def _part(self, kind: str, k: int, command: list[str], preload: tuple[str, ...], *descriptors: int) -> None:
        name = f"{kind}-{k}"
        log = self.folder / "logs" / f"{name}.log"
        self.parts.append(Part(
            name, command, self._environment(kind, name), log, self.guard, descriptors=descriptors,
            preload=preload if self.preload else (),
        ))  # fmt: skip

    def _command(self, planted: str, *usual: str) -> list[str]:
        words = usual if self.bug is None else ("-m", "tests.faults.histories.planted", planted)
        return [sys.executable, *words]

    def _given(self, link: str) -> dict[str, str]:
        server = self.servers[0]
        return {
            **SETTINGS, "redis_url": f"redis://:{server.password}@127.0.0.1:{self.links[link].port}/0",
            "data_dir": str(self.disks["data"]), "cache_dir": str(self.disks["cache"]),
            **({"artifacts_url": "s3://pictures"} if self.objects else {}),
            **({"lora_dir": str(self.folder / "loras")} if self.real else {}), **self.settings,
        }  # fmt: skip

    def _settings(self, link: str) -> Settings:
        return Settings.model_validate(self._given(link))

    def _environment(self, link: str, name: str) -> dict[str, str]:
        environment = {f"DIPTYCH_{key.upper()}": value for key, value in self._given(link).items()}
        environment |= {
            "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
            **({} if self.preload else self.clocks.environment(name)),
            "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.links['storage'].port}",
        }  # fmt: skip
        return environment | ({} if self.bug is None else {"BUG": str(self.bug)})

    def _disk(self, name: str, size: str) -> Path:
        """A small disk where one may be mounted, else a folder."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        self.guard.mounted(folder)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        self.small_disks = not subprocess.run(mount, capture_output=True, check=False).returncode
        if not self.small_disks:
            self.guard.unmounted(folder)
        return folder

    # -- Redis -----------------------------------------------------------------------------------------------------

    def _redis(self) -> None:
        password = secrets.token_hex(16)
        options = (f"masterauth {password}", "repl-diskless-sync yes", "repl-diskless-sync-delay 0")
        count = 2 if self.replica else 1
        self.servers = [RedisServer(self.disks["redis"] / str(k), options, password=password) for k in range(count)]
        for server in self.servers:
            self.start_redis(server)

    def start_redis(self, server: RedisServer) -> None:
        """Start one of them; the second follows the first. Raises `RedisError`."""
        place = self.clocks.environment("redis")
        was = {name: os.environ.get(name) for name in place}
        os.environ.update(place)
        try:
            server.start()
        finally:
            for name, value in was.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        assert server.process is not None
        self.guard.watch(server.process.pid)
        if server is not self.servers[0]:
            with self.direct(server) as client:
                client.execute_command("REPLICAOF", "127.0.0.1", str(self.servers[0].port))

    def direct(self, server: RedisServer) -> Any:
        return redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=5)

    def end_redis(self, server: RedisServer, how: str) -> None:
        assert server.process is not None
        pid = server.process.pid
        if how == "kill":
            server.kill()
        else:
            server.stop()
        self.guard.forget(pid)

    def promote(self) -> bool:
        """Have the replica take over in an orderly way, once it has all (FAILOVER). False: it is not ready."""
        first, second = self.servers
        try:
            with self.direct(first) as client:
                if not first.running or not second.running or client.info("replication").get("connected_slaves") != 1:
                    return False
                client.execute_command("FAILOVER", "TO", "127.0.0.1", str(second.port), "TIMEOUT", "2000")
            with self.direct(second) as client:
                until = time.monotonic() + 4
                while client.execute_command("ROLE")[0] != "master":
                    if time.monotonic() > until:
                        return False
                    time.sleep(0.01)
        except redis.RedisError:
            return False
        self.servers.reverse()
        return True

    def lead(self) -> None:
        """Have everybody talk to the Redis that is the first now."""
        for name in ("api", "worker", "own"):
            self.links[name].lead(self.servers[0].port)

    # -- keeping it up ---------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Start again what has ended, as a supervisor would."""
        for server in self.servers:
            if not server.running and not self.redis_away:
                with contextlib.suppress(RedisError, redis.RedisError, OSError):
                    self.start_redis(server)
        for part in self.parts:
            if not part.running:
                part.start()

    def urls(self) -> list[str]:
        return [url(listener).rstrip("/") for listener in self.listeners]

    def ready(self) -> bool:
        """Whether every part runs and says that it is ready."""
        self.tend()
        try:
            live = {card.pid for card in self.registry.workers() if card.state == "ready"}
        except RuntimeError:
            return False
        return {part.pid for part in self.crew} <= live and all(map(answers, self.urls()))

    def settle(self) -> None:
        """Wait until all is ready. Raises AssertionError, at once where a part ends whenever it is started."""
        starts = {part: part.starts for part in self.parts}

        def ready() -> bool:
            assert all(part.starts < starts[part] + _OFTEN for part in self.parts), "a part ends again and again"
            return self.ready()

        wait_for("every part is ready", ready, START_S, every_s=0.1)

    def close(self) -> None:
        """End everything, without asking."""
        for part in self.parts:
            part.kill()
        for server in getattr(self, "servers", ()):
            server.kill()
        for one in self._closing:
            one.close()
        self.guard.close()


def answers(url: str) -> bool:
    """Whether this API says that it is ready."""
    try:
        return httpx2.get(f"{url}/readyz", timeout=10, trust_env=False, verify=False).status_code == 200
    except httpx2.TransportError:
        return False
