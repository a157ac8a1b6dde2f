"""The process of a rank but 0: loads its part of a text model, and runs the steps that rank 0 tells it.

Run as `python -m llm.parallel.follower FD PARENT`: the connection to rank 0, and its process. It ends when rank 0 does,
however that ends and whatever it is waiting for.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
_ORPHAN = 73  # exit code


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker's terminal sends it to all; the worker ends this
    _end_with(parent, descriptor)
    connection = Connection(descriptor)
    try:
        serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # rank 0 has ended
        os._exit(_ORPHAN)
    except BaseException as error:
        traceback.print_exc()
        reason = next(iter(str(error).strip().splitlines()), "")[:300]
        try:
            connection.send(("error", f"{type(error).__name__}: {reason}"))
        finally:
            os._exit(1)  # other ranks may wait in a collective, and an orderly end would wait for them
    os._exit(0)


def _end_with(parent: int, descriptor: int) -> None:
    """End this process when rank 0's ends, also out of a collective."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_ORPHAN)
    if not hasattr(select, "POLLRDHUP"):
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP | select.POLLHUP)

    def watch() -> None:
        poll.poll()
        watched.wait(_GRACE_S)  # after an orderly end the process has gone by then
        os._exit(_ORPHAN)

    watched = threading.Event()
    threading.Thread(target=watch, name="rank 0", daemon=True).start()


_GRACE_S = 5.0


def serve(connection: Connection) -> None:
    """Load, join and run, as rank 0 says, until it says to end. Raises EOFError if it has ended."""
    arguments, device_name, rank = connection.recv()
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s {rank}: %(message)s")
    import torch

    from core.threads import compute_threads
    from llm.backends.select import select
    from llm.parallel.ranks import LEAVE_S, RankGroup

    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(arguments.pop("threads", 0) or compute_threads(0, gpu=device.type == "cuda"))
    module, _, name = arguments.pop("loader").partition(":")
    result = getattr(import_module(module), name)(**arguments, device=device_name, rank=rank)
    model = result[0] if isinstance(result, tuple) else result
    connection.send(("loaded", model.digest))
    port, options = connection.recv()
    group = RankGroup(rank, device, port)
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        backend = select(model, **options, group=group)
        connection.send(("ready",))
        _run(connection, backend)
    backend.close()
    group.leave().join(LEAVE_S)


def _run(connection: Connection, backend: Any) -> None:
    from llm.parallel.ranks import CLOSE, KEEP, PREPARE, STEP, StepMessage, kind_of

    while True:
        message = connection.recv_bytes()
        kind, value = kind_of(message)
        if kind == STEP:
            step, placed = StepMessage.unpack(message)
            for part in placed:
                sequence, start, pages = part
                backend.cache.place(sequence, pages, start)
            backend.forward(step)
        elif kind == KEEP:
            backend.group.share(backend.latest.table)
        elif kind == PREPARE:
            backend.prepare(value)
        elif kind == CLOSE:
            return


if __name__ == "__main__":
    main()
