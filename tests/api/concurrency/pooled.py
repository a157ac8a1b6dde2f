"""Functions that a process pool's children run in tests. Imports little: every child imports this module."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from api.concurrency.process_pool import serve


def echo(arguments: Any, blobs: list[bytes]) -> tuple[Any, list[bytes]]:
    return [arguments, os.getpid()], blobs[::-1]


def refuse(arguments: Any, blobs: list[bytes]) -> tuple[Any, list[bytes]]:
    raise ValueError("must be something else")


def allocate(arguments: int, blobs: list[bytes]) -> tuple[Any, list[bytes]]:
    return len(bytes(arguments)), []


def spin(arguments: Any, blobs: list[bytes]) -> tuple[Any, list[bytes]]:
    while True:
        pass


def hang(arguments: Any, blobs: list[bytes]) -> tuple[Any, list[bytes]]:
    time.sleep(3600)
    return None, []


def die(arguments: Any, blobs: list[bytes]) -> tuple[Any, list[bytes]]:
    os.abort()


def be_killed_once(path: str, blobs: list[bytes]) -> tuple[Any, list[bytes]]:
    """As the kernel does with whom it chooses when memory is short."""
    if not Path(path).exists():
        os.close(os.open(path, os.O_CREAT))
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid(), []


if __name__ == "__main__":
    serve(echo, refuse, allocate, spin, hang, die, be_killed_once)
