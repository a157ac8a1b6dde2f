"""The console script as process 1, as in a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deployment.redis import free_port
from tests.deployment.served import ROOT, environment, wait_until

PATIENCE_S = 60.0
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def _namespaces() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _namespaces(), reason="no namespace of processes can be made here")
def test_process_1_ends_at_sigterm_before_its_worker_loads() -> None:
    """The kernel drops signals without a handler there: it would be killed only after the grace period."""
    url = f"redis://127.0.0.1:{free_port()}/0"  # nobody listens: the worker waits for it, without a handler of its own
    command = [*NAMESPACE, sys.executable, "-m", "cli", "worker"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(DIPTYCH_REDIS_URL=url), stderr=subprocess.PIPE, text=True
    ) as unshare:
        try:
            assert unshare.stderr is not None and "trying until it does" in unshare.stderr.readline()
            children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
            os.kill(int(wait_until(children.read_text, "a child")), signal.SIGTERM)
            assert unshare.wait(PATIENCE_S) == 0
        finally:
            unshare.kill()
