"""Clients from PyPI and npm, unmodified, against a real service. `make clients` installs them and runs this.

A script in `scripts/` makes the calls of one client; each call is a test here.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.deployment.served import ROOT, Served

BUILT = ROOT / "build" / "clients"
PYTHON = BUILT / "python" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "scripts"
NODE = shutil.which("node")
TIMEOUT_S = 300.0  # of a script, on a busy machine
PICTURE = [32, 32]  # the size of a picture that was drawn

# The value of each call, or its type.
CALLS: dict[str, dict[str, Any]] = {
    "with_openai.py": {
        "generate": PICTURE, "edit": PICTURE, "stream_image": PICTURE, "chat": str, "stream": str, "parse": bool,
        "models": 2, "gpt_image": PICTURE, "tools": ["Emoji", "stop"],
        "responses": ["bool", "Emoji", True], "embed": 256,
    },
    "with_huggingface.py": {"generate": PICTURE, "generate_by_model": PICTURE, "edit": PICTURE, "chat": str},
    "with_replicate.py": {
        "generate": PICTURE, "poll": PICTURE, "edit": PICTURE, "stream": ["output", "done"], "models": "tiny",
    },
    "with_langchain.py": {
        "chat": str, "stream": str, "batch": 2, "parse": bool, "tools": ["Emoji"], "embed": [256, 256],
    },
    "with_litellm.py": {"generate": PICTURE, "edit": PICTURE, "chat": str, "stream": str, "embed": 256},
    "with_pydantic_ai.py": {"chat": str, "stream": str, "parse": bool, "tools": bool},
    "with_instructor.py": {"parse": bool, "tools": bool},
    "with_openai.mjs": {
        "generate": PICTURE, "edit": PICTURE, "chat": str, "stream": str, "parse": bool, "gpt_image": PICTURE,
        "tools": "boolean", "responses": str,
    },
    "with_vercel_ai.mjs": {
        "generate": PICTURE, "edit": PICTURE, "generate_by_openai": PICTURE, "generate_by_replicate": PICTURE,
        "chat": str, "stream": str, "parse": bool, "chat_by_openai": str, "tools": [2, "boolean"],
        "responses": [True, "boolean", 2, "boolean"],
    },
    "with_replicate.mjs": {
        "generate": PICTURE, "poll": PICTURE, "edit": PICTURE, "stream": ["output", "done"], "models": "tiny",
    },
}  # fmt: skip
FAILING: dict[str, str] = {}  # by call: why it fails

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="no client is installed: `make clients` does it"),
]


def client_name(script: str) -> str:
    """Such as openai-python of with_openai.py."""
    return script.removeprefix("with_").replace("_", "-").replace(".py", "-python").replace(".mjs", "-node")


def parameters() -> Iterator[Any]:
    for script, calls in CALLS.items():
        for call, expected in calls.items():
            marks = [pytest.mark.xfail(strict=True, reason=FAILING[call])] if call in FAILING else []
            if script.endswith(".mjs"):
                marks.append(pytest.mark.skipif(NODE is None, reason="there is no node on the PATH"))
            yield pytest.param(script, call, expected, marks=marks, id=f"{client_name(script)}-{call}")


@pytest.fixture(scope="module")
def outcome(service: Served, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, dict[str, Any]]]:
    """Runs a script, once; returns what each of its calls returned."""
    picture = tmp_path_factory.mktemp("clients") / "picture.png"
    Image.new("RGB", (64, 64), "red").save(picture)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    environment = inherited | {
        "DIPTYCH_URL": service.url, "IMAGE_MODEL": "tiny", "TEXT_MODEL": "emoji-lm",
        "PICTURE": str(picture), "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else fetched from elsewhere
    }  # fmt: skip

    @functools.cache
    def run(script: str) -> dict[str, dict[str, Any]]:
        text = (SCRIPTS / script).read_text("utf-8")
        if script.endswith(".mjs"):  # read from stdin, Node resolves packages from the working directory
            words, text = [str(NODE), "--input-type=module", "-"], text + (SCRIPTS / "harness.mjs").read_text("utf-8")
        else:
            words = [str(PYTHON), str(SCRIPTS / script)]
        done = subprocess.run(
            words, input=text, cwd=BUILT, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=True
        )
        outcomes: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return outcomes

    return run


@pytest.mark.parametrize(("script", "call", "expected"), list(parameters()))
def test_call(outcome: Callable[[str], dict[str, dict[str, Any]]], script: str, call: str, expected: Any) -> None:
    result = outcome(script)[call]
    assert "error" not in result, result["error"]
    if isinstance(expected, type):
        assert isinstance(result["value"], expected) and (expected is bool or result["value"])
    else:
        assert result["value"] == expected


def test_every_call_of_a_script_is_a_test(outcome: Callable[[str], dict[str, dict[str, Any]]]) -> None:
    assert {script: set(outcome(script)) for script in CALLS} == {script: set(calls) for script, calls in CALLS.items()}
