"""Ranks of a model as threads of one process: the code of the processes but for their start, in milliseconds."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import torch

from contract.parallel import parse
from core.batching.engine import Engine
from llm.checkpoints.load import TextModel, load
from llm.parallel import follower
from llm.parallel.followers import Followers
from llm.parallel.shards import Rank
from llm.runner import TextRunner
from tests.llm import stage


class ThreadedRank(threading.Thread):
    """A follower as `llm.parallel.followers.Process`."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(daemon=True)
        self.pid, self._connection = os.getpid(), Connection(connection.detach())
        self.start()

    def run(self) -> None:
        with self._connection:
            try:
                follower.serve(self._connection)
            except EOFError:
                pass
            except Exception as error:
                self._connection.send(("error", f"{type(error).__name__}: {error}"))

    def poll(self) -> int | None:
        return None if self.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        return 0

    def kill(self) -> None:
        raise AssertionError("it has not ended")


_LOADING = threading.Lock()  # torch's random state, by which seeded models are made, is of the process


def load_alone(name: str, **options: Any) -> TextModel:
    """The loader of ranks that are threads."""
    with _LOADING:
        return load(name, **options)


def loaded(name: str, parallel: str, digest: str = "", **options: Any) -> tuple[TextModel, Followers]:
    """Rank 0's part of a model, and the others."""
    split = parse(parallel)
    arguments = {"name": name, "threads": torch.get_num_threads()}
    options = {"loader": f"{__name__}:load_alone", "launch": ThreadedRank, "on_lost": print, **options}
    followers = Followers(split, arguments, device=torch.device("cpu"), **options)
    model = load_alone(name, rank=Rank(0, split))
    followers.loaded(digest or model.digest)
    return model, followers


def serving(name: str, parallel: str, **options: Any) -> AbstractContextManager[tuple[Engine, TextRunner]]:
    """An engine on a model that is spread over ranks."""
    model, followers = loaded(name, parallel)
    return stage.serving(model, followers=followers, **options)
