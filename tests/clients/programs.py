"""Starts a program that a client is, beside the service that it calls."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tests.deployment.served import READY_S, Client, wait_until


@contextmanager
def running(
    command: Sequence[str], folder: Path, cwd: Path | str, port: int, path: str, environment: Mapping[str, str]
) -> Iterator[httpx2.Client]:
    """A client of a program that listens on this port, once it answers this path; its log is in the folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DIPTYCH_"))}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=cwd, env={**inherited, **environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or Client(url).answers(path), command[0])
        assert process.poll() is None, (folder / "log").read_text("utf-8", "replace")[-3000:]
        with httpx2.Client(base_url=url, timeout=READY_S, verify=False) as client:
            yield client
    finally:
        process.kill()
        process.wait()
