"""What `make audit` says and ends with, and that `make sbom` writes CycloneDX: the real tools, offline.

Skipped where `make build/tools/.installed` was not called.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployment.audit import main
from tests.deployment.served import ROOT
from tests.http_server import Handler, LocalServer

TOOLS = ROOT / "build" / "tools" / "bin"
needs_tools = pytest.mark.skipif(
    not (TOOLS / "pip-audit").exists(), reason="no tools here: make build/tools/.installed"
)

FLAW = {
    "id": "PYSEC-2026-1",
    "summary": "It leaks.",
    "published": "2026-01-01T00:00:00Z",
    "modified": "2026-01-01T00:00:00Z",
    "affected": [{
        "package": {"ecosystem": "PyPI", "name": "idna"},
        "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}],
    }],
}  # fmt: skip


@pytest.fixture
def service() -> Iterator[str]:
    """OSV's interface, which knows a flaw of one package."""

    class Osv(Handler):
        def respond(self) -> None:
            found = {"vulns": [FLAW]} if json.loads(self.body())["package"]["name"] == "idna" else {}
            self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    with LocalServer(Osv) as server:
        yield f"{server.url}/v1/query"


def audit(url: str) -> subprocess.CompletedProcess[str]:
    command = [TOOLS / "python", "-m", "deployment.audit", "-s", "osv", "--osv-url", url]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@needs_tools
def test_a_vulnerable_package_is_named(service: str) -> None:
    done = audit(service)
    assert done.returncode == 1, done.stderr
    assert "PYSEC-2026-1, mended in 99.0\n1 vulnerabilities in" in done.stdout and done.stdout.startswith("idna ")


@needs_tools
def test_a_service_that_does_not_answer_is_told_apart() -> None:
    done = audit("http://127.0.0.1:9/v1/query")
    assert done.returncode == 2 and "the vulnerability service did not answer" in done.stderr


SEEN, SKIPPED = {"name": "six", "version": "1", "vulns": []}, {"name": "idna", "skip_reason": "not found"}
FLAWED = {"name": "idna", "version": "3", "vulns": [{"id": "PYSEC-2026-1", "fix_versions": []}]}


@pytest.mark.parametrize(
    ("packages", "code", "out", "err"),
    [
        ([SEEN], 0, "0 vulnerabilities in 1 packages\n", ""),
        ([SEEN, SKIPPED], 2, "0 vulnerabilities in 1 packages\n", "1 of 2 were not looked up, idna: not found"),
        ([FLAWED, SKIPPED], 1, "idna 3: PYSEC-2026-1, mended in no release\n1 vulnerabilities in 1 packages\n", "1 of"),
        ([], 2, "0 vulnerabilities in 0 packages\n", ""),
    ],
)
def test_what_was_not_looked_up_is_told_apart(
    packages: list[dict[str, object]], code: int, out: str, err: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """As a mirror of the index answers that has no such data: pip-audit itself ends with 0 then."""
    said = subprocess.CompletedProcess([], 0, json.dumps({"dependencies": packages}), "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    assert main() == code
    shown = capsys.readouterr()
    assert shown.out == out and err in shown.err and bool(shown.err) == bool(err)


@pytest.mark.long
@needs_tools
def test_the_bill_of_materials_is_cyclonedx(tmp_path: Path) -> None:
    """Of the tools' own environment, which is small; the schema's own validator reads it, once."""
    made = tmp_path / "sbom.cdx.json"
    words = ["--no-validate", "--pyproject", ROOT / "pyproject.toml", "--output-format", "JSON", "--output-file", made]
    subprocess.run([TOOLS / "cyclonedx-py", "environment", *words, TOOLS / "python"], check=True, capture_output=True)
    validate = (
        "import sys; from cyclonedx.schema import SchemaVersion\n"
        "from cyclonedx.validation.json import JsonStrictValidator\n"
        "text = open(sys.argv[1]).read(); print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(text))"
    )
    done = subprocess.run([TOOLS / "python", "-c", validate, made], capture_output=True, text=True)
    assert done.stdout == "None\n", done.stdout + done.stderr
    told = json.loads(made.read_text("utf-8"))
    names = {part["name"]: part["purl"] for part in told["components"]}
    assert told["bomFormat"] == "CycloneDX" and told["metadata"]["component"]["name"] == "diptych"
    assert names["uv"].startswith("pkg:pypi/uv@")
