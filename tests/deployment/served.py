"""A `diptych serve` for tests: a real one, with a folder and a port of its own, and all the processes it ever had."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from deployment import redis_programs
from deployment.redis import free_port
from pipeline.checkpoints import tiny
from tests.children import python_path

ROOT = Path(__file__).resolve().parents[2]
READY_S = 180.0  # a busy machine imports torch slowly


def wait_until(seen: Callable[[], Any], what: str, timeout_s: float = READY_S) -> Any:
    """What `seen` returns, as soon as it is true."""
    until = time.monotonic() + timeout_s
    while not (value := seen()):
        assert time.monotonic() < until, f"{what}: never came"
        time.sleep(0.05)
    return value


def environment(unset: Sequence[str] = (), **variables: str) -> dict[str, str]:
    """This process's environment with the tests' settings (less `unset`) and these, without Triton's interpreter."""
    dropped = ("DIPTYCH_", "TRITON_INTERPRET")
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(dropped)}
    ours = {
        "PYTHONPATH": python_path(ROOT), "DIPTYCH_THREADS": "1", "DIPTYCH_COMPILE": "0", "DIPTYCH_KERNELS": "0",
        "DIPTYCH_TEXT_MODEL": "off",
    }  # fmt: skip
    return inherited | {name: value for name, value in ours.items() if name not in unset} | variables


@contextlib.contextmanager
def killed_at_last(*processes: subprocess.Popen[Any]) -> Iterator[None]:
    """Leaves none of them behind, whatever happens."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Client:
    """Calls of a service."""

    def __init__(self, url: str, timeout_s: float = READY_S) -> None:
        self.url, self.timeout_s = url, timeout_s

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of what it answers to a GET, or to a POST of this JSON."""
        request = urllib.request.Request(self.url + path, headers={"Content-Type": "application/json"})
        if body is not None:
            request.data = json.dumps(body).encode()
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def answers(self, path: str) -> bool:
        """Whether somebody is there, and answers this with 200."""
        try:
            return self.call(path)[0] == 200
        except OSError:
            return False

    def json(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        status, answer = self.call(path, body)
        assert status < 300, (status, answer, self)
        found = json.loads(answer)
        assert isinstance(found, dict)
        return found

    def picture(self, prompt: str = "a fox", **fields: Any) -> bytes:
        """A PNG, asked for and waited for."""
        job = self.json("/v1/jobs", {"type": "image", "prompt": prompt, "steps": 2, **fields})
        return self.finished(job["id"])

    def finished(self, id: str) -> bytes:
        def look() -> dict[str, Any] | None:
            job = self.json(f"/v1/jobs/{id}")
            return job if job["status"] not in ("queued", "running") else None

        job = wait_until(look, f"the end of {id} of {self!r}")
        assert job["status"] == "succeeded", (job, self)
        status, data = self.call(f"/v1/jobs/{id}/images/0")
        assert status == 200
        return data


class Served(Client):
    """Started at once. `command` goes before `program`, which is what `diptych` is here.

    `model` may be any name; None leaves it to the default. `unset` are variables that `environment` is to leave out;
    without "DIPTYCH_TEXT_MODEL" among them no text model is loaded.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        model: str | None = tiny.TINY,
        command: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, "-m", "cli"),
        unset: Sequence[str] = (),
        variables: Mapping[str, str] = {},
        **options: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port = folder, free_port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        named = [] if model is None else ["--model", model]
        words = ["--port", str(self.port), "--data", str(folder / "data"), *named, *arguments]
        self._seen: dict[int, psutil.Process] = {}
        with (folder / "out").open("ab") as out, (folder / "err").open("ab") as err:
            self.process = subprocess.Popen(
                [*command, *program, "serve", *words], cwd=folder,
                env=environment(unset, **variables),
                **{"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **options},
            )  # fmt: skip

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text("utf-8", "replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text("utf-8", "replace")

    def __repr__(self) -> str:
        return f"<serve, exit code {self.process.poll()}\n{self.out}\n{self.err}>"

    # -- its processes ---------------------------------------------------------------------------------------------

    def part(self, word: str, timeout_s: float = READY_S) -> psutil.Process:
        """The child whose command line holds this word: "redis", "api" or "worker"."""
        return wait_until(lambda: next(iter(self.parts(word)), None), word, timeout_s)

    def parts(self, word: str) -> list[psutil.Process]:
        """All such children that are there, in the order of their start."""
        parts = [process for process in self._children() if word in _words(process)]
        # Not by their numbers, which wrap around.
        return sorted(parts, key=lambda process: process.create_time())

    def _children(self) -> list[psutil.Process]:
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._seen.update({child.pid: child for child in found})
        return found

    def started(self) -> None:
        """Wait until all three parts are there."""
        for word in ("redis", "api", "worker"):
            self.part(word)

    def ready(self) -> None:
        wait_until(lambda: self.process.poll() is not None or "curl" in self.out, f"a picture's command of {self!r}")
        assert self.process.poll() is None, self
        self.started()

    def ended(self, timeout_s: float = 60.0) -> int:
        """Its exit code, when it and everything that it ever started are gone."""
        self._children()
        code = self.process.wait(timeout_s)
        self.gone()
        return code

    def gone(self, timeout_s: float = 60.0) -> None:
        """Wait until none of its children is left."""
        left = lambda: [p for p in self._seen.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]  # noqa: E731
        wait_until(lambda: not left(), f"the end of {left()}", timeout_s)

    def stop(self, number: int, timeout_s: float = 60.0) -> int:
        self._children()
        self.process.send_signal(number)
        return self.ended(timeout_s)

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        self._children()
        for process in [psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            process.kill()
        self.process.wait()
        for process in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def ready(folder: Path, *arguments: str, **options: Any) -> Iterator[Served]:
    with contextlib.closing(Served(folder, *arguments, **options)) as service:
        service.ready()
        yield service


def _words(process: psutil.Process) -> list[str]:
    try:
        words = [Path(word).name for word in " ".join(process.cmdline()).split()]
        return ["redis", *words] if {*words} & {*redis_programs.NAMES} else words
    except psutil.NoSuchProcess:
        return []
