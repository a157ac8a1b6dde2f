"""A worker and a command refuse a model that is not there before they import what draws."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.deployment.served import ROOT, environment

_WORKER = """
from core.config import Settings
from workers.app import create
create(Settings(model="/nowhere", redis_url="redis://127.0.0.1:1")).build(Settings(model="/nowhere"), print)
"""
_COMMAND = """
from rich.console import Console
from cli.arguments import open_runtime
from core.config import Settings
open_runtime(Settings(model="/nowhere"), Console())
"""
_LOOK = """
except ModelError as error:
    print(error)
    print({"torch", "diffusers", "transformers"} & sys.modules.keys())
"""


@pytest.mark.parametrize("code", [_WORKER, _COMMAND])
def test_a_model_that_is_not_there_is_refused_without_torch(code: str) -> None:
    body = "".join(f"    {line}\n" for line in code.strip().splitlines())
    whole = f"import sys\nfrom pipeline.checkpoints.folder import ModelError\ntry:\n{body}{_LOOK.strip()}\n"
    done = subprocess.run(
        [sys.executable, "-c", whole], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    *_, said, imported = done.stdout.splitlines() or [done.stderr, ""]
    assert said == "/nowhere: no such folder, and not a hub id of the form owner/name", done.stderr
    assert imported == "set()"


def test_handlers_of_jobs_import_no_torch() -> None:
    code = "import sys, workers.serving_runtime, tests.workers.stage; print({'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
